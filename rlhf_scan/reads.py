"""What a call reads of its tensors: which steps it takes, and what an estimator's formulas make of each. For checks, which refuse nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .call import Call, is_per_segment
from .estimators import Estimator


@dataclass(frozen=True)
class Steps:
    """The steps of a call, as bool [N]. The first four tell apart what follows a step; together they are all steps.

    Attributes:
        continues: another step of the episode.
        terminates: nothing, since the episode terminates.
        stops: nothing, since no value is given there.
        bootstraps: the value after the end.
        followed: it is itself the one that follows another step.
        ends: where, per token, the value after the end is read.
        bounds: the end of each segment, int64 [S].
    """

    continues: Tensor
    terminates: Tensor
    stops: Tensor
    bootstraps: Tensor
    followed: Tensor
    ends: Tensor
    bounds: Tensor

    def per_segment(self, at: Tensor) -> Tensor:
        """Which segments hold a True of `at`, [S, 1]."""
        found = torch.zeros(len(self.bounds), dtype=torch.bool, device=at.device)
        found[torch.searchsorted(self.bounds, at.nonzero().flatten(), right=True)] = True
        return found.reshape(-1, 1)


@dataclass(frozen=True)
class Reach:
    """Whether an input or a rate of a step reaches a result, by what follows the step, and whether it does from the step before (`followed`)."""

    continues: bool
    terminates: bool
    stops: bool
    bootstraps: bool
    followed: bool

    def where(self, steps: Steps) -> Tensor:
        """The tokens at which it is read, [N]."""
        found = torch.zeros_like(steps.continues)
        for name in Reach.__dataclass_fields__:
            if getattr(self, name):
                found |= getattr(steps, name)
        return found


def steps_of(call: Call, lengths: Tensor) -> Steps:
    """The steps of `call`, whose segments have these lengths."""
    stops = lengths.cumsum(0)
    filled = lengths > 0
    first, last = (stops - lengths)[filled], stops[filled] - 1
    backward, opens = call.estimator.reverse, call.starts
    terminated, truncated = (_flagged(flag, last, filled, call) for flag in (call.terminated, call.truncated))
    # Which episode each token belongs to, and for each episode the token whose flag, or place in the segment, bounds it.
    bounds = terminated | truncated
    bounds[first if opens else last] = True
    episode = bounds.cumsum(0) - (1 if opens else bounds.long())

    taken = (torch.ones_like(bounds) if call.mask is None or call.masked != "skip" else call.mask != 0).nonzero().flatten()
    together = episode[taken[1:]] == episode[taken[:-1]]
    continues, followed = torch.zeros_like(bounds), torch.zeros_like(bounds)
    continues[taken[:-1] if backward else taken[1:]] = together
    followed[taken[1:] if backward else taken[:-1]] = together

    over = taken[~continues[taken]]
    bound = bounds.nonzero().flatten()[episode[over]]
    terminates = terminated[bound] & (backward or opens)
    segment = torch.searchsorted(stops, over, right=True)
    # Backward the value after the end is that of the bounding token; forward, that before a segment's first episode.
    end = bound if backward else (stops - lengths)[segment]
    outermost = bound == stops[segment] - 1 if backward else episode[over] == episode[end]
    given = call.bootstrap is not None and (outermost if is_per_segment(call.bootstrap) else torch.ones_like(outermost))
    bootstraps = ~terminates & given
    return Steps(
        continues=continues,
        terminates=_at(over[terminates], call),
        stops=_at(over[~terminates & ~bootstraps], call),
        bootstraps=_at(over[bootstraps], call),
        followed=followed,
        ends=_at(end[bootstraps], call),
        bounds=stops,
    )


def _flagged(flag: Tensor | None, last: Tensor, filled: Tensor, call: Call) -> Tensor:
    """A flag per token, [N], whatever form it came in."""
    if flag is None or is_per_segment(flag):
        return _at(last[:0] if flag is None else last[flag.flatten()[filled] != 0], call)
    return flag != 0


def _at(tokens: Tensor, call: Call) -> Tensor:
    """True at these tokens, [N]."""
    found = torch.zeros(call.tokens, dtype=torch.bool, device=tokens.device)
    found[tokens] = True
    return found


@lru_cache(maxsize=256)
def reaches(entry: Estimator) -> dict[str, Reach]:
    """For each input and rate, by trying it: whether another number, or none, changes what the formulas make of one step."""
    return {name: Reach(*(_matters(entry, name, *situation) for situation in _SITUATIONS)) for name in (*entry.inputs, *entry.rates)}


# What follows a step (its end, and whether it terminates there), and whether the name is looked at there rather than at the step.
_SITUATIONS: tuple[tuple[float | None, bool, bool], ...] = (
    (None, False, False),
    (0.0, True, False),
    (0.0, False, False),
    (0.75, False, False),
    (None, False, True),
)


def _matters(entry: Estimator, name: str, end: float | None, terminates: bool, after: bool) -> bool:
    usual = _results(entry, {}, {}, end, terminates)
    for number in (math.nan, 0.0, 0.125, 2.0):
        changed = {name: number}
        try:
            found = _results(entry, *(({}, changed) if after else (changed, {})), end, terminates)
        except (ArithmeticError, ValueError):
            return True
        if found != usual:
            return True
    return False


def _results(
    entry: Estimator, here: dict[str, float], after: dict[str, float], end: float | None, terminates: bool
) -> tuple[list[float], tuple[float, ...]]:
    """x and outputs of one step, all numbers 0.5 but those given at the step or `after` it. `end` None: another step follows."""
    inputs = tuple(here.get(name, 0.5) for name in entry.inputs)
    following = tuple(after.get(name, 0.5) if end is None else end for name in entry.following)
    if entry.continuation is not None:
        following += (0.0 if terminates else here.get(entry.continuation, 0.5),)
    next_x = 0.625 if end is None else 0.0
    x: list[float] = []
    rates: list[tuple[float, ...]] = []
    for names in entry.channels:
        rates.append(tuple((after if name in entry.rates_following else here).get(name, 0.5) for name in names))
        a, b = entry.coefficients(inputs, following, rates[-1])
        carried = end if entry.end in ("carry", "initial") else 0.0
        x.append(a + b * next_x if end is None else a + b * carried if carried else a)
    solved = tuple((x * 2)[:2])
    return x, entry.results(inputs, following, solved, (next_x, next_x), rates[0])
