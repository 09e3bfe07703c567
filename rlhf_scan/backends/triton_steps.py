"""Which tokens of a tile take a step, what precedes each in scan order, and where segments end. Part of the Triton backend's kernel.

Places count from the tile's first token, `origin`: `head` tokens of the segment lie before it and `tail` from it on, so that the segment is
-head <= at < tail. What precedes `at` in scan order lies beside it: at + 1 if REVERSE, else at - 1. All of them are scalars or [ROWS, 1], and
tiles are [ROWS, WIDTH]. A kind tells how a number is indexed: absent or one for all (0), by segment (1), by token (2). `flags` are (mask,
terminated, truncated), FLAGS their kinds. MASKED is what a masked token does, NO_MASK where there is no mask. STARTS: a flag marks an
episode's first token.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .triton_runs import load_anywhere, load_flags, load_runs
from .triton_tile import nearest

NO_MASK = tl.constexpr(-1)
SKIP = tl.constexpr(0)
ZERO = tl.constexpr(1)
KEEP = tl.constexpr(2)

_ENDED = tl.constexpr(1)
_TERMINATED = tl.constexpr(2)
_CODES = tl.constexpr(4)  # so that a key is a place's number and, in its two lowest bits, the code


@triton.jit
def trainable(
    flags,
    origin,
    at,
    head,
    tail,
    MASKED: tl.constexpr,
    REVERSE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Which tokens the mask keeps, and which have one that it keeps beside them."""
    inside = at < tail
    beside = at + 1 < tail if REVERSE else inside & (at > -head)
    if MASKED == NO_MASK:
        return inside, beside
    else:
        kept, kept_beside = load_flags(flags[0], origin, tail, True, ALIGNED, REVERSE, ROWS, WIDTH)
        return kept & inside, kept_beside & beside


@triton.jit
def _flagged(
    pointer,
    segment,
    origin,
    at,
    head,
    tail,
    KIND: tl.constexpr,
    REVERSE: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Whether a flag separates a token from what precedes it: backward its own does, forward that of the token before."""
    BESIDE: tl.constexpr = not REVERSE and not STARTS
    if KIND == 0:
        return (at < tail) & False
    elif KIND == 1:
        # The interpreter keeps the type of a compared float scalar, which `&` then refuses; an integer one passes.
        flag = tl.where(tl.load(pointer + segment) != 0, 1, 0)
        return ((at - 1 if BESIDE else at) == tail - 1) & (at < tail) & (flag != 0)
    else:
        here, beside = load_flags(pointer, origin, tail, BESIDE, ALIGNED, REVERSE, ROWS, WIDTH)
        return (at < tail) & (at > -head) & beside if BESIDE else (at < tail) & here


@triton.jit
def _ends(
    flags,
    segment,
    origin,
    at,
    head,
    tail,
    FLAGS: tl.constexpr,
    REVERSE: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(whether an end separates a token from what precedes it, whether that end is one that nothing follows)."""
    edge = at == tail - 1 if REVERSE else at == -head
    terminated = _flagged(flags[1], segment, origin, at, head, tail, FLAGS[1], REVERSE, STARTS, ALIGNED, ROWS, WIDTH)
    truncated = _flagged(flags[2], segment, origin, at, head, tail, FLAGS[2], REVERSE, STARTS, ALIGNED, ROWS, WIDTH)
    ended = (edge & (at < tail)) | terminated | truncated
    if REVERSE or STARTS:
        return ended, terminated
    else:
        return ended, ended & False


@triton.jit
def _event_beyond(
    flags,
    segment,
    origin,
    at,
    head,
    tail,
    FLAGS: tl.constexpr,
    MASKED: tl.constexpr,
    REVERSE: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(place, code) of the nearest event beyond a tile.

    Only a tile that borders on a masked token looks, so a masked span is read at most once more.
    """
    block = tail * 0
    key = tl.full([], -1, tl.int32)
    going = (block + WIDTH < tail) if REVERSE else (block > -head)
    while going:
        block += WIDTH if REVERSE else -WIDTH
        _, beside = trainable(flags, origin + block, at, head + block, tail - block, MASKED, REVERSE, ALIGNED, ROWS, WIDTH)
        ended, terminated = _ends(
            flags, segment, origin + block, at, head + block, tail - block, FLAGS, REVERSE, STARTS, ALIGNED, ROWS, WIDTH
        )
        keys = _keys(at, beside, ended, terminated, REVERSE, WIDTH)
        key = tl.min(keys) if REVERSE else tl.max(keys)
        found = key < WIDTH * _CODES if REVERSE else key >= 0
        going = (found == 0) & ((block + WIDTH < tail) if REVERSE else (block > -head))
    return block + (key >> 2), key & 3


@triton.jit
def _keys(at, beside, ended, terminated, REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """A token's place and code where it is an event: where what precedes it is known from there alone, an end or a step right beside it."""
    code = tl.where(ended, _ENDED, 0) + tl.where(terminated, _TERMINATED, 0)
    return tl.where(beside | ended, at * _CODES + code, WIDTH * _CODES if REVERSE else -_CODES)


@triton.jit
def boundaries(
    flags,
    segment,
    origin,
    at,
    head,
    tail,
    beside,
    FLAGS: tl.constexpr,
    MASKED: tl.constexpr,
    REVERSE: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(place of the nearest event on the way to what precedes each token, whether it is an end, whether nothing follows that end).

    The place is the token's own, unless masked tokens are passed over.
    """
    ended, terminated = _ends(flags, segment, origin, at, head, tail, FLAGS, REVERSE, STARTS, ALIGNED, ROWS, WIDTH)
    if MASKED != SKIP:
        return at, ended, terminated
    else:
        none = WIDTH * _CODES if REVERSE else -_CODES
        key = nearest(_keys(at, beside, ended, terminated, REVERSE, WIDTH), none, REVERSE, ROWS, WIDTH)
        place, code = key >> 2, key & 3
        if TILED:
            border = WIDTH if REVERSE else -1
            borders = (border < tail) & (border >= -head)
            if tl.load(flags[0] + origin + border, mask=borders, other=1) == 0:
                beyond, beyond_code = _event_beyond(
                    flags, segment, origin, at, head, tail, FLAGS, MASKED, REVERSE, STARTS, ALIGNED, ROWS, WIDTH
                )
                missing = key >= WIDTH * _CODES if REVERSE else key < 0
                place, code = tl.where(missing, beyond.to(place.dtype), place), tl.where(missing, beyond_code, code)
        return place, (code & _ENDED) != 0, (code & _TERMINATED) != 0


@triton.jit
def end_value(
    bootstrap,
    segment,
    origin,
    found,
    head,
    tail,
    HOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The value that follows the end which `boundaries` found; 0 where it found none or nothing follows."""
    place, ended, terminated = found
    read = ended & (terminated == 0)
    nothing = tl.where(read, tl.cast(0, HOW.DTYPE), tl.cast(0, HOW.DTYPE))
    if HOW.BOOTSTRAP == 0:
        return nothing
    elif HOW.BOOTSTRAP == 1:
        edge = place == tail - 1 if HOW.REVERSE else place == -head
        return tl.where(read & edge, tl.load(bootstrap + segment).to(HOW.DTYPE), nothing)
    elif ALIGNED and not TILED and HOW.MASKED != SKIP:
        # All of them at once: a batch of short rows waits for its reads, and to know first which are needed takes one wait more.
        value, _ = load_runs(bootstrap, origin, tail, False, ALIGNED, HOW.REVERSE, ROWS, WIDTH)
        return tl.where(read, value.to(HOW.DTYPE), nothing)
    else:
        return load_anywhere(bootstrap, origin + place, read, ROWS, WIDTH).to(HOW.DTYPE)
