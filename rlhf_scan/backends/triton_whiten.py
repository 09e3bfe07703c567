"""Whitening for the Triton backend: one pass over the tokens for statistics of tiles, one launch that merges them, one pass that whitens."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import INTERPRETED
from .triton_launch import Launcher, await_previous, on_device_of

if TYPE_CHECKING:
    from ..whitening import Whitening

# Tokens of a program. Statistics are made per tile and merged in the order of the tiles, without atomics: the same bits on each run.
TILE = 64 if INTERPRETED else 4096
MERGED = 16 if INTERPRETED else 1024  # parts merged at a time
_WARPS = 8


def statistics(x: Tensor, mask: Tensor | None) -> Tensor:
    """Of the trainable tokens."""
    tokens = x.numel()
    parts = torch.empty(-(-tokens // TILE), 3, dtype=torch.float64, device=x.device)
    with on_device_of(x):
        _tallier()(parts.shape[0], x, _flag(mask), parts, tokens)
        return merge(parts)


def merge(parts: Tensor) -> Tensor:
    """Of all tokens that the parts stand for."""
    merged = torch.empty(3, dtype=torch.float64, device=parts.device)
    with on_device_of(parts):
        _merger()(1, parts.contiguous(), merged, parts.shape[0])
    return merged


def apply(x: Tensor, mask: Tensor | None, statistics: Tensor, whitening: Whitening, dtype: torch.dtype) -> Tensor:
    """Whitened, 0 at masked tokens."""
    tokens = x.numel()
    result = torch.empty(tokens, dtype=dtype, device=x.device)
    launcher = _whitener(float(whitening.eps), whitening.shift_mean, whitening.scale, whitening.unbiased, whitening.eps_at)
    with on_device_of(x):
        launcher(-(-tokens // TILE), x, _flag(mask), result, statistics, tokens)
    return result


@cache
def _tallier() -> Launcher:
    return Launcher(_tile_statistics, {"TILE": TILE}, num_warps=_WARPS)


@cache
def _merger() -> Launcher:
    return Launcher(_merge, {"LANES": MERGED}, num_warps=_WARPS)


@lru_cache(maxsize=256)
def _whitener(eps: float, shift_mean: bool, scale: bool, unbiased: bool, eps_at: str) -> Launcher:
    constants = {"EPS": eps, "SHIFT_MEAN": shift_mean, "SCALE": scale, "UNBIASED": unbiased, "EPS_AT": eps_at, "TILE": TILE}
    return Launcher(_whiten, constants, num_warps=_WARPS)


def _flag(mask: Tensor | None) -> Tensor | None:
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


@triton.jit
def statistics_of(x, used):
    """Count, mean and M2, float64, of the numbers of a block that are `used`. The reductions run in an order that the block's shape fixes.

    Deviations are taken from one of the numbers, then from the mean: equal numbers deviate by exactly 0.
    """
    numbers = tl.where(used, x.to(tl.float64), float("-inf"))
    count = tl.sum(used.to(tl.int32)).to(tl.float64)
    near = tl.max(numbers)
    from_near = tl.where(used, numbers - near, 0.0)
    mean = tl.sum(from_near) / tl.maximum(count, 1.0)
    deviations = tl.where(used, from_near - mean, 0.0)
    return count, tl.where(count > 0, near + mean, 0.0), tl.sum(deviations * deviations)


@triton.jit
def shift_factor_offset(
    statistics, EPS: tl.constexpr, SHIFT_MEAN: tl.constexpr, SCALE: tl.constexpr, UNBIASED: tl.constexpr, EPS_AT: tl.constexpr
):
    """y = (x - shift) * factor + offset, in float64."""
    count = tl.load(statistics)
    mean = tl.load(statistics + 1)
    factor = count * 0 + 1.0
    if SCALE:
        variance = tl.load(statistics + 2) / tl.maximum(count - 1.0 if UNBIASED else count, 1.0)
        if EPS_AT == "inside":
            deviation = tl.sqrt(variance + EPS)
        elif EPS_AT == "outside":
            deviation = tl.sqrt(variance) + EPS
        else:
            deviation = tl.sqrt(tl.where(variance < EPS, variance * 0 + EPS, variance))  # a maximum could drop a NaN
        factor = tl.where(deviation == 0, 0.0, 1.0 / deviation)
    return mean, factor, mean * 0.0 if SHIFT_MEAN else mean


@triton.jit
def _place(tokens, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    return token, token < tokens


@triton.jit
def _tile_statistics(x, mask, parts, tokens, TILE: tl.constexpr):
    await_previous()
    token, used = _place(tokens, TILE)
    numbers = tl.load(x + token, mask=used, other=0)
    if mask is not None:
        used = used & (tl.load(mask + token, mask=used, other=0) != 0)
    count, mean, m2 = statistics_of(numbers, used)
    part = parts + tl.program_id(0) * 3
    tl.store(part, count)
    tl.store(part + 1, mean)
    tl.store(part + 2, m2)


@triton.jit
def merged_lanes(count, mean, m2):
    """Count, mean and M2 of all lanes."""
    near = tl.max(tl.where(count > 0, mean, float("-inf")))
    from_near = tl.where(count > 0, mean - near, 0.0)
    total = tl.sum(count)
    total_mean = tl.sum(count * from_near) / tl.maximum(total, 1.0)
    deviations = tl.where(count > 0, from_near - total_mean, 0.0)
    spread = tl.sum(tl.where(count > 0, m2 + count * deviations * deviations, 0.0))
    return total, tl.where(total > 0, near + total_mean, 0.0), spread


@triton.jit(do_not_specialize=["total"])
def _merge(parts, merged, total, LANES: tl.constexpr):
    """Each lane merges every LANES-th part in order (Chan et al. 1979), then the lanes are merged at once."""
    await_previous()
    count = tl.zeros([LANES], tl.float64)
    mean = tl.zeros([LANES], tl.float64)
    m2 = tl.zeros([LANES], tl.float64)
    for first in tl.range(0, total, LANES):
        part = first + tl.arange(0, LANES)
        there = part < total
        n = tl.load(parts + part * 3, mask=there, other=0.0)
        delta = tl.load(parts + part * 3 + 1, mask=there, other=0.0) - mean
        more = tl.load(parts + part * 3 + 2, mask=there, other=0.0)
        weight = n / tl.maximum(count + n, 1.0)
        mean = tl.where(n > 0, mean + delta * weight, mean)
        m2 = tl.where(n > 0, m2 + more + delta * delta * count * weight, m2)
        count += n
    count, mean, m2 = merged_lanes(count, mean, m2)
    tl.store(merged, count)
    tl.store(merged + 1, mean)
    tl.store(merged + 2, m2)


@triton.jit
def _whiten(
    x,
    mask,
    result,
    statistics,
    tokens,
    EPS: tl.constexpr,  # as an argument it would be rounded to float32
    SHIFT_MEAN: tl.constexpr,
    SCALE: tl.constexpr,
    UNBIASED: tl.constexpr,
    EPS_AT: tl.constexpr,
    TILE: tl.constexpr,
):
    await_previous()
    token, there = _place(tokens, TILE)
    shift, factor, offset = shift_factor_offset(statistics, EPS, SHIFT_MEAN, SCALE, UNBIASED, EPS_AT)
    numbers = tl.load(x + token, mask=there, other=0).to(tl.float64)
    y = (numbers - shift) * factor + offset
    if mask is not None:
        y = tl.where(tl.load(mask + token, mask=there, other=0) != 0, y, 0.0)
    # By way of float32, from which half precisions are rounded to nearest.
    if result.dtype.element_ty == tl.float64:
        tl.store(result + token, y, mask=there)
    else:
        tl.store(result + token, y.to(tl.float32).to(result.dtype.element_ty), mask=there)
