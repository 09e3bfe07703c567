"""The scan within a tile. Part of the Triton backend's kernel.

A run of RUN tokens is composed pair by pair, up three levels of halves; the runs are scanned across threads; what enters each run then goes
down the same levels to its tokens. The halves are dimensions of size 2, which the compiler keeps within a thread: so threads exchange one
pair (a, b) per run, and the order of the sums depends on a token's place in the tile alone.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

RUN = tl.constexpr(8)

# What STOPS: whether b may be 0 between steps of a segment, where nothing passes, not even NaN.
NOWHERE = tl.constexpr(0)  # it may not
AT_ZEROS = tl.constexpr(1)  # it may, and is finite, as what follows from numbers is
ANYWHERE = tl.constexpr(2)  # it may, and may be anything else


@triton.jit
def run_numbers(REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """[runs], in scan order: the compiler would scan backward by turning everything around twice."""
    runs = tl.arange(0, WIDTH // RUN)
    return runs * -1 + (WIDTH // RUN - 1) if REVERSE else runs


@triton.jit
def run_starts(REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """[runs]: the first place of each run."""
    return run_numbers(REVERSE, WIDTH) * RUN


@triton.jit
def places(REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """[1, WIDTH]: each token's place in its tile; within a run they ascend."""
    return tl.reshape(run_starts(REVERSE, WIDTH)[:, None] + tl.arange(0, RUN)[None, :], (1, WIDTH))


@triton.jit
def passed(a, b, x, STOPS: tl.constexpr = ANYWHERE):
    """x after a step: if it STOPS, nothing of it passes where b is 0, not even NaN.

    Fused here, and nowhere by the compiler, whose choice would change bits.
    """
    fused = tl.fma(b, x, a)
    return tl.where(b == 0, a, fused) if STOPS else fused


@triton.jit
def compose(a_first, b_first, a_then, b_then, STOPS: tl.constexpr = ANYWHERE):
    """What two steps do to a carry."""
    both = b_then * b_first
    return passed(a_then, b_then, a_first, STOPS), tl.where(b_then == 0, 0.0, both) if STOPS == ANYWHERE else both


@triton.jit
def _up(a, b, REVERSE: tl.constexpr, STOPS: tl.constexpr):
    """The two halves' (a, b), and what both do."""
    left_a, right_a = tl.split(a)
    left_b, right_b = tl.split(b)
    if REVERSE:
        both_a, both_b = compose(right_a, right_b, left_a, left_b, STOPS)
    else:
        both_a, both_b = compose(left_a, left_b, right_a, right_b, STOPS)
    return left_a, left_b, right_a, right_b, both_a, both_b


@triton.jit
def _down(entering, left_a, left_b, right_a, right_b, REVERSE: tl.constexpr, STOPS: tl.constexpr):
    """x that enters each half, given what enters both."""
    if REVERSE:
        return tl.join(passed(right_a, right_b, entering, STOPS), entering)
    else:
        return tl.join(entering, passed(left_a, left_b, entering, STOPS))


@triton.jit
def runs_of(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] as runs of three levels of halves."""
    return tl.reshape(x, (ROWS, WIDTH // RUN, 2, 2, 2))


@triton.jit
def _composed_anywhere(a_first, b_first, before_a_first, before_b_first, a_then, b_then, before_a_then, before_b_then):
    """`compose`, and what all but the last step do."""
    before_a, before_b = compose(a_first, b_first, before_a_then, before_b_then)
    a, b = compose(a_first, b_first, a_then, b_then)
    return a, b, before_a, before_b


@triton.jit
def _composed_at_zeros(a_first, b_first, before_a_first, before_b_first, a_then, b_then, before_a_then, before_b_then):
    before_a, before_b = compose(a_first, b_first, before_a_then, before_b_then, AT_ZEROS)
    a, b = compose(a_first, b_first, a_then, b_then, AT_ZEROS)
    return a, b, before_a, before_b


@triton.jit
def _composed_nowhere(a_first, b_first, before_a_first, before_b_first, a_then, b_then, before_a_then, before_b_then):
    before_a, before_b = compose(a_first, b_first, before_a_then, before_b_then, NOWHERE)
    a, b = compose(a_first, b_first, a_then, b_then, NOWHERE)
    return a, b, before_a, before_b


@triton.jit
def up_runs(a, b, REVERSE: tl.constexpr, STOPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Three levels of halves, and [ROWS, runs] what a run and those before it in the tile do to a carry, then what those before it do."""
    first = _up(runs_of(a, ROWS, WIDTH), runs_of(b, ROWS, WIDTH), REVERSE, STOPS)
    second = _up(first[4], first[5], REVERSE, STOPS)
    third = _up(second[4], second[5], REVERSE, STOPS)
    run_a, run_b = third[4], third[5]
    before_a, before_b = tl.zeros_like(run_a), tl.zeros_like(run_b) + 1
    if WIDTH > RUN:
        steps = run_a, run_b, before_a, before_b
        if STOPS == ANYWHERE:
            run_a, run_b, before_a, before_b = tl.associative_scan(steps, 1, _composed_anywhere)
        elif STOPS == AT_ZEROS:
            run_a, run_b, before_a, before_b = tl.associative_scan(steps, 1, _composed_at_zeros)
        else:
            run_a, run_b, before_a, before_b = tl.associative_scan(steps, 1, _composed_nowhere)
    return first, second, third, run_a, run_b, before_a, before_b


@triton.jit
def down_runs(entering, first, second, third, a, b, REVERSE: tl.constexpr, STOPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(x, x that precedes) of each token, given the x that enters each run."""
    entering = _down(entering, third[0], third[1], third[2], third[3], REVERSE, STOPS)
    entering = _down(entering, second[0], second[1], second[2], second[3], REVERSE, STOPS)
    entering = _down(entering, first[0], first[1], first[2], first[3], REVERSE, STOPS)
    preceding = tl.reshape(entering, (ROWS, WIDTH))
    return passed(a, b, preceding, STOPS), preceding


@triton.jit
def _smallest_and_before(first, before_first, then, before_then):
    return tl.minimum(first, then), tl.minimum(first, before_then)


@triton.jit
def _largest_and_before(first, before_first, then, before_then):
    return tl.maximum(first, then), tl.maximum(first, before_then)


@triton.jit
def nearest_beyond(run, none, REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, runs]: the smallest of the places `run` among the runs before each in scan order, if REVERSE, else the largest; or `none`."""
    beyond = tl.zeros_like(run) + none
    if WIDTH > RUN:
        if REVERSE:
            _, beyond = tl.associative_scan((run, beyond), 1, _smallest_and_before)
        else:
            _, beyond = tl.associative_scan((run, beyond), 1, _largest_and_before)
    return beyond
