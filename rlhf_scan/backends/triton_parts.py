"""How the Triton backend cuts sequences into parts, of one program each, and merges what these find.

A program goes through its part block by block. What it finds it stores, and parts are put together in order: no atomics, the same bits on each
run.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import shaping
from ..shaping import ShapingCall
from .tiles import INTERPRETED
from .triton_launch import Launcher, await_previous

BLOCK = 16 if INTERPRETED else 1024
WARPS = 4
# So many programs keep a large GPU busy; a sequence is cut into no more parts than that takes.
_PROGRAMS = 4 if INTERPRETED else 4096
# Entries of a program that merges: sequences by parts of them that are looked at together.
_ENTRIES = 16 if INTERPRETED else 128
_WIDTHS = (1, 4, 16) if INTERPRETED else (1, 32, 1024)

NO_FAULT = tl.constexpr(shaping.NO_FAULT)


def parts_of(call: ShapingCall) -> int:
    """Into how many parts each sequence is cut."""
    segments = max(call.segments, 1)
    return max(1, min(-(-_PROGRAMS // segments), -(-call.tokens // (segments * BLOCK))))


def at_a_time(parts: int) -> tuple[int, int]:
    """How many sequences a program that merges takes, and how many parts it looks at together: few numbers, since each is another kernel."""
    width = next((width for width in _WIDTHS if parts <= width), _WIDTHS[-1])
    return max(1, _ENTRIES // width), width


def flag(tensor: Tensor | None) -> Tensor | None:
    """Booleans as the bytes that they are."""
    return tensor.view(torch.uint8) if tensor is not None and tensor.dtype == torch.bool else tensor


def merged(counts: Tensor, kl_sums: Tensor, fault: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fault, clamped and kl_sum of `Shaped`, from those of parts, [2, S, parts] and [S, parts], and the faults that are known."""
    segments, parts = kl_sums.shape
    found, clamped = (torch.empty_like(fault) for _ in range(2))
    kl_sum = torch.empty(segments, dtype=kl_sums.dtype, device=kl_sums.device)
    rows, width = at_a_time(parts)
    _merger(rows, width)(-(-segments // rows), counts, kl_sums, fault, found, clamped, kl_sum, segments, parts)
    return found, clamped, kl_sum


@lru_cache(maxsize=8)
def _merger(rows: int, width: int) -> Launcher:
    return Launcher(_merge, {"ROWS": rows, "WIDTH": width}, num_warps=WARPS)


@triton.jit
def is_finite(x):
    """Neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def bounds_of(cu_seqlens, sequence, there, length, tokens):
    """The first token of a sequence, and the one after its last. What a pack's boundaries say wrongly stays within its tokens."""
    if cu_seqlens is None:
        start = sequence * length
        stop = start + length
    else:
        start = tl.maximum(tl.load(cu_seqlens + sequence, mask=there), 0)
        stop = tl.maximum(tl.minimum(tl.load(cu_seqlens + sequence + 1, mask=there), tokens), start)
    return start, stop


@triton.jit
def part_of(cu_seqlens, length, tokens, parts, BLOCK: tl.constexpr):
    """The program's sequence, that one's first token, and the first token and the end of the part, which is whole blocks long."""
    program = tl.program_id(0).to(tl.int64)
    sequence = program // parts
    start, stop = bounds_of(cu_seqlens, sequence, None, length, tokens)
    size = tl.cdiv(tl.cdiv(stop - start, parts), BLOCK) * BLOCK
    first = start + program % parts * size
    return sequence, start, first, tl.minimum(first + size, stop)


@triton.jit
def is_set(flag, token, there):
    """Whether the token is there, and flagged."""
    return there & (tl.load(flag + token, mask=there, other=0) != 0)


@triton.jit(do_not_specialize=["segments", "parts"])
def _merge(counts, kl_sums, faults, found, clamped, kl_sum, segments, parts, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """What `merged` returns."""
    await_previous()
    sequence = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = sequence < segments
    fault = tl.load(faults + sequence, mask=there, other=0)
    cut = tl.zeros([ROWS], tl.int64)
    total = tl.zeros([ROWS], kl_sums.dtype.element_ty)
    size = segments.to(tl.int64) * parts
    for first in tl.range(0, parts, WIDTH):
        part = first + tl.arange(0, WIDTH)
        some = there[:, None] & (part < parts)[None, :]
        entry = sequence[:, None] * parts + part[None, :]
        fault = tl.minimum(fault, tl.min(tl.load(counts + entry, mask=some, other=NO_FAULT), 1))
        cut += tl.sum(tl.load(counts + size + entry, mask=some, other=0), 1)
        total += tl.sum(tl.load(kl_sums + entry, mask=some, other=0), 1)
    tl.store(found + sequence, fault, mask=there)
    tl.store(clamped + sequence, cut, mask=there)
    tl.store(kl_sum + sequence, total, mask=there)
