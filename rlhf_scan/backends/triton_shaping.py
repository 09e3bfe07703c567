"""Reward shaping for the Triton backend: one launch that finds where sequences end, one that shapes rewards.

A program holds a part of one sequence and goes through it block by block. What it finds there it stores, and parts are put together in order: no
atomics, the same bits on each run.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reward_formulas, shaping
from ..reward_formulas import KL_ESTIMATORS
from ..shaping import Located, Placed, Shaped, ShapingCall
from .formulas import compiled_formula
from .tiles import INTERPRETED
from .triton_launch import on_device_of

BLOCK = 16 if INTERPRETED else 1024
# So many programs keep a large GPU busy; a sequence is cut into no more parts than that takes.
_PROGRAMS = 4 if INTERPRETED else 4096
_WARPS = 4

NO_FAULT = tl.constexpr(shaping.NO_FAULT)
FAULTS = tl.constexpr(len(shaping.FAULTS))


def locate(call: ShapingCall) -> Located:
    """Where each sequence ends."""
    parts = _parts(call)
    table = torch.empty(4, call.segments, parts, dtype=torch.int64, device=call.values.device)
    with on_device_of(call.values):
        _locate[(call.segments * parts,)](
            *(_flag(flag) for flag in (call.mask, call.attention, call.has_eos)),
            call.cu_seqlens,
            table,
            call.length or 0,
            call.segments,
            call.tokens,
            parts,
            PADDED=call.padded,
            BLOCK=BLOCK,
            num_warps=_WARPS,
        )
    last, real = table[0].amax(1), table[1].amax(1)
    end = torch.where(last < 0, -1, torch.maximum(last, real))
    return Located(last, end, table[2].sum(1), table[3].sum(1))


def shape(call: ShapingCall, placed: Placed) -> Shaped:
    """Rewards and KL of each token."""
    parts, device = _parts(call), call.values.device
    rewards, kl = (torch.empty(call.tokens, dtype=call.dtype, device=device) for _ in range(2))
    counts = torch.empty(2, call.segments, parts, dtype=torch.int64, device=device)
    kl_sums = torch.empty(call.segments, parts, dtype=call.dtype, device=device)
    with on_device_of(call.values):
        _shape[(call.segments * parts,)](
            (call.logprobs, call.ref_logprobs, call.values, call.rewards),
            _flag(call.mask),
            call.cu_seqlens,
            (placed.score, call.kl_coef),
            (placed.place, placed.slot, placed.end),
            rewards,
            kl,
            counts,
            kl_sums,
            call.length or 0,
            call.segments,
            call.tokens,
            parts,
            ESTIMATOR=_jit(call.kl),
            LOG_RATIO_LIMIT=call.log_ratio_limit,
            KL_LIMIT=call.kl_limit,
            IGNORES_MASK=call.ignores_mask,
            KL_EVERYWHERE=call.kl_everywhere,
            ZERO_FAULTS=call.zero_faults,
            DTYPE=tl.float64 if call.dtype == torch.float64 else tl.float32,
            BLOCK=BLOCK,
            num_warps=_WARPS,
        )
    return Shaped(rewards, kl, counts[0].amin(1), counts[1].sum(1), kl_sums.sum(1))


def counted(call: ShapingCall, left_out: Tensor) -> Tensor:
    """Trainable tokens of the sequences that are left in."""
    result, parts = torch.empty(call.tokens, dtype=torch.bool, device=call.values.device), _parts(call)
    with on_device_of(call.values):
        _counted[(call.segments * parts,)](
            _flag(call.mask),
            _flag(left_out),
            call.cu_seqlens,
            _flag(result),
            call.length or 0,
            call.tokens,
            parts,
            BLOCK=BLOCK,
            num_warps=_WARPS,
        )
    return result


def _parts(call: ShapingCall) -> int:
    """Into how many parts each sequence is cut."""
    segments = max(call.segments, 1)
    return max(1, min(triton.cdiv(_PROGRAMS, segments), triton.cdiv(call.tokens, segments * BLOCK)))


def _flag(flag: Tensor | None) -> Tensor | None:
    return flag.view(torch.uint8) if flag is not None and flag.dtype == torch.bool else flag


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


_OWN = {"exp": _exp, "minimum": _minimum, "maximum": _maximum, "tl": tl}


@cache
def _jit(kl: str):
    """The estimator as a Triton function, the same object every time."""
    return compiled_formula(KL_ESTIMATORS[kl], _OWN, triton.jit, tl.constexpr)


_clamped = compiled_formula(reward_formulas.clamped, _OWN, triton.jit, tl.constexpr)
_shaped_reward = compiled_formula(reward_formulas.shaped_reward, _OWN, triton.jit, tl.constexpr)


@triton.jit
def _part_of(cu_seqlens, length, tokens, parts, BLOCK: tl.constexpr):
    """The program's sequence, that one's first token, and the first token and the end of the part, which is whole blocks long."""
    program = tl.program_id(0).to(tl.int64)
    sequence = program // parts
    if cu_seqlens is None:
        start = sequence * length
        stop = start + length
    else:
        start = tl.maximum(tl.load(cu_seqlens + sequence), 0)
        stop = tl.maximum(tl.minimum(tl.load(cu_seqlens + sequence + 1), tokens), start)
    size = tl.cdiv(tl.cdiv(stop - start, parts), BLOCK) * BLOCK
    first = start + program % parts * size
    return sequence, start, first, tl.minimum(first + size, stop)


@triton.jit
def _is_set(flag, token, there):
    return there & (tl.load(flag + token, mask=there, other=0) != 0)


@triton.jit(do_not_specialize=["length", "segments", "tokens", "parts"])
def _locate(mask, attention, has_eos, cu_seqlens, table, length, segments, tokens, parts, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """Of each part: its last trainable token, its last that is no padding, how many trainable ones, how many of these end a sequence."""
    _, _, first, end = _part_of(cu_seqlens, length, tokens, parts, BLOCK)
    lanes = tl.arange(0, BLOCK)
    last = tl.full([BLOCK], -1, tl.int64)
    real = tl.full([BLOCK], -1, tl.int64)
    trainable = tl.zeros([BLOCK], tl.int64)
    eos = tl.zeros([BLOCK], tl.int64)
    for begin in tl.range(first, end, BLOCK):
        token = begin + lanes
        there = token < end
        live = there
        if mask is not None:
            live = _is_set(mask, token, there)
        last = tl.where(live, token, last)
        trainable += live.to(tl.int64)
        if has_eos is not None:
            eos += _is_set(has_eos, token, live).to(tl.int64)
        if attention is not None:
            real = tl.where(_is_set(attention, token, there), token, real)
        elif not PADDED:
            real = tl.where(there, token, real)
    entry = table + tl.program_id(0).to(tl.int64)
    size = segments.to(tl.int64) * parts
    tl.store(entry, tl.max(last))
    tl.store(entry + size, tl.max(real))
    tl.store(entry + 2 * size, tl.sum(trainable))
    tl.store(entry + 3 * size, tl.sum(eos))


@triton.jit
def _is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _with_fault(fault, bad, offset, WHICH: tl.constexpr):
    return tl.where(bad, tl.minimum(fault, offset * FAULTS + WHICH), fault)


@triton.jit(do_not_specialize=["length", "segments", "tokens", "parts"])
def _shape(
    inputs,
    mask,
    cu_seqlens,
    per_sequence,
    places,
    rewards,
    kls,
    counts,
    kl_sums,
    length,
    segments,
    tokens,
    parts,
    ESTIMATOR: tl.constexpr,
    LOG_RATIO_LIMIT: tl.constexpr,
    KL_LIMIT: tl.constexpr,
    IGNORES_MASK: tl.constexpr,
    KL_EVERYWHERE: tl.constexpr,
    ZERO_FAULTS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Shaped rewards and KL, and of each part the first number that is not finite, how many a limit cut, the sum of KL."""
    sequence, start, first, finish = _part_of(cu_seqlens, length, tokens, parts, BLOCK)
    score = tl.load(per_sequence[0] + sequence)
    kl_coef = tl.load(per_sequence[1] + sequence)
    place = tl.load(places[0] + sequence)
    slot = tl.load(places[1] + sequence)
    last = tl.load(places[2] + sequence)
    log_ratio_limit = tl.full([], LOG_RATIO_LIMIT, DTYPE)
    kl_limit = tl.full([], KL_LIMIT, DTYPE)
    lanes = tl.arange(0, BLOCK)
    fault = tl.full([BLOCK], NO_FAULT, tl.int64)
    cut = tl.zeros([BLOCK], tl.int64)
    total = tl.zeros([BLOCK], DTYPE)
    for begin in tl.range(first, finish, BLOCK):
        token = begin + lanes
        there = token < finish
        live = there
        if mask is not None:
            live = _is_set(mask, token, there)
        steps = live
        if IGNORES_MASK:
            steps = live | (there & (token <= last))
        read = steps | (there & (token == slot))
        offset = token - start
        value = tl.load(inputs[2] + token, mask=read, other=0).to(DTYPE)
        fault = _with_fault(fault, _is_finite(value) == 0, offset, 3)
        kl = tl.zeros([BLOCK], DTYPE)
        if inputs[0] is not None:
            on = steps if KL_EVERYWHERE else live
            logprob = tl.load(inputs[0] + token, mask=on, other=0).to(DTYPE)
            ref_logprob = tl.load(inputs[1] + token, mask=on, other=0).to(DTYPE)
            log_ratio = logprob - ref_logprob
            raw = ESTIMATOR(_clamped(log_ratio, log_ratio_limit))
            kl = _clamped(raw, kl_limit)
            cut += ((tl.abs(log_ratio) > log_ratio_limit) | (tl.abs(raw) > kl_limit)).to(tl.int64)
            fault = _with_fault(fault, _is_finite(kl) == 0, offset, 2)
            fault = _with_fault(fault, _is_finite(ref_logprob) == 0, offset, 1)
            fault = _with_fault(fault, _is_finite(logprob) == 0, offset, 0)
            if ZERO_FAULTS:
                kl = tl.where(_is_finite(kl) & _is_finite(logprob) & _is_finite(ref_logprob), kl, 0.0)
        reward = tl.zeros([BLOCK], DTYPE)
        if inputs[3] is not None:
            reward = tl.load(inputs[3] + token, mask=steps, other=0).to(DTYPE)
            fault = _with_fault(fault, _is_finite(reward) == 0, offset, 4)
            if ZERO_FAULTS:
                reward = tl.where(_is_finite(reward), reward, 0.0)
        shaped = _shaped_reward(reward, tl.where(token == place, score, 0.0), kl, kl_coef)
        kl = tl.where(live, kl, 0.0)
        total += kl
        tl.store(rewards + token, tl.where(read, shaped, 0.0), mask=there)
        tl.store(kls + token, kl, mask=there)
    program = tl.program_id(0).to(tl.int64)
    tl.store(counts + program, tl.min(fault))
    tl.store(counts + segments.to(tl.int64) * parts + program, tl.sum(cut))
    tl.store(kl_sums + program, tl.sum(total))


@triton.jit(do_not_specialize=["length", "tokens", "parts"])
def _counted(mask, left_out, cu_seqlens, result, length, tokens, parts, BLOCK: tl.constexpr):
    """1 at trainable tokens of sequences that are left in."""
    sequence, _, first, end = _part_of(cu_seqlens, length, tokens, parts, BLOCK)
    kept = tl.load(left_out + sequence) == 0
    for begin in tl.range(first, end, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        there = token < end
        live = there if mask is None else _is_set(mask, token, there)
        tl.store(result + token, (live & kept).to(tl.uint8), mask=there)
