"""Reward shaping and whitening's statistics as stages of the scan: `ppo_advantages` in one pass over the tokens before they are whitened.

Before the scan a tile makes rewards and KL of what it read, writes them, and tallies. After it, it clears the advantage of the step after a
sequence's end, and puts down count, mean and M2 of the advantages that it has. Tallies are smallest codes, counts, and sums in float64 of
sums in float32.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import shaping as meaning
from ..call import Call, Tensors
from ..shaping import Dtypes, Sequences, Shaped, ShapingCall, Solved
from . import triton_whiten
from .tiles import INTERPRETED
from .triton_formulas import jit_formula
from .triton_launch import Launcher, absent, await_previous, on_device_of
from .triton_parts import NO_FAULT, is_finite
from .triton_runs import store_runs
from .triton_shaping import FAULTS, clamped, jit_estimator, shaped_reward, with_fault
from .triton_solver import Scan, aligned
from .triton_whiten import merged_lanes

# What a stage is compiled for: each has its own in place of these.
KL, HAS_KL, HAS_REWARDS, LOG_RATIO_LIMIT, KL_LIMIT, LIMITED = None, False, False, math.inf, math.inf, False
HAS_MASK, PADDED, IGNORES_MASK, KL_EVERYWHERE, POST_EOS, CHECKED, TALLIED = False, False, False, False, False, False, False

RESULT_FAULT = tl.constexpr(meaning.RESULT_FAULT)
_PART = tl.constexpr(4)  # of a tile's row of a sequence: count, mean, M2, sequence
_LANES = 16 if INTERPRETED else 1024
# The oldest is forgotten beyond this.
_KEPT = 64
_passes: dict[tuple[Any, ...], Pass] = {}


def solve(
    call: Call, shaping: ShapingCall | None, sequences: Sequences, *, post_eos: bool, checked: bool, tallied: bool, dtypes: Dtypes
) -> Solved:
    """`rlhf_scan.shaping.OnePass`."""
    tensors = call.tensors
    kinds = tuple(
        [
            (tensor.dtype, tensor.dim()) if isinstance(tensor, Tensor) else type(tensor)
            for tensor in (*tensors.inputs, *tensors.rates, *tensors.flags, tensors.bootstrap)
        ]
    )
    options: tuple[Any, ...] = ()
    if shaping is not None:
        options = shaping.kl, shaping.log_ratio_limit, shaping.kl_limit, shaping.ignores_mask, shaping.kl_everywhere
    sizes = call.segments, sequences.start.numel(), call.length, call.tokens
    key = call.estimator.inputs, len(call.rates), sizes, call.masked, kinds, options, post_eos, checked, tallied, dtypes
    found = _passes.get(key)
    if found is None:
        stages = post_eos, checked or tallied, tallied
        found = _passes[key] = Pass(call, shaping, stages, dtypes, padded=call.segments != sequences.start.numel())
        if len(_passes) > _KEPT:
            del _passes[next(iter(_passes))]
    return found(tensors, sequences)


class Pass:
    """The pass of all calls with the same shapes, dtypes and options."""

    def __init__(self, call: Call, shaping: ShapingCall | None, stages: tuple[bool, bool, bool], dtypes: Dtypes, *, padded: bool) -> None:
        before = None
        if shaping is not None:
            before = _shaping(
                shaping.kl if shaping.logprobs is not None else None,
                (shaping.log_ratio_limit, shaping.kl_limit),
                shaping.rewards is not None,
                shaping.ignores_mask and shaping.mask is not None,
                shaping.kl_everywhere and shaping.mask is not None,
                padded,
                stages[0],
            )
        self._scan = Scan(call, before, _tallying(call.mask is not None, padded, *stages) if any(stages) else None)
        self._shapes, self._tallied = shaping is not None, stages[2]
        self._dtypes, self._shape = dtypes if self._shapes else dtypes[:2], call.inputs[0].shape

    def __call__(self, given: Tensors, sequences: Sequences) -> Solved:
        """Everything but whitening."""
        device, count = given.inputs[0].device, sequences.start.numel()
        outputs = tuple(torch.empty(self._shape, dtype=dtype, device=device) for dtype in self._dtypes)
        pairs = -(-count // 2)  # so that what follows starts at a multiple of 16 bytes
        parts = self._scan.rows if self._tallied else 0
        tallies = torch.zeros(4 * pairs + _PART.value * parts, dtype=torch.float64, device=device)
        kl_sum, clamped_tokens, table = tallies.split([2 * pairs, 2 * pairs, _PART.value * parts])
        placed = sequences.placed
        per_sequence = (placed.score, sequences.kl_coef, placed.place, placed.slot, sequences.fault)
        *placed, fault = aligned(per_sequence)
        made = outputs[2:] if self._shapes else absent(2)
        self._scan(given, outputs[:2], (*placed, *made, fault, clamped_tokens.view(torch.int64), kl_sum, table))
        shaped = Shaped(*made, fault, clamped_tokens.view(torch.int64)[:count], kl_sum[:count]) if self._shapes else None
        return Solved(*outputs[:2], shaped, fault, _merged(table, parts, fault) if self._tallied else None)


@cache
def _merger() -> Launcher:
    return Launcher(_sound_statistics, {"LANES": _LANES}, num_warps=4)


def _merged(parts: Tensor, count: int, fault: Tensor) -> Tensor:
    """The statistics of all parts, but for those of sequences with a fault."""
    blocks = torch.empty(-(-count // _LANES), 3, dtype=torch.float64, device=parts.device)
    with on_device_of(parts):
        _merger()(len(blocks), parts, fault, blocks, count)
    return triton_whiten.merge(blocks)


@triton.jit(do_not_specialize=["total"])
def _sound_statistics(parts, fault, blocks, total, LANES: tl.constexpr):
    """Of LANES parts, those of sound sequences, merged."""
    await_previous()
    part = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    entry, there = parts + part * _PART, part < total
    sequence = tl.load(entry + 3, mask=there, other=0).to(tl.int64)
    count = tl.load(entry, mask=there, other=0)
    count = tl.where(tl.load(fault + sequence, mask=count > 0, other=NO_FAULT) == NO_FAULT, count, 0.0)
    count, mean, m2 = merged_lanes(count, tl.load(entry + 1, mask=there, other=0), tl.load(entry + 2, mask=there, other=0))
    block = blocks + tl.program_id(0) * 3
    tl.store(block, count)
    tl.store(block + 1, mean)
    tl.store(block + 2, m2)


@lru_cache(maxsize=256)
def _shaping(
    kl: str | None,
    limits: tuple[float, float],
    has_rewards: bool,
    ignores_mask: bool,
    kl_everywhere: bool,
    padded: bool,
    post_eos: bool,
) -> Any:
    """The stage before the scan, the same object every time."""
    own = {
        "KL": None if kl is None else jit_estimator(kl),
        "LOG_RATIO_LIMIT": tl.constexpr(limits[0]),
        "KL_LIMIT": tl.constexpr(limits[1]),
        "LIMITED": tl.constexpr(min(limits) < math.inf),
        "HAS_KL": tl.constexpr(kl is not None),
        "HAS_REWARDS": tl.constexpr(has_rewards),
        "PADDED": tl.constexpr(padded),
        "IGNORES_MASK": tl.constexpr(ignores_mask),
        "KL_EVERYWHERE": tl.constexpr(kl_everywhere),
        "POST_EOS": tl.constexpr(post_eos),
    }
    return jit_formula(_shape_rewards, own)


@lru_cache(maxsize=16)
def _tallying(has_mask: bool, padded: bool, post_eos: bool, checked: bool, tallied: bool) -> Any:
    """The stage after the scan, the same object every time."""
    own = {"HAS_MASK": has_mask, "PADDED": padded, "POST_EOS": post_eos, "CHECKED": checked, "TALLIED": tallied}
    own = {name: tl.constexpr(value) for name, value in own.items()}
    return jit_formula(_tally_advantages, own)


@triton.jit
def _is_at(places, segment, origin, at):
    """Whether a token is its sequence's one of these."""
    return at == (tl.load(places + segment) - origin).to(tl.int32)


def _shape_rewards(staged, here, where, kept, ALIGNED, TILED, REVERSE, ROWS, WIDTH, DTYPE):
    """What `gae` reads, rewards and values; rewards and KL are written and tallied on the way.

    A number minus itself is 0, or NaN if it is not finite: with these added, the sum of KL tells whether all are.
    """
    score, kl_coef, place, slot, rewards, kls, fault, clamped_tokens, kl_sums, _ = staged
    segment, origin, at, head, tail, _ = where
    sequence = segment // 2 if PADDED else segment  # every second segment is a sequence's padding
    steps = kept
    if IGNORES_MASK:
        steps = (at < tail) & (segment % 2 == 0)
    live = kept
    on = steps if KL_EVERYWHERE else kept
    if POST_EOS:
        after = _is_at(slot, sequence, origin, at)
        live, on = live & (after == 0), on & (after == 0)
    values = here[2 if HAS_KL else 0]
    reward = tl.zeros_like(values)
    test = values - values
    if HAS_REWARDS:
        reward = here[3 if HAS_KL else 1]
        if POST_EOS:
            reward = tl.where(after, 0.0, reward)
        test += reward - reward
    test = tl.where(steps, test, 0.0)
    log_ratio = tl.zeros_like(values)
    raw = log_ratio
    kl = log_ratio
    if HAS_KL:
        log_ratio = tl.where(on, here[0] - here[1], 0.0)
        raw = KL(clamped(log_ratio, LOG_RATIO_LIMIT) if LIMITED else log_ratio)
        kl = clamped(raw, KL_LIMIT) if LIMITED else raw
        test += log_ratio - log_ratio
        if KL_EVERYWHERE:
            test += kl - kl
    score_here = tl.where(_is_at(place, sequence, origin, at), tl.load(score + sequence), 0.0)
    shaped = shaped_reward(reward, score_here, kl, tl.where(on, tl.load(kl_coef + sequence), 0.0))
    counted_kl = tl.where(live, kl, 0.0) if KL_EVERYWHERE else kl
    store_runs(rewards, origin, tail, tl.where(kept, shaped, 0.0), ALIGNED, TILED, REVERSE, ROWS, WIDTH)
    store_runs(kls, origin, tail, counted_kl, ALIGNED, TILED, REVERSE, ROWS, WIDTH)
    lane = tl.zeros([ROWS, 1], tl.int32)
    sequence, there = lane + sequence, lane + tail > 0
    total = tl.sum(counted_kl + test, 1, keep_dims=True)
    if HAS_KL:
        tl.atomic_add(kl_sums + sequence, total.to(tl.float64), mask=there, sem="relaxed")
    if LIMITED:
        cut = (tl.abs(log_ratio) > LOG_RATIO_LIMIT) | (tl.abs(raw) > KL_LIMIT)
        cuts = tl.sum(cut.to(tl.int32), 1, keep_dims=True)
        tl.atomic_add(clamped_tokens + sequence, cuts.to(tl.int64), mask=there & (cuts > 0), sem="relaxed")
    if tl.max((is_finite(total) == 0).to(tl.int32)) > 0:
        offset = (at + head).to(tl.int64)
        code = with_fault(tl.full([ROWS, WIDTH], NO_FAULT, tl.int64), steps & (is_finite(values) == 0), offset, 3)
        if HAS_REWARDS:
            code = with_fault(code, steps & (is_finite(reward) == 0), offset, 4)
        if HAS_KL:
            code = with_fault(code, on & (is_finite(kl) == 0), offset, 2)
            code = with_fault(code, on & (is_finite(here[1]) == 0), offset, 1)
            code = with_fault(code, on & (is_finite(here[0]) == 0), offset, 0)
        tl.atomic_min(fault + sequence, tl.min(code, 1, keep_dims=True), mask=there, sem="relaxed")
    return shaped, values


@triton.jit
def _note_result(fault, advantages, test, kept, sequence, offset, ROWS: tl.constexpr):
    """Where `test`, made of all of them, is not finite, the first advantage that is not is a fault of its sequence."""
    if tl.max((is_finite(test) == 0).to(tl.int32)) > 0:
        code = offset.to(tl.int64) * FAULTS + (RESULT_FAULT + FAULTS - 1)
        code = tl.min(tl.where(kept & (is_finite(advantages) == 0), code, NO_FAULT), 1, keep_dims=True)
        tl.atomic_min(fault + (tl.zeros([ROWS, 1], tl.int32) + sequence), code, mask=code < NO_FAULT, sem="relaxed")


def _tally_advantages(staged, values, where, kept, ROWS, DTYPE):
    """The outputs of `gae`, with 0 as the advantage of the step after a sequence's end."""
    slot, fault, parts = staged[3], staged[6], staged[9]
    segment, origin, at, head, tail, row = where
    sequence = segment // 2 if PADDED else segment
    advantages = values[0]
    if POST_EOS:
        kept = kept & (_is_at(slot, sequence, origin, at) == 0)
        advantages = tl.where(kept, advantages, 0.0)
    if TALLIED:
        if HAS_MASK:
            count = tl.sum(kept.to(tl.int32), 1, keep_dims=True)
        else:
            count = tl.minimum(tl.zeros([ROWS, 1], tl.int32) + tail, kept.shape[1]).to(tl.int32)
        near = tl.max(tl.where(kept, advantages, float("-inf")), 1, keep_dims=True)
        from_near = tl.where(kept, advantages - near, 0.0)
        mean = tl.sum(from_near, 1, keep_dims=True) / tl.maximum(count, 1)
        deviations = tl.where(kept, from_near - mean, 0.0)
        test = mean
        part = parts + (tl.zeros([ROWS, 1], tl.int64) + row) * _PART
        tl.store(part, count.to(tl.float64))
        tl.store(part + 1, tl.where(count > 0, near.to(tl.float64) + mean.to(tl.float64), 0.0))
        tl.store(part + 2, tl.sum(deviations * deviations, 1, keep_dims=True).to(tl.float64))
        tl.store(part + 3, (tl.zeros([ROWS, 1], tl.int32) + sequence).to(tl.float64))
    elif CHECKED:
        test = tl.sum(tl.where(kept, advantages - advantages, 0.0), 1, keep_dims=True)
    if CHECKED:
        _note_result(fault, advantages, test, kept, sequence, at + head, ROWS)
    return advantages, values[1]
