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
from .triton_inputs import inputs_of, rates_of
from .triton_map import FIELDS
from .triton_runs import store_runs
from .triton_steps import NO_MASK, SKIP, boundaries, end_value, trainable
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
        entry, there = slots + slot * FIELDS, slot < bound
        length = tl.load(entry + 3, mask=there, other=0).to(INDEX)
        segment = tl.where(length > 0, tl.load(entry, mask=there, other=0), 0).to(INDEX)
        start = tl.where(length > 0, tl.load(entry + 2, mask=there, other=0), 0).to(INDEX)
    return segment, start, length


@triton.jit
def _solved(
    a,
    b,
    early,
    carries,
    chain,
    channel: tl.constexpr,
    CHANNELS: tl.constexpr,
    REVERSE: tl.constexpr,
    TILED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
):
    """(x, x that precedes) of each token of a tile whose steps are (a, b)."""
    first, second, third, run_a, run_b, before_a, before_b = up_runs(a, b, REVERSE, ROWS, WIDTH)
    entering = tl.cast(0, DTYPE)
    if TILED:
        entering = entering_carry(
            run_a, run_b, early[channel], carries, chain, channel, CHANNELS, REVERSE, GROUP, WIDTH // RUN, DTYPE, WORD
        )
    return down_runs(passed(before_a, before_b, entering), first, second, third, a, b, REVERSE, ROWS, WIDTH)


# Not specialised, so that the number of compiled kernels does not depend on how many different shapes there are.
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
    staged,  # what the two stages take, else None
    segments,
    length,
    bound,
    coefficients: tl.constexpr,
    results: tl.constexpr,
    BEFORE: tl.constexpr,  # None, or a stage that makes what the formulas read of what was given
    AFTER: tl.constexpr,  # None, or one that changes what they made
    CHANNELS: tl.constexpr,
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
        if slots is not None and tl.max(length) <= 0:
            return
        head = length * 0
    origin, tail = start + head, length - head
    chain, early = (), ()
    if TILED:
        chain = slot, tile, tl.cdiv(length, WIDTH), tl.cast(bound, INDEX)
        for channel in tl.static_range(CHANNELS):
            early = early + (look_early(carries, chain, channel, CHANNELS, REVERSE, GROUP),)
    at = places(REVERSE, WIDTH)
    keeps = trainable(flags, origin, at, head, tail, MASKED, REVERSE, ALIGNED, ROWS, WIDTH)
    steps = keeps[0] if MASKED == SKIP else at < tail
    place, ended, terminated = boundaries(
        flags, segment, origin, at, head, tail, keeps[1], FLAGS, MASKED, REVERSE, STARTS, ALIGNED, TILED, ROWS, WIDTH
    )
    end = end_value(bootstrap, segment, origin, place, head, tail, ended, terminated, BOOTSTRAP, REVERSE, DTYPE)
    next = origin + place + (1 if REVERSE else -1), steps & (ended == 0)
    ends, given = (ended, terminated, end), (rates, rate_numbers)
    here, following = inputs_of(
        inputs, origin, tail, next, keeps, ends, FOLLOWING, BESIDE, CONTINUATION, MASKED, ALIGNED, REVERSE, ROWS, WIDTH, DTYPE
    )
    where = segment, origin, at, head, tail
    if BEFORE is not None:
        here = BEFORE(staged, here, where, keeps[0], ALIGNED, TILED, REVERSE, ROWS, WIDTH, DTYPE)
    solved = ()
    before = ()
    for channel in tl.static_range(CHANNELS):
        taken = rates_of(
            given, segment, origin, tail, next, channel, RATE_FOLLOWS, RATE_KINDS, MASKED, ALIGNED, REVERSE, ROWS, WIDTH, DTYPE
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
        x, preceding_x = _solved(a, b, early, carries, chain, channel, CHANNELS, REVERSE, TILED, GROUP, ROWS, WIDTH, DTYPE, WORD)
        preceding_x = tl.where(next[1], preceding_x, tl.cast(0, DTYPE))
        solved, before = solved + (x,), before + (preceding_x,)
    if CHANNELS == 1:
        solved, before = solved + (solved[0],), before + (before[0],)
    values = results(here, following, solved, before, numbers)
    if AFTER is not None:
        values = AFTER(staged, values, where, keeps[0], ROWS, DTYPE)
    for i in tl.static_range(len(outputs)):
        value = values[i] if MASKED == NO_MASK else tl.where(keeps[0], values[i], 0.0)
        store_runs(outputs[i], origin, tail, value, ALIGNED, TILED, REVERSE, ROWS, WIDTH)
