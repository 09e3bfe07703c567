"""The checks of ``validate="full"``: what stands in the tensors. They read the device, so they run when asked for and in every service."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .call import Call, is_per_segment
from .checks import RATE_REMEDY, Layout, interval
from .errors import InputError
from .reads import reaches, steps_of


def check_contents(layout: Layout, call: Call, rates: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raise unless boundaries are in order and every number that is read is finite (rates and actions: in their range).

    Args:
        layout, call: of the caller.
        rates: the rates given as tensors, resolved, by name.
        given: the caller's tensors by name.
    """
    lengths = _segment_lengths(layout, call)
    suspects = [check for check in _checks(call, rates, given) if check.tensor.numel()]
    suspects = [check for check, fine in zip(suspects, _all_within(suspects), strict=True) if not fine]
    if not suspects:
        return
    steps, reach = None, reaches(call.estimator)
    live = call.mask != 0 if call.mask is not None else None
    for check in suspects:
        outside = _outside(check)
        # At a masked token that takes no step nothing is read; at one that takes a step with zeros for inputs, no input.
        unread = call.masked == "skip" or (call.masked == "zero" and check.read in call.estimator.inputs)
        if live is not None and unread and check.read is not None and not is_per_segment(check.tensor):
            outside = outside & live
        if not bool(outside.any()):
            continue
        steps = steps or steps_of(call, lengths)
        where = steps.ends if check.read is None else reach[check.read].where(steps)
        _raise_where(layout, check, outside & (steps.per_segment(where) if is_per_segment(check.tensor) else where))


def _outside(check: _Check) -> Tensor:
    """Where a number is none that it may be, read or not."""
    tensor, largest = check.tensor, check.largest
    outside = ~tensor.isfinite() if largest is None else ~((tensor >= 0) & (tensor <= largest))
    return outside & (tensor != -math.inf) if check.minus_infinity else outside


@dataclass(frozen=True)
class _Check:
    """That every number of `tensor` that is read lies from 0 to `largest`, or is finite where that is None.

    It is read where the input or rate `read` is; None: where the value after the end is.
    """

    name: str
    tensor: Tensor
    read: str | None
    must: str
    remedy: str
    largest: float | None = None
    minus_infinity: bool = False


def _checks(call: Call, rates: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Iterator[_Check]:
    entry = call.estimator
    for name, (probabilities, actions) in entry.choices.items():
        if name not in given:
            count = given[probabilities].shape[-1]
            chosen = given[actions].detach().to(torch.int64).flatten()
            must = f"must be from 0 to {count - 1} where a step is taken, as {probabilities} has {count} actions"
            yield _Check(actions, chosen, name, must, "mask that token or mend it", count - 1)
    for name, tensor in zip(entry.inputs, call.inputs, strict=True):
        shown = name
        if entry.expectation is not None and name == entry.continuation:
            shown = " * ".join(entry.expectation)
        if name in entry.choices and name not in given:
            shown = "the logarithm of {} at {}".format(*entry.choices[name])
        zero = name in entry.minus_infinity
        must = f"must be finite{', or -inf for probability 0,' if zero else ''} at trainable tokens"
        yield _Check(shown, tensor, name, must, "mask that token or mend it", minus_infinity=zero)
    for name, tensor in rates.items():
        largest = entry.rates[name].largest
        yield _Check(name, tensor, name, f"must lie in {interval(largest)}", RATE_REMEDY, largest)
    if call.bootstrap is not None:
        initial = entry.end == "initial"
        yield _Check(
            entry.end_name or "bootstrap",
            call.bootstrap,
            None,
            "must be finite where the segment has tokens" if initial else "must be finite where the segment does not terminate",
            "pass what precedes the first one" if initial else "set terminated there or pass the value that follows",
        )


def _all_within(checks: Sequence[_Check]) -> list[bool]:
    """For each check whether all numbers are in its range, read or not: one pass and one wait, since most often they are."""
    if not checks:
        return []
    extremes = torch.stack([number.double() for check in checks for number in torch.aminmax(check.tensor)]).tolist()
    return [
        math.isfinite(low) and math.isfinite(high) if check.largest is None else low >= 0 and high <= check.largest
        for check, low, high in zip(checks, extremes[::2], extremes[1::2], strict=True)
    ]


def _segment_lengths(layout: Layout, call: Call) -> Tensor:
    """[S], after checking the boundaries."""
    if layout.boundaries is None:
        return torch.full((call.segments,), call.length or 0, device=layout.device)
    check_boundaries(layout)
    return layout.boundaries.on(layout.device).diff()


def check_boundaries(layout: Layout) -> None:
    """Raise unless the boundaries of a pack are in order and end at its last token."""
    if layout.boundaries is None:
        return
    layout.boundaries.check(layout.op)
    total, tokens = int(layout.boundaries.cu_seqlens[-1]), layout.shape.numel()
    if total != tokens:
        raise InputError(
            f"{layout.op}: cu_seqlens must end at N = {tokens}, got {total}; add the missing segments or cut the tensors to the pack"
        )


def check_padding(layout: Layout, mask: Tensor | None, attention: Tensor | None) -> None:
    """Raise where a trainable token is padding."""
    if mask is not None and attention is not None:
        bad = (mask != 0) & (attention == 0)
        _raise_where(layout, _Check("mask", mask, None, "must be 0 where attention_mask is", "swap the two, or mend one"), bad)


def _raise_where(layout: Layout, check: _Check, bad: Tensor) -> None:
    """Raise for the first True of `bad`, naming segment or token as the caller indexes it."""
    at = bad.flatten().nonzero()
    if not at.numel():
        return
    index = int(at[0])
    if is_per_segment(check.tensor):
        where = f"segment {index}"
    elif len(layout.shape) == 2:
        where = f"[{index // layout.shape[1]}, {index % layout.shape[1]}]"
    else:
        where = f"token {index}"
    found = check.tensor.flatten()[index].item()
    raise InputError(f"{layout.op}: {check.name} {check.must}, got {found} at {where} ({at.numel()} in all); {check.remedy}")
