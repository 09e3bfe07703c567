"""The definitions: one plain float64 loop per estimator over the steps of one segment. Slow on purpose; all else is checked against these.

A naive loop takes `steps` in the order of the scan (backward in time: the last token first), then the estimator's inputs and rates as
sequences indexed by token, and returns one ``{token: number}`` per output. See `Step` for what a boundary means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Tokens = Mapping[int, float] | Sequence[float]
Numbers = dict[int, float]


@dataclass(frozen=True)
class Step:
    """A token at which the recursion takes a step.

    Attributes:
        token: where it is.
        next: the token of the step taken just before in scan order, x_next(t)'s; None where the segment ends.
        end: where it ends, the value that follows: 0 after a terminated token, else the bootstrap or 0.
        terminated: whether it ends because the episode terminates.
    """

    token: int
    next: int | None
    end: float
    terminated: bool


def passed(a: float, b: float, x_next: float) -> float:
    """a + b * x_next; where b is 0 nothing passes, not even NaN."""
    return a + b * x_next if b else a


def carried(step: Step, a: float, b: float, x: Numbers) -> float:
    """`passed`, x_next being the end's value where the segment ends; where that is 0 nothing is carried, whatever b is."""
    if step.next is None:
        return passed(a, b, step.end) if step.end else a
    return passed(a, b, x[step.next])


def gae(
    steps: Sequence[Step], rewards: Tokens, values: Tokens, *, gamma: Tokens, lam: Tokens, lam_value: Tokens | None
) -> tuple[Numbers, Numbers]:
    """A_t = delta_t + gamma * lam * A_{t+1},  delta_t = r_t + gamma * V_{t+1} - V_t;  returns = A_t + V_t (Schulman et al. 2016)."""
    advantages: Numbers = {}
    value_advantages: Numbers = {}
    for step in steps:
        t = step.token
        if step.next is None:
            delta = rewards[t] + gamma[t] * step.end - values[t]
            advantages[t] = value_advantages[t] = delta
            continue
        delta = rewards[t] + gamma[t] * values[step.next] - values[t]
        advantages[t] = passed(delta, gamma[t] * lam[t], advantages[step.next])
        value_lam = lam[t] if lam_value is None else lam_value[t]
        value_advantages[t] = passed(delta, gamma[t] * value_lam, value_advantages[step.next])
    return advantages, {t: value_advantages[t] + values[t] for t in value_advantages}


def discounted_returns(steps: Sequence[Step], rewards: Tokens, *, gamma: Tokens) -> tuple[Numbers]:
    """G_t = r_t + gamma * G_{t+1}."""
    returns: Numbers = {}
    for step in steps:
        returns[step.token] = carried(step, rewards[step.token], gamma[step.token], returns)
    return (returns,)


def lambda_returns(steps: Sequence[Step], rewards: Tokens, values: Tokens, *, gamma: Tokens, lam: Tokens) -> tuple[Numbers]:
    """G_t = r_t + gamma * ((1 - lam) * V_{t+1} + lam * G_{t+1}), the value that follows an end being both (Sutton & Barto 2018, 12.1)."""
    returns: Numbers = {}
    for step in steps:
        t = step.token
        next_value = step.end if step.next is None else values[step.next]
        returns[t] = carried(step, rewards[t] + gamma[t] * (1 - lam[t]) * next_value, gamma[t] * lam[t], returns)
    return (returns,)


def ratio(behavior_logprob: float, target_logprob: float) -> float:
    """pi(a | s) / mu(a | s), its logarithm cut at 20."""
    return math.exp(smaller(target_logprob - behavior_logprob, 20.0))


def smaller(x: float, y: float) -> float:
    """The smaller; NaN if either is."""
    return x if x < y or math.isnan(x) else y


def vtrace(
    steps: Sequence[Step],
    rewards: Tokens,
    values: Tokens,
    behavior_logprobs: Tokens,
    target_logprobs: Tokens,
    *,
    gamma: Tokens,
    lam: Tokens,
    rho_bar: Tokens,
    c_bar: Tokens,
) -> tuple[Numbers, Numbers]:
    """v_t = V_t + rho_t * delta_t + gamma * lam * c_t * (v_{t+1} - V_{t+1});  advantages rho_t * (r_t + gamma * v_{t+1} - V_t) (Espeholt 2018)."""
    x: Numbers = {}  # v - V
    targets: Numbers = {}
    advantages: Numbers = {}
    for step in steps:
        t = step.token
        weight = ratio(behavior_logprobs[t], target_logprobs[t])
        rho = smaller(rho_bar[t], weight)
        next_value = step.end if step.next is None else values[step.next]
        next_target = step.end if step.next is None else targets[step.next]
        x[t] = rho * (rewards[t] + gamma[t] * next_value - values[t])
        if step.next is not None:
            x[t] = passed(x[t], gamma[t] * lam[t] * smaller(c_bar[t], weight), x[step.next])
        targets[t] = x[t] + values[t]
        advantages[t] = rho * (rewards[t] + gamma[t] * next_target - values[t])
    return targets, advantages


def retrace(
    steps: Sequence[Step],
    rewards: Tokens,
    q_values: Tokens,
    expected_next_q: Tokens,
    behavior_logprobs: Tokens,
    target_logprobs: Tokens,
    *,
    gamma: Tokens,
    lam: Tokens,
    c_bar: Tokens,
    rho_bar: Tokens,
) -> tuple[Numbers, Numbers]:
    """T_t = r_t + gamma * E_t + gamma * lam * c_{t+1} * (T_{t+1} - Q_{t+1});  advantages rho_t * (r_t + gamma * T_{t+1} - Q_t) (Munos 2016)."""
    x: Numbers = {}  # T - Q
    targets: Numbers = {}
    advantages: Numbers = {}
    for step in steps:
        t = step.token
        expected = 0.0 if step.terminated else expected_next_q[t]
        x[t] = rewards[t] + gamma[t] * expected - q_values[t]
        next_target = expected
        if step.next is not None:
            next_target = targets[step.next]
            c = smaller(c_bar[step.next], ratio(behavior_logprobs[step.next], target_logprobs[step.next]))
            x[t] = passed(x[t], gamma[t] * lam[t] * c, x[step.next])
        targets[t] = x[t] + q_values[t]
        rho = smaller(rho_bar[t], ratio(behavior_logprobs[t], target_logprobs[t]))
        advantages[t] = rho * (rewards[t] + gamma[t] * next_target - q_values[t])
    return targets, advantages


def eligibility_traces(steps: Sequence[Step], inputs: Tokens, *, gamma: Tokens, lam: Tokens) -> tuple[Numbers]:
    """e_t = x_t + gamma * lam * e_{t-1} (Sutton & Barto 2018, 12.2)."""
    traces: Numbers = {}
    for step in steps:
        t = step.token
        traces[t] = carried(step, inputs[t], gamma[t] * lam[t], traces)
    return (traces,)


def episodic_cumsum(steps: Sequence[Step], inputs: Tokens) -> tuple[Numbers]:
    """s_t = x_t + s_{t-1}."""
    sums: Numbers = {}
    for step in steps:
        sums[step.token] = carried(step, inputs[step.token], 1.0, sums)
    return (sums,)


def linear_scan(steps: Sequence[Step], a: Tokens, b: Tokens) -> tuple[Numbers]:
    """x_t = a_t + b_t * x_next."""
    x: Numbers = {}
    for step in steps:
        x[step.token] = carried(step, a[step.token], b[step.token], x)
    return (x,)
