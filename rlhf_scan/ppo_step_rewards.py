"""The step rewards of a `ppo_advantages` call, checked and in their normal form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checks import Layout
from .errors import InputError


@dataclass(frozen=True)
class StepRewards:
    """Rewards at chosen tokens: int64 [K] sequences, int64 [K] tokens counted from the sequence's first, [K] rewards."""

    sequences: Tensor
    tokens: Tensor
    rewards: Tensor


def resolve_step_rewards(layout: Layout, given: Any, number: torch.dtype) -> StepRewards | None:
    """From three tensors, a [K, 3] tensor or a list of triples; `number` is the dtype of the rewards."""
    if given is None:
        return None
    try:
        columns = given if _is_columns(given) else _table(given).unbind(1)
        places = [part.detach() for part in columns[:2]]
        sequences, tokens = (_whole(part) for part in places)
        rewards = columns[2].detach().to(number)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"{layout.op}: step_rewards must be (sequence, end token, reward) triples, got {_what_it_is(given)}; pass a list of triples, "
            "a [K, 3] tensor, or three tensors [K], with sequences and tokens as integers, float32 or float64"
        ) from error
    if not (sequences.shape == tokens.shape == rewards.shape and sequences.dim() == 1):
        shapes = [list(part.shape) for part in (sequences, tokens, rewards)]
        raise InputError(
            f"{layout.op}: step_rewards must be three tensors [K] of one length, got shapes {shapes}; pass one entry of each per step"
        )
    if sequences.device.type == "cpu" and tokens.device.type == "cpu":
        _check_places(layout, sequences, tokens, places)
    return StepRewards(*(part.to(layout.device, non_blocking=True) for part in (sequences, tokens, rewards)))


def _is_columns(given: Any) -> bool:
    return not isinstance(given, Tensor) and len(given) == 3 and all(isinstance(part, Tensor) for part in given)


def _table(given: Any) -> Tensor:
    """[K, 3]"""
    table = given if isinstance(given, Tensor) else torch.tensor([tuple(map(float, triple)) for triple in given], dtype=torch.float64)
    if not table.numel():
        return table.reshape(0, 3)
    if table.dim() != 2 or table.shape[1] != 3:
        raise ValueError("no triples")
    return table


def _what_it_is(given: Any) -> str:
    """What is given in place of triples."""
    if isinstance(given, Tensor):
        return f"{given.dtype} of shape {list(given.shape)}"
    for at, step in enumerate(given if isinstance(given, list | tuple) else ()):
        if isinstance(step, Tensor) and _is_columns(given):
            if _is_rough(step):
                return f"{step.dtype} at entry {at}"
        elif not hasattr(step, "__len__") or isinstance(step, str | Tensor):
            return f"{type(step).__name__} at entry {at}"
        elif len(step) != 3:
            return f"{len(step)} numbers at entry {at}"
    return type(given).__name__


def _is_rough(numbers: Tensor) -> bool:
    """Whether its dtype does not hold every place."""
    return numbers.dtype in (torch.bfloat16, torch.float16) or numbers.dtype.is_complex


def _whole(numbers: Tensor) -> Tensor:
    """Sequences or tokens as int64; -1, which no batch has, for what is no whole number."""
    if _is_rough(numbers):
        raise TypeError(f"{numbers.dtype} does not hold every place")
    whole = numbers.to(torch.int64)
    return torch.where(numbers == whole, whole, -1)


def _check_places(layout: Layout, sequences: Tensor, tokens: Tensor, given: list[Tensor]) -> None:
    """Raise for a step outside its sequence, as `given`. What lies on a GPU is not read: such a step is left out, and the report counts it."""
    known = layout.boundaries is None or layout.boundaries.cu_seqlens.device.type == "cpu"
    if layout.boundaries is None:
        lengths = torch.full((layout.segments,), layout.length or 0)
    else:
        lengths = layout.boundaries.lengths() if known else torch.full((layout.segments,), layout.shape.numel())
    inside = (sequences >= 0) & (sequences < layout.segments)
    there = inside.clone()
    if layout.segments:
        inside &= (tokens >= 0) & (tokens < lengths[sequences.clamp(0, layout.segments - 1)])
    outside = (~inside).nonzero()
    if outside.numel():
        at = int(outside[0])
        sequence, token = (_written(part[at].item()) for part in given)
        count = f"of {int(lengths[sequences[at]])} tokens" if there[at] and known else f"the batch has {layout.segments} sequences"
        raise InputError(
            f"{layout.op}: step_rewards must name tokens of the batch, got token {token} of sequence {sequence} at entry {at} ({count}); "
            "count sequences from 0, and tokens from the first of their sequence, in whole numbers"
        )


def _written(number: float) -> str:
    """A place as the caller wrote it; whole numbers without a point."""
    return str(int(number)) if float(number).is_integer() else str(number)
