"""The formulas, each written once: plain arithmetic that numba and Triton both compile.

A builder turns one step into the (a, b) of ``x_t = a + b * x_next``. `here` holds the estimator's inputs at the step, `following` those
inputs it asked for at the next step (the value after the end where the segment ends), `rates` its gamma, lambda, ... at the step, or at the
next one those it asked for there. The scan puts b = 0 at an end; a builder never sees a boundary or a mask. A `*_results` function turns the
solved x, one per channel, into outputs. A formula may call `exp` and `minimum` below, and other functions of its own module.
"""

# mypy: ignore-errors
# pyright: basic

import math

# A log-ratio beyond this is cut: exp(20) is 5e8, and no estimator gains from a larger importance weight.
LARGEST_LOG_RATIO = 20.0


def exp(x):
    """e^x; each backend puts its own in place of it."""
    return math.exp(x)


def minimum(x, y):
    """The smaller, NaN if either is; each backend puts its own in place of it."""
    return x if x < y or x != x else y


def gae_coefficients(here, following, rates):
    """A_t = delta_t + gamma * lam * A_{t+1},  delta_t = r_t + gamma * V_{t+1} - V_t."""
    rewards, values = here
    (next_values,) = following
    gamma, lam = rates
    return rewards + gamma * next_values - values, gamma * lam


def gae_results(here, following, x, next_x, rates):
    """advantages = A_t,  returns = A_t + V_t, the latter with the second lambda's A_t."""
    _, values = here
    advantages, value_advantages = x
    return advantages, value_advantages + values


def discounted_returns_coefficients(here, following, rates):
    """G_t = r_t + gamma * G_{t+1}."""
    (rewards,) = here
    (gamma,) = rates
    return rewards, gamma


def lambda_returns_coefficients(here, following, rates):
    """G_t = r_t + gamma * ((1 - lam) * V_{t+1} + lam * G_{t+1})."""
    rewards, _ = here
    (next_values,) = following
    gamma, lam = rates
    return rewards + gamma * (1 - lam) * next_values, gamma * lam


def importance_ratio(behavior_logprobs, target_logprobs):
    """pi(a | s) / mu(a | s)."""
    return exp(minimum(target_logprobs - behavior_logprobs, LARGEST_LOG_RATIO))


def vtrace_coefficients(here, following, rates):
    """x_t = rho_t * delta_t + gamma * lam * c_t * x_{t+1}, where x = target - V and delta_t = r_t + gamma * V_{t+1} - V_t."""
    rewards, values, behavior_logprobs, target_logprobs = here
    (next_values,) = following
    gamma, lam, rho_bar, c_bar = rates
    ratio = importance_ratio(behavior_logprobs, target_logprobs)
    return minimum(ratio, rho_bar) * (rewards + gamma * next_values - values), gamma * lam * minimum(ratio, c_bar)


def vtrace_results(here, following, x, next_x, rates):
    """targets = x_t + V_t,  advantages = rho_t * (r_t + gamma * target_{t+1} - V_t)."""
    rewards, values, behavior_logprobs, target_logprobs = here
    (next_values,) = following
    gamma, _, rho_bar, _ = rates
    rho = minimum(importance_ratio(behavior_logprobs, target_logprobs), rho_bar)
    return x[0] + values, rho * (rewards + gamma * (next_values + next_x[0]) - values)


def retrace_coefficients(here, following, rates):
    """x_t = delta_t + gamma * lam * c_{t+1} * x_{t+1}, where x = target - Q and delta_t = r_t + gamma * E[Q(s_{t+1}, .)] - Q_t."""
    rewards, q_values, _, _, _ = here
    _, next_behavior_logprobs, next_target_logprobs, expected_next_q = following
    gamma, lam, next_c_bar, _ = rates
    next_c = minimum(importance_ratio(next_behavior_logprobs, next_target_logprobs), next_c_bar)
    return rewards + gamma * expected_next_q - q_values, gamma * lam * next_c


def retrace_results(here, following, x, next_x, rates):
    """targets = x_t + Q_t,  advantages = rho_t * (r_t + gamma * target_{t+1} - Q_t)."""
    rewards, q_values, _, behavior_logprobs, target_logprobs = here
    next_q_values, _, _, _ = following
    gamma, _, _, rho_bar = rates
    rho = minimum(importance_ratio(behavior_logprobs, target_logprobs), rho_bar)
    return x[0] + q_values, rho * (rewards + gamma * (next_q_values + next_x[0]) - q_values)


def eligibility_traces_coefficients(here, following, rates):
    """e_t = x_t + gamma * lam * e_{t-1}."""
    (inputs,) = here
    gamma, lam = rates
    return inputs, gamma * lam


def episodic_cumsum_coefficients(here, following, rates):
    """s_t = x_t + s_{t-1}."""
    (inputs,) = here
    return inputs, 1.0


def linear_scan_coefficients(here, following, rates):
    """x_t = a_t + b_t * x_next."""
    a, b = here
    return a, b


def scanned_results(here, following, x, next_x, rates):
    """The scanned value itself is the output."""
    return (x[0],)
