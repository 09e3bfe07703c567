"""Whitening by its definition, in float64, number by number, with sums that do not round."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..whitening import Whitening


def statistics(x: Tensor, mask: Tensor | None) -> Tensor:
    """Of the trainable tokens."""
    numbers: list[float] = (x if mask is None else x[mask != 0]).double().tolist()
    if not numbers:
        return x.new_zeros(3, dtype=torch.float64)
    if not all(math.isfinite(number) for number in numbers):
        return x.new_tensor([len(numbers), math.nan, math.nan], dtype=torch.float64)
    mean = _sum(numbers) / len(numbers)
    return x.new_tensor([len(numbers), mean, _sum([_square(number - mean) for number in numbers])], dtype=torch.float64)


def merge(parts: Tensor) -> Tensor:
    """Of all tokens that the parts stand for."""
    rows: list[list[float]] = [row for row in parts.tolist() if row[0] != 0]
    count = _sum([row[0] for row in rows])
    if not rows or not all(math.isfinite(number) for row in rows for number in row):
        return parts.new_tensor([count, *([math.nan] * 2 if rows else [0.0] * 2)])
    mean = _sum([row[0] * row[1] for row in rows]) / count
    return parts.new_tensor([count, mean, _sum([m2 + n * _square(part_mean - mean) for n, part_mean, m2 in rows])])


def apply(x: Tensor, mask: Tensor | None, statistics: Tensor, whitening: Whitening, dtype: torch.dtype) -> Tensor:
    """Whitened, 0 at masked tokens."""
    count, mean, m2 = statistics.tolist()
    degrees = count - 1 if whitening.unbiased else count
    variance = m2 / degrees if degrees > 0 else 0.0
    trainable = [True] * len(x) if mask is None else (mask != 0).tolist()
    numbers = [
        _one(number, mean, variance, whitening) if live else 0.0 for number, live in zip(x.double().tolist(), trainable, strict=True)
    ]
    return torch.tensor(numbers, dtype=torch.float64).to(dtype).to(x.device)


def _sum(numbers: list[float]) -> float:
    """Without rounding; inf, and no error, where it is beyond a float."""
    try:
        return math.fsum(numbers)
    except OverflowError:
        return sum(numbers)


def _square(number: float) -> float:
    return number * number  # a power raises where this is inf


def _one(number: float, mean: float, variance: float, whitening: Whitening) -> float:
    result = number - mean
    if whitening.scale:
        eps = whitening.eps
        deviation = {
            "inside": math.sqrt(variance + eps),
            "outside": math.sqrt(variance) + eps,
            "floor": math.sqrt(max(variance, eps)),
        }[whitening.eps_at]
        result = 0.0 if deviation == 0 else result / deviation
    return result if whitening.shift_mean else result + mean
