"""The scan core of the Triton backend: one kernel over tiles of segments, specialised by an estimator's formulas. It knows no RL.

A program reads its tile's raw inputs once, builds (a, b) in registers, scans them, takes the carry from the tile before it in scan order, and
writes the outputs once. Names and conventions are those of `triton_steps`.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .triton_carry import CARRY_WORDS, entering_carry
from .triton_map import FIELDS
from .triton_steps import KEEP, SKIP, ZERO, end_value, ends_before, events, terminated_at, trainable
from .triton_tile import RUN, carried, down_runs, up_runs


@triton.jit
def _tile_of_program(slots, segments, length, bound, REVERSE: tl.constexpr, WIDTH: tl.constexpr, INDEX: tl.constexpr):
    """The one tile of a program: (segment, its first token, its length, tile, slot in the chain); length 0 where there is nothing to do.

    Tiles come in the order of their chains: of rows all first tiles, then all second ones, ...; of a pack slot by slot.
    """
    program = tl.program_id(0).to(INDEX)
    if slots is None:
        tiles = tl.cdiv(length, WIDTH)
        turn = program // segments
        segment = program % segments
        start = segment * length
        tile = tiles - 1 - turn if REVERSE else turn
        slot = segment * tiles + tile
    else:
        slot = bound - 1 - program if REVERSE else program
        segment = tl.load(slots + slot * FIELDS).to(INDEX)
        tile = tl.load(slots + slot * FIELDS + 1).to(INDEX)
        start = tl.load(slots + slot * FIELDS + 2).to(INDEX)
        length = tl.load(slots + slot * FIELDS + 3).to(INDEX)
    return segment, start, length, tile, slot


@triton.jit
def _rows_of_program(slots, segments, length, bound, ROWS: tl.constexpr, INDEX: tl.constexpr):
    """The ROWS whole segments of a program, as [ROWS, 1]: (segment, its first token, its length), length 0 where there is none."""
    slot = tl.program_id(0).to(INDEX) * ROWS + tl.arange(0, ROWS)[:, None]
    if slots is None:
        segment = tl.minimum(slot, segments - 1)
        start = segment * length
        length = tl.where(slot < segments, length, 0)
    else:
        there = slot < bound
        segment = tl.load(slots + slot * FIELDS, mask=there, other=0).to(INDEX)
        start = tl.load(slots + slot * FIELDS + 2, mask=there, other=0).to(INDEX)
        length = tl.load(slots + slot * FIELDS + 3, mask=there, other=0).to(INDEX)
    return segment, start, length


@triton.jit
def _rates_of(
    pointers,
    numbers,
    segment,
    origin,
    here,
    next,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    FOLLOWS: tl.constexpr,
    KINDS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`COUNT` rates from the `FIRST` on, as the tile sees them: at `here`, (place, whether there is one), or those that FOLLOWS at `next`."""
    found = ()
    for i in tl.static_range(COUNT):
        if KINDS[FIRST + i] == 0:
            found = found + (tl.cast(numbers[FIRST + i], DTYPE),)
        elif KINDS[FIRST + i] == 1:
            found = found + (tl.load(pointers[FIRST + i] + segment).to(DTYPE),)
        elif FOLLOWS[i]:
            found = found + (tl.load(pointers[FIRST + i] + origin + next[0], mask=next[1], other=0).to(DTYPE),)
        else:
            found = found + (tl.load(pointers[FIRST + i] + origin + here[0], mask=here[1], other=0).to(DTYPE),)
    return found


# Not specialised, so that loads are never wider than an element: then a thread holds one element at a time and a segment's bits do not depend
# on where it lies, nor the number of compiled kernels on how many different shapes there are.
@triton.jit(do_not_specialize=["segments", "length", "bound"])
def scan_tiles(
    inputs,
    outputs,
    rates,
    rate_numbers,
    flags,
    bootstrap,
    slots,  # of a pack, else None: rows of `length` tokens
    carries,
    segments,
    length,
    bound,
    coefficients: tl.constexpr,
    results: tl.constexpr,
    CHANNELS: tl.constexpr,
    RATES: tl.constexpr,  # how many a channel takes
    RATE_KINDS: tl.constexpr,
    FOLLOWING: tl.constexpr,
    RATE_FOLLOWS: tl.constexpr,  # for each rate of a channel, whether the formulas read it at the next step
    CONTINUATION: tl.constexpr,
    FLAGS: tl.constexpr,
    BOOTSTRAP: tl.constexpr,
    END_IS_CARRY: tl.constexpr,
    MASKED: tl.constexpr,
    REVERSE: tl.constexpr,
    STARTS: tl.constexpr,
    TILED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Everything, for the tile (TILED) or the ROWS whole segments of one program."""
    if TILED:
        segment, start, length, tile, slot = _tile_of_program(slots, segments, length, bound, REVERSE, WIDTH, INDEX)
        head = tile * WIDTH
    else:
        segment, start, length = _rows_of_program(slots, segments, length, bound, ROWS, INDEX)
        head = length * 0
    origin, tail = start + head, length - head
    at = tl.arange(0, WIDTH)[None, :]
    inside = at < tail
    kept = trainable(flags, origin, at, inside, MASKED)
    steps, on = kept if MASKED == SKIP else inside, inside if MASKED == KEEP else kept

    event = events(flags, segment, origin, at, head, tail, FLAGS, MASKED, REVERSE, STARTS, TILED, ROWS, WIDTH)
    ended = ends_before(flags, segment, origin, event, head, tail, steps, FLAGS, REVERSE, STARTS)
    terminated = terminated_at(flags, segment, origin, event, tail, ended, FLAGS, REVERSE, STARTS)
    end = end_value(bootstrap, segment, origin, event, head, tail, ended, terminated, BOOTSTRAP, REVERSE, DTYPE)
    preceding = tl.max_contiguous(event + 1 if REVERSE else event - 1, [1, 2])
    continues = steps & (ended == 0)

    here = ()
    for i in tl.static_range(len(inputs)):
        here = here + (tl.load(inputs[i] + origin + at, mask=on, other=0).to(DTYPE),)
    if CONTINUATION >= 0:
        end = tl.where(terminated, tl.cast(0, DTYPE), here[CONTINUATION])
    following = ()
    for i in tl.static_range(len(FOLLOWING)):
        reads = trainable(flags, origin, preceding, continues, MASKED) if MASKED == ZERO else continues
        found = tl.load(inputs[FOLLOWING[i]] + origin + preceding, mask=reads, other=0).to(DTYPE)
        following = following + (tl.where(ended, end, found),)
    if CONTINUATION >= 0:
        following = following + (end,)

    solved = ()
    before = ()
    for channel in tl.static_range(CHANNELS):
        places, next_places = (at, steps), (preceding, continues)
        taken = _rates_of(
            rates, rate_numbers, segment, origin, places, next_places, channel * RATES, RATES, RATE_FOLLOWS, RATE_KINDS, DTYPE
        )
        a, b = coefficients(here, following, taken)
        if END_IS_CARRY:
            a = tl.where(ended & (end != 0), a + b * end, a)
        a = tl.where(steps, a, tl.cast(0, DTYPE))
        b = tl.where(steps, tl.where(ended, tl.cast(0, DTYPE), b), tl.cast(1, DTYPE))
        first, second, third, run_a, run_b, before_a, before_b = up_runs(a, b, REVERSE, ROWS, WIDTH)
        entering = tl.cast(0, DTYPE)
        if TILED:
            tiles = tl.maximum(tl.cdiv(length, WIDTH), 1)
            words = carries + channel * CARRY_WORDS
            entering = entering_carry(
                run_a, run_b, words, slot, tile, tiles, REVERSE, GROUP, WIDTH // RUN, CARRY_WORDS * CHANNELS, DTYPE, WORD
            )
        entering = before_a + carried(before_b, entering)
        x, preceding_x = down_runs(entering, first, second, third, a, b, REVERSE, ROWS, WIDTH)
        preceding_x = tl.where(continues, preceding_x, tl.cast(0, DTYPE))
        solved, before = solved + (x,), before + (preceding_x,)
    if CHANNELS == 1:
        solved, before = solved + (solved[0],), before + (before[0],)
    numbers = _rates_of(
        rates, rate_numbers, segment, origin, (at, steps), (preceding, continues), 0, RATES, RATE_FOLLOWS, RATE_KINDS, DTYPE
    )
    values = results(here, following, solved, before, numbers)
    for i in tl.static_range(len(outputs)):
        tl.store(outputs[i] + origin + at, tl.where(kept, values[i], 0.0).to(outputs[i].dtype.element_ty), mask=inside)
