"""The kernels of the Triton backend: which tokens a program holds. They know no RL.

Names and conventions are those of `triton_steps`.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .triton_core import solve
from .triton_launch import await_previous
from .triton_map import FIELDS
from .triton_steps import NO_MASK
from .triton_tile import RUN

# A program asks for the tile of the program that comes so many later: three for each multiprocessor of an H200. On it rows of 1024 x 16384 took
# 72.5 us (76.2 where none asks, 74.8 with 264, 74.0 with 528, 89.8 with 1056, which push each other out), and 128 x 131072 75.5 us (83.7).
AHEAD = tl.constexpr(396)


@triton.jit
def _tile_of_program(program, slots, segments, length, REVERSE: tl.constexpr, WIDTH: tl.constexpr, INDEX: tl.constexpr):
    """The one tile of a program: (segment, its first token, its length, tile, slot of its carry); length 0 where there is nothing to do.

    All first tiles in scan order come first, then all second ones, ...; carries lie by segment, tile after tile.
    """
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
def _rows_of_program(first, slots, segments, length, bound, ROWS: tl.constexpr, INDEX: tl.constexpr):
    """ROWS whole segments, of the `bound` that there are, from the `first` on: (segment, its first token, its length), length 0 for none."""
    slot = first + tl.arange(0, ROWS)[:, None]
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
def _solve_tile(given, program, slots, segments, length, bound, HOW: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr):
    """A program's tile, of the `bound` that there are at most."""
    later = tl.minimum(program + AHEAD, bound - 1)
    ahead = _tile_of_program(later, slots, segments, length, HOW.REVERSE, WIDTH, HOW.INDEX), program + AHEAD < bound
    segment, start, length, tile, slot = _tile_of_program(program, slots, segments, length, HOW.REVERSE, WIDTH, HOW.INDEX)
    if length > 0:
        origin, head, tail = start + tile * WIDTH, tile * WIDTH, length - tile * WIDTH
        if ALIGNED:
            origin, tail = origin // RUN * RUN, tail // RUN * RUN  # tells the compiler
        chain = slot, tile, tl.cdiv(length, WIDTH), bound
        inside = False
        if not ALIGNED and HOW.MASKED == NO_MASK and HOW.FLAGS[1] < 2 and HOW.FLAGS[2] < 2:
            inside = (tail > WIDTH) & (origin % RUN == 0)
        if inside:
            # The segment's end lies beyond the tile: a constant tail tells the compiler, which then leaves out what looks for it.
            place = segment, origin // RUN * RUN, head, tail * 0 + (WIDTH + RUN), program
            solve(given, place, chain, ahead, HOW, True, True, False, 1, WIDTH)
        else:
            solve(given, (segment, origin, head, tail, program), chain, ahead, HOW, ALIGNED, True, False, 1, WIDTH)


@triton.jit
def _solve_rows(
    given, first, row, slots, segments, length, bound, HOW: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """ROWS whole segments from the `first` on, the rows of the launch from `row` on."""
    segment, start, length = _rows_of_program(first, slots, segments, length, bound, ROWS, HOW.INDEX)
    rows = row + tl.arange(0, ROWS)[:, None]
    there = True if slots is None else tl.max(length) > 0
    if there:
        if ALIGNED:
            start, length = start // RUN * RUN, length // RUN * RUN
        solve(given, (segment, start, length * 0, length, rows), (), None, HOW, ALIGNED, False, False, ROWS, WIDTH)


@triton.jit
def _solve_pair(given, segment, length, HOW: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr):
    """A segment of two tiles: side by side neither waits for the other."""
    tile = tl.arange(0, 2)[:, None].to(HOW.INDEX)
    start = segment * length
    if ALIGNED:
        start, length = start // RUN * RUN, length // RUN * RUN
    place = tile * 0 + segment, start + tile * WIDTH, tile * WIDTH, length - tile * WIDTH, segment * 2 + tile
    solve(given, place, (), None, HOW, ALIGNED, False, True, 2, WIDTH)


# Nothing is specialised by its value, so that the number of compiled kernels does not depend on how many different shapes there are.
@triton.jit(do_not_specialize=["segments", "length", "bound"])
def scan_rows(
    inputs,
    outputs,
    rates,
    rate_numbers,
    flags,
    bootstrap,
    carries,
    staged,
    segments,
    length,
    bound,
    HOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILED: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rows of `length` tokens: a tile of one, both tiles of one, or ROWS of them."""
    await_previous()
    given = inputs, outputs, rates, rate_numbers, flags, bootstrap, carries, staged
    program = tl.program_id(0).to(HOW.INDEX)
    if PAIRED:
        _solve_pair(given, program, tl.cast(length, HOW.INDEX), HOW, ALIGNED, WIDTH)
    elif TILED:
        _solve_tile(given, program, None, segments, length, tl.cast(bound, HOW.INDEX), HOW, ALIGNED, WIDTH)
    else:
        _solve_rows(given, program * ROWS, program * ROWS, None, segments, length, bound, HOW, ALIGNED, ROWS, WIDTH)


@triton.jit(do_not_specialize=["long", "medium", "short"])
def scan_pack(
    inputs,
    outputs,
    rates,
    rate_numbers,
    flags,
    bootstrap,
    carries,
    staged,
    slots,
    long,  # slots of tiles, of medium and of short segments
    medium,
    short,
    HOW: tl.constexpr,
    WIDTH: tl.constexpr,
    MEDIUM: tl.constexpr,
    SHORT: tl.constexpr,
):
    """Packed segments: a tile of a long one, or as many tokens of medium or of short ones."""
    await_previous()
    given = inputs, outputs, rates, rate_numbers, flags, bootstrap, carries, staged
    program = tl.program_id(0).to(HOW.INDEX)
    tiles = tl.cast(long, HOW.INDEX)
    if program < tiles:
        _solve_tile(given, program, slots, 0, 0, tiles, HOW, False, WIDTH)
    else:
        ROWS: tl.constexpr = WIDTH // MEDIUM
        first = (program - tiles) * ROWS
        slots += tiles * FIELDS
        if first < medium:
            _solve_rows(given, first, tiles + first, slots, 0, 0, medium, HOW, False, ROWS, MEDIUM)
        else:
            before = tl.cdiv(medium, ROWS)
            slots += tl.cast(medium, HOW.INDEX) * FIELDS
            first = (program - tiles - before) * (WIDTH // SHORT)
            _solve_rows(given, first, tiles + before * ROWS + first, slots, 0, 0, short, HOW, False, WIDTH // SHORT, SHORT)
