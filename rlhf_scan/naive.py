"""The definitions: one plain float64 loop per estimator over the steps of one segment. Slow on purpose; everything is checked against these.

A naive loop takes `steps` in the order of the scan (backward in time: the last token first), then the estimator's inputs and rates as
sequences indexed by token, and returns one ``{token: number}`` per output. See `Step` for what a boundary means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Tokens = Mapping[int, float] | Sequence[float]


@dataclass(frozen=True)
class Step:
    """A token at which the recursion takes a step.

    Attributes:
        token: where it is.
        next: the token of the step taken just before in scan order, x_next(t)'s; None where the segment ends.
        end: where it ends, the value that follows: 0 after a terminated token, else the bootstrap or 0.
    """

    token: int
    next: int | None
    end: float


def gae(
    steps: Sequence[Step], rewards: Tokens, values: Tokens, *, gamma: Tokens, lam: Tokens, lam_value: Tokens | None
) -> tuple[dict[int, float], dict[int, float]]:
    """A_t = delta_t + gamma * lam * A_{t+1},  delta_t = r_t + gamma * V_{t+1} - V_t;  returns = A_t + V_t (Schulman et al. 2016)."""
    advantages: dict[int, float] = {}
    value_advantages: dict[int, float] = {}
    for step in steps:
        t = step.token
        if step.next is None:
            delta = rewards[t] + gamma[t] * step.end - values[t]
            advantages[t] = value_advantages[t] = delta
            continue
        delta = rewards[t] + gamma[t] * values[step.next] - values[t]
        advantages[t] = delta + gamma[t] * lam[t] * advantages[step.next]
        value_lam = lam[t] if lam_value is None else lam_value[t]
        value_advantages[t] = delta + gamma[t] * value_lam * value_advantages[step.next]
    return advantages, {t: value_advantages[t] + values[t] for t in value_advantages}


def discounted_returns(steps: Sequence[Step], rewards: Tokens, *, gamma: Tokens) -> tuple[dict[int, float]]:
    """G_t = r_t + gamma * G_{t+1}."""
    returns: dict[int, float] = {}
    for step in steps:
        following = step.end if step.next is None else returns[step.next]
        returns[step.token] = rewards[step.token] + carried(gamma[step.token], following)
    return (returns,)


def linear_scan(steps: Sequence[Step], a: Tokens, b: Tokens) -> tuple[dict[int, float]]:
    """x_t = a_t + b_t * x_next."""
    x: dict[int, float] = {}
    for step in steps:
        t = step.token
        x[t] = a[t] + carried(b[t], step.end if step.next is None else x[step.next])
    return (x,)


def carried(b: float, x_next: float) -> float:
    """b * x_next, where nothing follows (0) nothing is carried, whatever b is."""
    return b * x_next if x_next else 0.0
