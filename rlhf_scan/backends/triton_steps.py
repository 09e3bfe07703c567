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

from .triton_runs import load_flags, load_runs, load_tokens
from .triton_skip import passed_over

NO_MASK = tl.constexpr(-1)
SKIP = tl.constexpr(0)
ZERO = tl.constexpr(1)
KEEP = tl.constexpr(2)


@triton.jit
def _trainable(
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
def _end_value(
    bootstrap,
    segment,
    origin,
    at,
    head,
    tail,
    read,
    HOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The value that follows the ends that `read` one; 0 at all other tokens."""
    nothing = tl.where(read, tl.cast(0, HOW.DTYPE), tl.cast(0, HOW.DTYPE))
    if HOW.BOOTSTRAP == 0:
        return nothing
    elif HOW.BOOTSTRAP == 1:
        edge = at == tail - 1 if HOW.REVERSE else at == -head
        return tl.where(read & edge, tl.load(bootstrap + segment).to(HOW.DTYPE), nothing)
    elif ALIGNED and not TILED:
        # All of them at once: a batch of short rows waits for its reads, and to know first which are needed takes one wait more.
        value, _ = load_runs(bootstrap, origin, tail, False, ALIGNED, HOW.REVERSE, ROWS, WIDTH)
        return tl.where(read, value.to(HOW.DTYPE), nothing)
    else:
        return load_tokens(bootstrap, origin, read, HOW.REVERSE, ROWS, WIDTH).to(HOW.DTYPE)


@triton.jit
def surroundings(
    flags,
    bootstrap,
    place,
    at,
    HOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What lies around the tokens of a tile.

    ((which the mask keeps, which have one that it keeps beside them), which take a step, (whether what precedes each is an end, one that
    nothing follows, the value there), what `beside_event` takes if masked tokens are passed over)
    """
    segment, origin, head, tail = place
    if HOW.MASKED == SKIP:
        kept, ends, nearest = passed_over(flags, bootstrap, segment, origin, head, tail, HOW, ALIGNED, TILED, ROWS, WIDTH)
        return (kept, kept), kept, ends, nearest
    else:
        keeps = _trainable(flags, origin, at, head, tail, HOW.MASKED, HOW.REVERSE, ALIGNED, ROWS, WIDTH)
        ended, terminated = _ends(flags, segment, origin, at, head, tail, HOW.FLAGS, HOW.REVERSE, HOW.STARTS, ALIGNED, ROWS, WIDTH)
        read = ended & (terminated == 0)
        end = _end_value(bootstrap, segment, origin, at, head, tail, read, HOW, ALIGNED, TILED, ROWS, WIDTH)
        return keeps, at < tail, (ended, terminated, end), ()
