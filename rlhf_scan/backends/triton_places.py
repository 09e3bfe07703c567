"""What there is once per sequence, for the Triton backend: one launch, after one that reads the masks if there are any."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import score_formulas
from ..call import is_per_segment
from ..shaping import FAULTS, Located, Placed, ScoreCall, Sequences, ShapingCall
from .triton_formulas import jit_formula
from .triton_launch import Launcher, await_previous, on_device_of
from .triton_locate import located, parts_located
from .triton_parts import NO_FAULT, WARPS, at_a_time, bounds_of, flag, is_finite

_SCORES, _KL_COEF, _BOOTSTRAP = (tl.constexpr(FAULTS.index(name)) for name in ("scores", "kl_coef", "bootstrap"))


def place(call: ShapingCall, scores: ScoreCall) -> Sequences:
    """Where each sequence ends, and what there is once per sequence."""
    with on_device_of(call.values):
        ends = tuple(tensor if _kind(scores.truncated) == _kind(tensor) == 2 else None for tensor in (scores.truncated, scores.terminated))
        # Where nobody says otherwise a sequence ends with its last token.
        read = any(tensor is not None for tensor in (call.mask, call.has_eos, ends[0]))
        parts, table = parts_located(call, ends) if read else (1, None)
        return _placed(call, scores, parts, table)


def _placed(call: ShapingCall, given: ScoreCall, parts: int, table: Tensor | None) -> Sequences:
    """From what the parts found, or from the boundaries alone, to all there is once per sequence."""
    segments, device = call.segments, call.values.device
    room = segments + -segments % 4  # rows begin at multiples of 16 bytes
    places = torch.empty(9, room, dtype=torch.int64, device=device)
    numbers = torch.empty(2, room, dtype=call.dtype, device=device)
    missing = torch.empty(segments, dtype=torch.bool, device=device) if given.looks_for_eos else None
    trimmed = torch.empty(2 * segments + 1, dtype=torch.int64, device=device) if given.trims else None
    kl_coef = given.kl_coef if isinstance(given.kl_coef, Tensor) else None
    rows, width = at_a_time(parts)
    launcher = _placer(
        (given.post_eos, given.trailing, call.zero_faults, call.dtype),
        (_kind(given.terminated), _kind(given.truncated), _kind(given.bootstrap)),
        rows,
        width,
    )
    launcher(
        -(-segments // rows),
        call.cu_seqlens,
        table,
        (flag(given.scores), kl_coef, flag(given.has_eos)),
        (flag(given.terminated), flag(given.truncated), given.bootstrap),
        places,
        numbers,
        flag(missing),
        trimmed,
        call.length or 0,
        segments,
        call.tokens,
        parts,
        room,
        0.0 if kl_coef is not None else float(given.kl_coef),
        float(given.bias),
        float(given.scale),
        float(given.low),
        float(given.high),
        float(given.missing_eos_penalty),
    )
    if room != segments:
        places, numbers = places[:, :segments], numbers[:, :segments]
    start, last, end, trainable, eos, place, slot, fault, cuts = places.unbind(0)
    score, kl_coef = numbers.unbind(0)
    found = Located(last, end, trainable, eos), Placed(score, place, slot, end)
    return Sequences(start, *found, fault, kl_coef, missing, None if given.truncated is None else cuts, trimmed)


def _kind(tensor: Tensor | None) -> int:
    """Absent (0), by segment (1), by token (2)."""
    return 0 if tensor is None else 1 if is_per_segment(tensor) else 2


@lru_cache(maxsize=256)
def _placer(options: tuple[bool, str, bool, torch.dtype], kinds: tuple[int, int, int], rows: int, width: int) -> Launcher:
    post_eos, trailing, zero, dtype = options
    constants = {
        "POST_EOS": post_eos,
        "TRAILING": trailing,
        "ZERO_FAULTS": zero,
        "DTYPE": tl.float64 if dtype == torch.float64 else tl.float32,
        **dict(zip(("TERMINATED", "TRUNCATED", "BOOTSTRAP"), kinds, strict=True)),
        "ROWS": rows,
        "WIDTH": width,
    }
    return Launcher(_place, constants, num_warps=WARPS)


@triton.jit
def _select(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def _smaller(x, y):
    return tl.minimum(x, y)


@triton.jit
def _within(x, low, high):
    lifted = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(lifted, high, propagate_nan=tl.PropagateNan.ALL)


_OWN = {"select": _select, "smaller": _smaller, "within": _within}
_lacks_eos, _score_paid, _slot_after, _token_of_score, _with_fault = (
    jit_formula(formula, _OWN)
    for formula in (
        score_formulas.lacks_eos,
        score_formulas.score_paid,
        score_formulas.slot_after,
        score_formulas.token_of_score,
        score_formulas.with_fault,
    )
)


@triton.jit
def _at_end(tensor, sequence, there, step, KIND: tl.constexpr):
    """What a tensor per sequence (1) or per token (2) says of the last step; 0 where there is none."""
    return tl.load(tensor + sequence, mask=there, other=0) if KIND == 1 else tl.load(tensor + step, mask=there & (step >= 0), other=0)


@triton.jit
def _paid(given, sequence, there, last, slot, eos, missing_eos, bias, scale, low, high, penalty, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """The score; on the way it is written which sequences lack an end."""
    score = tl.zeros([ROWS], DTYPE)
    if given[0] is not None:
        score = tl.load(given[0] + sequence, mask=there, other=0).to(DTYPE)
    score = _score_paid(score, tl.full([], bias, DTYPE), tl.full([], scale, DTYPE), tl.full([], low, DTYPE), tl.full([], high, DTYPE))
    if missing_eos is not None:
        has_eos = (eos > 0).to(tl.int32)
        if given[2] is not None:
            has_eos = (tl.load(given[2] + sequence, mask=there, other=0) != 0).to(tl.int32)
        missing = _lacks_eos(has_eos, last, slot)
        score = tl.where(missing, score - tl.full([], penalty, DTYPE), score)
        tl.store(missing_eos + sequence, missing.to(tl.uint8), mask=there)
    return score


@triton.jit
def _faults(score, coefficient, ends, sequence, there, start, end, place, step, TERMINATED: tl.constexpr, BOOTSTRAP: tl.constexpr):
    """The first number that is not finite, of those that there are once per sequence."""
    fault = tl.full([sequence.shape[0]], NO_FAULT, tl.int64)
    fault = _with_fault(fault, is_finite(score) == 0, place, start, _SCORES)
    fault = _with_fault(fault, is_finite(coefficient) == 0, end, start, _KL_COEF)
    if BOOTSTRAP > 0:
        bad = is_finite(_at_end(ends[2], sequence, there, step, BOOTSTRAP).to(tl.float64)) == 0
        if TERMINATED > 0:
            bad = bad & (_at_end(ends[0], sequence, there, step, TERMINATED) == 0)
        fault = _with_fault(fault, bad, step, start, _BOOTSTRAP)
    return fault


@triton.jit(do_not_specialize=["length", "segments", "tokens", "parts", "room"])
def _place(
    cu_seqlens,
    table,
    given,
    ends,
    places,
    numbers,
    missing_eos,
    trimmed,
    length,
    segments,
    tokens,
    parts,
    room,
    kl_coef: tl.float64,
    bias: tl.float64,
    scale: tl.float64,
    low: tl.float64,
    high: tl.float64,
    penalty: tl.float64,
    POST_EOS: tl.constexpr,
    TRAILING: tl.constexpr,
    ZERO_FAULTS: tl.constexpr,
    DTYPE: tl.constexpr,
    TERMINATED: tl.constexpr,
    TRUNCATED: tl.constexpr,
    BOOTSTRAP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """All of `Sequences`; `given`: scores, kl_coef, has_eos; `ends`: terminated, truncated, bootstrap."""
    await_previous()
    sequence = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = sequence < segments
    room = room.to(tl.int64)
    start, stop = bounds_of(cu_seqlens, sequence, there, length, tokens)
    if table is None:
        last = tl.where(stop > start, stop - 1, -1)
        end, trainable, eos = last, stop - start, tl.zeros([ROWS], tl.int64)
        cuts = eos
    else:
        last, end, trainable, eos, cuts = located(table, sequence, there, segments, parts, ROWS, WIDTH)
    slot = tl.full([ROWS], -1, tl.int64)
    if POST_EOS:
        slot = _slot_after(last, end, start, stop)
    place = _token_of_score(last, end, slot, TRAILING)
    step = tl.maximum(slot, end)
    score = _paid(given, sequence, there, last, slot, eos, missing_eos, bias, scale, low, high, penalty, ROWS, DTYPE)
    coefficient = tl.full([ROWS], kl_coef, DTYPE)
    if given[1] is not None:
        coefficient = tl.load(given[1] + sequence, mask=there, other=0).to(DTYPE)
    fault = _faults(score, coefficient, ends, sequence, there, start, end, place, step, TERMINATED, BOOTSTRAP)
    if ZERO_FAULTS:
        score, coefficient = tl.where(is_finite(score), score, 0.0), tl.where(is_finite(coefficient), coefficient, 0.0)
    if TRUNCATED == 1:
        cut = tl.load(ends[1] + sequence, mask=there, other=0) != 0
        if TERMINATED == 1:
            cut = cut & (tl.load(ends[0] + sequence, mask=there, other=0) == 0)
        cuts = cut.to(tl.int64)
    if trimmed is not None:
        tl.store(trimmed + 2 * sequence, start, mask=there)
        tl.store(trimmed + 2 * sequence + 1, tl.maximum(step + 1, start), mask=there)
        tl.store(trimmed + 2 * sequence + 2, stop, mask=sequence == segments - 1)
    found = start, last, end, trainable, eos, place, slot, fault, cuts
    for i in tl.static_range(len(found)):
        tl.store(places + i * room + sequence, found[i], mask=there)
    tl.store(numbers + sequence, score, mask=there)
    tl.store(numbers + room + sequence, coefficient, mask=there)
