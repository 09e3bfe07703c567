"""Which tile of which segment each program of a launch over a pack holds: made on the device, without reading it, and kept per batch."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..recordings import recording
from .tiles import INTERPRETED, MEDIUM, SHORT, WIDTH
from .triton_carry import WORDS, clear, clear_words
from .triton_launch import Launcher, await_previous

# Of a slot: segment, turn of the tile in scan order, the segment's first token, its length, the segment's first slot.
FIELDS = tl.constexpr(8)
# A program puts down the tiles of one turn of one part of the segments, block by block. A part is one block unless there are very many, so that
# few programs wait for much.
_PARTS = 2 if INTERPRETED else 4  # at most
_BLOCKS = (64, 128) if INTERPRETED else (256, 4096)  # segments of a block, at least and at most
# Those that a program looks at together to find its place, if there are so many: on an H200 the map of 3,204 took 10.4 us (11.5 with 1024).
_LOOK = 128 if INTERPRETED else 4096
_PER_WARP = 64  # segments of a block
_AT_ONCE = 64 if INTERPRETED else 132 * 1024 // 32  # warps on an H200 that have 64 registers a thread: more programs would have to wait
_LOOKED_AT = 512 if INTERPRETED else 2**18  # segments, by all programs that run at once
_FEWEST_TURNS = 2 if INTERPRETED else 32

# A captured graph or a recording neither reads nor fills this: its boundaries may change between replays, and its memory is its own.
_KEPT = WeakTensorKeyDictionary()


def bounds_of(tokens: int, segments: int) -> tuple[int, int, int]:
    """At most so many tiles of long segments, medium and short segments a pack has."""
    return tokens // WIDTH + min(segments, tokens // (MEDIUM + 1)), min(segments, tokens // (SHORT + 1)), min(segments, tokens)


def slots_of(cu_seqlens: Tensor, tokens: int, carries: Tensor) -> Tensor:
    """[slots, FIELDS]: those of tiles, of which come all first ones in scan order, then all second ones, ...; of medium and of short segments.

    As many of each as there may be; one not in use has length 0, and anything else. Sets all words of `carries` to UNSET, in the same launch if
    the map is made.
    """
    capturing = cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or recording() is not None or cu_seqlens.is_inference():
        return _make(cu_seqlens, tokens, carries)
    state = cu_seqlens._version, tokens
    kept = _KEPT.get(cu_seqlens)
    if kept is None or kept[0] != state:
        kept = state, _make(cu_seqlens, tokens, carries)
        _KEPT[cu_seqlens] = kept
    else:
        clear(carries)
    return kept[1]


def _make(cu_seqlens: Tensor, tokens: int, carries: Tensor) -> Tensor:
    segments, device = cu_seqlens.numel() - 1, cu_seqlens.device
    bounds = bounds_of(tokens, segments)
    slots = torch.empty(sum(bounds), FIELDS.value, dtype=torch.int32 if tokens < 2**31 - WIDTH else torch.int64, device=device)
    wanted, words = max(triton.next_power_of_2(segments), 1), carries.numel()
    block = min(max(wanted // _PARTS, _BLOCKS[0]), _BLOCKS[1])
    parts = min(triton.cdiv(segments, block), _PARTS)
    others = 2 * triton.cdiv(segments, block) + triton.cdiv(words, WORDS)
    at_once = min(_AT_ONCE // _warps(block) - others, _LOOKED_AT // wanted)
    turns = min(bounds[0], tokens // WIDTH + 1, max(at_once // max(parts, 1), _FEWEST_TURNS))
    # Segments that overlap have at most so many tiles.
    wide = slots.dtype == torch.int64 or segments * (tokens // WIDTH + 1) >= 2**31
    launcher = _launcher(block, max(block, min(wanted, _LOOK)), wide)
    launcher(turns * parts + others, cu_seqlens, slots, carries, segments, tokens, *bounds, turns, parts, words)
    return slots


def _warps(block: int) -> int:
    return min(32, block // _PER_WARP)


@lru_cache(maxsize=32)
def _launcher(block: int, look: int, wide: bool) -> Launcher:
    integer = tl.int64 if wide else tl.int32
    constants = {"WIDTH": WIDTH, "MEDIUM": MEDIUM, "SHORT": SHORT, "BLOCK": block, "LOOK": look, "WORDS": WORDS, "INTEGER": integer}
    return Launcher(_fill_slots, constants, num_warps=_warps(block))


@triton.jit
def _within(boundary, tokens, INTEGER: tl.constexpr):
    """0 <= boundary <= tokens; of narrow integers by their low words, where a comparison of wide ones takes several instructions."""
    if boundary.dtype == tl.int64 and INTEGER == tl.int32:  # noqa: SIM300  # a constant of the kernel, not of Python
        low = tl.minimum(boundary.to(tl.uint32), tl.cast(tokens, tl.uint32)).to(tl.int32)
        high = (boundary >> 32).to(tl.int32)
        return tl.where(high == 0, low, tl.where(high < 0, 0, tl.cast(tokens, tl.int32)))
    else:
        return tl.minimum(tl.maximum(boundary, 0), tokens).to(INTEGER)


@triton.jit
def _segments_from(first, cu_seqlens, segments, tokens, BLOCK: tl.constexpr, INTEGER: tl.constexpr):
    """(number, first token, length) of BLOCK segments; within the tokens, whatever the boundaries say."""
    segment = first + tl.arange(0, BLOCK)
    there = segment < segments
    start = _within(tl.load(cu_seqlens + segment, mask=there, other=0), tokens, INTEGER)
    stop = _within(tl.load(cu_seqlens + segment + 1, mask=there, other=0), tokens, INTEGER)
    return segment, start, tl.maximum(stop - start, 0)


@triton.jit
def _put(slots, slot, segment, turn, start, length, first, there):
    """Write entries, four fields at once."""
    kind = slots.dtype.element_ty
    entry = slots + slot.to(tl.int64) * FIELDS
    fields = tl.join(tl.join(segment.to(kind), start.to(kind)), tl.join(turn.to(kind), length.to(kind)))
    tl.store(entry[:, None] + tl.arange(0, 4)[None, :], tl.reshape(fields, (segment.shape[0], 4)), mask=there[:, None])
    tl.store(entry + 4, first.to(kind), mask=there)


@triton.jit
def _clear(slots, first, step, bound, BLOCK: tl.constexpr):
    """Slots not in use: BLOCK from `first` on, and every `step` further."""
    while first < bound:
        slot = first + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(slots + slot * FIELDS + 3, (slot * 0).to(slots.dtype.element_ty), mask=slot < bound)
        first += step


@triton.jit
def _sums_and_largest(place, before, total, most, other_place, other_before, other_total, other_most):
    return place + other_place, before + other_before, total + other_total, tl.maximum(most, other_most)


@triton.jit
def _add_both(left, other_left, right, other_right):
    return left + right, other_left + other_right


@triton.jit
def _tiles(length, WIDTH: tl.constexpr, MEDIUM: tl.constexpr):
    """Of each segment, 0 if it is not long."""
    unsigned = length.to(tl.uint32 if length.dtype == tl.int32 else tl.uint64)  # so that to divide is to shift
    return tl.where(length > MEDIUM, tl.cdiv(unsigned, WIDTH).to(length.dtype), 0)


@triton.jit
def _before(
    begin, cu_seqlens, segments, tokens, turn, WIDTH: tl.constexpr, MEDIUM: tl.constexpr, LOOK: tl.constexpr, INTEGER: tl.constexpr
):
    """(tiles of earlier turns and this turn's of segments before `begin`, tiles of those segments, all tiles, tiles of the longest)."""
    place = tl.zeros([LOOK], INTEGER)
    before, total, most = place, place, place
    for at in tl.range(0, segments, LOOK):
        segment, _, length = _segments_from(at, cu_seqlens, segments, tokens, LOOK, INTEGER)
        tiles = _tiles(length, WIDTH, MEDIUM)
        earlier = segment < begin
        place += tl.minimum(tiles, turn) + (earlier & (tiles > turn)).to(INTEGER)
        before += tl.where(earlier, tiles, 0)
        total += tiles
        most = tl.maximum(most, tiles)
    return tl.reduce((place, before, total, most), 0, _sums_and_largest)


@triton.jit
def _put_turns(
    cu_seqlens,
    slots,
    segments,
    tokens,
    bound,
    program,
    turns,
    parts,
    WIDTH: tl.constexpr,
    MEDIUM: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOK: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """The tiles of a turn of a part's long segments, and those of every further `turns`-th turn.

    Turn 0 of a segment is where its scan begins.
    """
    share = tl.cdiv(tl.cdiv(segments, BLOCK), parts) * BLOCK
    turn, begin = program // parts, program % parts * share
    end = tl.minimum(begin + share, segments)
    most, total = tl.cast(turn + 1, INTEGER), tl.zeros([], INTEGER)
    while turn < most:
        slot, before, total, most = _before(begin, cu_seqlens, segments, tokens, turn, WIDTH, MEDIUM, LOOK, INTEGER)
        if turn < most:
            for at in tl.range(begin, end, BLOCK):
                segment, start, length = _segments_from(at, cu_seqlens, segments, tokens, BLOCK, INTEGER)
                tiles = _tiles(length, WIDTH, MEDIUM)
                there = tiles > turn
                places, after = tl.associative_scan((there.to(INTEGER), tiles), 0, _add_both)
                place, after = slot + places - 1, before + after
                # Segments that overlap have more tiles than there is room for: those beyond it are left out whole, so that no tile waits for ever.
                kept = tl.where(after <= bound, length, 0)
                _put(slots, place, segment, segment * 0 + turn, start, kept, after - tiles, there & (place < bound))
                if at + BLOCK < end:
                    slot, before = slot + tl.sum(there.to(INTEGER)), before + tl.sum(tiles)
        turn += turns
    _clear(slots, total + program * BLOCK, turns * parts * BLOCK, bound, BLOCK)


@triton.jit
def _put_rows(
    cu_seqlens,
    slots,
    segments,
    tokens,
    bound,
    block,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOK: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """This block's segments of more than SHORTEST and at most LONGEST tokens."""
    earlier = tl.zeros([LOOK], INTEGER)
    for at in tl.range(0, block * BLOCK, LOOK):
        segment, _, length = _segments_from(at, cu_seqlens, segments, tokens, LOOK, INTEGER)
        earlier += ((segment < block * BLOCK) & (length > SHORTEST) & (length <= LONGEST)).to(INTEGER)
    slot = tl.sum(earlier)
    segment, start, length = _segments_from(block * BLOCK, cu_seqlens, segments, tokens, BLOCK, INTEGER)
    there = (length > SHORTEST) & (length <= LONGEST)
    place = slot + tl.cumsum(there.to(INTEGER)) - 1
    _put(slots, place, segment, segment * 0, start, length, start * 0, there & (place < bound))
    if (block + 1) * BLOCK >= segments:
        _clear(slots, slot + tl.sum(there.to(INTEGER)), BLOCK, bound, BLOCK)


@triton.jit(do_not_specialize=["segments", "tokens", "long_bound", "medium_bound", "short_bound", "turns", "parts", "words"])
def _fill_slots(
    cu_seqlens,
    slots,
    carries,
    segments,
    tokens,
    long_bound,
    medium_bound,
    short_bound,
    turns,
    parts,
    words,
    WIDTH: tl.constexpr,
    MEDIUM: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOK: tl.constexpr,
    WORDS: tl.constexpr,
    INTEGER: tl.constexpr,  # of tokens and of tiles
):
    """The first programs put down the tiles of long segments, the next a block's medium or its short ones each, the last clear carries."""
    await_previous()
    program = tl.program_id(0)
    tiled, rows = turns * parts, 2 * tl.cdiv(segments, BLOCK)
    if program < tiled:
        _put_turns(cu_seqlens, slots, segments, tokens, long_bound, program, turns, parts, WIDTH, MEDIUM, BLOCK, LOOK, INTEGER)
    elif program < tiled + rows:
        block, slots = (program - tiled) // 2, slots + tl.cast(long_bound, tl.int64) * FIELDS
        if (program - tiled) % 2 == 0:
            _put_rows(cu_seqlens, slots, segments, tokens, medium_bound, block, SHORT, MEDIUM, BLOCK, LOOK, INTEGER)
        else:
            slots += tl.cast(medium_bound, tl.int64) * FIELDS
            _put_rows(cu_seqlens, slots, segments, tokens, short_bound, block, 0, SHORT, BLOCK, LOOK, INTEGER)
    else:
        clear_words(carries, program - tiled - rows, words, WORDS)
