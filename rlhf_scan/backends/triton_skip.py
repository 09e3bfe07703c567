"""Masked tokens that the scan passes over: what precedes each token that the mask keeps. Part of the Triton backend's kernel.

Names and conventions are those of `triton_steps`. What is yes or no for each token is known by runs, a bit for each token. An event is a token
of which it is known without a further look what precedes it: an end, or one beside which lies a token that the mask keeps. What precedes any
other token precedes the nearest event on the way there, in its run or, where the run has none, beyond it.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .triton_runs import load_bits, load_nearest, load_where, nearest_of, tokens_of
from .triton_tile import RUN, nearest_beyond, run_starts

_ALL = tl.constexpr(255)  # a bit for each token of a run
_ENDED = tl.constexpr(1)
_TERMINATED = tl.constexpr(2)
_CODES = tl.constexpr(4)  # so that a key is a place's number and, in its two lowest bits, the code


@triton.jit
def _flagged(
    pointer,
    segment,
    origin,
    within,
    tail,
    KIND: tl.constexpr,
    REVERSE: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Whether a flag separates a token from what precedes it; `within`: which tokens can have one, are the segment's last, have one beside them."""
    inside, last, beside = within
    BESIDE: tl.constexpr = not REVERSE and not STARTS
    if KIND == 0 or (KIND == 1 and BESIDE):
        return inside & 0
    elif KIND == 1:
        return tl.where(tl.load(pointer + segment) != 0, last, 0)
    else:
        flag, flag_beside = load_bits(pointer, origin, tail, BESIDE, ALIGNED, REVERSE, ROWS, WIDTH)
        return flag_beside & beside if BESIDE else flag & inside


@triton.jit
def _seen(
    flags,
    segment,
    origin,
    head,
    tail,
    FLAGS: tl.constexpr,
    REVERSE: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Which tokens of each run the mask keeps, are events, are ends, are ends that nothing follows, are ends of their segment."""
    starts = run_starts(REVERSE, WIDTH)[None, :]
    count = tl.minimum(tl.maximum(tail - starts, 0), RUN + 1).to(tl.int32)
    more = (tl.zeros_like(count) + 1 << count) - 1  # those of the segment, and one more than the run has
    inside = more & _ALL
    last = inside & ~(more >> 1)
    first = tl.where(starts == -head, inside & 1, 0)
    beside = more >> 1 if REVERSE else inside & ~first
    kept, kept_beside = load_bits(flags[0], origin, tail, True, ALIGNED, REVERSE, ROWS, WIDTH)
    edge = last if REVERSE else first
    within = inside, last, beside
    terminated = _flagged(flags[1], segment, origin, within, tail, FLAGS[1], REVERSE, STARTS, ALIGNED, ROWS, WIDTH)
    truncated = _flagged(flags[2], segment, origin, within, tail, FLAGS[2], REVERSE, STARTS, ALIGNED, ROWS, WIDTH)
    ended = edge | terminated | truncated
    if not (REVERSE or STARTS):
        terminated = terminated & 0
    return kept & inside, kept_beside & beside | ended, ended, terminated, edge


@triton.jit
def _keys(seen, none, REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """The place and code of the event of each run that other runs meet first."""
    _, events, ended, terminated, _ = seen
    one = events & -events if REVERSE else events
    number = (one.to(tl.float32).to(tl.int32, bitcast=True) >> 23) + 1 & RUN - 1  # of its highest bit: its exponent is 127 more
    code = (ended >> number & 1) * _ENDED + (terminated >> number & 1) * _TERMINATED
    return tl.where(events != 0, (run_starts(REVERSE, WIDTH)[None, :] + number) * _CODES + code, none)


@triton.jit
def _event_beyond(
    flags,
    segment,
    origin,
    head,
    tail,
    FLAGS: tl.constexpr,
    REVERSE: tl.constexpr,
    STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(place, code) of the nearest event beyond a tile.

    Only a tile that borders on a masked token looks, so a masked span is read at most once more.
    """
    none = WIDTH * _CODES if REVERSE else -_CODES
    block = tail * 0
    key = tl.full([], -1, tl.int32)
    going = (block + WIDTH < tail) if REVERSE else (block > -head)
    while going:
        block += WIDTH if REVERSE else -WIDTH
        seen = _seen(flags, segment, origin + block, head + block, tail - block, FLAGS, REVERSE, STARTS, ALIGNED, ROWS, WIDTH)
        keys = _keys(seen, none, REVERSE, WIDTH)
        key = tl.min(keys) if REVERSE else tl.max(keys)
        found = key < WIDTH * _CODES if REVERSE else key >= 0
        going = (found == 0) & ((block + WIDTH < tail) if REVERSE else (block > -head))
    return block + (key >> 2), key & 3


@triton.jit
def _nearest_bits(bits, events, beyond, REVERSE: tl.constexpr):
    """Of each token the bit of the nearest event, all of `bits` being events; `beyond` where its run has none. Then where that is."""
    none = ~events
    for i in tl.static_range(3):
        BY = 1 << i
        if REVERSE:
            bits |= none & (bits >> BY)
            none = none & (none >> BY)
        else:
            bits |= none & (bits << BY)
            none = none & (none << BY | (1 << BY) - 1)
    return bits | tl.where(beyond, none, 0), none


@triton.jit
def passed_over(
    flags,
    bootstrap,
    segment,
    origin,
    head,
    tail,
    HOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(which tokens the mask keeps, (whether what precedes them is an end, one that nothing follows, the value there), what `beside_event` takes)."""
    seen = _seen(flags, segment, origin, head, tail, HOW.FLAGS, HOW.REVERSE, HOW.STARTS, ALIGNED, ROWS, WIDTH)
    kept, events, ended, terminated, edge = seen
    none = WIDTH * _CODES if HOW.REVERSE else -_CODES
    key = nearest_beyond(_keys(seen, none, HOW.REVERSE, WIDTH), none, HOW.REVERSE, WIDTH)
    place, code = key >> 2, key & 3
    if TILED:
        border = WIDTH if HOW.REVERSE else -1
        borders = (border < tail) & (border >= -head)
        if tl.load(flags[0] + origin + border, mask=borders, other=1) == 0:
            further, further_code = _event_beyond(
                flags, segment, origin, head, tail, HOW.FLAGS, HOW.REVERSE, HOW.STARTS, ALIGNED, ROWS, WIDTH
            )
            missing = key >= WIDTH * _CODES if HOW.REVERSE else key < 0
            place, code = tl.where(missing, further.to(place.dtype), place), tl.where(missing, further_code, code)
    beyond_ended, beyond_terminated = (code & _ENDED) != 0, (code & _TERMINATED) != 0
    ends, without = _nearest_bits(ended, events, beyond_ended, HOW.REVERSE)
    final, _ = _nearest_bits(terminated, events, beyond_terminated, HOW.REVERSE)
    asks = (kept & without & _ALL) != 0
    value = tl.zeros([ROWS, WIDTH], HOW.DTYPE)
    if HOW.BOOTSTRAP == 1:
        edge_beyond = beyond_ended & (place == (tail - 1 if HOW.REVERSE else -head))
        edges, _ = _nearest_bits(edge, events, edge_beyond, HOW.REVERSE)
        value = tl.where(tokens_of(edges & ~final, ROWS, WIDTH), tl.load(bootstrap + segment).to(HOW.DTYPE), value)
    elif HOW.BOOTSTRAP == 2:
        own = load_where(bootstrap, origin, ended & ~terminated, HOW.REVERSE, WIDTH)
        beyond = tl.load(bootstrap + origin + place, mask=asks & beyond_ended & (beyond_terminated == 0), other=0)
        found = nearest_of(own, 0, beyond, events, HOW.REVERSE, ROWS, WIDTH).to(HOW.DTYPE)
        value = tl.where(tokens_of(ends & ~final, ROWS, WIDTH), found, value)
    ended_tokens, final_tokens = tokens_of(ends, ROWS, WIDTH), tokens_of(final, ROWS, WIDTH)
    return tokens_of(kept, ROWS, WIDTH), (ended_tokens, final_tokens, value), (events, place, asks & (beyond_ended == 0))


@triton.jit
def beside_event(pointer, origin, tail, nearest, ALIGNED: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(the tokens of a tile, what precedes each that the mask keeps unless it is an end), [ROWS, WIDTH]."""
    events, place, asks = nearest
    beyond = tl.load(pointer + origin + place + (1 if REVERSE else -1), mask=asks, other=0)
    return load_nearest(pointer, origin, tail, events, beyond, ALIGNED, REVERSE, ROWS, WIDTH)
