"""The CPU backend: one compiled sweep per estimator, over pieces of segments, on torch's number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..call import MASK_MODES, Call, Rate, Tensors, is_per_segment
from .cpu_actions import sum_of_products
from .cpu_compile import kept_in
from .cpu_outputs import empty_like
from .cpu_sweep import compiled_sweep
from .cpu_threads import TOKENS_PER_THREAD, spread

Array = npt.NDArray[Any]

# A longer segment is swept in pieces, on every machine and whatever its batch mates, so that its bits depend on nothing else.
PIECE = 1 << 18
# More pieces than this are cut anew for each call rather than kept for the next one like it.
_KEPT = 1 << 12
# Several shares a thread, so that one with a slow core does not keep the others waiting.
_SHARES_PER_THREAD = 6


def why_not(device: torch.device) -> str | None:
    """It takes CPU tensors."""
    if device.type != "cpu":
        return f'takes CPU tensors, got {device}; call .cpu() on them or choose backend="triton"'
    return None


def note() -> str:
    """How it works here."""
    kept = kept_in()
    return f"on {torch.get_num_threads()} threads; " + (
        f"compiled code in {kept}" if kept else "compiles in each process: no cache directory of its own"
    )


def run(call: Call) -> list[Tensor]:
    """Sweep every segment; long ones in pieces, first for what each piece does to a carry, then for the outputs."""
    return prepare(call)(call.tensors)


def prepare(call: Call) -> Callable[[Tensors], list[Tensor]]:
    """What runs any call with the shapes, dtypes and options of `call`; it keeps no tensor of it."""
    return _Sweeps(call)


def expectation(values: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the actions of values * probabilities, in the order of the actions."""
    values, probabilities = (tensor.reshape(-1, tensor.shape[-1]).contiguous().to(dtype) for tensor in (values, probabilities))
    expected = torch.empty(len(values), dtype=dtype)
    sum_of_products(values.numpy(), probabilities.numpy(), expected.numpy())
    return expected


def chosen_logprobs(probabilities: Tensor, actions: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of the probability of each token's action, read where it lies."""
    count = probabilities.shape[-1]
    chosen = actions.to(torch.int64)
    within = (chosen >= 0) & (chosen < count)
    places = torch.where(within, chosen, 0).reshape(*probabilities.shape[:-1], 1)
    found = probabilities.gather(-1, places).flatten().to(dtype)
    return torch.where(within, found.log_(), torch.nan)


class _Sweeps:
    """The sweeps of all calls with the same shapes, dtypes and options."""

    def __init__(self, call: Call) -> None:
        self.number: type[np.floating[Any]] = np.float64 if call.compute_dtype == torch.float64 else np.float32
        self.dtypes = call.compute_dtype, call.dtype
        self.outputs = len(call.estimator.outputs)
        self.reverse = call.estimator.reverse
        channels = tuple(len(rates) for rates in call.rates)
        self.formulas: tuple[Any, ...] = call.estimator, call.following, call.rates_following, channels, self.number
        self.rate_kinds = tuple(_kind(rate) for rate in call.tensors.rates)
        self.kinds = tuple(_kind(tensor) for tensor in (*call.tensors.flags, call.bootstrap))
        self.masked, self.starts = MASK_MODES.index(call.masked), call.starts
        self.rows: Array = np.arange(call.segments + 1, dtype=np.int64) * (call.length or 0)
        self.kept: _Pieces | None = None

    def __call__(self, given: Tensors) -> list[Tensor]:
        bounds = self.rows if given.cu_seqlens is None else given.cu_seqlens.numpy()
        pieces = self._pieces_of_rows() if given.cu_seqlens is None else _Pieces(bounds)
        carries = np.zeros((len(pieces.rows), 4), dtype=self.number)
        outputs = [empty_like(given.inputs[0], self.dtypes[0]) for _ in range(self.outputs)]
        arguments = carries, tuple(output.numpy().reshape(-1) for output in outputs), *self._arguments(given), bounds
        if pieces.split:
            aggregate = compiled_sweep(*self.formulas, True)
            _spread(lambda part: aggregate(part, *arguments), pieces.split)
            _chain(pieces.rows, carries, self.reverse)
        sweep = compiled_sweep(*self.formulas, False)
        _spread(lambda part: sweep(part, *arguments), pieces.shares)
        return outputs if self.dtypes[0] == self.dtypes[1] else [output.to(self.dtypes[1]) for output in outputs]

    def _pieces_of_rows(self) -> _Pieces:
        """The same for every call, so kept if they are few."""
        if self.kept is not None and self.kept.threads == torch.get_num_threads():
            return self.kept
        pieces = _Pieces(self.rows)
        self.kept = pieces if len(pieces.rows) <= _KEPT else None
        return pieces

    def _arguments(self, given: Tensors) -> tuple[Any, ...]:
        """What the sweep takes between outputs and boundaries, see `compiled_sweep`."""
        return (
            tuple([_numbers(tensor, self.number) for tensor in given.inputs]),
            tuple([_rate_numbers(rate, self.number) for rate in given.rates]),
            self.rate_kinds,
            tuple([_flag(flag) for flag in given.flags]),
            self.kinds,
            self.masked,
            self.starts,
            np.zeros(1, dtype=self.number) if given.bootstrap is None else _numbers(given.bootstrap, self.number),
        )


class _Pieces:
    """How segments are cut into pieces, and those into shares for torch's number of threads.

    Attributes:
        rows: of (segment, first token, end, which piece of a split segment, from 1; 0 for a whole one), in token order.
        shares: of (place in `rows`, segment, first token, end).
        split: the shares of split segments alone.
    """

    def __init__(self, bounds: Array) -> None:
        self.threads = torch.get_num_threads()
        self.rows = _pieces(bounds)
        self.shares = _shares(np.arange(len(self.rows)), self.rows, self.threads)
        split = np.flatnonzero(self.rows[:, 3])
        self.split = _shares(split, self.rows, self.threads) if len(split) else []


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
        decay = carries[piece, 2:]
        passes = (entering != 0) & (decay != 0)
        leaving = carries[piece, :2] + np.multiply(decay, entering, where=passes, out=np.zeros_like(entering))
        carries[piece, :2] = entering


def _kind(value: Rate | None) -> int:
    """How a number per call (0), segment (1) or token (2) is indexed; an absent one is 0."""
    if not isinstance(value, Tensor):
        return 0
    return 1 if is_per_segment(value) else 2


def _numbers(tensor: Tensor, number: type[np.floating[Any]]) -> Array:
    flat: Array = tensor.detach().to(torch.float64 if number is np.float64 else torch.float32).numpy().reshape(-1)
    return flat


def _rate_numbers(rate: Rate, number: type[np.floating[Any]]) -> Array:
    return _numbers(rate, number) if isinstance(rate, Tensor) else np.array([rate], dtype=number)


def _flag(flag: Tensor | None) -> Array:
    if flag is None:
        return np.zeros(1, dtype=np.bool_)
    flat: Array = (flag.detach() if flag.dtype == torch.bool else flag != 0).numpy().reshape(-1)
    return flat


def _shares(chosen: Array, pieces: Array, threads: int) -> list[Array]:
    """The chosen pieces in shares of about equal tokens; one where they are too few to wake a thread for."""
    rows = np.concatenate([chosen[:, None], pieces[chosen, :3]], axis=1)
    ends = np.cumsum(rows[:, 3] - rows[:, 2])
    threads = min(threads, int(ends[-1]) // TOKENS_PER_THREAD, len(rows))
    if threads <= 1:
        return [rows]
    shares = _SHARES_PER_THREAD * threads
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, shares) / shares)
    return [share for share in np.split(rows, np.unique(cuts)) if len(share)]


def _spread(sweep: Callable[[Array], None], shares: list[Array]) -> None:
    """Sweep them all, on torch's number of threads."""
    if len(shares) == 1:
        sweep(shares[0])
    else:
        spread(sweep, shares, torch.get_num_threads())
