"""Whitening by its textbook definition, and numbers to whiten."""

from __future__ import annotations

import math

import torch
from conftest import device_of
from torch import Tensor


def textbook(
    x: Tensor, *, shift_mean: bool = True, scale: bool = True, unbiased: bool = True, eps: float = 1e-8, eps_at: str = "inside"
) -> Tensor:
    """Of float64 numbers, all of them trainable."""
    mean = x.mean()
    variance = x.var(correction=1 if unbiased else 0)
    divisors = {
        "inside": torch.sqrt(variance + eps),
        "outside": torch.sqrt(variance) + eps,
        "floor": torch.sqrt(variance.clamp(min=eps)),
    }
    y = (x - mean) / divisors[eps_at] if scale else x - mean
    return y if shift_mean else y + mean


def case(backend: str, n: int = 150, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Numbers with NaN, inf and huge ones at masked places."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * 2 + 3
    mask = torch.rand(n, generator=generator) < 0.7
    x[~mask] = torch.tensor([math.nan, math.inf, -1e30])[torch.arange(int((~mask).sum())) % 3]
    return x.to(device_of(backend)), mask.to(device_of(backend))
