"""The group baselines by their textbook definition, as loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlhf_scan import GroupAdvantages, grpo, reinforce_plus_plus, rloo

Function = Callable[..., GroupAdvantages]

FUNCTIONS: list[Function] = [grpo, rloo, reinforce_plus_plus]

Numbers = list[float]


def members(groups: Sequence[object], keep: Sequence[bool]) -> list[list[int]]:
    """The kept rows of each group."""
    found: dict[object, list[int]] = {}
    for row, group in enumerate(groups):
        if keep[row]:
            found.setdefault(group, []).append(row)
    return list(found.values())


def spread(numbers: Numbers, mean: float, unbiased: bool, weights: Numbers | None = None) -> float:
    """Standard deviation; 0 for a single number."""
    weights = weights or [1.0] * len(numbers)
    degrees = sum(weights) - (1 if unbiased else 0)
    return math.sqrt(sum(w * (x - mean) ** 2 for x, w in zip(numbers, weights, strict=True)) / degrees) if degrees > 0 else 0.0


def textbook_grpo(
    scores: Numbers,
    groups: Sequence[object],
    keep: Sequence[bool],
    *,
    scale: bool = True,
    std_over: str = "group",
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Numbers:
    advantages = [0.0] * len(scores)
    kept = [score for score, used in zip(scores, keep, strict=True) if used]
    for rows in members(groups, keep):
        mean = sum(scores[row] for row in rows) / len(rows)
        over = [scores[row] for row in rows] if std_over == "group" else kept
        std = spread(over, sum(over) / len(over), unbiased)
        for row in rows:
            advantages[row] = (scores[row] - mean) / (std + eps if scale else 1.0)
    return advantages


def textbook_rloo(scores: Numbers, groups: Sequence[object], keep: Sequence[bool]) -> Numbers:
    advantages = [0.0] * len(scores)
    for rows in members(groups, keep):
        for row in rows:
            others = [scores[other] for other in rows if other != row]
            advantages[row] = scores[row] - sum(others) / len(others) if others else 0.0
    return advantages


def textbook_reinforce_plus_plus(
    scores: Numbers, groups: Sequence[object] | None, keep: Sequence[bool], *, tokens: Sequence[int] | None = None, eps: float = 1e-8
) -> Numbers:
    deviations = list(scores)
    alone: set[int] = set()
    for rows in members(groups, keep) if groups is not None else []:
        mean = sum(scores[row] for row in rows) / len(rows)
        for row in rows:
            deviations[row] = scores[row] - mean
        if len({scores[row] for row in rows}) == 1:
            alone |= set(rows)
            deviations = [0.0 if row in alone else deviation for row, deviation in enumerate(deviations)]
    used = [row for row in range(len(scores)) if keep[row]]
    if not used:
        return [0.0] * len(scores)
    weights = [float(tokens[row]) if tokens is not None else 1.0 for row in used]
    mean = sum(w * deviations[row] for row, w in zip(used, weights, strict=True)) / max(sum(weights), 1.0)
    std = spread([deviations[row] for row in used], mean, True, weights)
    return [(deviations[row] - mean) / math.sqrt(std**2 + eps) if keep[row] and row not in alone else 0.0 for row in range(len(scores))]


TEXTBOOK: dict[Function, Callable[..., Numbers]] = {
    grpo: textbook_grpo,
    rloo: textbook_rloo,
    reinforce_plus_plus: textbook_reinforce_plus_plus,
}
