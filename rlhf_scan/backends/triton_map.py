"""Which tile of which segment each program of a launch over a pack holds: made on the device, without reading it, and kept per batch."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .tiles import INTERPRETED, MEDIUM, PROGRAM, SHORT, WIDTH

FIELDS = tl.constexpr(
    8
)  # of a slot: segment, turn of the tile in scan order, the segment's first token, its length, the segment's first slot
_COUNTED = 64 if INTERPRETED else 4096  # segments counted at a time
_FILLED = 64 if INTERPRETED else 256  # slots filled by a program


@dataclass(frozen=True)
class TileMap:
    """The slots of one launch. Of long segments come all first tiles in scan order, then all second ones, ...

    Attributes:
        width: of the tiles.
        rows: slots a program holds.
        bound: at most so many slots are in use.
        slots: [bound, FIELDS], length 0 in one not in use; None for rows, whose programs tell their tile from their number.
    """

    width: int
    rows: int
    bound: int
    slots: Tensor | None


# A captured graph neither reads nor fills this: its boundaries may change between replays, and its memory is its own.
_KEPT = WeakTensorKeyDictionary()


def tile_maps(cu_seqlens: Tensor, tokens: int) -> tuple[TileMap, ...]:
    """The launches that cover a pack: its long segments, then its medium and its short ones."""
    capturing = cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or cu_seqlens.is_inference():
        return _make(cu_seqlens, tokens)
    state = cu_seqlens._version, tokens
    kept = _KEPT.get(cu_seqlens)
    if kept is None or kept[0] != state:
        kept = state, _make(cu_seqlens, tokens)
        _KEPT[cu_seqlens] = kept
    return kept[1]


def _make(cu_seqlens: Tensor, tokens: int) -> tuple[TileMap, ...]:
    segments, device = cu_seqlens.numel() - 1, cu_seqlens.device
    long = tokens // WIDTH + min(segments, tokens // (MEDIUM + 1))
    bounds = long, min(segments, tokens // (SHORT + 1)), min(segments, tokens)
    kind = torch.int32 if tokens < 2**31 - WIDTH else torch.int64
    totals = torch.empty(3, segments, dtype=kind, device=device)
    slots = torch.empty(long + sum(bounds), FIELDS.value, dtype=kind, device=device)
    turns = torch.empty(min(long, tokens // WIDTH + 1) + 1, dtype=torch.int32, device=device)
    programs = [triton.cdiv(bound, _FILLED) for bound in bounds]
    _count_tiles[(1,)](cu_seqlens, totals, turns, segments, tokens, turns.numel(), WIDTH, MEDIUM, SHORT, _COUNTED, num_warps=8)
    _fill_slots[(sum(programs),)](cu_seqlens, totals, slots, turns, segments, tokens, *bounds, *programs[:2], _FILLED, num_warps=4)
    _sum_turns[(1,)](turns, turns.numel(), _COUNTED, num_warps=8)
    _order_slots[(programs[0],)](slots, turns, long, _FILLED, num_warps=4)
    ordered, medium, short = slots[long:].split(bounds)
    return (
        TileMap(WIDTH, 1, long, ordered),
        TileMap(MEDIUM, PROGRAM // MEDIUM, bounds[1], medium),
        TileMap(SHORT, PROGRAM // SHORT, bounds[2], short),
    )


@triton.jit
def _start_and_length(cu_seqlens, segment, tokens, there):
    """Of a segment; within the tokens, whatever the boundaries say."""
    start = tl.maximum(tl.load(cu_seqlens + segment, mask=there, other=0), 0)
    stop = tl.minimum(tl.load(cu_seqlens + segment + 1, mask=there, other=0), tokens)
    return start, tl.maximum(stop - start, 0)


@triton.jit(do_not_specialize=["segments", "tokens", "turn_bound"])
def _count_tiles(
    cu_seqlens,
    totals,
    turns,
    segments,
    tokens,
    turn_bound,
    WIDTH: tl.constexpr,
    MEDIUM: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Running totals, over the segments, of the tiles of long ones, of the medium ones and of the short ones; and `turns` cleared."""
    kind = totals.dtype.element_ty
    long_before = tl.zeros([], kind)
    medium_before = tl.zeros([], kind)
    short_before = tl.zeros([], kind)
    for first in tl.range(0, segments, BLOCK):
        segment = first + tl.arange(0, BLOCK)
        there = segment < segments
        _, length = _start_and_length(cu_seqlens, segment, tokens, there)
        long = tl.where(length > MEDIUM, tl.cdiv(length, WIDTH), 0).to(kind)
        medium = ((length > SHORT) & (length <= MEDIUM)).to(kind)
        short = ((length > 0) & (length <= SHORT)).to(kind)
        tl.store(totals + segment, long_before + tl.cumsum(long), mask=there)
        tl.store(totals + segments + segment, medium_before + tl.cumsum(medium), mask=there)
        tl.store(totals + 2 * segments + segment, short_before + tl.cumsum(short), mask=there)
        long_before += tl.sum(long)
        medium_before += tl.sum(medium)
        short_before += tl.sum(short)
    for first in tl.range(0, turn_bound, BLOCK):
        turn = first + tl.arange(0, BLOCK)
        tl.store(turns + turn, 0, mask=turn < turn_bound)


@triton.jit(do_not_specialize=["segments", "tokens", "long_bound", "medium_bound", "short_bound", "long_programs", "medium_programs"])
def _fill_slots(
    cu_seqlens,
    totals,
    slots,
    turns,
    segments,
    tokens,
    long_bound,
    medium_bound,
    short_bound,
    long_programs,
    medium_programs,
    BLOCK: tl.constexpr,
):
    """Each slot's segment is the first whose running total exceeds it. Long segments' slots lie in their order, still to be put in turns."""
    program = tl.program_id(0)
    is_long = program < long_programs
    is_medium = (is_long == 0) & (program < long_programs + medium_programs)
    first_program = tl.where(is_long, 0, tl.where(is_medium, long_programs, long_programs + medium_programs))
    bound = tl.where(is_long, long_bound, tl.where(is_medium, medium_bound, short_bound))
    target = tl.where(is_long, 0, tl.where(is_medium, 2 * long_bound, 2 * long_bound + medium_bound))
    totals += tl.where(is_long, 0, tl.where(is_medium, segments, 2 * segments))
    slot = ((program - first_program) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    there = slot < bound
    used = there & (slot < tl.load(totals + segments - 1))
    low = slot * 0
    high = low + segments
    left = segments
    while left > 0:
        middle = (low + high) // 2
        beyond = tl.load(totals + middle, mask=used & (low < high), other=0) > slot
        high = tl.where(beyond, middle, high)
        low = tl.where(beyond | (low >= high), low, middle + 1)
        left = left // 2
    start, length = _start_and_length(cu_seqlens, low, tokens, used)
    before = tl.load(totals + low - 1, mask=used & (low > 0), other=0)
    turn = tl.where(used, slot - before, 0)
    kind = slots.dtype.element_ty
    place = slots + (target + slot) * FIELDS
    tl.store(place, tl.where(used, low, 0).to(kind), mask=there)
    tl.store(place + 1, turn.to(kind), mask=there)
    tl.store(place + 2, start.to(kind), mask=there)
    tl.store(place + 3, tl.where(used, length, 0).to(kind), mask=there)
    tl.store(place + 4, before.to(kind), mask=there)
    tl.atomic_add(turns + turn, 1, mask=used & is_long, sem="relaxed")


@triton.jit(do_not_specialize=["turn_bound"])
def _sum_turns(turns, turn_bound, BLOCK: tl.constexpr):
    """In place of how many tiles a turn has, how many the turns before it have."""
    before = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int32) + 1
    first = tl.zeros([], tl.int32)
    while (first < turn_bound) & (last > 0):
        turn = first + tl.arange(0, BLOCK)
        count = tl.load(turns + turn, mask=turn < turn_bound, other=0)
        tl.store(turns + turn, before + tl.cumsum(count) - count, mask=turn < turn_bound)
        last = tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, count, 0))
        before += tl.sum(count)
        first += BLOCK


@triton.jit(do_not_specialize=["bound"])
def _order_slots(slots, turns, bound, BLOCK: tl.constexpr):
    """The slots by their turns; within a turn in any order. Those not in use come last."""
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = slot < bound
    length = tl.load(slots + slot * FIELDS + 3, mask=there, other=0)
    used = length > 0
    turn = tl.load(slots + slot * FIELDS + 1, mask=used, other=0)
    place = tl.where(used, tl.atomic_add(turns + turn, 1, mask=used, sem="relaxed").to(tl.int64), slot)
    target = slots + (bound + place) * FIELDS
    tl.store(target + 3, length, mask=there)
    tl.store(target, tl.load(slots + slot * FIELDS, mask=used, other=0), mask=used)
    tl.store(target + 1, turn, mask=used)
    tl.store(target + 2, tl.load(slots + slot * FIELDS + 2, mask=used, other=0), mask=used)
    tl.store(target + 4, tl.load(slots + slot * FIELDS + 4, mask=used, other=0), mask=used)
