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
def passed(a, b, x, STOPS: tl.constexpr = True):
    """x after a step: if it STOPS, nothing of it passes where b is 0, not even NaN.

    Fused here, and nowhere by the compiler, whose choice would change bits.
    """
    fused = tl.fma(b, x, a)
    return tl.where(b == 0, a, fused) if STOPS else fused


@triton.jit
def compose(a_first, b_first, a_then, b_then, STOPS: tl.constexpr = True):
    """What two steps do to a carry."""
    both = b_then * b_first
    return passed(a_then, b_then, a_first, STOPS), tl.where(b_then == 0, 0.0, both) if STOPS else both


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
def _compose_and_before(a_first, b_first, before_a_first, before_b_first, a_then, b_then, before_a_then, before_b_then):
    """`compose`, and what all but the last step do."""
    before_a, before_b = compose(a_first, b_first, before_a_then, before_b_then)
    a, b = compose(a_first, b_first, a_then, b_then)
    return a, b, before_a, before_b


@triton.jit
def _fused_and_before(a_first, b_first, before_a_first, before_b_first, a_then, b_then, before_a_then, before_b_then):
    """The same where nothing stops."""
    before_a, before_b = compose(a_first, b_first, before_a_then, before_b_then, False)
    a, b = compose(a_first, b_first, a_then, b_then, False)
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
        if STOPS:
            run_a, run_b, before_a, before_b = tl.associative_scan((run_a, run_b, before_a, before_b), 1, _compose_and_before)
        else:
            run_a, run_b, before_a, before_b = tl.associative_scan((run_a, run_b, before_a, before_b), 1, _fused_and_before)
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
def _nearer(left, right, REVERSE: tl.constexpr):
    return tl.minimum(left, right) if REVERSE else tl.maximum(left, right)


@triton.jit
def nearest(places, none, REVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The first of `places` from each lane on against the order of the scan: the smallest at or after it if REVERSE, else the largest."""
    first_left, first_right = tl.split(runs_of(places, ROWS, WIDTH))
    second_left, second_right = tl.split(_nearer(first_left, first_right, REVERSE))
    third_left, third_right = tl.split(_nearer(second_left, second_right, REVERSE))
    run = _nearer(third_left, third_right, REVERSE)
    beyond = tl.zeros_like(run) + none
    if WIDTH > RUN:
        if REVERSE:
            _, beyond = tl.associative_scan((run, beyond), 1, _smallest_and_before)
        else:
            _, beyond = tl.associative_scan((run, beyond), 1, _largest_and_before)
    if REVERSE:
        beyond = tl.join(tl.minimum(third_right, beyond), beyond)
        beyond = tl.join(tl.minimum(second_right, beyond), beyond)
        beyond = tl.join(tl.minimum(first_right, beyond), beyond)
    else:
        beyond = tl.join(beyond, tl.maximum(third_left, beyond))
        beyond = tl.join(beyond, tl.maximum(second_left, beyond))
        beyond = tl.join(beyond, tl.maximum(first_left, beyond))
    return _nearer(places, tl.reshape(beyond, (ROWS, WIDTH)), REVERSE)
