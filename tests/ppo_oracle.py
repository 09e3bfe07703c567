"""The RLHF block once more, from DESIGN alone, on Python floats and one sequence at a time. It shares no line with the library."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Numbers = list[float]


@dataclass
class Sequence:
    """One sequence's tokens, padding included, and what belongs to it."""

    logprobs: Numbers
    ref_logprobs: Numbers
    values: Numbers
    rewards: Numbers
    mask: list[bool]
    real: list[bool] | None  # None: tokens up to the last trainable one, or all of them in a pack
    score: float
    has_eos: bool
    kl_coef: float
    gamma: float
    lam: float
    terminated: bool
    bootstrap: float
    packed: bool
    step_rewards: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class Outputs:
    """Of one sequence."""

    advantages: Numbers
    returns: Numbers
    rewards: Numbers
    kl: Numbers
    steps: list[int] = field(default_factory=list)
    slot: int | None = None
    bad: bool = False


def estimate(kind: str, x: float) -> float:
    """From x = logprob - ref_logprob."""
    if kind == "k1":
        return x
    if kind == "k2":
        return x * x / 2
    if kind == "abs":
        return abs(x)
    return math.expm1(-x) + x if -x < 700 else math.inf


def cut(x: float, limit: float) -> float:
    """Within the limit; NaN stays."""
    return x if math.isnan(x) else max(-limit, min(limit, x))


def kl_of(o: Any, x: float) -> float:
    """The clamped estimate."""
    if o.kl_clamp == "off" or (o.kl_clamp == "exp" and o.kl != "k3"):
        return estimate(o.kl, x)
    return cut(estimate(o.kl, cut(x, o.log_ratio_limit)), o.kl_limit)


def shape(q: Sequence, o: Any) -> Outputs:
    """Rewards and KL of one sequence."""
    n = len(q.mask)
    zeros = [0.0] * n
    out = Outputs(list(zeros), list(zeros), list(zeros), list(zeros))
    chosen = [t for t in range(n) if q.mask[t]]
    if not chosen and (o.score_at == "last" or not n):
        return out
    last = chosen[-1] if chosen else -1
    end = n - 1 if q.packed and o.score_at == "last" else last
    if q.real is not None:
        end = max([last] + [t for t in range(n) if q.real[t]])
    end = end if chosen else -1
    out.steps = [t for t in range(end + 1) if q.mask[t] or o.masked in ("keep", "zero")]
    place: int | None = {"carry_back": last, "stay": end, "drop": None if end > last else last}[o.trailing]
    if o.score_at == "post_eos" and end + 1 < n:
        place = out.slot = end + 1
        out.steps.append(end + 1)
    low, high = o.score_clip if isinstance(o.score_clip, tuple) else (-o.score_clip, o.score_clip)
    score = min(max((q.score + o.score_bias) * o.score_scale, low), high)
    score -= 0 if q.has_eos else o.missing_eos_penalty
    for t in out.steps:
        counts = q.mask[t] or (o.masked == "keep" and t != out.slot)
        if q.mask[t] or (counts and o.kl_at == "all"):
            kl = kl_of(o, q.logprobs[t] - q.ref_logprobs[t])
            out.rewards[t] -= q.kl_coef * kl
            out.kl[t] = kl if q.mask[t] else 0.0
        out.rewards[t] += q.rewards[t] if counts else 0.0
        out.rewards[t] += score if t == place else 0.0
    for t, reward in q.step_rewards:
        earlier = [u for u in chosen if u <= t]
        if q.mask[t] or (o.trailing == "stay" and t <= end):
            out.rewards[t] += reward
        elif o.trailing == "carry_back" and earlier:
            out.rewards[earlier[-1]] += reward
    return out


def credit(q: Sequence, o: Any, out: Outputs) -> None:
    """GAE of one sequence."""
    following = 0.0 if q.terminated else q.bootstrap
    advantage = for_return = 0.0
    lam = q.lam
    if o.length_adaptive_alpha:
        lam = 1 - 1 / max(1.0, o.length_adaptive_alpha * sum(q.mask))
    lam_value = o.lam_value if o.lam_value is not None else q.lam
    for t in reversed(out.steps):
        here = q.mask[t] or t == out.slot or o.masked == "keep"
        value, reward = (q.values[t], out.rewards[t]) if here else (0.0, 0.0)
        delta = reward + q.gamma * following - value
        advantage = delta + q.gamma * lam * advantage
        for_return = delta + q.gamma * lam_value * for_return
        following = value
        if q.mask[t]:
            out.advantages[t] = advantage
        if q.mask[t] or t == out.slot:
            out.returns[t] = for_return + value


def whiten(places: list[tuple[Numbers, int]], counted: list[tuple[Numbers, int]], definition: Any) -> None:
    """In place, with the statistics of `counted`."""
    numbers = [row[t] for row, t in counted]
    if not numbers:
        return
    mean = math.fsum(numbers) / len(numbers)
    squares = math.fsum((x - mean) ** 2 for x in numbers)
    variance = squares / max(1, len(numbers) - 1 if definition.unbiased else len(numbers))
    deviation = {
        "inside": math.sqrt(variance + definition.eps),
        "outside": math.sqrt(variance) + definition.eps,
        "floor": math.sqrt(max(variance, definition.eps)),
    }[definition.eps_at]
    for row, t in places:
        row[t] = (row[t] - mean) / (deviation if definition.scale else 1.0) + (0.0 if definition.shift_mean else mean)


def block(sequences: list[Sequence], o: Any, definitions: tuple[Any, Any]) -> list[Outputs]:
    """The whole of it. `o` has the options as attributes, `definitions` how rewards and advantages are whitened."""
    outputs = [shape(q, o) for q in sequences]
    pairs = list(zip(sequences, outputs, strict=True))
    if definitions[0]:
        steps = [(q.mask[t] or t == out.slot, (out.rewards, t)) for q, out in pairs for t in out.steps]
        whiten([place for on, place in steps if on or o.masked == "keep"], [place for on, place in steps if on], definitions[0])
    for q, out in pairs:
        credit(q, o, out)
    if definitions[1]:
        live = [(out.advantages, t) for q, out in pairs for t in range(len(q.mask)) if q.mask[t]]
        whiten(live, live, definitions[1])
    for q, out in pairs:
        out.rewards = [r if q.mask[t] or t == out.slot else 0.0 for t, r in enumerate(out.rewards)]
    return outputs
