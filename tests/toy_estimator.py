"""An eighth estimator, as a user would add one: a builder, a naive loop, a registration. Reward to go with a bonus for rare states.

The bonus is scale / sqrt(visits) (Strehl & Littman 2008, MBIE-EB), from the logarithm of the visits, at most `largest_bonus`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlhf_scan.coefficients import exp, minimum, scanned_results
from rlhf_scan.estimators import Estimator, Rate, register
from rlhf_scan.naive import Numbers, Step, Tokens

NAME = "explorer_returns"


def explorer_coefficients(here: Any, following: Any, rates: Any) -> Any:
    """G_t = r_t + min(largest_bonus, scale / sqrt(visits_t)) + gamma * G_{t+1}."""
    rewards, log_visits = here
    gamma, scale, largest_bonus = rates
    bonus: Any = minimum(scale * exp(-0.5 * log_visits), largest_bonus)
    return rewards + bonus, gamma


def explorer_naive(
    steps: Sequence[Step], rewards: Tokens, log_visits: Tokens, *, gamma: Tokens, scale: Tokens, largest_bonus: Tokens
) -> tuple[Numbers]:
    """The same in words."""
    returns: Numbers = {}
    for step in steps:
        t = step.token
        bonus = min(scale[t] / math.sqrt(math.exp(log_visits[t])), largest_bonus[t])
        returns[t] = rewards[t] + bonus + gamma[t] * (step.end if step.next is None else returns[step.next])
    return (returns,)


def add() -> None:
    """Make it known to this process."""
    register(
        Estimator(
            name=NAME,
            summary="G_t = r_t + min(largest_bonus, scale / sqrt(visits_t)) + gamma * G_{t+1}",
            inputs=("rewards", "log_visits"),
            outputs=("returns",),
            rates={
                "gamma": Rate(1.0, meaning="discount per step"),
                "scale": Rate(0.5, math.inf, "bonus at the first visit"),
                "largest_bonus": Rate(1.0, math.inf, "bonus at most"),
            },
            channels=(("gamma", "scale", "largest_bonus"),),
            coefficients=explorer_coefficients,
            results=scanned_results,
            naive=explorer_naive,
            end="carry",
        )
    )
