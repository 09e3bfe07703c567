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
def _loaded(
    pointer, origin, tail, BESIDE: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """The tokens of each run in order, and if BESIDE the one before them, or after them if REVERSE: [ROWS, RUNS] each."""
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
    return elements


@triton.jit
def load_runs(
    pointer, origin, tail, BESIDE: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """(the tokens of a tile, what lies beside each in scan order: only if BESIDE), [ROWS, WIDTH]; anything stands outside a segment.

    ALIGNED: `origin` is a multiple of RUN.
    """
    elements = _loaded(pointer, origin, tail, BESIDE, ALIGNED, REVERSE, ROWS, WIDTH)
    if not BESIDE:
        here = _run(elements, 0, ROWS, WIDTH)
        return here, here
    elif REVERSE:
        return _run(elements, 0, ROWS, WIDTH), _run(elements, 1, ROWS, WIDTH)
    else:
        return _run(elements, 1, ROWS, WIDTH), _run(elements, 0, ROWS, WIDTH)


@triton.jit
def load_nearest(
    pointer, origin, tail, events, beyond, ALIGNED: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """(the tokens of a tile, what lies beside the nearest event of each), [ROWS, WIDTH]; `beyond` where its run has none."""
    elements = _loaded(pointer, origin, tail, True, ALIGNED, REVERSE, ROWS, WIDTH)
    BEFORE: tl.constexpr = 0 if REVERSE else 1
    return _run(elements, BEFORE, ROWS, WIDTH), nearest_of(elements, 1 - BEFORE, beyond, events, REVERSE, ROWS, WIDTH)


@triton.jit
def nearest_of(elements, FIRST: tl.constexpr, beyond, events, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What `elements`, from the FIRST on, tell of the nearest event on the way to what precedes each token; `beyond` where its run has none."""
    value, found = beyond, ()
    for i in tl.static_range(RUN):
        if REVERSE:
            value = tl.where((events >> (RUN - 1 - i) & 1) != 0, elements[FIRST + RUN - 1 - i], value)
            found = (value,) + found
        else:
            value = tl.where((events >> i & 1) != 0, elements[FIRST + i], value)
            found = found + (value,)
    return _run(found, 0, ROWS, WIDTH)


@triton.jit
def load_where(pointer, origin, bits, REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """The tokens of each run that have a bit, in order, [ROWS, RUNS] each; 0 in place of the others."""
    first = pointer + (origin + run_starts(REVERSE, WIDTH)[None, :])
    loaded = ()
    for i in tl.static_range(RUN):
        loaded = loaded + (tl.load(first + i, mask=(bits & (1 << i)) != 0, other=0),)
    return loaded


@triton.jit
def load_tokens(pointer, origin, there, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The tokens of a tile that are `there`, and no others, [ROWS, WIDTH]; 0 in their place."""
    return _run(load_where(pointer, origin, _bits_of_tokens(there, ROWS, WIDTH), REVERSE, WIDTH), 0, ROWS, WIDTH)


@triton.jit
def load_flags(
    pointer, origin, tail, BESIDE: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """`load_runs`, as bool."""
    if pointer.dtype.element_ty.primitive_bitwidth > 8:
        here, beside = load_runs(pointer, origin, tail, BESIDE, ALIGNED, REVERSE, ROWS, WIDTH)
        return here != 0, beside != 0
    else:
        here, beside = load_bits(pointer, origin, tail, BESIDE, ALIGNED, REVERSE, ROWS, WIDTH)
        return tokens_of(here, ROWS, WIDTH), tokens_of(beside, ROWS, WIDTH)


@triton.jit
def load_bits(
    pointer, origin, tail, BESIDE: tl.constexpr, ALIGNED: tl.constexpr, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """`load_flags` as a bit for each token of a run, [ROWS, RUNS]; anything stands in further bits. Of flags one byte wide a run is one word."""
    if pointer.dtype.element_ty.primitive_bitwidth > 8:
        here, beside = load_runs(pointer, origin, tail, BESIDE, ALIGNED, REVERSE, ROWS, WIDTH)
        return _bits_of_tokens(here, ROWS, WIDTH), _bits_of_tokens(beside, ROWS, WIDTH)
    else:
        BEFORE: tl.constexpr = 1 if BESIDE and not REVERSE else 0
        words = pointer.to(tl.pointer_type(tl.int64), bitcast=True)
        first = tl.zeros([ROWS, 1], origin.dtype) + (origin - BEFORE)
        block = (first + RUN) // RUN - 1
        place = block + run_numbers(REVERSE, WIDTH)[None, :]
        stop = first + BEFORE + tail
        bits = _bits_of_bytes(tl.load(words + place, mask=(place * RUN < stop) & (place >= 0), other=0))
        if BESIDE or not ALIGNED:
            bits |= _bits_of_bytes(tl.load(words + place + 1, mask=(place + 1) * RUN < stop, other=0)) << RUN
            bits = bits >> (first - block * RUN).to(tl.int32)
        if BEFORE == 1:
            return bits >> 1, bits
        else:
            return bits, bits >> 1


@triton.jit
def _bits_of_bytes(words):
    """Of each int64 the 8 bits that tell which of its bytes are not 0."""
    return _bits_of_half(words) | _bits_of_half(words >> 32) << 4


@triton.jit
def _bits_of_half(word):
    """Of its four lowest bytes: a byte's highest bit is set if it is not 0, then a product brings the four bits together."""
    word = word.to(tl.int32).to(tl.uint32, bitcast=True)
    highest = (((word & 0x7F7F7F7F) + 0x7F7F7F7F) | word) & 0x80808080
    return ((highest * 0x00204081) >> 28).to(tl.int32)


@triton.jit
def _bits_of_tokens(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    parts = _elements(tl.reshape((x != 0).to(tl.int32), (ROWS, WIDTH // RUN, RUN)), ROWS, WIDTH // RUN, RUN)
    bits = parts[0]
    for i in tl.static_range(1, RUN):
        bits |= parts[i] << i
    return bits


@triton.jit
def tokens_of(bits, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH]: whether each token has its bit."""
    flags = ()
    for i in tl.static_range(RUN):
        flags = flags + (bits & (1 << i),)
    return _run(flags, 0, ROWS, WIDTH) != 0


@triton.jit
def ask_for(pointer, first, count, WIDTH: tl.constexpr):
    """Have `count` tokens from `first` on brought into the L2 cache, for a program that will read them soon; a GPU before Hopper does not."""
    if not INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        address = (pointer + first).to(tl.uint64)
        begin = address // 16 * 16
        size = (address + count * (max(8, pointer.dtype.element_ty.primitive_bitwidth) // 8) + 15) // 16 * 16 - begin
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
