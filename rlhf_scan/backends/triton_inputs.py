"""What an estimator's formulas read at the steps of a tile. Part of the Triton backend's kernel.

`next` is (what precedes each token in scan order, its place in the tensors; whether it is a step of the same episode), `keeps` and `ends` are
what `trainable` and `boundaries` found.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .triton_runs import load_anywhere, load_runs
from .triton_steps import SKIP, ZERO


@triton.jit
def inputs_of(
    inputs,
    origin,
    tail,
    next,
    keeps,
    ends,
    FOLLOWING: tl.constexpr,
    BESIDE: tl.constexpr,
    CONTINUATION: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """(the inputs at each step, the FOLLOWING ones at the next step, or what stands in for them at an end)."""
    here = ()
    beside = ()
    for i in tl.static_range(len(inputs)):
        run, run_beside = load_runs(inputs[i], origin, tail, BESIDE[i] and MASKED != SKIP, ALIGNED, REVERSE, ROWS, WIDTH)
        if MASKED == ZERO:
            run, run_beside = tl.where(keeps[0], run, 0), tl.where(keeps[1], run_beside, 0)
        here, beside = here + (run.to(DTYPE),), beside + (run_beside.to(DTYPE),)
    ended, terminated, end = ends
    if CONTINUATION >= 0:
        end = tl.where(terminated, tl.cast(0, DTYPE), here[CONTINUATION])
    following = ()
    for i in tl.static_range(len(FOLLOWING)):
        found = beside[FOLLOWING[i]]
        if MASKED == SKIP:
            found = load_anywhere(inputs[FOLLOWING[i]], *next, ROWS, WIDTH).to(DTYPE)
        following = following + (tl.where(ended, end, found),)
    if CONTINUATION >= 0:
        following = following + (end,)
    return here, following


@triton.jit
def rates_of(
    rates,
    segment,
    origin,
    tail,
    next,
    channel: tl.constexpr,
    FOLLOWS: tl.constexpr,
    KINDS: tl.constexpr,
    MASKED: tl.constexpr,
    ALIGNED: tl.constexpr,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The rates of a channel at each step; those that FOLLOWS at the next one."""
    pointers, numbers = rates
    found = ()
    for rate in tl.static_range(channel * len(FOLLOWS), (channel + 1) * len(FOLLOWS)):
        if KINDS[rate] == 0:
            found = found + (tl.cast(numbers[rate], DTYPE),)
        elif KINDS[rate] == 1:
            found = found + (tl.load(pointers[rate] + segment).to(DTYPE),)
        elif FOLLOWS[rate % len(FOLLOWS)] and MASKED == SKIP:
            found = found + (load_anywhere(pointers[rate], *next, ROWS, WIDTH).to(DTYPE),)
        else:
            here, beside = load_runs(pointers[rate], origin, tail, FOLLOWS[rate % len(FOLLOWS)], ALIGNED, REVERSE, ROWS, WIDTH)
            found = found + ((beside if FOLLOWS[rate % len(FOLLOWS)] else here).to(DTYPE),)
    return found
