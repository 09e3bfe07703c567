"""Reward shaping for the Triton backend: one launch for what there is once per sequence, one that shapes rewards, one that merges its parts."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
import triton.language as tl

from .. import reward_formulas, shaping
from ..reward_formulas import KL_ESTIMATORS
from ..shaping import Kept, Placed, Sequences, Shaped, ShapingCall
from .triton_formulas import jit_formula
from .triton_launch import Launcher, await_previous, on_device_of
from .triton_parts import BLOCK, NO_FAULT, WARPS, flag, is_finite, is_set, merged, part_of, parts_of
from .triton_places import place as place

FAULTS = tl.constexpr(len(shaping.FAULTS))


def shape(call: ShapingCall, sequences: Sequences) -> Shaped:
    """Rewards and KL of each token."""
    parts, device, placed = parts_of(call), call.values.device, sequences.placed
    rewards, kl = (torch.empty(call.tokens, dtype=call.dtype, device=device) for _ in range(2))
    counts = torch.empty(2, call.segments, parts, dtype=torch.int64, device=device)
    kl_sums = torch.empty(call.segments, parts, dtype=call.dtype, device=device)
    with on_device_of(call.values):
        launcher = _shaper(
            call.kl, call.log_ratio_limit, call.kl_limit, call.ignores_mask, call.kl_everywhere, call.zero_faults, call.dtype
        )
        launcher(
            call.segments * parts,
            (call.logprobs, call.ref_logprobs, call.values, call.rewards),
            flag(call.mask),
            call.cu_seqlens,
            (placed.score, sequences.kl_coef),
            (placed.place, placed.slot, placed.end),
            rewards,
            kl,
            counts,
            kl_sums,
            call.length or 0,
            call.segments,
            call.tokens,
            parts,
        )
        return Shaped(rewards, kl, *merged(counts, kl_sums, sequences.fault))


def kept(call: ShapingCall, placed: Placed, fault: torch.Tensor, *, slots: bool, drops: bool) -> Kept:
    """Which tokens count."""
    mask = call.mask
    slots = slots and mask is not None
    if not slots and not drops:
        return Kept(mask, mask, mask, mask)
    steps, counted, counted_steps = (
        torch.empty(call.tokens, dtype=torch.bool, device=call.values.device) if wanted else None
        for wanted in (slots, drops, slots and drops)
    )
    parts = parts_of(call)
    with on_device_of(call.values):
        _keeper()(
            call.segments * parts,
            flag(mask),
            placed.slot,
            fault,
            call.cu_seqlens,
            (flag(steps), flag(counted), flag(counted_steps)),
            call.length or 0,
            call.tokens,
            parts,
        )
    if not slots:
        return Kept(mask, mask, counted, counted)
    return Kept(mask, steps, counted, counted_steps) if drops else Kept(mask, steps, mask, steps)


@lru_cache(maxsize=256)
def _shaper(kl: str, log_ratio_limit: float, kl_limit: float, ignores_mask: bool, kl_everywhere: bool, zero: bool, dtype) -> Launcher:
    constants = {
        "ESTIMATOR": jit_estimator(kl),
        "LOG_RATIO_LIMIT": log_ratio_limit,
        "KL_LIMIT": kl_limit,
        "IGNORES_MASK": ignores_mask,
        "KL_EVERYWHERE": kl_everywhere,
        "ZERO_FAULTS": zero,
        "DTYPE": tl.float64 if dtype == torch.float64 else tl.float32,
        "BLOCK": BLOCK,
    }
    return Launcher(_shape, constants, num_warps=WARPS)


@cache
def _keeper() -> Launcher:
    return Launcher(_kept, {"BLOCK": BLOCK}, num_warps=WARPS)


@cache
def jit_estimator(kl: str):
    """The estimator as a Triton function, the same object every time."""
    return jit_formula(KL_ESTIMATORS[kl])


clamped = jit_formula(reward_formulas.clamped)
shaped_reward = jit_formula(reward_formulas.shaped_reward)


@triton.jit
def with_fault(fault, bad, offset, WHICH: tl.constexpr):
    """The first fault, if the number at `offset` is `bad`, too."""
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
    await_previous()
    sequence, start, first, finish = part_of(cu_seqlens, length, tokens, parts, BLOCK)
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
            live = is_set(mask, token, there)
        steps = live
        if IGNORES_MASK:
            steps = live | (there & (token <= last))
        read = steps | (there & (token == slot))
        offset = token - start
        value = tl.load(inputs[2] + token, mask=read, other=0).to(DTYPE)
        fault = with_fault(fault, is_finite(value) == 0, offset, 3)
        kl = tl.zeros([BLOCK], DTYPE)
        coefficient = kl
        if inputs[0] is not None:
            on = steps if KL_EVERYWHERE else live
            coefficient = tl.where(on, kl_coef, 0.0)
            logprob = tl.load(inputs[0] + token, mask=on, other=0).to(DTYPE)
            ref_logprob = tl.load(inputs[1] + token, mask=on, other=0).to(DTYPE)
            log_ratio = logprob - ref_logprob
            raw = ESTIMATOR(clamped(log_ratio, log_ratio_limit))
            kl = clamped(raw, kl_limit)
            cut += ((tl.abs(log_ratio) > log_ratio_limit) | (tl.abs(raw) > kl_limit)).to(tl.int64)
            fault = with_fault(fault, is_finite(kl) == 0, offset, 2)
            fault = with_fault(fault, is_finite(ref_logprob) == 0, offset, 1)
            fault = with_fault(fault, is_finite(logprob) == 0, offset, 0)
            if ZERO_FAULTS:
                kl = tl.where(is_finite(kl) & is_finite(logprob) & is_finite(ref_logprob), kl, 0.0)
        reward = tl.zeros([BLOCK], DTYPE)
        if inputs[3] is not None:
            reward = tl.load(inputs[3] + token, mask=steps, other=0).to(DTYPE)
            fault = with_fault(fault, is_finite(reward) == 0, offset, 4)
            if ZERO_FAULTS:
                reward = tl.where(is_finite(reward), reward, 0.0)
        shaped = shaped_reward(reward, tl.where(token == place, score, 0.0), kl, coefficient)
        kl = tl.where(live, kl, 0.0)
        total += kl
        tl.store(rewards + token, tl.where(read, shaped, 0.0), mask=there)
        tl.store(kls + token, kl, mask=there)
    program = tl.program_id(0).to(tl.int64)
    tl.store(counts + program, tl.min(fault))
    tl.store(counts + segments.to(tl.int64) * parts + program, tl.sum(cut))
    tl.store(kl_sums + program, tl.sum(total))


@triton.jit(do_not_specialize=["tokens", "parts"])  # rows of a multiple of 16 are read and written in whole vectors
def _kept(mask, slots, faults, cu_seqlens, results, length, tokens, parts, BLOCK: tl.constexpr):
    """1 at tokens that are steps, at trainable ones of sequences without a fault, and at steps of these; those of the three that there are."""
    await_previous()
    sequence, _, first, end = part_of(cu_seqlens, length, tokens, parts, BLOCK)
    slot = tl.load(slots + sequence)
    sound = tl.load(faults + sequence) == NO_FAULT
    for begin in tl.range(first, end, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        there = token < end
        live = there if mask is None else is_set(mask, token, there)
        steps = live | (there & (token == slot))
        if results[0] is not None:
            tl.store(results[0] + token, steps.to(tl.uint8), mask=there)
        if results[1] is not None:
            tl.store(results[1] + token, (live & sound).to(tl.uint8), mask=there)
        if results[2] is not None:
            tl.store(results[2] + token, (steps & sound).to(tl.uint8), mask=there)
