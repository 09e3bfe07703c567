"""Whitening on the CPU: compiled loops over blocks of tokens, on torch's number of threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..whitening import Whitening
from .cpu_compile import compiled_once, inlined
from .cpu_threads import TOKENS_PER_THREAD, thread_pool

Array = npt.NDArray[Any]

# Tokens whose statistics are made together. A block's bits depend on its tokens alone, so the number of threads changes none.
BLOCK = 4096


def statistics(x: Tensor, mask: Tensor | None) -> Tensor:
    """Of the trainable tokens: of each block, then merged in order."""
    numbers, live = _numbers(x), _live(mask)
    parts = np.empty((-(-len(numbers) // BLOCK), 3))
    _spread(lambda first, end: _block_statistics(numbers, live, parts, first, end), len(parts))
    return merge(torch.from_numpy(parts))


def merge(parts: Tensor) -> Tensor:
    """Of all tokens that the parts stand for."""
    merged = np.empty(3)
    _merge(parts.contiguous().numpy(), merged)
    return torch.from_numpy(merged)


def apply(x: Tensor, mask: Tensor | None, statistics: Tensor, whitening: Whitening, dtype: torch.dtype) -> Tensor:
    """Whitened, 0 at masked tokens."""
    numbers, live = _numbers(x), _live(mask)
    shift, factor, offset = _shift_factor_offset(statistics, whitening)
    result = torch.empty(len(x), dtype=torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32)
    written = result.numpy()

    def work(first: int, end: int) -> None:
        part = slice(first * BLOCK, end * BLOCK)
        _whiten(numbers[part], live[part], written[part], shift, factor, offset)

    _spread(work, -(-len(numbers) // BLOCK))
    return result.to(dtype)


def _shift_factor_offset(statistics: Tensor, whitening: Whitening) -> tuple[float, float, float]:
    """y = (x - shift) * factor + offset."""
    count, mean, m2 = statistics.tolist()
    factor = 1.0
    if whitening.scale:
        variance = m2 / max(count - 1.0 if whitening.unbiased else count, 1.0)
        if whitening.eps_at == "inside":
            deviation = math.sqrt(variance + whitening.eps)
        elif whitening.eps_at == "outside":
            deviation = math.sqrt(variance) + whitening.eps
        else:
            # min and max would drop a NaN.
            deviation = math.sqrt(whitening.eps if variance < whitening.eps else variance)
        factor = 0.0 if deviation == 0 else 1.0 / deviation
    return mean, factor, 0.0 if whitening.shift_mean else mean


def _numbers(x: Tensor) -> Array:
    return (x if x.dtype == torch.float64 else x.float()).numpy()


def _live(mask: Tensor | None) -> Array:
    """Empty where all tokens are trainable."""
    return np.empty(0, dtype=np.bool_) if mask is None else (mask if mask.dtype == torch.bool else mask != 0).numpy()


def _spread(work: Callable[[int, int], None], blocks: int) -> None:
    """`work(first, end)` over all blocks."""
    threads = min(torch.get_num_threads(), blocks * BLOCK // TOKENS_PER_THREAD)
    if threads <= 1:
        work(0, blocks)
        return
    cuts = np.linspace(0, blocks, threads + 1).astype(int).tolist()
    list(thread_pool(torch.get_num_threads()).map(work, cuts[:-1], cuts[1:]))


@compiled_once()
def _block_statistics(numbers: Array, live: Array, parts: Array, first: int, end: int) -> None:
    """Count, mean and M2 of each block. Deviations are taken from one of its numbers, then from the mean: equal numbers deviate by 0."""
    deviations = np.empty(BLOCK)
    for block in range(first, end):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, len(numbers))
        used = live[start:stop]
        count, near = _deviations_from_one(numbers[start:stop], used, deviations)
        mean = _sum(deviations[: stop - start]) / max(count, 1)
        parts[block, 0], parts[block, 1], parts[block, 2] = count, near + mean, _squares(deviations[: stop - start], used, mean)


@inlined()
def _deviations_from_one(numbers: Array, live: Array, deviations: Array) -> tuple[int, float]:
    """How many numbers are trainable, and the first of these, from which the others' deviations are taken; those of the rest are 0."""
    if len(live) == 0:
        near = np.float64(numbers[0])
        for t in range(len(numbers)):
            deviations[t] = np.float64(numbers[t]) - near
        return len(numbers), near
    near = np.float64(0.0)
    for t in range(len(numbers)):
        if live[t]:
            near = np.float64(numbers[t])
            break
    count = 0
    for t in range(len(numbers)):
        # Loaded whatever the mask says, so that the loop has no branch.
        deviation = np.float64(numbers[t]) - near
        deviations[t] = deviation if live[t] else 0.0
        count += live[t]
    return count, near


# Several sums side by side, always the same way.
@inlined(fastmath={"reassoc"})
def _sum(deviations: Array) -> float:
    total = 0.0
    for t in range(len(deviations)):
        total += deviations[t]
    return total


@inlined(fastmath={"reassoc", "contract"})
def _squares(deviations: Array, live: Array, mean: float) -> float:
    m2 = 0.0
    if len(live) == 0:
        for t in range(len(deviations)):
            m2 += (deviations[t] - mean) ** 2
    else:
        for t in range(len(deviations)):
            deviation = deviations[t] - mean
            m2 += deviation * deviation if live[t] else 0.0
    return m2


@compiled_once()
def _merge(parts: Array, merged: Array) -> None:
    """One part after the other."""
    count, mean, m2 = 0.0, 0.0, 0.0
    for part in range(len(parts)):
        n = parts[part, 0]
        if n > 0:
            both = count + n
            delta = parts[part, 1] - mean
            mean += delta * (n / both)
            m2 += parts[part, 2] + delta * delta * (count * n / both)
            count = both
    merged[0], merged[1], merged[2] = count, mean, m2


@compiled_once()
def _whiten(numbers: Array, live: Array, written: Array, shift: float, factor: float, offset: float) -> None:
    if len(live) == 0:
        for t in range(len(numbers)):
            written[t] = (np.float64(numbers[t]) - shift) * factor + offset
    else:
        for t in range(len(numbers)):
            number = (np.float64(numbers[t]) - shift) * factor + offset
            written[t] = number if live[t] else 0.0
