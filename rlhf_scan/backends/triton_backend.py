"""The Triton backend: how a call becomes launches of the one kernel. One launch for rows, two for a pack, whatever the lengths."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import MASK_MODES, Call, Rate, is_per_segment
from . import tiles, triton_carry, triton_expectation, triton_map, triton_scan, triton_steps, triton_tile
from .formulas import compiled_formula

# Places within a launch are int32 below this many tokens (a tile may reach past the last one), int64 above.
_INT32_TOKENS = 2**31 - 2 * tiles.WIDTH

# Per thread. Four programs of 256 threads on a multiprocessor keep more loads in flight than fewer with more registers: on an H200, 1024 x 16384
# tokens took 198 us with a mask (363 without this limit) and 132 us as a pack (142).
_REGISTERS = {torch.float32: 64, torch.float64: 128}


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
    if call.segments == 0:
        return [output.zero_() for output in outputs]
    if call.cu_seqlens is None:
        _launch(_rows(call), call, outputs, arguments)
    else:
        for tile_map in triton_map.tile_maps(call.cu_seqlens, call.tokens):
            _launch(tile_map, call, outputs, arguments)
    return outputs


def expectation(values: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the actions of values * probabilities."""
    *shape, actions = values.shape
    tokens = math.prod(shape)
    expected = torch.empty(tokens, dtype=dtype, device=values.device)
    width = min(triton.next_power_of_2(actions), 128)
    rows = max(1, tiles.PROGRAM // width)
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    places = _strides(values) + _strides(probabilities)
    triton_expectation.sum_of_products[(triton.cdiv(tokens, rows),)](
        *(values, probabilities, expected, tokens, actions, shape[-1], *places, rows, width, accumulate), num_warps=4, enable_fp_fusion=True
    )
    return expected


def chosen_logprobs(probabilities: Tensor, actions: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of the probability of each token's action."""
    *shape, count = probabilities.shape
    tokens, block = actions.numel(), 256
    logprobs = torch.empty(tokens, dtype=dtype, device=actions.device)
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    places = _strides(probabilities)
    triton_expectation.logarithm_of_chosen[(triton.cdiv(tokens, block),)](
        *(probabilities, actions, logprobs, tokens, count, shape[-1], *places, block, accumulate), num_warps=4
    )
    return logprobs


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Of [.., A]: from row to row, which a pack has none of, from token to token, from action to action."""
    return (0, *tensor.stride())[-3:]


def _rows(call: Call) -> triton_map.TileMap:
    """Rows need no map: a program tells its tile from its number."""
    length = call.length or 0
    if length > tiles.WIDTH:
        return triton_map.TileMap(tiles.WIDTH, 1, call.segments * triton.cdiv(length, tiles.WIDTH), None)
    width = max(triton_tile.RUN.value, triton.next_power_of_2(length))
    return triton_map.TileMap(width, max(1, tiles.PROGRAM // width), call.segments, None)


def _launch(tile_map: triton_map.TileMap, call: Call, outputs: list[Tensor], arguments: dict[str, Any]) -> None:
    """One launch."""
    if tile_map.bound == 0:
        return
    packed = tile_map.slots is not None
    tiled = tile_map.width == tiles.WIDTH and (packed or (call.length or 0) > tiles.WIDTH)
    word = torch.int64 if call.compute_dtype == torch.float64 else torch.int32
    carries = None
    if tiled:
        words = tile_map.bound * len(call.rates) * triton_carry.CARRY_WORDS.value
        carries = torch.full((words,), triton_carry.UNSET.value, dtype=word, device=outputs[0].device)
    triton_scan.scan_tiles[(triton.cdiv(tile_map.bound, tile_map.rows),)](
        outputs=tuple(outputs),
        slots=tile_map.slots,
        carries=carries,
        segments=call.segments,
        length=call.length or 0,
        bound=tile_map.bound,
        TILED=tiled,
        GROUP=tiles.GROUP,
        ROWS=tile_map.rows,
        WIDTH=tile_map.width,
        WORD=tl.int64 if word == torch.int64 else tl.int32,
        num_warps=max(1, min(8, tile_map.rows * tile_map.width // 256)),
        enable_fp_fusion=True,
        maxnreg=_REGISTERS[call.compute_dtype],
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
        "RATE_FOLLOWS": tuple(i in call.rates_following for i in range(len(call.rates[0]))),
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
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _exp(x):
    return tl.exp(x)


@lru_cache(maxsize=256)
def _jit(formula: Any) -> Any:
    """The formula as a Triton function, the same object every time."""
    return compiled_formula(formula, {"minimum": _minimum, "exp": _exp, "tl": tl}, triton.jit, tl.constexpr)
