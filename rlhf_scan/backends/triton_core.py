"""The scan core of the Triton backend: what a program does with its tokens, specialised by an estimator's formulas. It knows no RL.

A program reads its tile's raw inputs once, builds (a, b) in registers, scans them, takes the carry from the tile before it in scan order, and
writes the outputs once. Names and conventions are those of `triton_steps`.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .triton_carry import entering_carry, look_early
from .triton_inputs import inputs_of, rates_of
from .triton_runs import ask_for, store_runs
from .triton_steps import NO_MASK, SKIP, surroundings
from .triton_tile import NOWHERE, RUN, down_runs, passed, places, up_runs


class How(NamedTuple):
    """What the kernels of a call are compiled for. A kind is as in `triton_steps`.

    Attributes:
        coefficients, results: the estimator's formulas.
        BEFORE, AFTER: None, or a stage that makes what the formulas read of what was given, and one that changes what they made.
        CHANNELS: how many scans share the inputs.
        RATE_KINDS: the kind of each rate of each channel.
        FOLLOWING, BESIDE: the inputs that the builder reads at the next step, by position; for each input, whether it does.
        RATE_FOLLOWS: for each rate of a channel, whether the formulas read it at the next step.
        CONTINUATION: as in `Call`.
        FLAGS, BOOTSTRAP: the kinds of mask, terminated, truncated; of the bootstrap.
        END_IS_CARRY: the value after the end is the x that follows, too.
        MASKED, REVERSE, STARTS: as in `Call` and its estimator.
        STOPS: as in `triton_tile`.
        GROUP: tiles composed at one look.
        DTYPE, WORD: of the arithmetic, and the integer as wide.
        INDEX: of places.
    """

    coefficients: Any
    results: Any
    BEFORE: Any
    AFTER: Any
    CHANNELS: int
    RATE_KINDS: tuple[int, ...]
    FOLLOWING: tuple[int, ...]
    BESIDE: tuple[bool, ...]
    RATE_FOLLOWS: tuple[bool, ...]
    CONTINUATION: int
    FLAGS: tuple[int, ...]
    BOOTSTRAP: int
    END_IS_CARRY: bool
    MASKED: int
    REVERSE: bool
    STARTS: bool
    STOPS: int
    GROUP: int
    DTYPE: Any
    WORD: Any
    INDEX: Any

    @property
    def cache_key(self) -> str:
        """By which Triton finds again what it compiled, also on disk: its own would have functions by their names, which others share."""
        return "-".join(getattr(part, "cache_key", str(part)) for part in self)


@triton.jit
def _ask_ahead(inputs, flags, ahead, there, FLAGS: tl.constexpr, WIDTH: tl.constexpr):
    """Have the inputs and flags of a later program's tile brought near: it then waits for less, while it keeps others from running."""
    _, start, length, tile, _ = ahead
    # What else an unused slot says is anything.
    count = tl.where(there & (length > 0), tl.minimum(length - tile * WIDTH, WIDTH), 0)
    for i in tl.static_range(len(inputs)):
        ask_for(inputs[i], start + tile * WIDTH, count, WIDTH)
    for i in tl.static_range(len(FLAGS)):
        if FLAGS[i] == 2:
            ask_for(flags[i], start + tile * WIDTH, count, WIDTH)


@triton.jit
def _from_the_first(a, b, HOW: tl.constexpr, RUNS: tl.constexpr):
    """The x that enters each of two rows: 0 the first in scan order, and the other what leaves the first, whose runs, scanned, do (a, b) to 0.

    As through `entering_carry`, where a b that is not finite makes NaN of that 0.
    """
    first = tl.arange(0, 2)[:, None] == (1 if HOW.REVERSE else 0)
    last = tl.arange(0, RUNS)[None, :] == RUNS - 1
    left = passed(a, b, tl.zeros_like(a)).to(HOW.WORD, bitcast=True)
    leaves = tl.sum(tl.where(first & last, left, 0))  # a sum of bits: nothing is rounded
    return tl.where(first, tl.cast(0, HOW.DTYPE), leaves.to(HOW.DTYPE, bitcast=True))


@triton.jit
def _solved(
    a,
    b,
    early,
    carries,
    chain,
    channel: tl.constexpr,
    HOW: tl.constexpr,
    TILED: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """(x, x that precedes) of each token of a tile whose steps are (a, b)."""
    first, second, third, run_a, run_b, before_a, before_b = up_runs(a, b, HOW.REVERSE, HOW.STOPS, ROWS, WIDTH)
    entering = tl.cast(0, HOW.DTYPE)
    if PAIRED:
        entering = _from_the_first(run_a, run_b, HOW, WIDTH // RUN)
    elif TILED:
        entering = entering_carry(
            run_a, run_b, early[channel], carries, chain, channel, HOW.CHANNELS, HOW.REVERSE, HOW.GROUP, WIDTH // RUN, HOW.DTYPE, HOW.WORD
        )
    entering = passed(before_a, before_b, entering, HOW.STOPS)
    return down_runs(entering, first, second, third, a, b, HOW.REVERSE, HOW.STOPS, ROWS, WIDTH)


@triton.jit
def solve(
    given,
    place,
    chain,
    ahead,
    HOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILED: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Everything, for the tile (TILED), the two tiles of one segment (PAIRED) or the ROWS whole segments of a program, rows of a tensor.

    ALIGNED: they start at multiples of RUN.

    `given` are inputs, outputs, rates, numbers in place of them, flags, bootstrap, carries, and what the stages take; `place` is (segment,
    first token, tokens of the segment before it, and from it on, number of the row among those of all programs); `chain` (slot of the tile's
    carry, tile, tiles of the segment, slots in all); `ahead` (a later program's tile, whether there is one).
    """
    inputs, outputs, rates, rate_numbers, flags, bootstrap, carries, staged = given
    segment, origin, head, tail, row = place
    early = ()
    if TILED:
        for channel in tl.static_range(HOW.CHANNELS):
            early = early + (look_early(carries, chain, channel, HOW.CHANNELS, HOW.REVERSE, HOW.GROUP),)
    at = places(HOW.REVERSE, WIDTH)
    keeps, steps, ends, nearest = surroundings(flags, bootstrap, (segment, origin, head, tail), at, HOW, ALIGNED, TILED, ROWS, WIDTH)
    ended, _, end = ends
    rated = rates, rate_numbers
    here, following = inputs_of(inputs, origin, tail, nearest, keeps, ends, HOW, ALIGNED, ROWS, WIDTH)
    if TILED:
        _ask_ahead(inputs, flags, *ahead, HOW.FLAGS, WIDTH)
    where = segment, origin, at, head, tail, row
    if HOW.BEFORE is not None:
        here = HOW.BEFORE(staged, here, where, keeps[0], ALIGNED, TILED, HOW.REVERSE, ROWS, WIDTH, HOW.DTYPE)
    solved, before = (), ()
    for channel in tl.static_range(HOW.CHANNELS):
        taken = rates_of(rated, segment, origin, tail, nearest, channel, HOW, ALIGNED, ROWS, WIDTH)
        a, b = HOW.coefficients(here, following, taken)
        if channel == 0:
            numbers = taken
        if HOW.END_IS_CARRY:
            a = tl.where(ended & (end != 0), tl.where(b == 0, a, a + b * end), a)
        b = tl.where(ended, tl.cast(0, HOW.DTYPE), b)
        # Where it STOPS, what lies beyond the segment needs no care: an end is between, or nothing follows it.
        if HOW.MASKED == SKIP:
            a, b = tl.where(steps, a, tl.cast(0, HOW.DTYPE)), tl.where(steps, b, tl.cast(1, HOW.DTYPE))
        elif HOW.REVERSE and HOW.STOPS == NOWHERE:
            a = tl.where(at < tail, a, tl.cast(0, HOW.DTYPE))
        x, preceding_x = _solved(a, b, early, carries, chain, channel, HOW, TILED, PAIRED, ROWS, WIDTH)
        preceding_x = tl.where(steps & (ended == 0), preceding_x, tl.cast(0, HOW.DTYPE))
        solved, before = solved + (x,), before + (preceding_x,)
    if HOW.CHANNELS == 1:
        solved, before = solved + (solved[0],), before + (before[0],)
    values = HOW.results(here, following, solved, before, numbers)
    if HOW.AFTER is not None:
        values = HOW.AFTER(staged, values, where, keeps[0], ROWS, HOW.DTYPE)
    for i in tl.static_range(len(outputs)):
        value = values[i] if HOW.MASKED == NO_MASK else tl.where(keeps[0], values[i], 0.0)
        store_runs(outputs[i], origin, tail, value, ALIGNED, TILED, HOW.REVERSE, ROWS, WIDTH)
