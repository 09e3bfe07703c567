"""How a call becomes launches: one that makes a pack's map and clears the carries, or, where there is a map, clears them alone; and the scan."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import repeat
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import MASK_MODES, Call, Rate, Tensors, is_per_segment
from . import tiles, triton_carry, triton_core, triton_map, triton_scan, triton_steps, triton_tile
from .triton_formulas import jit_formula
from .triton_launch import Launcher, absent, on_device_of

# Places within a launch are int32 below this many tokens (a tile may reach past the last one), int64 above.
_INT32_TOKENS = 2**31 - 2 * tiles.WIDTH

# Numbers from this on have a product that is not 0 in float32.
_FADING = 1e-15

_NOWHERE, _AT_ZEROS = triton_tile.NOWHERE.value, triton_tile.AT_ZEROS.value

# Registers per thread: four programs of 256 threads on a multiprocessor keep more loads in flight than fewer with more registers, and five more where
# the kernel needs no more. On an H200 a pack of 1024 x 16384 tokens took 92 us with 64 (101 with 72, 96 with 56; later 74, and 79 with 48), a mixed
# one with mask and flags 193 us (211, 210), and the returns of a pack, which read one tensor, 49 us (45 with 48).
_REGISTERS, _FEW_REGISTERS, _WIDE_REGISTERS = 64, 48, 128  # in general; for one input without flags; for arithmetic in float64
_WARP_REGISTERS = 96  # for a program of one warp, of which a multiprocessor holds 32 at most
_PAIR_REGISTERS = 40  # for two tiles in a program that read one input: three fit on a multiprocessor


class Scan:
    """Solves all calls with the same shapes, dtypes and options, between the two stages `before` and `after` of the kernel, if there are any.

    Attributes:
        rows: how many rows of tiles its programs hold.
    """

    def __init__(self, call: Call, before: Any = None, after: Any = None) -> None:
        rates = call.tensors.rates
        self._tokens, self._segments = call.tokens, call.segments
        self._packed = call.cu_seqlens is not None and call.segments != 1  # a pack of one segment is a row
        self._length = 0 if self._packed else call.tokens // max(1, call.segments)
        self._outputs = len(call.estimator.outputs)
        same = call.dtype == call.inputs[0].dtype  # then to say less is faster
        self._empty_like = torch.empty_like if same else partial(torch.empty_like, dtype=call.dtype)
        # Triton passes floats in float32: where float64 arithmetic needs a number in full it travels as a tensor.
        self._exact = call.compute_dtype == torch.float64
        self._numbers_alone = not self._exact and not any(isinstance(rate, Tensor) for rate in rates)
        self._how = _how(call, [1 if self._exact and not isinstance(rate, Tensor) else _kind(rate) for rate in rates], before, after)
        self._flagged = any(flag is not None for flag in call.tensors.flags)
        self._stops = _stops(call)
        self._alone = len(call.inputs) == 1
        self._launchers: dict[int, Launcher] = {}  # by what STOPS
        if self._packed:
            self._places = bounds = triton_map.bounds_of(call.tokens, call.segments)
            shared = tiles.WIDTH // tiles.MEDIUM, tiles.WIDTH // tiles.SHORT
            programs = [-(-bound // rows) for bound, rows in zip(bounds[1:], shared, strict=True)]
            self.rows = bounds[0] + sum(count * rows for count, rows in zip(programs, shared, strict=True))
            self._programs, tiled = bounds[0] + sum(programs), bounds[0]
        else:
            width, shared_rows = _rows(self._length)
            # Two tiles of a segment share a program; masked tokens that are passed over may reach from one to the other.
            passed_over = call.mask is not None and call.masked == "skip"
            self._paired = tiles.WIDTH < self._length <= 2 * tiles.WIDTH and not passed_over
            self._tiled = self._length > tiles.WIDTH and not self._paired
            tiled = call.segments * triton.cdiv(self._length, width) if self._tiled else 0
            bound = tiled or call.segments
            self._places = call.segments, self._length, bound
            self._programs = -(-bound // shared_rows)
            self.rows = self._programs * (2 if self._paired else shared_rows)
        self._carried = tiled * len(call.rates) * triton_carry.CARRY_WORDS.value

    def __call__(
        self, given: Tensors, outputs: tuple[Tensor, ...] | None = None, staged: tuple[Tensor, ...] | None = None
    ) -> Sequence[Tensor]:
        """Launch; into `outputs`, if they are given. `staged` is what the stages take."""
        like = given.inputs[0]
        outputs = outputs or tuple(map(self._empty_like, repeat(like, self._outputs)))
        if self._segments == 0:
            return [output.zero_() for output in outputs]
        stops = self._stops or (_AT_ZEROS if min(given.rates, default=1.0) < _FADING else _NOWHERE)
        with on_device_of(like):
            pointers, numbers = self._rates(given.rates, like)
            flags = aligned(given.flags) if self._flagged else absent(len(given.flags))
            bootstrap = given.bootstrap
            if bootstrap is not None:
                (bootstrap,) = aligned((bootstrap,))
            carries: Tensor | None = None
            slots: tuple[Tensor, ...] = ()
            if self._carried or self._packed:
                carries = torch.empty(self._carried, dtype=torch.int64 if self._exact else torch.int32, device=like.device)
            if self._packed:
                slots = (triton_map.slots_of(given.cu_seqlens, self._tokens, carries),)
            elif self._carried:
                triton_carry.clear(carries)
            arguments = aligned(given.inputs), outputs, pointers, numbers, flags, bootstrap, carries, staged, *slots
            launcher = self._launchers.get(stops) or self._launcher(stops)
            launcher(self._programs, *arguments, *self._places)
        return outputs

    def _registers(self, warps: int) -> int:
        """How many a thread has at most."""
        if self._exact:
            return _WIDE_REGISTERS
        if warps == 1:
            return _WARP_REGISTERS
        if warps == 16 and self._alone:
            return _PAIR_REGISTERS
        return _FEW_REGISTERS if self._alone and not self._flagged else _REGISTERS

    def _launcher(self, stops: int) -> Launcher:
        """That and its constants."""
        kernel, constants = triton_scan.scan_pack, {"WIDTH": tiles.WIDTH, "MEDIUM": tiles.MEDIUM, "SHORT": tiles.SHORT}
        warps = 8
        if not self._packed:
            width, rows = _rows(self._length)
            kernel, constants = triton_scan.scan_rows, {"WIDTH": width, "ROWS": rows, "TILED": self._tiled, "PAIRED": self._paired}
            constants["ALIGNED"] = self._length % triton_tile.RUN.value == 0
            warps = 16 if self._paired else max(1, min(8, rows * width // 256))
        constants["HOW"] = self._how._replace(STOPS=_constant(stops))
        options = {"num_warps": warps, "maxnreg": self._registers(warps)}
        self._launchers[stops] = Launcher(kernel, constants, alike=True, **options)
        return self._launchers[stops]

    def _rates(self, rates: tuple[Rate, ...], like: Tensor) -> tuple[tuple[Tensor | None, ...], tuple[float, ...]]:
        """As pointers and as numbers, each absent where it is the other."""
        if self._numbers_alone:
            return absent(len(rates)), rates
        if self._exact:
            rates = tuple(
                rate if isinstance(rate, Tensor) else torch.full((self._segments,), rate, dtype=torch.float64, device=like.device)
                for rate in rates
            )
        pointers = aligned(tuple(rate if isinstance(rate, Tensor) else None for rate in rates))
        return pointers, tuple(0.0 if isinstance(rate, Tensor) else rate for rate in rates)


def aligned(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Tensors that begin at a multiple of 16 bytes: of such a one the kernel reads whole vectors and stays within its memory."""
    return tuple([tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone() for tensor in tensors])


def _rows(length: int) -> tuple[int, int]:
    """How wide a tile of rows of that length is, and how many rows a program takes."""
    if length > tiles.WIDTH:
        return tiles.WIDTH, 1
    width = max(triton_tile.RUN.value, triton.next_power_of_2(length))
    return width, max(1, tiles.PROGRAM // width)


def _constant(value: Any) -> Any:
    """As an attribute of what a kernel is compiled for must be; the interpreter takes plain values."""
    return value if tiles.INTERPRETED else tl.constexpr(value)


def _how(call: Call, rate_kinds: Sequence[int], before: Any, after: Any) -> triton_core.How:
    """What the kernel is compiled for, whatever the numbers."""
    wide = call.compute_dtype == torch.float64
    constants = {
        "CHANNELS": len(call.rates),
        "RATE_KINDS": tuple(rate_kinds),
        "FOLLOWING": call.following,
        "BESIDE": tuple(i in call.following for i in range(len(call.inputs))),
        "RATE_FOLLOWS": tuple(i in call.rates_following for i in range(len(call.rates[0]))),
        "CONTINUATION": call.continuation,
        "FLAGS": tuple(_kind(flag) for flag in call.tensors.flags),
        "BOOTSTRAP": _kind(call.bootstrap),
        "END_IS_CARRY": call.estimator.end in ("carry", "initial"),
        "MASKED": triton_steps.NO_MASK.value if call.mask is None else MASK_MODES.index(call.masked),
        "REVERSE": call.estimator.reverse,
        "STARTS": call.starts,
        "STOPS": triton_tile.ANYWHERE.value,
        "GROUP": tiles.GROUP,
        "DTYPE": tl.float64 if wide else tl.float32,
        "WORD": tl.int64 if wide else tl.int32,
        "INDEX": tl.int64 if call.tokens >= _INT32_TOKENS else tl.int32,
    }
    formulas = _jit(call.estimator.coefficients), _jit(call.estimator.results)
    return triton_core.How(*formulas, before, after, **{name: _constant(value) for name, value in constants.items()})


def _stops(call: Call) -> int:
    """What STOPS, whatever the rates that are numbers. Where one may be more than 1, products of them may be infinite."""
    estimator = call.estimator
    fades = estimator.fades_by_rates and all(rate.largest <= 1 for rate in estimator.rates.values())
    if not fades or any(isinstance(rate, Tensor) for rate in call.tensors.rates):
        return triton_tile.ANYWHERE.value
    divided = any(flag is not None and not is_per_segment(flag) for flag in (call.terminated, call.truncated))
    return _AT_ZEROS if divided else _NOWHERE


def _kind(value: Rate | None) -> int:
    """How a number is indexed: absent or one for all (0), by segment (1), by token (2)."""
    if not isinstance(value, Tensor):
        return 0
    return 1 if is_per_segment(value) else 2


@lru_cache(maxsize=256)
def _jit(formula: Any) -> Any:
    """The formula as a Triton function, the same object every time."""
    return jit_formula(formula)
