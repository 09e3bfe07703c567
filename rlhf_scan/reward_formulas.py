"""The formulas of reward shaping, each written once: plain arithmetic that numba and Triton both compile.

`log_ratio` is log pi(a | s) - log pi_ref(a | s) of the token that was sampled, in nats. The estimators are those of Schulman 2020, Approximating
KL Divergence. A formula may call the functions below and others of this module; each backend puts its own in place of `exp`, `minimum`, `maximum`.
"""

# mypy: ignore-errors
# pyright: basic

import math


def exp(x):
    """e^x."""
    return math.exp(x)


def minimum(x, y):
    """The smaller; x where it is NaN."""
    return min(x, y)


def maximum(x, y):
    """The larger; x where it is NaN."""
    return max(x, y)


def clamped(x, limit):
    """`x` within [-limit, limit]."""
    return maximum(minimum(x, limit), -limit)


def k1(log_ratio):
    """Unbiased, may be negative."""
    return log_ratio


def k2(log_ratio):
    """Half the square: its gradient is that of the KL divergence."""
    return 0.5 * log_ratio * log_ratio


def k3(log_ratio):
    """Unbiased, never negative."""
    return exp(-log_ratio) - 1.0 + log_ratio


def absolute(log_ratio):
    """The size of k1."""
    return maximum(log_ratio, -log_ratio)


def shaped_reward(reward, score, kl, kl_coef):
    """r_t + the sequence's score where it belongs - kl_coef * KL_t; the coefficient is 0 where no KL counts, whatever the sequence's is."""
    return reward + score - kl_coef * kl


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
