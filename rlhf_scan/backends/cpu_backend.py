"""The CPU backend: one compiled sweep per estimator, over pieces of segments, on torch's number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..call import MASK_MODES, Call, Rate, is_per_segment
from .cpu_actions import sum_of_products
from .cpu_sweep import compiled_sweep
from .cpu_threads import TOKENS_PER_THREAD, thread_pool

Array = npt.NDArray[Any]

# A longer segment is swept in pieces, on every machine and whatever its batch mates, so that its bits depend on nothing else.
PIECE = 1 << 18


def why_not(device: torch.device) -> str | None:
    """It takes CPU tensors."""
    if device.type != "cpu":
        return f'takes CPU tensors, got {device}; call .cpu() on them or choose backend="triton"'
    return None


def run(call: Call) -> list[Tensor]:
    """Sweep every segment; long ones in pieces, first for what each piece does to a carry, then for the outputs."""
    number = np.float64 if call.compute_dtype == torch.float64 else np.float32
    formulas = (call.estimator, call.following, call.rates_following, tuple(len(rates) for rates in call.rates), number)
    outputs = [torch.empty(call.tokens, dtype=call.compute_dtype) for _ in call.estimator.outputs]
    bounds = _bounds(call)
    pieces = _pieces(bounds)
    carries = np.zeros((len(pieces), 4), dtype=number)
    arguments = _arguments(call, bounds, number)
    written = tuple(output.numpy() for output in outputs)
    split = pieces[:, 3] > 0
    if split.any():
        aggregate = compiled_sweep(*formulas, True)
        _spread(lambda part: aggregate(part, carries, written, *arguments), np.flatnonzero(split), pieces)
        _chain(pieces, carries, call.estimator.reverse)
    sweep = compiled_sweep(*formulas, False)
    _spread(lambda part: sweep(part, carries, written, *arguments), np.arange(len(pieces)), pieces)
    return [output.to(call.dtype) for output in outputs]


def prepare(call: Call) -> None:
    """Nothing: `run` it is."""


def expectation(values: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the actions of values * probabilities, in the order of the actions."""
    number = np.float64 if dtype == torch.float64 else np.float32
    values, probabilities = (tensor.reshape(-1, tensor.shape[-1]).contiguous() for tensor in (values, probabilities))
    expected = torch.empty(len(values), dtype=dtype)
    sum_of_products(_numbers(values, number), _numbers(probabilities, number), expected.numpy())
    return expected


def chosen_logprobs(probabilities: Tensor, actions: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of the probability of each token's action, read where it lies."""
    count = probabilities.shape[-1]
    chosen = actions.to(torch.int64)
    within = (chosen >= 0) & (chosen < count)
    places = torch.where(within, chosen, 0).reshape(*probabilities.shape[:-1], 1)
    found = probabilities.gather(-1, places).flatten().to(dtype)
    return torch.where(within, found.log_(), torch.nan)


def _bounds(call: Call) -> Array:
    if call.cu_seqlens is not None:
        return call.cu_seqlens.numpy()
    return np.arange(call.segments + 1, dtype=np.int64) * (call.length or 0)


def _pieces(bounds: Array) -> Array:
    """Rows of (segment, first token, end, which piece of a split segment, from 1; 0 for a whole one), in token order."""
    lengths = np.diff(bounds)
    counts = np.maximum(1, -(-lengths // PIECE)) * (lengths > 0)
    segment = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = bounds[:-1][segment] + within * PIECE
    end = np.minimum(first + PIECE, bounds[1:][segment])
    return np.stack([segment, first, end, np.where(counts[segment] > 1, within + 1, 0)], axis=1).astype(np.int64)


def _chain(pieces: Array, carries: Array, reverse: bool) -> None:
    """What each piece does to a carry, (A, B) per channel in `carries`, becomes the carry that enters it."""
    order = range(len(pieces) - 1, -1, -1) if reverse else range(len(pieces))
    previous, leaving = -1, np.zeros(2, dtype=carries.dtype)
    for piece in order:
        if pieces[piece, 3] == 0:
            continue
        entering = leaving if pieces[piece, 0] == previous else np.zeros_like(leaving)
        previous = pieces[piece, 0]
        leaving = carries[piece, :2] + np.where(entering != 0, carries[piece, 2:] * entering, 0).astype(carries.dtype)
        carries[piece, :2] = entering


def _arguments(call: Call, bounds: Array, number: type[np.floating[Any]]) -> tuple[Any, ...]:
    """The call as what the sweep takes, see `compiled_sweep`."""
    rates = [rate for channel in call.rates for rate in channel]
    flags = (_flag(call.mask), _flag(call.terminated), _flag(call.truncated))
    return (
        tuple(_numbers(tensor, number) for tensor in call.inputs),
        tuple(_rate_numbers(rate, number) for rate in rates),
        tuple(_kind(rate) for rate in rates),
        tuple(flag.reshape(-1) for flag in flags),
        tuple(_kind(flag) for flag in (call.mask, call.terminated, call.truncated, call.bootstrap)),
        MASK_MODES.index(call.masked),
        call.starts,
        np.zeros(1, dtype=number) if call.bootstrap is None else _numbers(call.bootstrap.flatten(), number),
        bounds,
    )


def _kind(value: Rate | None) -> int:
    """How a number per call (0), segment (1) or token (2) is indexed; an absent one is 0."""
    if not isinstance(value, Tensor):
        return 0
    return 1 if is_per_segment(value) else 2


def _numbers(tensor: Tensor, number: type[np.floating[Any]]) -> Array:
    return tensor.to(torch.float64 if number is np.float64 else torch.float32).numpy()


def _rate_numbers(rate: Rate, number: type[np.floating[Any]]) -> Array:
    return _numbers(rate.flatten(), number) if isinstance(rate, Tensor) else np.array([rate], dtype=number)


def _flag(flag: Tensor | None) -> Array:
    return np.zeros(1, dtype=np.bool_) if flag is None else (flag if flag.dtype == torch.bool else flag != 0).numpy()


def _spread(sweep: Callable[[Array], None], chosen: Array, pieces: Array) -> None:
    """Sweep the chosen pieces on torch's number of threads, shares of about equal tokens."""
    rows = np.concatenate([chosen[:, None], pieces[chosen, :3]], axis=1)
    ends = np.cumsum(rows[:, 3] - rows[:, 2])
    threads = min(torch.get_num_threads(), int(ends[-1]) // TOKENS_PER_THREAD, len(rows))
    if threads <= 1:
        sweep(rows)
        return
    # Several shares a thread, so that one with a slow core does not keep the others waiting.
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, 4 * threads) / (4 * threads))
    shares = [share for share in np.split(rows, np.unique(cuts)) if len(share)]
    list(thread_pool(torch.get_num_threads()).map(sweep, shares))
