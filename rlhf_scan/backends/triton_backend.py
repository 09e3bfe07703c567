"""The Triton backend: how a call becomes launches of the one kernel. One launch for rows, three for a pack, whatever the lengths."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import MASK_MODES, Call, Rate, Tensors, is_per_segment
from . import tiles, triton_carry, triton_expectation, triton_map, triton_scan, triton_steps, triton_tile
from .formulas import compiled_formula
from .triton_launch import Launcher, absent, on_device_of, too_old, why_not_direct

# What the stages of a launch take, whose programs hold the rows of tiles from a number on.
Staged = Callable[[int], tuple[Tensor, ...]]

# Places within a launch are int32 below this many tokens (a tile may reach past the last one), int64 above.
_INT32_TOKENS = 2**31 - 2 * tiles.WIDTH

# Per thread. Four programs of 256 threads on a multiprocessor keep more loads in flight than fewer with more registers: on an H200 a pack of
# 1024 x 16384 tokens took 92 us (101 with 72 registers, 96 with 56), a mixed one with mask and flags 193 us (211 and 210).
_REGISTERS = {False: 64, True: 128}  # by whether arithmetic is in float64


def why_not(device: torch.device) -> str | None:
    """It takes CUDA tensors, or CPU tensors in Triton's interpreter; an old Triton does not compile the kernels."""
    reason = too_old()
    if reason is not None:
        return reason
    if device.type == "cuda" and not tiles.INTERPRETED:
        return None
    if device.type == "cpu" and tiles.INTERPRETED:
        return None
    if tiles.INTERPRETED:
        return f"runs in Triton's interpreter here and takes CPU tensors, got {device}; unset TRITON_INTERPRET for CUDA tensors"
    return f'takes CUDA tensors, got {device}; move them to a GPU, choose backend="cpu", or set TRITON_INTERPRET=1 before the first import'


def note() -> str:
    """How it launches."""
    reason = why_not_direct()
    return "repeated launches are direct" if reason is None else f"every launch is Triton's own: {reason}"


def run(call: Call) -> list[Tensor]:
    """Launch the kernel over rows, or over a pack's long, its medium and its short segments."""
    return prepare(call)(call.tensors)


def prepare(call: Call) -> Callable[[Tensors], list[Tensor]]:
    """What runs any call with the shapes, dtypes and options of `call`; it keeps no tensor of it."""
    return Scan(call)


def expectation(values: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the actions of values * probabilities."""
    *shape, actions = values.shape
    tokens = math.prod(shape)
    expected = torch.empty(tokens, dtype=dtype, device=values.device)
    width = min(triton.next_power_of_2(actions), 128)
    rows = max(1, tiles.PROGRAM // width)
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    launcher = Launcher(
        triton_expectation.sum_of_products, {"ROWS": rows, "WIDTH": width, "DTYPE": accumulate}, num_warps=4, enable_fp_fusion=True
    )
    places = _strides(values) + _strides(probabilities)
    with on_device_of(values):
        launcher(triton.cdiv(tokens, rows), values, probabilities, expected, tokens, actions, shape[-1], *places)
    return expected


def chosen_logprobs(probabilities: Tensor, actions: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of the probability of each token's action."""
    *shape, count = probabilities.shape
    tokens, block = actions.numel(), 256
    logprobs = torch.empty(tokens, dtype=dtype, device=actions.device)
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    launcher = Launcher(triton_expectation.logarithm_of_chosen, {"BLOCK": block, "DTYPE": accumulate}, num_warps=4)
    with on_device_of(actions):
        launcher(triton.cdiv(tokens, block), probabilities, actions, logprobs, tokens, count, shape[-1], *_strides(probabilities))
    return logprobs


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Of [.., A]: from row to row, which a pack has none of, from token to token, from action to action."""
    return (0, *tensor.stride())[-3:]


class Scan:
    """The launches of all calls with the same shapes, dtypes and options, between the two stages `before` and `after` of the kernel, if any."""

    def __init__(self, call: Call, before: Any = None, after: Any = None) -> None:
        rates = call.tensors.rates
        self.tokens, self.segments = call.tokens, call.segments
        # A pack of one segment is a row.
        self.length = call.tokens // max(1, call.segments) if call.cu_seqlens is None or call.segments == 1 else 0
        self.outputs = len(call.estimator.outputs)
        same = call.dtype == call.inputs[0].dtype  # then to say less is faster
        self.empty_like = torch.empty_like if same else partial(torch.empty_like, dtype=call.dtype)
        self.channels = len(call.rates)
        # Triton passes floats in float32: where float64 arithmetic needs a number in full it travels as a tensor.
        self.exact = call.compute_dtype == torch.float64
        self.numbers_alone = not self.exact and not any(isinstance(rate, Tensor) for rate in rates)
        self.constants = _constants(call, [1 if self.exact and not isinstance(rate, Tensor) else _kind(rate) for rate in rates])
        self.constants |= {"BEFORE": before, "AFTER": after}
        self.flagged = any(flag is not None for flag in call.tensors.flags)
        self.rows = _rows(call.segments, self.length) if call.cu_seqlens is None or call.segments == 1 else None
        self.launches: dict[int, tuple[Launcher, int, int]] = {}  # by width of the tiles

    def slots(self, given: Tensors) -> int:
        """How many rows of tiles the programs of all launches hold."""
        return sum(-(-tile_map.bound // tile_map.rows) * tile_map.rows for tile_map in self._maps(given))

    def __call__(self, given: Tensors, outputs: tuple[Tensor, ...] | None = None, staged: Staged | None = None) -> Sequence[Tensor]:
        """Launch; into `outputs`, if they are given."""
        like = given.inputs[0]
        outputs = outputs or tuple([self.empty_like(like) for _ in range(self.outputs)])
        if self.segments == 0:
            return [output.zero_() for output in outputs]
        with on_device_of(like):
            pointers, numbers = self._rates(given.rates, like)
            flags = aligned(given.flags) if self.flagged else absent(len(given.flags))
            (bootstrap,) = aligned((given.bootstrap,))
            arguments = aligned(given.inputs), outputs, pointers, numbers, flags, bootstrap
            first = 0
            for tile_map in self._maps(given):
                launcher, programs, words = self.launches.get(tile_map.width) or self._prepare(tile_map)
                carries = None
                if words:
                    kind = torch.int64 if self.exact else torch.int32
                    carries = torch.full((words,), triton_carry.UNSET.value, dtype=kind, device=like.device)
                stage = None if staged is None else staged(first)
                first += programs * tile_map.rows
                if programs:
                    launcher(programs, *arguments, tile_map.slots, carries, stage, self.segments, self.length, tile_map.bound)
        return outputs

    def _maps(self, given: Tensors) -> tuple[triton_map.TileMap, ...]:
        return (self.rows,) if self.rows is not None else triton_map.tile_maps(given.cu_seqlens, self.tokens)

    def _prepare(self, tile_map: triton_map.TileMap) -> tuple[Launcher, int, int]:
        """The launcher of the maps of one tile size, their number of programs, and their number of words for carries."""
        tiled = tile_map.width == tiles.WIDTH and (tile_map.slots is not None or self.length > tiles.WIDTH)
        words = tile_map.bound * self.channels * triton_carry.CARRY_WORDS.value if tiled else 0
        found = self._launcher(tile_map, tiled), -(-tile_map.bound // tile_map.rows), words
        self.launches[tile_map.width] = found
        return found

    def _launcher(self, tile_map: triton_map.TileMap, tiled: bool) -> Launcher:
        """For maps of one tile size."""
        aligned = tile_map.slots is None and self.length % triton_tile.RUN.value == 0
        constants = {
            **self.constants,
            "ALIGNED": aligned,
            "TILED": tiled,
            "GROUP": tiles.GROUP,
            "ROWS": tile_map.rows,
            "WIDTH": tile_map.width,
        }
        warps = max(1, min(8, tile_map.rows * tile_map.width // 256))
        return Launcher(
            triton_scan.scan_tiles, constants, alike=True, num_warps=warps, enable_fp_fusion=False, maxnreg=_REGISTERS[self.exact]
        )

    def _rates(self, rates: tuple[Rate, ...], like: Tensor) -> tuple[tuple[Tensor | None, ...], tuple[float, ...]]:
        """As pointers and as numbers, each absent where it is the other."""
        if self.numbers_alone:
            return absent(len(rates)), rates
        if self.exact:
            rates = tuple(
                rate if isinstance(rate, Tensor) else torch.full((self.segments,), rate, dtype=torch.float64, device=like.device)
                for rate in rates
            )
        pointers = aligned(tuple(rate if isinstance(rate, Tensor) else None for rate in rates))
        return pointers, tuple(0.0 if isinstance(rate, Tensor) else rate for rate in rates)


def aligned(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Tensors that begin at a multiple of 16 bytes: of such a one the kernel reads whole vectors and stays within its memory."""
    return tuple([tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone() for tensor in tensors])


def _rows(segments: int, length: int) -> triton_map.TileMap:
    """Rows need no map: a program tells its tile from its number."""
    if length > tiles.WIDTH:
        return triton_map.TileMap(tiles.WIDTH, 1, segments * triton.cdiv(length, tiles.WIDTH), None)
    width = max(triton_tile.RUN.value, triton.next_power_of_2(length))
    return triton_map.TileMap(width, max(1, tiles.PROGRAM // width), segments, None)


def _constants(call: Call, rate_kinds: Sequence[int]) -> dict[str, Any]:
    """What the launches of a call share."""
    wide = call.compute_dtype == torch.float64
    return {
        "coefficients": _jit(call.estimator.coefficients),
        "results": _jit(call.estimator.results),
        "CHANNELS": len(call.rates),
        "RATE_KINDS": tuple(rate_kinds),
        "FOLLOWING": call.following,
        "BESIDE": tuple(i in call.following for i in range(len(call.inputs))),
        "RATE_FOLLOWS": tuple(i in call.rates_following for i in range(len(call.rates[0]))),
        "FLAGS": tuple(_kind(flag) for flag in call.tensors.flags),
        "BOOTSTRAP": _kind(call.bootstrap),
        "CONTINUATION": call.continuation,
        "END_IS_CARRY": call.estimator.end in ("carry", "initial"),
        "MASKED": triton_steps.NO_MASK.value if call.mask is None else MASK_MODES.index(call.masked),
        "REVERSE": call.estimator.reverse,
        "STARTS": call.starts,
        "INDEX": tl.int64 if call.tokens >= _INT32_TOKENS else tl.int32,
        "DTYPE": tl.float64 if wide else tl.float32,
        "WORD": tl.int64 if wide else tl.int32,
    }


def _kind(value: Rate | None) -> int:
    """How a number is indexed: absent or one for all (0), by segment (1), by token (2)."""
    if not isinstance(value, Tensor):
        return 0
    return 1 if is_per_segment(value) else 2


@triton.jit
def _minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _exp(x):
    return tl.exp(x)


@lru_cache(maxsize=256)
def _jit(formula: Any) -> Any:
    """The formula as a Triton function, the same object every time."""
    return compiled_formula(formula, {"minimum": _minimum, "exp": _exp, "tl": tl}, triton.jit, tl.constexpr)
