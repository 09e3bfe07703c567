"""How a carry gets from tile to tile of a long segment. Part of the Triton backend's kernel.

What a tile does to a carry, (a, b), is published as soon as the tile is read; whoever needs it looks at GROUP tiles at once and composes them
in an order that their places fix. The last tile of a group, in scan order, speaks for it: it publishes what the group does, looks at the GROUP
groups of its block, and publishes the carry that leaves the group, for which the tiles of the next one wait. So tiles wait for three looks, and
for one more per block that lies before theirs. Words are UNSET until a value is there. Programs start in scan order: the one that is waited
for has always started.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .triton_launch import Launcher, await_previous
from .triton_tile import compose, passed

INTERPRETED = tl.constexpr(tiles.INTERPRETED)
UNSET = tl.constexpr(-1)  # as bits: a NaN that no published value has
CARRY_WORDS = tl.constexpr(5)  # of a slot: a and b of the tile, of the group, and the carry that leaves the group; `stride` words apart
WORDS = 1024  # that a program clears


def clear(carries: Tensor) -> None:
    """Set all words to UNSET."""
    words = carries.numel()
    if words:
        _clearer()(triton.cdiv(words, WORDS), carries, words)


@lru_cache(maxsize=1)
def _clearer() -> Launcher:
    return Launcher(_clear, {"WORDS": WORDS}, num_warps=4)


@triton.jit(do_not_specialize=["words"])
def _clear(carries, words, WORDS: tl.constexpr):
    await_previous()
    clear_words(carries, tl.program_id(0), words, WORDS)


@triton.jit
def clear_words(carries, program, words, WORDS: tl.constexpr):
    """One program's WORDS of them."""
    word = program.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    tl.store(carries + word, tl.full([WORDS], UNSET, carries.dtype.element_ty), mask=word < words)


@triton.jit
def _publish(pointer, value, where, DTYPE: tl.constexpr, WORD: tl.constexpr):
    """Make the one lane of `value` that `where` selects visible to other programs."""
    word = tl.where(value == value, value, tl.cast(float("nan"), DTYPE)).to(WORD, bitcast=True)
    if INTERPRETED:
        tl.store(pointer + tl.zeros_like(where).to(tl.int32), word, mask=where)
    else:
        # A `tl.store` asks for a layout of its own, for which the compiler would scan everything once more.
        BITS: tl.constexpr = WORD.primitive_bitwidth
        tl.inline_asm_elementwise(
            f"{{ .reg .pred sets; setp.ne.s32 sets, $3, 0; @sets st.global.b{BITS} [$1], $2; mov.u32 $0, 0; }}",
            "=r,l,r,r" if BITS == 32 else "=r,l,l,r",
            [pointer.to(tl.uint64), word, where.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _of_channel(chain, channel: tl.constexpr, CHANNELS: tl.constexpr):
    """(the tile's slot in that channel's words, tile, tiles of the segment, stride of the words), of (slot, tile, tiles, slots in all)."""
    slot, tile, tiles, slots = chain
    return slot + channel * slots, tile, tiles, slots * CHANNELS


@triton.jit
def _look(pointers, stride, needed):
    """The words (a, b) there, whether set or not; 0 where none is needed."""
    return tl.load(pointers, mask=needed, other=0, volatile=True), tl.load(pointers + stride, mask=needed, other=0, volatile=True)


@triton.jit
def _group_lanes(place, count, REVERSE: tl.constexpr, GROUP: tl.constexpr):
    """(the GROUP places around `place` in scan order, which of them come before it and are fewer than `count`)."""
    lanes = tl.arange(0, GROUP)
    others = place - place % GROUP + (GROUP - 1 - lanes if REVERSE else lanes)
    needed = (others > place) & (others < count) if REVERSE else others < place
    return others, needed


@triton.jit
def _composed(pointers, stride, needed, words_a, words_b, DTYPE: tl.constexpr):
    """What the needed lanes do to a carry, in their order, once all of them are published."""
    while tl.max(((words_a == UNSET) | (words_b == UNSET)).to(tl.int32)) != 0:
        words_a, words_b = _look(pointers, stride, needed)
    b = tl.where(needed, words_b.to(DTYPE, bitcast=True), tl.cast(1, DTYPE))
    a, b = tl.associative_scan((words_a.to(DTYPE, bitcast=True), b), 0, compose)
    last = tl.arange(0, needed.shape[0]) == needed.shape[0] - 1
    return tl.sum(tl.where(last, a, 0.0)), tl.sum(tl.where(last, b, 0.0))


@triton.jit
def _of_group(early, carries, stride, slot, tile, tiles, REVERSE: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """What the tiles of its group that come before this one do to a carry."""
    others, needed = _group_lanes(tile, tiles, REVERSE, GROUP)
    return _composed(carries + (slot - tile + others), stride, needed, early[2], early[3], DTYPE)


@triton.jit
def _awaited(pointer, DTYPE: tl.constexpr):
    """The x there, once it is published."""
    word = tl.load(pointer, volatile=True)
    while word == UNSET:
        word = tl.load(pointer, volatile=True)
    return word.to(DTYPE, bitcast=True)


@triton.jit
def _into_group(carries, stride, slot, tile, tiles, REVERSE: tl.constexpr, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """The x that enters this tile's group: who speaks for it composes what all groups before it do, the others take what left the last one."""
    group, groups = tile // GROUP, tl.cdiv(tiles, GROUP)
    speaks = slot - tile + (0 if REVERSE else GROUP - 1)  # for the first group: the slot of its last tile in scan order
    x = tl.cast(0, DTYPE)
    if _speaks(tile, REVERSE, GROUP):
        others, needed = _group_lanes(group, groups, REVERSE, GROUP)
        pointers = carries + 2 * stride + (speaks + others * GROUP)
        words_a, words_b = _look(pointers, stride, needed)
        x, decay = _composed(pointers, stride, needed, words_a, words_b, DTYPE)
        block, blocks = group // GROUP, tl.cdiv(groups, GROUP)
        if (decay != 0) & ((block < blocks - 1) if REVERSE else (block > 0)):
            other = speaks + ((block + 1) * GROUP if REVERSE else block * GROUP - 1) * GROUP
            x = passed(x, decay, _awaited(carries + 4 * stride + other, DTYPE))
    elif (group < groups - 1) if REVERSE else (group > 0):
        x = _awaited(carries + 4 * stride + speaks + (group + 1 if REVERSE else group - 1) * GROUP, DTYPE)
    return x


@triton.jit
def _speaks(tile, REVERSE: tl.constexpr, GROUP: tl.constexpr):
    """Whether it is its group's last tile in scan order."""
    return tile % GROUP == (0 if REVERSE else GROUP - 1)


@triton.jit
def look_early(carries, chain, channel: tl.constexpr, CHANNELS: tl.constexpr, REVERSE: tl.constexpr, GROUP: tl.constexpr):
    """What the tile before this one, and those of its group, have published by now: read along with the tokens, it is mostly in time."""
    slot, tile, tiles, stride = _of_channel(chain, channel, CHANNELS)
    exists = tile < tiles - 1 if REVERSE else tile > 0
    others, needed = _group_lanes(tile, tiles, REVERSE, GROUP)
    a, b = _look(carries + (slot + 1 if REVERSE else slot - 1), stride, exists)
    group_a, group_b = _look(carries + (slot - tile + others), stride, needed)
    return a, b, group_a, group_b


@triton.jit
def entering_carry(
    a,
    b,
    early,
    carries,
    chain,
    channel: tl.constexpr,
    CHANNELS: tl.constexpr,
    REVERSE: tl.constexpr,
    GROUP: tl.constexpr,
    RUNS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORD: tl.constexpr,
):
    """The x that enters a tile whose runs, scanned, do (a, b) to a carry; passes on what leaves it."""
    slot, tile, tiles, stride = _of_channel(chain, channel, CHANNELS)
    leaving = (tl.arange(0, RUNS)[None, :] == RUNS - 1) & ((tile > 0) if REVERSE else (tile < tiles - 1))
    own = carries + slot
    _publish(own, a, leaving, DTYPE, WORD)
    _publish(own + stride, b, leaving, DTYPE, WORD)
    exists = tile < tiles - 1 if REVERSE else tile > 0
    word_a, word_b = early[0], early[1]
    while (word_a == UNSET) | (word_b == UNSET):
        word_a, word_b = _look(carries + (slot + 1 if REVERSE else slot - 1), stride, exists)
    # Most tiles let nothing pass: then the one before tells all.
    entering, decay = word_a.to(DTYPE, bitcast=True), word_b.to(DTYPE, bitcast=True)
    group_decay = decay
    if decay != 0:
        entering, group_decay = _of_group(early, carries, stride, slot, tile, tiles, REVERSE, GROUP, DTYPE)
    group_a, group_b = compose(entering, group_decay, a, b)
    leaves_group = leaving & _speaks(tile, REVERSE, GROUP)
    _publish(own + 2 * stride, group_a, leaves_group, DTYPE, WORD)
    _publish(own + 3 * stride, group_b, leaves_group, DTYPE, WORD)
    if group_decay != 0:
        entering = passed(entering, group_decay, _into_group(carries, stride, slot, tile, tiles, REVERSE, GROUP, DTYPE))
    _publish(own + 4 * stride, passed(a, b, entering), leaves_group, DTYPE, WORD)
    return entering
