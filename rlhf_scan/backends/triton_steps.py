"""Which tokens of a tile take a step, what precedes each in scan order, and where segments end. Part of the Triton backend's kernel.

Places count from the tile's first token, `origin`: `head` tokens of the segment lie before it and `tail` from it on, so that the segment is
-head <= at < tail. What precedes `at` in scan order lies at + 1 if REVERSE, else at - 1. All of them are scalars or [ROWS, 1], and tiles are
[ROWS, WIDTH]. A kind tells how a number is indexed: absent or one for all (0), by segment (1), by token (2). `flags` are (mask, terminated,
truncated), FLAGS their kinds. MASKED is what a masked token does, NO_MASK where there is no mask. STARTS: a flag marks an episode's first token.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tile import nearest

NO_MASK = tl.constexpr(-1)
SKIP = tl.constexpr(0)
ZERO = tl.constexpr(1)
KEEP = tl.constexpr(2)


@triton.jit
def _flagged(pointer, segment, origin, at, tail, on, KIND: tl.constexpr):
    """Whether a flag is set at `at`."""
    if KIND == 0:
        return on & False
    elif KIND == 1:
        # The interpreter keeps the type of a compared float scalar, which `&` then refuses; an integer one passes.
        flag = tl.where(tl.load(pointer + segment) != 0, 1, 0)
        return on & (at == tail - 1) & (flag != 0)
    else:
        return on & (tl.load(pointer + origin + at, mask=on, other=0) != 0)


@triton.jit
def ends_before(flags, segment, origin, at, head, tail, inside, FLAGS: tl.constexpr, REVERSE: tl.constexpr, STARTS: tl.constexpr):
    """Whether an end separates `at` from what precedes it: backward it is flagged there, forward at the token before."""
    edge = at == tail - 1 if REVERSE else at == -head
    flagged_at = at if REVERSE or STARTS else at - 1
    on = inside & (flagged_at >= -head)
    terminated = _flagged(flags[1], segment, origin, flagged_at, tail, on, FLAGS[1])
    return inside & (edge | terminated | _flagged(flags[2], segment, origin, flagged_at, tail, on, FLAGS[2]))


@triton.jit
def terminated_at(flags, segment, origin, at, tail, ended, FLAGS: tl.constexpr, REVERSE: tl.constexpr, STARTS: tl.constexpr):
    """Whether the end there is one that nothing follows; forward one that nothing precedes, which only a flagged start is."""
    if REVERSE or STARTS:
        return _flagged(flags[1], segment, origin, at, tail, ended, FLAGS[1])
    else:
        return ended & False


@triton.jit
def end_value(
    bootstrap, segment, origin, at, head, tail, ended, terminated, BOOTSTRAP: tl.constexpr, REVERSE: tl.constexpr, DTYPE: tl.constexpr
):
    """The value that follows the end there; 0 where `ended` is False or it terminates."""
    read = ended & (terminated == 0)
    nothing = tl.where(read, tl.cast(0, DTYPE), tl.cast(0, DTYPE))
    if BOOTSTRAP == 0:
        return nothing
    elif BOOTSTRAP == 1:
        edge = at == tail - 1 if REVERSE else at == -head
        return tl.where(read & edge, tl.load(bootstrap + segment).to(DTYPE), nothing)
    else:
        return tl.load(bootstrap + origin + at, mask=read, other=0).to(DTYPE)


@triton.jit
def trainable(flags, origin, at, inside, MASKED: tl.constexpr):
    """Which tokens the mask keeps."""
    if MASKED == NO_MASK:
        return inside
    else:
        return inside & (tl.load(flags[0] + origin + at, mask=inside, other=0) != 0)


@triton.jit
def _is_event(
    flags, segment, origin, at, head, tail, FLAGS: tl.constexpr, MASKED: tl.constexpr, REVERSE: tl.constexpr, STARTS: tl.constexpr
):
    """Whether what precedes `at` is known from there alone: an end, or a step right beside it."""
    inside = (at >= -head) & (at < tail)
    beside = at + 1 if REVERSE else at - 1
    step_beside = trainable(flags, origin, beside, inside & (beside >= -head) & (beside < tail), MASKED)
    return inside & (step_beside | ends_before(flags, segment, origin, at, head, tail, inside, FLAGS, REVERSE, STARTS))


@triton.jit
def _event_beyond(
    flags,
    segment,
    origin,
    head,
    tail,
    FLAGS: tl.constexpr,
    MASKED: tl.constexpr,
    REVERSE: tl.constexpr,
    STARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The nearest event beyond a tile. Only a tile that borders on a masked token looks, so a masked span is read at most once more."""
    lanes = tl.arange(0, WIDTH)[None, :]
    first = tail * 0
    block = tail * 0 + (WIDTH if REVERSE else -WIDTH)
    while (first == 0) & (block < tail) & (block + WIDTH > -head):
        at = block + lanes
        event = _is_event(flags, segment, origin, at, head, tail, FLAGS, MASKED, REVERSE, STARTS)
        if REVERSE:
            found = tl.min(tl.where(event, at, tail))
            first = tl.where(found < tail, found, 0)
            block += WIDTH
        else:
            first = tl.max(tl.where(event, at, -head - 1))
            first = tl.where(first >= -head, first, 0)
            block -= WIDTH
    return first


@triton.jit
def events(
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
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """For each place the nearest event, there or on the way to what precedes it: the place itself, unless masked tokens are passed over."""
    if MASKED != SKIP:
        return at
    else:
        event = _is_event(flags, segment, origin, at, head, tail, FLAGS, MASKED, REVERSE, STARTS)
        if REVERSE:
            found = nearest(tl.where(event, at, tail), tail, REVERSE, ROWS, WIDTH)
            missing = found >= tail
            beside = WIDTH
        else:
            found = nearest(tl.where(event, at, -head - 1), -head - 1, REVERSE, ROWS, WIDTH)
            missing = found < -head
            beside = -1
        if TILED:
            borders = (beside < tail) & (beside >= -head)
            masked_beside = tl.load(flags[0] + origin + beside, mask=borders, other=1) == 0
            if masked_beside:
                beyond = _event_beyond(flags, segment, origin, head, tail, FLAGS, MASKED, REVERSE, STARTS, WIDTH)
                found = tl.where(missing, beyond, found)
        # Lanes hold tokens one by one along a row, whatever the compiler thinks of these addresses: the layout decides the order of the sums.
        return tl.max_contiguous(tl.where(at < tail, found, at), [1, 2])
