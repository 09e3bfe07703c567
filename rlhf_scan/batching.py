"""Packing many requests into one launch, and taking the results apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .segments import Segments

_OPTIONAL = ("mask", "terminated", "truncated", "bootstrap")


@dataclass(frozen=True)
class Batch:
    """Arguments of one `estimate` call and whose they are.

    Attributes:
        members: indices of the requests, in the order of the pack.
        arguments: of the call.
        shapes: of each member's tokens.
        sizes: (segments, tokens) of each member.
    """

    members: tuple[int, ...]
    arguments: Mapping[str, Any]
    shapes: tuple[torch.Size, ...]
    sizes: tuple[tuple[int, int], ...]

    def split(self, outputs: Sequence[Tensor]) -> list[list[Tensor]]:
        """Per member, its part of each output."""
        tokens = [size[1] for size in self.sizes]
        parts = [output.flatten().split(tokens) for output in outputs]
        return [[part[i].reshape(shape) for part in parts] for i, shape in enumerate(self.shapes)]


def batches(calls: Sequence[Mapping[str, Any]]) -> list[Batch]:
    """Group `calls` (arguments of `estimate`) so that each group is one call: same estimator, options, dtypes, devices and kinds of shape."""
    if len(calls) == 1:
        return [_pack([0], calls)]
    groups: dict[Any, list[int]] = {}
    for index, call in enumerate(calls):
        groups.setdefault(_signature(index, call), []).append(index)
    return [_pack(members, [calls[i] for i in members]) for members in groups.values()]


def _first(call: Mapping[str, Any]) -> Any:
    return next(iter(call["tensors"].values()))


def _layout(call: Mapping[str, Any]) -> tuple[int, int]:
    """(segments, tokens)"""
    tokens = _first(call)
    given: Segments | None = call["segments"]
    if given is not None:
        return call["segments"].count, tokens.numel()
    return (1 if tokens.dim() == 1 else tokens.shape[0]), tokens.numel()


def _signature(index: int, call: Mapping[str, Any]) -> Any:
    """Equal for calls that can share a launch. A call whose shapes do not fit goes alone, so that its error speaks of it alone."""
    tensors = {**call["tensors"], **{k: v for k, v in call["rates"].items() if isinstance(v, Tensor)}}
    tensors |= {name: call[name] for name in _OPTIONAL if call[name] is not None}
    kinds: list[Any] = []
    for name, tensor in sorted(tensors.items()):
        kind = _kind(call, name, tensor)
        if kind is None:
            return index
        kinds.append((name, kind, tensor.dtype, tensor.device))
    numbers = tuple((name, rate) for name, rate in call["rates"].items() if not isinstance(rate, Tensor))
    return call["name"], call.get("masked"), call.get("boundary"), call["dtype"], numbers, tuple(kinds)


def _kind(call: Mapping[str, Any], name: str, tensor: Any) -> str | None:
    """Whether "segment", "token", or None where the shape is neither. Where it is both, an input or a mask is per token, all else per segment."""
    first = _first(call)
    if not isinstance(tensor, Tensor) or not isinstance(first, Tensor) or first.dim() not in (1, 2):
        return None
    segments, tokens = _layout(call)
    if call["segments"] is not None and call["segments"].total not in (None, tokens):
        return None
    if tensor.shape == (segments,) and name not in call["tensors"] and name != "mask":
        return "segment"
    if tensor.shape[:-1] == first.shape:
        return f"{tensor.shape[-1]} actions"
    return "token" if tensor.shape == first.shape else None


def _pack(members: Sequence[int], calls: Sequence[Mapping[str, Any]]) -> Batch:
    shapes = tuple(_first(call).shape for call in calls) if len(calls) > 1 else (getattr(_first(calls[0]), "shape", torch.Size()),)
    if len(calls) == 1:
        sizes: tuple[tuple[int, int], ...] = (
            (_layout(calls[0]),) if isinstance(_first(calls[0]), Tensor) and _first(calls[0]).dim() else ((0, 0),)
        )
        return Batch(tuple(members), calls[0], shapes, sizes)
    return Batch(tuple(members), _joined(calls), shapes, tuple(_layout(call) for call in calls))


def _joined(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One packed call that holds all of `calls`, in order."""
    lead = calls[0]

    def join(name: str, values: Sequence[Any]) -> Any:
        first = values[0]
        if not isinstance(first, Tensor):
            return first
        if _kind(lead, name, first) == "segment":
            return torch.cat(list(values))
        # What a tensor has beyond the shape of the tokens (actions) stays as it is. Tokens are a row, which is no shape of one entry per segment.
        extra = max(0, first.dim() - _first(lead).dim())
        return torch.cat([value.reshape(-1, *value.shape[value.dim() - extra :]) for value in values]).unsqueeze(0)

    lengths = [_lengths(call) for call in calls]
    return {
        **lead,
        "tensors": {name: join(name, [call["tensors"][name] for call in calls]) for name in lead["tensors"]},
        "rates": {name: join(name, [call["rates"][name] for call in calls]) for name in lead["rates"]},
        "segments": Segments.from_lengths(torch.cat(lengths)),
        **{name: join(name, [call[name] for call in calls]) for name in _OPTIONAL},
    }


def _lengths(call: Mapping[str, Any]) -> Tensor:
    given: Segments | None = call["segments"]
    if given is not None:
        return given.on(_first(call).device).diff()
    segments, tokens = _layout(call)
    return torch.full((segments,), tokens // max(segments, 1), device=_first(call).device)
