"""What an estimator's formulas read at the steps of a tile. Part of the Triton backend's kernel.

`keeps`, `ends` and `nearest` are what `surroundings` found.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .triton_runs import load_runs
from .triton_skip import beside_event
from .triton_steps import SKIP, ZERO


@triton.jit
def _with_beside(
    pointer, origin, tail, nearest, BESIDE: tl.constexpr, HOW: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """(the tokens of a tile, what precedes each in scan order: only if BESIDE)."""
    if BESIDE and HOW.MASKED == SKIP:
        return beside_event(pointer, origin, tail, nearest, ALIGNED, HOW.REVERSE, ROWS, WIDTH)
    else:
        return load_runs(pointer, origin, tail, BESIDE, ALIGNED, HOW.REVERSE, ROWS, WIDTH)


@triton.jit
def inputs_of(
    inputs, origin, tail, nearest, keeps, ends, HOW: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """(the inputs at each step, the FOLLOWING ones at the next step, or what stands in for them at an end)."""
    here = ()
    beside = ()
    for i in tl.static_range(len(inputs)):
        run, run_beside = _with_beside(inputs[i], origin, tail, nearest, HOW.BESIDE[i], HOW, ALIGNED, ROWS, WIDTH)
        if HOW.MASKED == ZERO:
            run, run_beside = tl.where(keeps[0], run, 0), tl.where(keeps[1], run_beside, 0)
        here, beside = here + (run.to(HOW.DTYPE),), beside + (run_beside.to(HOW.DTYPE),)
    ended, terminated, end = ends
    if HOW.CONTINUATION >= 0:
        end = tl.where(terminated, tl.cast(0, HOW.DTYPE), here[HOW.CONTINUATION])
    following = ()
    for i in tl.static_range(len(HOW.FOLLOWING)):
        following = following + (tl.where(ended, end, beside[HOW.FOLLOWING[i]]),)
    if HOW.CONTINUATION >= 0:
        following = following + (end,)
    return here, following


@triton.jit
def rates_of(
    rates,
    segment,
    origin,
    tail,
    nearest,
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
        else:
            here, beside = _with_beside(
                pointers[rate], origin, tail, nearest, HOW.RATE_FOLLOWS[rate % len(HOW.RATE_FOLLOWS)], HOW, ALIGNED, ROWS, WIDTH
            )
            found = found + ((beside if HOW.RATE_FOLLOWS[rate % len(HOW.RATE_FOLLOWS)] else here).to(HOW.DTYPE),)
    return found
