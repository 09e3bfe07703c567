"""The checks of ``validate="full"``: what stands in the tensors. They read the device, so they run when asked for and in every service."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .call import Call, is_per_segment
from .checks import RATE_REMEDY, Layout, interval
from .errors import InputError


def check_contents(layout: Layout, call: Call, rates: Mapping[str, Tensor]) -> None:
    """Raise unless boundaries are in order and every number that can reach a trainable token is finite (rates: in their range).

    `rates` maps the names of rates given as tensors to their resolved form.
    """
    lengths = _segment_lengths(layout, call)
    used = torch.ones(call.tokens, dtype=torch.bool, device=layout.device)
    if call.mask is not None and call.masked != "keep":
        used = call.mask != 0
    for name, tensor in zip(call.estimator.inputs, call.inputs, strict=True):
        if call.estimator.expectation is not None and name == call.estimator.continuation:
            name = " * ".join(call.estimator.expectation)
        _raise_where(layout, name, tensor, used & ~tensor.isfinite(), "must be finite at trainable tokens", "mask that token or mend it")
    for name, tensor in rates.items():
        largest = call.estimator.rates[name].largest
        outside = ~((tensor >= 0) & (tensor <= largest))
        where = lengths.reshape(-1, 1) > 0 if is_per_segment(tensor) else used
        _raise_where(layout, name, tensor, where & outside, f"must lie in {interval(largest)}", RATE_REMEDY)
    if call.bootstrap is not None:
        initial = call.estimator.end == "initial"
        where = _initial_is_read(call, lengths) if initial else _bootstrap_is_read(call, lengths)
        _raise_where(
            layout,
            call.estimator.end_name or "bootstrap",
            call.bootstrap,
            where & ~call.bootstrap.isfinite(),
            "must be finite where the segment has tokens" if initial else "must be finite where the segment does not terminate",
            "pass what precedes the first one" if initial else "set terminated there or pass the value that follows",
        )


def _segment_lengths(layout: Layout, call: Call) -> Tensor:
    """[S], after checking the boundaries."""
    if layout.boundaries is None:
        return torch.full((call.segments,), call.length or 0, device=layout.device)
    layout.boundaries.check(layout.op)
    total = int(layout.boundaries.cu_seqlens[-1])
    if total != call.tokens:
        raise InputError(
            f"{layout.op}: cu_seqlens must end at N = {call.tokens}, got {total}; add the missing segments or cut the tensors to the pack"
        )
    return layout.boundaries.on(layout.device).diff()


def _initial_is_read(call: Call, lengths: Tensor) -> Tensor:
    """Where `initial` reaches a result, [S, 1]: everywhere but in empty segments and before a token that starts an episode."""
    read = lengths > 0
    if call.starts and call.terminated is not None:
        first = (lengths.cumsum(0) - lengths)[read]
        if is_per_segment(call.terminated):
            read[read.clone()] = ~((call.terminated.flatten() != 0)[read] & (lengths[read] == 1))
        else:
            read[read.clone()] = call.terminated[first] == 0
    return read.reshape(-1, 1)


def _bootstrap_is_read(call: Call, lengths: Tensor) -> Tensor:
    """Where `bootstrap` reaches a result, in the shape of `bootstrap`."""
    filled = lengths > 0
    last = (lengths.cumsum(0) - 1)[filled]
    ends = torch.zeros(call.tokens, dtype=torch.bool, device=lengths.device)
    ends[last] = True
    terminated = torch.zeros_like(ends)
    if call.terminated is not None:
        if is_per_segment(call.terminated):
            terminated[last] = (call.terminated.flatten() != 0)[filled]
        else:
            terminated = call.terminated != 0
    if call.bootstrap is not None and is_per_segment(call.bootstrap):
        read = torch.zeros_like(filled)
        read[filled] = ~terminated[last]
        return read.reshape(-1, 1)
    if call.truncated is not None and not is_per_segment(call.truncated):
        ends |= call.truncated != 0
    return ends & ~terminated


def _raise_where(layout: Layout, name: str, tensor: Tensor, bad: Tensor, must: str, remedy: str) -> None:
    """Raise for the first True of `bad`, naming segment or token as the caller indexes it."""
    at = bad.flatten().nonzero()
    if not at.numel():
        return
    index = int(at[0])
    if is_per_segment(tensor):
        where = f"segment {index}"
    elif len(layout.shape) == 2:
        where = f"[{index // layout.shape[1]}, {index % layout.shape[1]}]"
    else:
        where = f"token {index}"
    raise InputError(f"{layout.op}: {name} {must}, got {float(tensor.flatten()[index])} at {where} ({at.numel()} in all); {remedy}")
