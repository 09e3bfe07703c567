"""The formulas, each written once: plain arithmetic that numba and Triton both compile.

A builder turns one step into the (a, b) of ``x_t = a + b * x_next``. `here` holds the estimator's inputs at the step, `following` those
inputs it asked for at the next step (the value after the end where the segment ends), `rates` its gamma, lambda, ... at the step. The scan
puts b = 0 at an end; a builder never sees a boundary or a mask. `*_results` turn the solved x (one per channel) into outputs.
"""

# mypy: allow-untyped-defs
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownVariableType=false


def gae_coefficients(here, following, rates):
    """A_t = delta_t + gamma * lam * A_{t+1},  delta_t = r_t + gamma * V_{t+1} - V_t."""
    rewards, values = here
    (next_values,) = following
    gamma, lam = rates
    return rewards + gamma * next_values - values, gamma * lam


def gae_results(here, x):
    """advantages = A_t,  returns = A_t + V_t, the latter with the second lambda's A_t."""
    _, values = here
    advantages, value_advantages = x
    return advantages, value_advantages + values


def discounted_returns_coefficients(here, following, rates):
    """G_t = r_t + gamma * G_{t+1}."""
    (rewards,) = here
    (gamma,) = rates
    return rewards, gamma


def linear_scan_coefficients(here, following, rates):
    """x_t = a_t + b_t * x_next."""
    a, b = here
    return a, b


def scanned_results(here, x):
    """The scanned value itself is the output."""
    solved, _ = x
    return (solved,)
