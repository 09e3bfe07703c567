"""Where sequences end, for the Triton backend: one launch that reads the masks, a program for each part of a sequence."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..shaping import ShapingCall
from .triton_launch import Launcher, await_previous
from .triton_parts import BLOCK, WARPS, flag, is_set, part_of, parts_of

_INT32_TOKENS = 2**31 - BLOCK  # a block may reach past the last one


def parts_located(call: ShapingCall, ends: tuple[Tensor | None, Tensor | None]) -> tuple[int, Tensor]:
    """How many parts a sequence has, and what `_locate` finds in each, [5, S, parts]; `ends`: truncated and terminated, where they are per token."""
    parts = parts_of(call)
    table = torch.empty(5, call.segments, parts, dtype=torch.int64, device=call.values.device)
    flags = flag(call.mask), flag(call.attention), flag(call.has_eos), (flag(ends[0]), flag(ends[1]))
    _locator(call.padded, call.tokens >= _INT32_TOKENS)(
        call.segments * parts, *flags, call.cu_seqlens, table, call.length or 0, call.segments, call.tokens, parts
    )
    return parts, table


@cache
def _locator(padded: bool, wide: bool) -> Launcher:
    return Launcher(_locate, {"PADDED": padded, "INDEX": tl.int64 if wide else tl.int32, "BLOCK": BLOCK}, num_warps=WARPS)


@triton.jit(do_not_specialize=["segments", "tokens", "parts"])  # rows of a multiple of 16 are read in whole vectors
def _locate(
    mask,
    attention,
    has_eos,
    ends,
    cu_seqlens,
    table,
    length,
    segments,
    tokens,
    parts,
    PADDED: tl.constexpr,
    INDEX: tl.constexpr,  # of a token
    BLOCK: tl.constexpr,
):
    """Of each part: its last trainable token, its last that is no padding, how many are trainable, are these and end a sequence, are truncated."""
    await_previous()
    _, _, first, end = part_of(cu_seqlens, length, tokens, parts, BLOCK)
    first, end = first.to(INDEX), end.to(INDEX)
    lanes = tl.arange(0, BLOCK)
    last = tl.full([BLOCK], -1, INDEX)
    real = tl.full([BLOCK], -1, INDEX)
    trainable = tl.zeros([BLOCK], tl.int32)
    eos = tl.zeros([BLOCK], tl.int32)
    cuts = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(first, end, BLOCK):
        token = begin + lanes
        there = token < end
        live = there
        if mask is not None:
            live = is_set(mask, token, there)
        last = tl.where(live, token, last)
        trainable += live.to(tl.int32)
        if has_eos is not None:
            eos += is_set(has_eos, token, live).to(tl.int32)
        if ends[0] is not None:
            cut = is_set(ends[0], token, there)
            if ends[1] is not None:
                cut = cut & (is_set(ends[1], token, there) == 0)
            cuts += cut.to(tl.int32)
        if attention is not None:
            real = tl.where(is_set(attention, token, there), token, real)
        elif not PADDED:
            real = tl.where(there, token, real)
    entry = table + tl.program_id(0).to(tl.int64)
    size = segments.to(tl.int64) * parts
    tl.store(entry, tl.max(last).to(tl.int64))
    tl.store(entry + size, tl.max(real).to(tl.int64))
    tl.store(entry + 2 * size, tl.sum(trainable.to(tl.int64)))
    tl.store(entry + 3 * size, tl.sum(eos.to(tl.int64)))
    tl.store(entry + 4 * size, tl.sum(cuts.to(tl.int64)))


@triton.jit
def located(table, sequence, there, segments, parts, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """From what the parts of sequences found to the sequences' `Located`, and how many of their tokens are truncated."""
    last = tl.full([ROWS], -1, tl.int64)
    real = tl.full([ROWS], -1, tl.int64)
    trainable = tl.zeros([ROWS], tl.int64)
    eos = tl.zeros([ROWS], tl.int64)
    cuts = tl.zeros([ROWS], tl.int64)
    size = segments.to(tl.int64) * parts
    for first in tl.range(0, parts, WIDTH):
        part = first + tl.arange(0, WIDTH)
        some = there[:, None] & (part < parts)[None, :]
        entry = table + sequence[:, None] * parts + part[None, :]
        last = tl.maximum(last, tl.max(tl.load(entry, mask=some, other=-1), 1))
        real = tl.maximum(real, tl.max(tl.load(entry + size, mask=some, other=-1), 1))
        trainable += tl.sum(tl.load(entry + 2 * size, mask=some, other=0), 1)
        eos += tl.sum(tl.load(entry + 3 * size, mask=some, other=0), 1)
        cuts += tl.sum(tl.load(entry + 4 * size, mask=some, other=0), 1)
    return last, tl.where(last < 0, -1, tl.maximum(last, real)), trainable, eos, cuts
