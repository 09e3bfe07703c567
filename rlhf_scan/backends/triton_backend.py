"""The Triton backend: how a call becomes launches of the one kernel. One launch for rows, two for a pack, whatever the lengths."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import MASK_MODES, Call, Rate, is_per_segment
from . import tiles, triton_carry, triton_scan, triton_steps, triton_tile
from .formulas import compiled_formula

# Places within a launch are int32 below this many tokens (a tile may reach past the last one), int64 above.
_INT32_TOKENS = 2**31 - 2 * tiles.WIDTH


def why_not(device: torch.device) -> str | None:
    """It takes CUDA tensors, or CPU tensors in Triton's interpreter."""
    if device.type == "cuda" and not tiles.INTERPRETED:
        return None
    if device.type == "cpu" and tiles.INTERPRETED:
        return None
    if tiles.INTERPRETED:
        return f"runs in Triton's interpreter here and takes CPU tensors, got {device}; unset TRITON_INTERPRET for CUDA tensors"
    return f'takes CUDA tensors, got {device}; move them to a GPU, choose backend="cpu", or set TRITON_INTERPRET=1 before the first import'


def run(call: Call) -> list[Tensor]:
    """Launch the kernel over rows, or over a pack's long and then its short segments."""
    outputs = [torch.empty(call.tokens, dtype=call.dtype, device=call.inputs[0].device) for _ in call.estimator.outputs]
    arguments = _arguments(call)
    if call.cu_seqlens is None:
        _launch_rows(call, outputs, arguments)
    else:
        for tile_map in tiles.tile_maps(call.cu_seqlens, call.tokens):
            _launch_slots(call, outputs, arguments, tile_map)
    return outputs


def _launch_rows(call: Call, outputs: list[Tensor], arguments: dict[str, Any]) -> None:
    length = call.length or 0
    if length > tiles.WIDTH:
        slots = call.segments * triton.cdiv(length, tiles.WIDTH)
        _launch(slots, call, outputs, arguments, (None, None, None), length, slots, tiles.WIDTH, 1)
    else:
        width = max(triton_tile.RUN.value, triton.next_power_of_2(length))
        rows = max(1, tiles.PROGRAM // width)
        _launch(triton.cdiv(call.segments, rows), call, outputs, arguments, (None, None, None), length, call.segments, width, rows)


def _launch_slots(call: Call, outputs: list[Tensor], arguments: dict[str, Any], tile_map: tiles.TileMap) -> None:
    slots = tile_map.segment.numel()
    if slots:
        where = call.cu_seqlens, tile_map.segment, tile_map.tile
        _launch(triton.cdiv(slots, tile_map.rows), call, outputs, arguments, where, 0, slots, tile_map.width, tile_map.rows)


def _launch(
    grid: int,
    call: Call,
    outputs: list[Tensor],
    arguments: dict[str, Any],
    where: tuple[Tensor | None, Tensor | None, Tensor | None],
    length: int,
    slots: int,
    width: int,
    rows: int,
) -> None:
    """One launch; `width` == WIDTH with one row a program means that segments may have several tiles."""
    tiled = width == tiles.WIDTH and (length > width or where[0] is not None)
    word = torch.int64 if call.compute_dtype == torch.float64 else torch.int32
    carries = None
    if tiled:
        words = slots * len(call.rates) * triton_carry.CARRY_WORDS.value
        carries = torch.full((words,), triton_carry.UNSET.value, dtype=word, device=outputs[0].device)
    triton_scan.scan_tiles[(grid,)](
        outputs=tuple(outputs),
        bounds=where[0],
        slot_segment=where[1],
        slot_tile=where[2],
        carries=carries,
        segments=call.segments,
        length=length,
        slots=slots,
        TILED=tiled,
        GROUP=tiles.GROUP,
        ROWS=rows,
        WIDTH=width,
        WORD=tl.int64 if word == torch.int64 else tl.int32,
        num_warps=max(1, min(8, rows * width // 256)),
        enable_fp_fusion=True,
        **arguments,
    )


def _arguments(call: Call) -> dict[str, Any]:
    """What the launches of a call share."""
    rates = [_exact(rate, call) for channel in call.rates for rate in channel]
    flags = call.mask, call.terminated, call.truncated
    return {
        "inputs": call.inputs,
        "rates": tuple(rate if isinstance(rate, Tensor) else None for rate in rates),
        "rate_numbers": tuple(0.0 if isinstance(rate, Tensor) else rate for rate in rates),
        "flags": flags,
        "bootstrap": call.bootstrap,
        "coefficients": _jit(call.estimator.coefficients),
        "results": _jit(call.estimator.results),
        "CHANNELS": len(call.rates),
        "RATES": len(call.rates[0]),
        "RATE_KINDS": tuple(_kind(rate) for rate in rates),
        "FOLLOWING": call.following,
        "FLAGS": tuple(_kind(flag) for flag in flags),
        "BOOTSTRAP": _kind(call.bootstrap),
        "CONTINUATION": call.continuation,
        "END_IS_CARRY": call.estimator.end in ("carry", "initial"),
        "MASKED": triton_steps.NO_MASK.value if call.mask is None else MASK_MODES.index(call.masked),
        "REVERSE": call.estimator.reverse,
        "STARTS": call.starts,
        "INDEX": tl.int64 if call.tokens >= _INT32_TOKENS else tl.int32,
        "DTYPE": tl.float64 if call.compute_dtype == torch.float64 else tl.float32,
    }


def _kind(value: Rate | None) -> int:
    """How a number is indexed: absent or one for all (0), by segment (1), by token (2)."""
    if not isinstance(value, Tensor):
        return 0
    return 1 if is_per_segment(value) else 2


def _exact(rate: Rate, call: Call) -> Rate:
    """`rate`; a number that float64 arithmetic needs in full travels as a tensor, since Triton passes floats in float32."""
    if isinstance(rate, Tensor) or call.compute_dtype != torch.float64:
        return rate
    return torch.full((call.segments, 1), rate, dtype=torch.float64, device=call.inputs[0].device)


@triton.jit
def _minimum(x, y):
    return tl.minimum(x, y)


@triton.jit
def _exp(x):
    return tl.exp(x)


@lru_cache(maxsize=256)
def _jit(formula: Any) -> Any:
    """The formula as a Triton function, the same object every time."""
    return compiled_formula(formula, {"minimum": _minimum, "exp": _exp, "tl": tl}, triton.jit, tl.constexpr)
