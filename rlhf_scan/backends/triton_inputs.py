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
def inputs_of(inputs, origin, tail, next, keeps, ends, HOW: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(the inputs at each step, the FOLLOWING ones at the next step, or what stands in for them at an end)."""
    here = ()
    beside = ()
    for i in tl.static_range(len(inputs)):
        run, run_beside = load_runs(inputs[i], origin, tail, HOW.BESIDE[i] and HOW.MASKED != SKIP, ALIGNED, HOW.REVERSE, ROWS, WIDTH)
        if HOW.MASKED == ZERO:
            run, run_beside = tl.where(keeps[0], run, 0), tl.where(keeps[1], run_beside, 0)
        here, beside = here + (run.to(HOW.DTYPE),), beside + (run_beside.to(HOW.DTYPE),)
    ended, terminated, end = ends
    if HOW.CONTINUATION >= 0:
        end = tl.where(terminated, tl.cast(0, HOW.DTYPE), here[HOW.CONTINUATION])
    following = ()
    for i in tl.static_range(len(HOW.FOLLOWING)):
        found = beside[HOW.FOLLOWING[i]]
        if HOW.MASKED == SKIP:
            found = load_anywhere(inputs[HOW.FOLLOWING[i]], *next, ROWS, WIDTH).to(HOW.DTYPE)
        following = following + (tl.where(ended, end, found),)
    if HOW.CONTINUATION >= 0:
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
    HOW: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The rates of a channel at each step; those that HOW.RATE_FOLLOWS at the next one."""
    pointers, numbers = rates
    found = ()
    for rate in tl.static_range(channel * len(HOW.RATE_FOLLOWS), (channel + 1) * len(HOW.RATE_FOLLOWS)):
        if HOW.RATE_KINDS[rate] == 0:
            found = found + (tl.cast(numbers[rate], HOW.DTYPE),)
        elif HOW.RATE_KINDS[rate] == 1:
            found = found + (tl.load(pointers[rate] + segment).to(HOW.DTYPE),)
        elif HOW.RATE_FOLLOWS[rate % len(HOW.RATE_FOLLOWS)] and HOW.MASKED == SKIP:
            found = found + (load_anywhere(pointers[rate], *next, ROWS, WIDTH).to(HOW.DTYPE),)
        else:
            here, beside = load_runs(
                pointers[rate], origin, tail, HOW.RATE_FOLLOWS[rate % len(HOW.RATE_FOLLOWS)], ALIGNED, HOW.REVERSE, ROWS, WIDTH
            )
            found = found + ((beside if HOW.RATE_FOLLOWS[rate % len(HOW.RATE_FOLLOWS)] else here).to(HOW.DTYPE),)
    return found
