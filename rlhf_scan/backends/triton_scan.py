"""The scan core of the Triton backend: one kernel over tiles of segments, specialised by an estimator's formulas. It knows no RL.

A program reads its tile's raw inputs once, builds (a, b) in registers, scans them, takes the carry from the tile before it in scan order,
and writes the outputs once. Carries travel in one chain per group of GROUP tiles and one chain over a segment's groups, each link a word
that is -1 until its value is there. Programs are launched in the order of the chains, so the one that is waited for has always started.

Throughout: `REVERSE` scans backward in time; `start` is a segment's first token and `t` a place in the segment, so what precedes t in scan
order lies at t + 1 if reversed, else at t - 1. A kind tells how a number is indexed: absent or one for all (0), by segment (1), by token (2).
`MASKED` is what a masked token does, -1 where there is no mask. `segment`, `start`, `length` are scalars or [ROWS, 1]; tiles are [ROWS, WIDTH].
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

NO_MASK = tl.constexpr(-1)
SKIP = tl.constexpr(0)
ZERO = tl.constexpr(1)
KEEP = tl.constexpr(2)
UNSET = tl.constexpr(-1)  # as bits: a NaN that no published value has
CARRY_WORDS = tl.constexpr(3)  # what a tile and its group so far do to a carry (a, b), and the carry that leaves the group


@triton.jit
def _compose(a_first, b_first, a_then, b_then):
    """What two steps do to a carry. Where b is 0 nothing is carried over, not even NaN."""
    return a_then + tl.where(b_then == 0, 0.0, b_then * a_first), b_then * b_first


@triton.jit
def _smaller(left, right):
    return tl.minimum(left, right)


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def _rates_of(pointers, numbers, segment, offsets, on, FIRST: tl.constexpr, COUNT: tl.constexpr, KINDS: tl.constexpr, DTYPE: tl.constexpr):
    """`COUNT` rates from the `FIRST` on, as the tile sees them."""
    found = ()
    for i in tl.static_range(COUNT):
        if KINDS[FIRST + i] == 0:
            found = found + (tl.cast(numbers[FIRST + i], DTYPE),)
        elif KINDS[FIRST + i] == 1:
            found = found + (tl.load(pointers[FIRST + i] + segment).to(DTYPE),)
        else:
            found = found + (tl.load(pointers[FIRST + i] + offsets, mask=on, other=0).to(DTYPE),)
    return found


@triton.jit
def _flagged(pointer, segment, start, t, length, on, KIND: tl.constexpr):
    """Whether a flag is set at t."""
    if KIND == 0:
        return on & False
    elif KIND == 1:
        # Not `& (flag != 0)`: Triton's interpreter makes a float of that where `segment` is a scalar.
        return on & (t == tl.where(tl.load(pointer + segment) != 0, length - 1, -1))
    else:
        return on & (tl.load(pointer + start + t, mask=on, other=0) != 0)


@triton.jit
def _ends_before(flags, segment, start, t, length, inside, FLAGS: tl.constexpr, REVERSE: tl.constexpr):
    """Whether an end separates t from what precedes it in scan order: backward it is flagged at t, forward at the token before."""
    if REVERSE:
        edge = t == length - 1
        at = t
    else:
        edge = t == 0
        at = t - 1
    on = inside & (at >= 0)
    flagged = _flagged(flags[1], segment, start, at, length, on, FLAGS[1]) | _flagged(flags[2], segment, start, at, length, on, FLAGS[2])
    return inside & (edge | flagged)


@triton.jit
def _end_value(
    flags,
    bootstrap,
    segment,
    start,
    t,
    length,
    ended,
    FLAGS: tl.constexpr,
    BOOTSTRAP: tl.constexpr,
    REVERSE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The value that follows the end at t; 0 where `ended` is False."""
    nothing = tl.where(ended, tl.cast(0, DTYPE), tl.cast(0, DTYPE))
    if BOOTSTRAP == 0:
        return nothing
    else:
        if REVERSE:
            read = ended & (_flagged(flags[1], segment, start, t, length, ended, FLAGS[1]) == 0)
            edge = t == length - 1
        else:
            read = ended
            edge = t == 0
        if BOOTSTRAP == 1:
            return tl.where(read & edge, tl.load(bootstrap + segment).to(DTYPE), nothing)
        else:
            return tl.load(bootstrap + start + t, mask=read, other=0).to(DTYPE)


@triton.jit
def _trainable(flags, start, t, inside, MASKED: tl.constexpr):
    """Which tokens the mask keeps."""
    if MASKED == NO_MASK:
        return inside
    else:
        return inside & (tl.load(flags[0] + start + t, mask=inside, other=0) != 0)


@triton.jit
def _is_event(flags, segment, start, t, length, FLAGS: tl.constexpr, MASKED: tl.constexpr, REVERSE: tl.constexpr):
    """Whether what precedes t is known from t alone: an end, or a step right beside it."""
    inside = (t >= 0) & (t < length)
    beside = t + 1 if REVERSE else t - 1
    step_beside = _trainable(flags, start, beside, inside & (beside >= 0) & (beside < length), MASKED)
    return inside & (step_beside | _ends_before(flags, segment, start, t, length, inside, FLAGS, REVERSE))


@triton.jit
def _event_beyond(
    flags, segment, start, first, length, FLAGS: tl.constexpr, MASKED: tl.constexpr, REVERSE: tl.constexpr, WIDTH: tl.constexpr
):
    """The nearest event beyond a tile. Only a tile that borders on a masked token looks, so a masked span is read at most once more."""
    lanes = tl.arange(0, WIDTH)[None, :]
    at = first + WIDTH if REVERSE else first - WIDTH
    nearest = first * 0 - 1
    while (nearest == -1) & (at < length) & (at > -WIDTH):
        event = _is_event(flags, segment, start, at + lanes, length, FLAGS, MASKED, REVERSE)
        if REVERSE:
            found = tl.min(tl.where(event, at + lanes, length))
            nearest = tl.where(found < length, found, -1)
            at += WIDTH
        else:
            nearest = tl.max(tl.where(event, at + lanes, -1))
            at -= WIDTH
    return nearest


@triton.jit
def _events(
    flags,
    segment,
    start,
    first,
    length,
    t,
    FLAGS: tl.constexpr,
    MASKED: tl.constexpr,
    REVERSE: tl.constexpr,
    TILED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """For each t the nearest event, at t or on the way to what precedes it: itself, unless masked tokens are passed over."""
    if MASKED != SKIP:
        return t
    else:
        event = _is_event(flags, segment, start, t, length, FLAGS, MASKED, REVERSE)
        if REVERSE:
            nearest = tl.associative_scan(tl.where(event, t, length), 1, _smaller, reverse=True)
            missing = nearest >= length
            beside = first + WIDTH
        else:
            nearest = tl.associative_scan(tl.where(event, t, -1), 1, _larger)
            missing = nearest < 0
            beside = first - 1
        if TILED:
            if (beside >= 0) & (beside < length):
                if tl.load(flags[0] + start + beside) == 0:
                    beyond = _event_beyond(flags, segment, start, first, length, FLAGS, MASKED, REVERSE, WIDTH)
                    nearest = tl.where(missing, beyond, nearest)
        # Lanes hold tokens one by one along a row, whatever the compiler thinks of these addresses: the layout decides the order of the sums.
        return tl.max_contiguous(tl.where(t < length, nearest, t), [1, 2])


@triton.jit
def _publish(pointer, value, where, DTYPE: tl.constexpr, WORD: tl.constexpr):
    """Make the one lane of `value` that `where` selects visible to other programs."""
    quiet = tl.where(value == value, value, tl.cast(float("nan"), DTYPE))
    tl.store(pointer + tl.zeros_like(where).to(tl.int32), quiet.to(WORD, bitcast=True), mask=where)


@triton.jit
def _await(pointer, DTYPE: tl.constexpr):
    """The value that another program publishes there."""
    word = tl.load(pointer, volatile=True)
    while word == UNSET:
        word = tl.load(pointer, volatile=True)
    return word.to(DTYPE, bitcast=True)


@triton.jit
def _carry_through(
    a,
    b,
    carries,
    slot,
    tile,
    tiles,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
):
    """x of a tile, from its scanned (a, b) and the carry that enters it; passes on the carry that leaves.

    The sums are always taken in the same order: tile by tile within a group, then group by group.
    """
    within = tile % GROUP
    lanes = tl.arange(0, WIDTH)[None, :]
    if REVERSE:
        leaving_lane = lanes == 0
        before, group_before = slot + 1, slot + GROUP - within
        enters_segment, leaves_segment = tile == tiles - 1, tile == 0
        enters_group, leaves_group = within == GROUP - 1, within == 0
    else:
        leaving_lane = lanes == WIDTH - 1
        before, group_before = slot - 1, slot - within - 1
        enters_segment, leaves_segment = tile == 0, tile == tiles - 1
        enters_group, leaves_group = within == 0, within == GROUP - 1
    leaving_lane = leaving_lane & (leaves_segment == 0)
    # A tile that carries nothing over tells so at once, and nobody waits for a chain that it cuts.
    cuts = leaving_lane & (b == 0)
    _publish(carries + slot * WORDS, a, cuts, DTYPE, WORD)
    _publish(carries + slot * WORDS + 1, b, cuts, DTYPE, WORD)
    entering = tl.cast(0, DTYPE)
    decay = tl.cast(0, DTYPE)
    if enters_group & (enters_segment == 0):
        decay = tl.cast(1, DTYPE)
    if (enters_group | enters_segment) == 0:
        entering = _await(carries + before * WORDS, DTYPE)
        decay = _await(carries + before * WORDS + 1, DTYPE)
    group_a, group_b = _compose(entering, decay, a, b)
    passes = leaving_lane & (b != 0)
    _publish(carries + slot * WORDS, group_a, passes, DTYPE, WORD)
    _publish(carries + slot * WORDS + 1, group_b, passes, DTYPE, WORD)
    if decay != 0:
        entering += decay * _await(carries + group_before * WORDS + 2, DTYPE)
    x, _ = _compose(entering, decay, a, b)
    _publish(carries + slot * WORDS + 2, x, leaving_lane & leaves_group, DTYPE, WORD)
    return x


@triton.jit
def _tile_of_program(bounds, slot_segment, slot_tile, segments, length, slots, REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """The one tile of a program: (segment, its first token, its length, tile, slot in the chain); length 0 where there is nothing to do.

    Tiles come in the order of their chains: of rows all first tiles, then all second ones, ...; of a pack slot by slot.
    """
    program = tl.program_id(0).to(tl.int64)
    if bounds is None:
        tiles = tl.cdiv(length, WIDTH)
        turn = program // segments
        segment = program % segments
        start = segment * length
        tile = tiles - 1 - turn if REVERSE else turn
        slot = segment * tiles + tile
    else:
        slot = slots - 1 - program if REVERSE else program
        found = tl.load(slot_segment + slot).to(tl.int64)
        segment = tl.maximum(found, 0)
        start = tl.load(bounds + segment)
        length = tl.where(found < 0, 0, tl.load(bounds + segment + 1) - start)
        tile = tl.where(found < 0, 0, tl.load(slot_tile + slot).to(tl.int64))
    return segment, start, length, tile, slot


@triton.jit
def _rows_of_program(bounds, slot_segment, segments, length, slots, ROWS: tl.constexpr):
    """The ROWS whole segments of a program, as [ROWS, 1]: (segment, its first token, its length), length 0 where there is none."""
    slot = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    if bounds is None:
        segment = tl.minimum(slot, segments - 1)
        start = segment * length
        length = tl.where(slot < segments, length, 0)
    else:
        found = tl.load(slot_segment + slot, mask=slot < slots, other=-1).to(tl.int64)
        segment = tl.maximum(found, 0)
        start = tl.load(bounds + segment)
        length = tl.where(found < 0, 0, tl.load(bounds + segment + 1) - start)
    return segment, start, length


# Not specialised, so that loads are never wider than an element: then a thread holds one element at a time and a segment's bits do not depend
# on where it lies, nor the number of compiled kernels on how many different shapes there are.
@triton.jit(do_not_specialize=["segments", "length", "slots"])
def scan_tiles(
    inputs,
    outputs,
    rates,
    rate_numbers,
    flags,  # mask, terminated, truncated
    bootstrap,
    bounds,  # of a pack, else None: rows of `length` tokens
    slot_segment,
    slot_tile,
    carries,
    segments,
    length,
    slots,
    coefficients: tl.constexpr,
    results: tl.constexpr,
    CHANNELS: tl.constexpr,
    RATES: tl.constexpr,  # how many a channel takes
    RATE_KINDS: tl.constexpr,
    FOLLOWING: tl.constexpr,
    FLAGS: tl.constexpr,
    BOOTSTRAP: tl.constexpr,
    END_IS_CARRY: tl.constexpr,
    MASKED: tl.constexpr,
    REVERSE: tl.constexpr,
    TILED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
):
    """Everything, for the tile (TILED) or the ROWS whole segments of one program."""
    if TILED:
        segment, start, length, tile, slot = _tile_of_program(bounds, slot_segment, slot_tile, segments, length, slots, REVERSE, WIDTH)
        first = tile * WIDTH
    else:
        segment, start, length = _rows_of_program(bounds, slot_segment, segments, length, slots, ROWS)
        first = 0
    t = first + tl.arange(0, WIDTH)[None, :]
    inside = t < length
    trainable = _trainable(flags, start, t, inside, MASKED)
    steps = trainable if MASKED == SKIP else inside
    on = inside if MASKED == KEEP else trainable

    event = _events(flags, segment, start, first, length, t, FLAGS, MASKED, REVERSE, TILED, WIDTH)
    ended = _ends_before(flags, segment, start, event, length, steps, FLAGS, REVERSE)
    end = _end_value(flags, bootstrap, segment, start, event, length, ended, FLAGS, BOOTSTRAP, REVERSE, DTYPE)
    preceding = tl.max_contiguous(event + 1 if REVERSE else event - 1, [1, 2])
    continues = steps & (ended == 0)

    here = ()
    for i in tl.static_range(len(inputs)):
        here = here + (tl.load(inputs[i] + start + t, mask=on, other=0).to(DTYPE),)
    following = ()
    for i in tl.static_range(len(FOLLOWING)):
        reads = _trainable(flags, start, preceding, continues, MASKED) if MASKED == ZERO else continues
        found = tl.load(inputs[FOLLOWING[i]] + start + preceding, mask=reads, other=0).to(DTYPE)
        following = following + (tl.where(ended, end, found),)

    solved = ()
    for channel in tl.static_range(CHANNELS):
        numbers = _rates_of(rates, rate_numbers, segment, start + t, steps, channel * RATES, RATES, RATE_KINDS, DTYPE)
        a, b = coefficients(here, following, numbers)
        if END_IS_CARRY:
            a = tl.where(ended & (end != 0), a + b * end, a)
        a = tl.where(steps, a, tl.cast(0, DTYPE))
        b = tl.where(steps, tl.where(ended, tl.cast(0, DTYPE), b), tl.cast(1, DTYPE))
        a, b = tl.associative_scan((a, b), 1, _compose, reverse=REVERSE)
        if TILED:
            a = _carry_through(
                a,
                b,
                carries + channel * CARRY_WORDS,
                slot,
                tile,
                tl.maximum(tl.cdiv(length, WIDTH), 1),
                REVERSE,
                GROUP,
                WIDTH,
                CARRY_WORDS * CHANNELS,
                DTYPE,
                WORD,
            )
        solved = solved + (a,)
    if CHANNELS == 1:
        solved = solved + (solved[0],)
    values = results(here, solved)
    for i in tl.static_range(len(outputs)):
        tl.store(outputs[i] + start + t, tl.where(trainable, values[i], 0.0).to(outputs[i].dtype.element_ty), mask=inside)
