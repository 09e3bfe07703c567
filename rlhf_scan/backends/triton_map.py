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

from .tiles import INTERPRETED, PROGRAM, SHORT, WIDTH

FIELDS = tl.constexpr(4)  # of a slot: segment, tile, the segment's first token, its length
_COUNTED = 64 if INTERPRETED else 2048  # segments counted at a time
_FILLED = 64 if INTERPRETED else 256  # slots filled by a program


@dataclass(frozen=True)
class TileMap:
    """The slots of one launch. Consecutive tiles of a segment have consecutive slots.

    Attributes:
        width: of the tiles.
        rows: slots a program holds.
        bound: at most so many slots are in use.
        slots: int64 [bound, FIELDS], length 0 in one not in use; None for rows, whose programs tell their tile from their number.
    """

    width: int
    rows: int
    bound: int
    slots: Tensor | None


# A captured graph neither reads nor fills this: its boundaries may change between replays, and its memory is its own.
_KEPT = WeakTensorKeyDictionary()


def tile_maps(cu_seqlens: Tensor, tokens: int) -> tuple[TileMap, ...]:
    """The launches that cover a pack: its long segments, then its short ones."""
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
    segments = cu_seqlens.numel() - 1
    bounds = tokens // WIDTH + min(segments, tokens // (SHORT + 1)), min(segments, tokens)
    ends = torch.empty(2, segments, dtype=torch.int64, device=cu_seqlens.device)
    slots = torch.empty(sum(bounds), FIELDS.value, dtype=torch.int64, device=cu_seqlens.device)
    _count_tiles[(1,)](cu_seqlens, ends, segments, tokens, WIDTH, SHORT, _COUNTED, num_warps=8)
    programs = triton.cdiv(bounds[0], _FILLED), triton.cdiv(bounds[1], _FILLED)
    _fill_slots[(sum(programs),)](cu_seqlens, ends, slots, segments, tokens, bounds[0], bounds[1], programs[0], _FILLED, num_warps=4)
    long = TileMap(WIDTH, 1, bounds[0], slots[: bounds[0]])
    return long, TileMap(SHORT, PROGRAM // SHORT, bounds[1], slots[bounds[0] :])


@triton.jit
def _start_and_length(cu_seqlens, segment, tokens, there):
    """Of a segment; within the tokens, whatever the boundaries say."""
    start = tl.maximum(tl.load(cu_seqlens + segment, mask=there, other=0), 0)
    stop = tl.minimum(tl.load(cu_seqlens + segment + 1, mask=there, other=0), tokens)
    return start, tl.maximum(stop - start, 0)


@triton.jit(do_not_specialize=["segments", "tokens"])
def _count_tiles(cu_seqlens, ends, segments, tokens, WIDTH: tl.constexpr, SHORT: tl.constexpr, BLOCK: tl.constexpr):
    """Running totals, over the segments, of the tiles of long ones (first row of `ends`) and of the short ones (second row)."""
    long_before = tl.zeros([], tl.int64)
    short_before = tl.zeros([], tl.int64)
    for first in tl.range(0, segments, BLOCK):
        segment = first + tl.arange(0, BLOCK)
        there = segment < segments
        _, length = _start_and_length(cu_seqlens, segment, tokens, there)
        long = tl.where(length > SHORT, tl.cdiv(length, WIDTH), 0)
        short = (length > 0) & (length <= SHORT)
        tl.store(ends + segment, long_before + tl.cumsum(long), mask=there)
        tl.store(ends + segments + segment, short_before + tl.cumsum(short.to(tl.int32)), mask=there)
        long_before += tl.sum(long)
        short_before += tl.sum(short.to(tl.int32))


@triton.jit(do_not_specialize=["segments", "tokens", "long_bound", "short_bound", "long_programs"])
def _fill_slots(cu_seqlens, ends, slots, segments, tokens, long_bound, short_bound, long_programs, BLOCK: tl.constexpr):
    """Each slot's segment is the first whose running total exceeds it."""
    program = tl.program_id(0)
    is_short = program >= long_programs
    slot = ((program - long_programs if is_short else program) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    totals = ends + (segments if is_short else 0)
    there = slot < (short_bound if is_short else long_bound)
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
    target = slots + (slot + (long_bound if is_short else 0)) * FIELDS
    tl.store(target, tl.where(used, low, 0), mask=there)
    tl.store(target + 1, tl.where(used, slot - before, 0), mask=there)
    tl.store(target + 2, start, mask=there)
    tl.store(target + 3, tl.where(used, length, 0), mask=there)
