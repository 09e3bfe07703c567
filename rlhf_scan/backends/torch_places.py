"""What there is once per sequence, for the CPU and the reference backend: the formulas as torch runs them."""

# mypy: disallow-untyped-calls=false

from __future__ import annotations

import torch
from torch import Tensor

from ..call import is_per_segment
from ..score_formulas import lacks_eos, score_paid, slot_after, token_of_score, with_fault
from ..shaping import FAULTS, NO_FAULT, Located, Placed, ScoreCall, Sequences, ShapingCall


def placed(call: ShapingCall, given: ScoreCall, located: Located) -> Sequences:
    """From where each sequence ends to all there is once per sequence."""
    start, stop = call.boundaries[:-1], call.boundaries[1:]
    last, end = located.last, located.end
    slot = slot_after(last, end, start, stop) if given.post_eos else torch.full_like(last, -1)
    score = torch.zeros(call.segments, dtype=call.dtype, device=start.device) if given.scores is None else given.scores.to(call.dtype)
    score = score_paid(score, given.bias, given.scale, given.low, given.high)
    missing = None
    if given.looks_for_eos:
        missing = lacks_eos(located.eos > 0 if given.has_eos is None else given.has_eos, last, slot)
        score = torch.where(missing, score - given.missing_eos_penalty, score)
    found = Placed(score, token_of_score(last, end, slot, given.trailing), slot, end)
    kl_coef = _kl_coef(call, given)
    fault = _fault(given, found, kl_coef, start)
    if call.zero_faults:
        score, kl_coef = (torch.nan_to_num(number, nan=0.0, posinf=0.0, neginf=0.0) for number in (score, kl_coef))
        found = Placed(score, found.place, slot, end)
    trimmed = _trimmed(call, found) if given.trims else None
    return Sequences(start.clone(), located, found, fault, kl_coef, missing, _truncated(call, given), trimmed)


def _trimmed(call: ShapingCall, placed: Placed) -> Tensor:
    """Boundaries of sequences up to their last step, and of what follows it."""
    start = call.boundaries[:-1]
    stop = torch.maximum(torch.maximum(placed.slot, placed.end) + 1, start)
    return torch.cat([torch.stack([start, stop], 1).flatten(), call.boundaries[-1:]])


def _kl_coef(call: ShapingCall, given: ScoreCall) -> Tensor:
    if isinstance(given.kl_coef, Tensor):
        return given.kl_coef.to(call.dtype, copy=True)
    return torch.full((call.segments,), given.kl_coef, dtype=call.dtype, device=call.values.device)


def _fault(given: ScoreCall, placed: Placed, kl_coef: Tensor, start: Tensor) -> Tensor:
    """Of the numbers that there are once per sequence, and of the value that follows."""
    step = torch.maximum(placed.slot, placed.end)
    checked = [("scores", placed.place, placed.score), ("kl_coef", placed.end, kl_coef)]
    if given.bootstrap is not None:
        checked.append(("bootstrap", step, _value_after(given, given.bootstrap, step)))
    fault = torch.full_like(start, NO_FAULT)
    for name, token, number in checked:
        fault = with_fault(fault, ~number.isfinite(), token, start, FAULTS.index(name))
    return fault


def _value_after(given: ScoreCall, bootstrap: Tensor, step: Tensor) -> Tensor:
    """The value after each sequence's last step; 0 where it terminates."""
    there = step >= 0

    def at_ends(tensor: Tensor) -> Tensor:
        if is_per_segment(tensor):
            return tensor.flatten()
        found = tensor.new_zeros(len(step))
        found[there] = tensor[step[there]]
        return found

    value = at_ends(bootstrap)
    return value if given.terminated is None else torch.where(at_ends(given.terminated) != 0, torch.zeros_like(value), value)


def _truncated(call: ShapingCall, given: ScoreCall) -> Tensor | None:
    """How many tokens of each sequence are cut and do not terminate."""
    if given.truncated is None:
        return None
    cut = (given.truncated != 0).flatten()
    if given.terminated is not None and given.terminated.shape == given.truncated.shape:
        cut = cut & (given.terminated == 0).flatten()
    if is_per_segment(given.truncated):
        return cut.to(torch.int64)
    return torch.nn.functional.pad(cut.cumsum(0), (1, 0))[call.boundaries].diff()
