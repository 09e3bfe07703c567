"""How a thread reads a run of RUN consecutive tokens and the token beside it. Part of the Triton backend's kernel.

A tile starts anywhere, while vectors of 16 bytes start at multiples of 16 bytes: a thread reads the aligned vectors that cover its run and the
token beside it, then moves the elements into place. So a run lies within one thread from the load on, wherever its segment lies. Reads go no
further than the vectors that hold a token of the tile; what lies in them beyond the tile is read and not used.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from . import tiles
from .triton_tile import RUN, run_numbers, run_starts

INTERPRETED = tl.constexpr(tiles.INTERPRETED)


@triton.jit
def _elements(vectors, ROWS: tl.constexpr, RUNS: tl.constexpr, VECTOR: tl.constexpr):
    """[ROWS, RUNS, VECTOR] -> VECTOR tensors [ROWS, RUNS], in order."""
    if VECTOR == 2:
        return tl.split(vectors)
    elif VECTOR == 4:
        even, odd = tl.split(tl.reshape(vectors, (ROWS, RUNS, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth
    else:
        even, odd = tl.split(tl.reshape(vectors, (ROWS, RUNS, 4, 2)))
        first, third, fifth, seventh = _elements(even, ROWS, RUNS, 4)
        second, fourth, sixth, eighth = _elements(odd, ROWS, RUNS, 4)
        return first, second, third, fourth, fifth, sixth, seventh, eighth


@triton.jit
def _run(elements, FIRST: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """RUN elements of each run, from the `FIRST` on, as [ROWS, WIDTH]."""
    even = tl.join(tl.join(elements[FIRST], elements[FIRST + 4]), tl.join(elements[FIRST + 2], elements[FIRST + 6]))
    odd = tl.join(tl.join(elements[FIRST + 1], elements[FIRST + 5]), tl.join(elements[FIRST + 3], elements[FIRST + 7]))
    return tl.reshape(tl.join(even, odd), (ROWS, WIDTH))


@triton.jit
def _moved(elements, shift, BY: tl.constexpr):
    """Each element's place taken by the one BY further on, where `shift` has that bit."""
    moved = ()
    for i in tl.static_range(len(elements) - BY):
        moved = moved + (tl.where((shift & BY) != 0, elements[i + BY], elements[i]),)
    return moved


@triton.jit
def load_runs(
    pointer, origin, tail, BESIDE: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """(the tokens of a tile, what lies beside each in scan order: only if BESIDE), [ROWS, WIDTH]; anything stands outside a segment.

    ALIGNED: `origin` is a multiple of RUN.
    """
    RUNS: tl.constexpr = WIDTH // RUN
    VECTOR: tl.constexpr = 128 // max(16, pointer.dtype.element_ty.primitive_bitwidth)
    BEFORE: tl.constexpr = 1 if BESIDE and not REVERSE else 0
    MOVES: tl.constexpr = BEFORE == 1 or not ALIGNED
    NEEDED: tl.constexpr = RUN + (1 if BESIDE else 0) + (VECTOR - 1 if MOVES else 0)
    first = tl.zeros([ROWS, 1], origin.dtype) + (origin - BEFORE)
    base = ((first + VECTOR) // VECTOR - 1) * VECTOR if MOVES else first
    shift = first - base
    starts = run_starts(REVERSE, WIDTH)[None, :, None]
    vector = base[:, :, None] + starts
    stop = (shift + BEFORE + tail)[:, :, None]
    elements = ()
    for piece in tl.static_range((NEEDED + VECTOR - 1) // VECTOR):
        there = starts + piece * VECTOR < stop
        if BEFORE == 1:
            there = there & (vector + piece * VECTOR >= 0)
        loaded = tl.load(pointer + vector + (piece * VECTOR + tl.arange(0, VECTOR)[None, None, :]), mask=there)
        elements = elements + _elements(loaded, ROWS, RUNS, VECTOR)
    if MOVES:
        elements = _moved(elements, shift, 1)
        if VECTOR > 2:
            elements = _moved(elements, shift, 2)
        if VECTOR > 4:
            elements = _moved(elements, shift, 4)
    here = _run(elements, BEFORE, ROWS, WIDTH)
    if BESIDE:
        return here, _run(elements, 0 if BEFORE == 1 else 1, ROWS, WIDTH)
    else:
        return here, here


@triton.jit
def _parts(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] -> the RUN tokens of each run, [ROWS, RUNS] each."""
    return _elements(tl.reshape(x, (ROWS, WIDTH // RUN, RUN)), ROWS, WIDTH // RUN, RUN)


@triton.jit
def load_anywhere(pointer, at, there, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What stands at the places `at` that are `there`, else 0; token by token of a run, so that it lies within one thread like all else."""
    at, there = _parts(at, ROWS, WIDTH), _parts(there, ROWS, WIDTH)
    loaded = ()
    for i in tl.static_range(RUN):
        loaded = loaded + (tl.load(pointer + at[i], mask=there[i], other=0),)
    return _run(loaded, 0, ROWS, WIDTH)


@triton.jit
def load_flags(
    pointer, origin, tail, BESIDE: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """`load_runs`, as bool; of flags one byte wide a run is one word."""
    if pointer.dtype.element_ty.primitive_bitwidth > 8:
        here, beside = load_runs(pointer, origin, tail, BESIDE, ALIGNED, REVERSE, ROWS, WIDTH)
        return here != 0, beside != 0
    else:
        BEFORE: tl.constexpr = 1 if BESIDE and not REVERSE else 0
        words = pointer.to(tl.pointer_type(tl.int64), bitcast=True)
        first = tl.zeros([ROWS, 1], origin.dtype) + (origin - BEFORE)
        block = (first + RUN) // RUN - 1
        shift = (first - block * RUN) * 8
        place = block + run_numbers(REVERSE, WIDTH)[None, :]
        stop = first + BEFORE + tail
        low = tl.load(words + place, mask=(place * RUN < stop) & (place >= 0), other=0)
        moved = tl.where(shift > 0, shift, 8).to(tl.int64)
        if ALIGNED and not BESIDE:
            run, beyond = low, low
        else:
            high = tl.load(words + place + 1, mask=(place + 1) * RUN < stop, other=0)
            joined = ((low >> moved) & ~(-1 << (64 - moved))) | (high << (64 - moved))
            run = tl.where(shift > 0, joined, low)
            beyond = high >> shift.to(tl.int64)
        if BEFORE == 1:
            return _flags_of((run >> 8) & ~(-1 << 56) | (beyond << 56), ROWS, WIDTH), _flags_of(run, ROWS, WIDTH)
        elif BESIDE:
            return _flags_of(run, ROWS, WIDTH), _flags_of((run >> 8) & ~(-1 << 56) | (beyond << 56), ROWS, WIDTH)
        else:
            here = _flags_of(run, ROWS, WIDTH)
            return here, here


@triton.jit
def _flags_of(words, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A flag for each byte."""
    halves = words.to(tl.int32), (words >> 32).to(tl.int32)
    flags = ()
    for i in tl.static_range(RUN):
        flags = flags + (halves[i // 4] & (-1 << 24 if i % 4 == 3 else 255 << (8 * (i % 4))),)
    return _run(flags, 0, ROWS, WIDTH) != 0


@triton.jit
def ask_for(pointer, first, count, WIDTH: tl.constexpr):
    """Have `count` tokens from `first` on brought into the L2 cache, for a program that will read them soon; a GPU before Hopper does not."""
    if not INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        address = (pointer + first).to(tl.uint64)
        begin = address // 16 * 16
        size = (address + count * (pointer.dtype.element_ty.primitive_bitwidth // 8) + 15) // 16 * 16 - begin
        tl.inline_asm_elementwise(
            "{ .reg .pred asks; setp.eq.s32 asks, $3, 0; @asks cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r,r",
            [begin, tl.where(count > 0, size, 0).to(tl.uint32), tl.arange(0, WIDTH // RUN) + tl.where(count > 0, 0, 1)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_runs(
    pointer,
    origin,
    tail,
    values,
    ALIGNED: tl.constexpr,
    TILED: tl.constexpr,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the tokens of a tile that lie in its segment; whole vectors where a full tile starts at a multiple of one."""
    kind = pointer.dtype.element_ty
    VECTOR: tl.constexpr = 128 // max(16, kind.primitive_bitwidth)
    if INTERPRETED and kind == tl.bfloat16:
        values = values.to(tl.float32)  # it takes the bits of a float64 for those of a float32
    runs = tl.reshape(values.to(kind), (ROWS, WIDTH // RUN, RUN))
    at = run_starts(REVERSE, WIDTH)[None, :, None] + tl.arange(0, RUN)[None, None, :]
    if TILED and not ALIGNED:
        if (origin % VECTOR == 0) & (tail >= WIDTH):
            tl.store(pointer + origin // VECTOR * VECTOR + at, runs)
        else:
            tl.store(pointer + origin + at, runs, mask=at < tail)
    else:
        first = tl.zeros([ROWS, 1], origin.dtype) + origin
        tl.store(pointer + first[:, :, None] + at, runs, mask=at < (tl.zeros([ROWS, 1], tail.dtype) + tail)[:, :, None])
