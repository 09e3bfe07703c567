"""How a carry gets from tile to tile of a long segment. Part of the Triton backend's kernel.

Each tile has a slot of CARRY_WORDS words, each UNSET until its value is there: what the tile and those before it in its group of GROUP tiles
do to a carry, (a, b), and, from the last of a group, the carry that leaves it. So the tiles of a group form one chain, all groups' chains
run side by side, and the groups form one more. Programs start in the order of the chains: the one that is waited for has always started.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tile import carried, compose

UNSET = tl.constexpr(-1)  # as bits: a NaN that no published value has
CARRY_WORDS = tl.constexpr(3)


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
def entering_carry(
    a,
    b,
    carries,
    slot,
    tile,
    tiles,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    RUNS: tl.constexpr,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
):
    """The x that enters a tile whose runs, scanned, do (a, b) to a carry; passes on what leaves it.

    The sums are always taken in the same order: tile by tile within a group, then group by group.
    """
    within = tile % GROUP
    lanes = tl.arange(0, RUNS)[None, :]
    if REVERSE:
        leaving_lane = lanes == 0
        before, group_before = slot + 1, slot + GROUP - within
        enters_segment, leaves_segment = tile == tiles - 1, tile == 0
        enters_group, leaves_group = within == GROUP - 1, within == 0
    else:
        leaving_lane = lanes == RUNS - 1
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
    group_a, group_b = compose(entering, decay, a, b)
    # Also where b is inf or NaN: else the tiles that follow would wait for a group that does not exist.
    group_b = tl.where(decay == 0, tl.cast(0, DTYPE), group_b)
    passes = leaving_lane & (b != 0)
    _publish(carries + slot * WORDS, group_a, passes, DTYPE, WORD)
    _publish(carries + slot * WORDS + 1, group_b, passes, DTYPE, WORD)
    if decay != 0:
        entering += decay * _await(carries + group_before * WORDS + 2, DTYPE)
    _publish(carries + slot * WORDS + 2, a + carried(b, entering), leaving_lane & leaves_group, DTYPE, WORD)
    return entering
