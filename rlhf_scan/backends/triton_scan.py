"""The scan core of the Triton backend: one kernel over tiles of segments, specialised by an estimator's formulas. It knows no RL.

A program reads its tile's raw inputs once, builds (a, b) in registers, scans them, takes the carry from the tile before it in scan order, and
writes the outputs once. Names and conventions are those of `triton_steps`.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .triton_carry import entering_carry, look_early
from .triton_map import FIELDS
from .triton_runs import load_runs, store_runs
from .triton_steps import NO_MASK, SKIP, ZERO, boundaries, end_value, trainable
from .triton_tile import RUN, down_runs, passed, places, up_runs


@triton.jit
def _tile_of_program(slots, segments, length, REVERSE: tl.constexpr, WIDTH: tl.constexpr, INDEX: tl.constexpr):
    """The one tile of a program: (segment, its first token, its length, tile, slot of its carry); length 0 where there is nothing to do.

    All first tiles in scan order come first, then all second ones, ...; carries lie by segment, tile after tile.
    """
    program = tl.program_id(0).to(INDEX)
    if slots is None:
        turn = program // segments
        segment = program % segments
        start = segment * length
        first = segment * tl.cdiv(length, WIDTH)
    else:
        entry = slots + program * FIELDS
        segment = tl.load(entry).to(INDEX)
        turn = tl.load(entry + 1).to(INDEX)
        start = tl.load(entry + 2).to(INDEX)
        length = tl.load(entry + 3).to(INDEX)
        first = tl.load(entry + 4).to(INDEX)
    tile = tl.cdiv(length, WIDTH) - 1 - turn if REVERSE else turn
    return segment, start, length, tile, first + tile


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
    tail,
    next,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    FOLLOWS: tl.constexpr,
    KINDS: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """`COUNT` rates from the `FIRST` on, as the tile sees them; those that FOLLOWS at `next`, (the next step's place, whether there is one)."""
    found = ()
    for i in tl.static_range(COUNT):
        if KINDS[FIRST + i] == 0:
            found = found + (tl.cast(numbers[FIRST + i], DTYPE),)
        elif KINDS[FIRST + i] == 1:
            found = found + (tl.load(pointers[FIRST + i] + segment).to(DTYPE),)
        elif FOLLOWS[i] and MASKED == SKIP:
            found = found + (tl.load(pointers[FIRST + i] + next[0], mask=next[1], other=0).to(DTYPE),)
        else:
            here, beside = load_runs(pointers[FIRST + i], origin, tail, FOLLOWS[i], ALIGNED, REVERSE, ROWS, WIDTH)
            found = found + ((beside if FOLLOWS[i] else here).to(DTYPE),)
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
    BESIDE: tl.constexpr,  # of each input, whether the builder reads it at the next step
    ALIGNED: tl.constexpr,  # rows start at multiples of RUN
    TILED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
    INDEX: tl.constexpr,
):
    """Everything, for the tile (TILED) or the ROWS whole segments of one program."""
    if ALIGNED:
        length = length // RUN * RUN  # tells the compiler
    if TILED:
        segment, start, length, tile, slot = _tile_of_program(slots, segments, length, REVERSE, WIDTH, INDEX)
        if length <= 0:
            return
        head = tile * WIDTH
    else:
        segment, start, length = _rows_of_program(slots, segments, length, bound, ROWS, INDEX)
        head = length * 0
    origin, tail = start + head, length - head
    early = ()
    if TILED:
        tiles = tl.cdiv(length, WIDTH)
        stride = tl.cast(bound, INDEX)
        for channel in tl.static_range(CHANNELS):
            looked = look_early(carries + channel * stride, stride * CHANNELS, slot, tile, tiles, REVERSE, GROUP)
            early = early + (looked,)
    at = places(REVERSE, WIDTH)
    inside = at < tail
    kept, beside_kept = trainable(flags, origin, at, head, tail, MASKED, REVERSE, ALIGNED, ROWS, WIDTH)
    steps = kept if MASKED == SKIP else inside
    place, ended, terminated = boundaries(
        flags, segment, origin, at, head, tail, beside_kept, FLAGS, MASKED, REVERSE, STARTS, ALIGNED, TILED, ROWS, WIDTH
    )
    end = end_value(bootstrap, segment, origin, place, head, tail, ended, terminated, BOOTSTRAP, REVERSE, DTYPE)
    continues = steps & (ended == 0)

    here = ()
    beside = ()
    for i in tl.static_range(len(inputs)):
        run, run_beside = load_runs(inputs[i], origin, tail, BESIDE[i] and MASKED != SKIP, ALIGNED, REVERSE, ROWS, WIDTH)
        if MASKED == ZERO:
            run, run_beside = tl.where(kept, run, 0), tl.where(beside_kept, run_beside, 0)
        here, beside = here + (run.to(DTYPE),), beside + (run_beside.to(DTYPE),)
    if CONTINUATION >= 0:
        end = tl.where(terminated, tl.cast(0, DTYPE), here[CONTINUATION])
    next_place = origin + place + (1 if REVERSE else -1)
    following = ()
    for i in tl.static_range(len(FOLLOWING)):
        found = beside[FOLLOWING[i]]
        if MASKED == SKIP:
            found = tl.load(inputs[FOLLOWING[i]] + next_place, mask=continues, other=0).to(DTYPE)
        following = following + (tl.where(ended, end, found),)
    if CONTINUATION >= 0:
        following = following + (end,)

    solved = ()
    before = ()
    for channel in tl.static_range(CHANNELS):
        taken = _rates_of(
            rates,
            rate_numbers,
            segment,
            origin,
            tail,
            (next_place, continues),
            channel * RATES,
            RATES,
            RATE_FOLLOWS,
            RATE_KINDS,
            MASKED,
            ALIGNED,
            REVERSE,
            ROWS,
            WIDTH,
            DTYPE,
        )
        a, b = coefficients(here, following, taken)
        if channel == 0:
            numbers = taken
        if END_IS_CARRY:
            a = tl.where(ended & (end != 0), a + b * end, a)
        b = tl.where(ended, tl.cast(0, DTYPE), b)
        # What lies beyond the segment needs no such care: an end is between, or nothing follows it.
        if MASKED == SKIP:
            a, b = tl.where(steps, a, tl.cast(0, DTYPE)), tl.where(steps, b, tl.cast(1, DTYPE))
        first, second, third, run_a, run_b, before_a, before_b = up_runs(a, b, REVERSE, ROWS, WIDTH)
        entering = tl.cast(0, DTYPE)
        if TILED:
            entering = entering_carry(
                run_a,
                run_b,
                early[channel],
                carries + channel * stride,
                stride * CHANNELS,
                slot,
                tile,
                tiles,
                REVERSE,
                GROUP,
                WIDTH // RUN,
                DTYPE,
                WORD,
            )
        entering = passed(before_a, before_b, entering)
        x, preceding_x = down_runs(entering, first, second, third, a, b, REVERSE, ROWS, WIDTH)
        preceding_x = tl.where(continues, preceding_x, tl.cast(0, DTYPE))
        solved, before = solved + (x,), before + (preceding_x,)
    if CHANNELS == 1:
        solved, before = solved + (solved[0],), before + (before[0],)
    values = results(here, following, solved, before, numbers)
    for i in tl.static_range(len(outputs)):
        store_runs(outputs[i], origin, tail, values[i] if MASKED == NO_MASK else tl.where(kept, values[i], 0.0), ALIGNED, TILED, REVERSE, ROWS, WIDTH)
