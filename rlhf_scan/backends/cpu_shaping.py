"""Reward shaping on the CPU: compiled loops over sequences, on torch's number of threads."""

# mypy: disallow-untyped-defs=false, disallow-untyped-calls=false, disallow-untyped-decorators=false
# pyright: basic

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import reward_formulas
from ..reward_formulas import KL_ESTIMATORS
from ..shaping import FAULTS, NO_FAULT, Kept, Located, Placed, ScoreCall, Sequences, Shaped, ShapingCall
from .cpu_compile import compiled_once, inlined
from .cpu_threads import TOKENS_PER_THREAD, thread_pool
from .formulas import compiled_formula
from .torch_places import placed

Array = npt.NDArray[Any]

_FAULTS = len(FAULTS)
_LOGPROBS, _REF_LOGPROBS, _KL, _VALUES, _REWARDS = range(5)
_KINDS = tuple(KL_ESTIMATORS)


@inlined()
def _exp(x):
    return math.exp(x)


@inlined()
def _minimum(x, y):
    return y if y < x else x


@inlined()
def _maximum(x, y):
    return y if y > x else x


_OWN = {"exp": _exp, "minimum": _minimum, "maximum": _maximum}
_k1, _k2, _k3, _absolute = (compiled_formula(formula, _OWN, inlined()) for formula in KL_ESTIMATORS.values())
_clamped = compiled_formula(reward_formulas.clamped, _OWN, inlined())
_shaped_reward = compiled_formula(reward_formulas.shaped_reward, _OWN, inlined())


def place(call: ShapingCall, scores: ScoreCall) -> Sequences:
    """Where each sequence ends, and what there is once per sequence."""
    bounds = call.boundaries.numpy()
    table = np.empty((4, call.segments), dtype=np.int64)
    mask, attention, has_eos = (_flag(flag) for flag in (call.mask, call.attention, call.has_eos))
    _spread(lambda first, end: _locate(bounds, mask, attention, has_eos, call.padded, table, first, end), bounds)
    return placed(call, scores, Located(*torch.from_numpy(table).unbind(0)))


def shape(call: ShapingCall, sequences: Sequences) -> Shaped:
    """Rewards and KL of each token."""
    bounds, placed = call.boundaries.numpy(), sequences.placed
    number = np.float64 if call.dtype == torch.float64 else np.float32
    inputs = tuple(_numbers(tensor, call.dtype) for tensor in (call.logprobs, call.ref_logprobs, call.values, call.rewards))
    numbers = tuple(np.zeros(size, dtype=number) for size in (call.tokens, call.tokens, call.segments))
    counts = sequences.fault.numpy().copy(), np.zeros(call.segments, dtype=np.int64)
    per_sequence = placed.score.numpy(), sequences.kl_coef.numpy()
    places = tuple(tensor.numpy() for tensor in (placed.place, placed.slot, placed.end))
    limits = number(call.log_ratio_limit), number(call.kl_limit)
    options = _KINDS.index(call.kl), call.ignores_mask, call.kl_everywhere, call.zero_faults
    arguments = bounds, _flag(call.mask), inputs, per_sequence, places, limits, options, numbers, counts
    _spread(lambda first, end: _shape(*arguments, first, end), bounds)
    rewards, kl, kl_sum = (torch.from_numpy(array) for array in numbers)
    return Shaped(rewards, kl, torch.from_numpy(counts[0]), torch.from_numpy(counts[1]), kl_sum)


def kept(call: ShapingCall, placed: Placed, fault: Tensor, *, slots: bool, drops: bool) -> Kept:
    """Which tokens count."""
    mask = counted = call.mask
    sound = fault == NO_FAULT
    if drops:
        counted = torch.repeat_interleave(sound, call.boundaries.diff(), output_size=call.tokens)
        counted = counted if mask is None else counted & (mask != 0)
    if mask is None or not slots:
        return Kept(mask, mask, counted, counted)
    steps = _with_slots(mask, placed.slot)
    return Kept(mask, steps, counted, _with_slots(counted, placed.slot[sound]) if drops and counted is not None else steps)


def _with_slots(flags: Tensor, slot: Tensor) -> Tensor:
    """Where `flags` [N] are nonzero, and at the slots that there are."""
    found = flags != 0
    found[slot[slot >= 0]] = True
    return found


def _flag(flag: Tensor | None) -> Array:
    """Empty where there is none."""
    return np.empty(0, dtype=np.bool_) if flag is None else (flag if flag.dtype == torch.bool else flag != 0).numpy()


def _numbers(tensor: Tensor | None, dtype: torch.dtype) -> Array:
    return (torch.empty(0, dtype=dtype) if tensor is None else tensor.to(dtype)).numpy()


def _spread(work: Callable[[int, int], None], bounds: Array) -> None:
    """`work(first, end)` over all sequences, in shares of about equal tokens."""
    sequences, tokens = len(bounds) - 1, int(bounds[-1])
    threads = min(torch.get_num_threads(), tokens // TOKENS_PER_THREAD, sequences)
    if threads <= 1:
        work(0, sequences)
        return
    cuts = np.unique(np.searchsorted(bounds, np.linspace(0, tokens, 4 * threads + 1))).tolist()
    cuts = sorted({0, *cuts[1:-1], sequences})
    list(thread_pool(torch.get_num_threads()).map(work, cuts[:-1], cuts[1:]))


@compiled_once()
def _locate(bounds, mask, attention, has_eos, padded, table, first, end):
    """One row of `table` for each attribute of `Located`."""
    for sequence in range(first, end):
        start, stop = bounds[sequence], bounds[sequence + 1]
        last, real, trainable, eos = -1, -1 if padded else stop - 1, 0, 0
        if len(attention) > 0:
            real = -1
        for t in range(start, stop):
            if len(mask) == 0 or mask[t]:
                last = t
                trainable += 1
                if len(has_eos) > 0 and has_eos[t]:
                    eos += 1
            if len(attention) > 0 and attention[t]:
                real = t
        table[0, sequence] = last
        table[1, sequence] = -1 if last < 0 else max(last, real)
        table[2, sequence] = trainable
        table[3, sequence] = eos


@inlined()
def _estimate(kind, log_ratio):
    if kind == 0:
        return _k1(log_ratio)
    if kind == 1:
        return _k2(log_ratio)
    if kind == 2:
        return _k3(log_ratio)
    return _absolute(log_ratio)


@inlined()
def _penalty(kind, logprob, ref_logprob, limits):
    """KL, the fault in it or -1, and whether a limit cut it."""
    log_ratio = logprob - ref_logprob
    raw = _estimate(kind, _clamped(log_ratio, limits[0]))
    kl = _clamped(raw, limits[1])
    fault = -1
    if not math.isfinite(logprob):
        fault = _LOGPROBS
    elif not math.isfinite(ref_logprob):
        fault = _REF_LOGPROBS
    elif not math.isfinite(kl):
        fault = _KL
    return kl, fault, abs(log_ratio) > limits[0] or abs(raw) > limits[1]


@compiled_once()
def _shape(bounds, mask, inputs, per_sequence, places, limits, options, numbers, counts, first, end):
    """See `shape`."""
    logprobs, ref_logprobs, values, token_rewards = inputs
    kind, ignores_mask, kl_everywhere, zero = options
    rewards, kls, kl_sums = numbers
    nothing = rewards.dtype.type(0)
    for sequence in range(first, end):
        start, last = bounds[sequence], places[2][sequence]
        place, slot = places[0][sequence], places[1][sequence]
        fault, cut, total = counts[0][sequence], 0, nothing
        for t in range(start, bounds[sequence + 1]):
            trainable = len(mask) == 0 or mask[t]
            steps = trainable or (ignores_mask and t <= last)
            if not steps and t != slot:
                continue
            offset = (t - start) * _FAULTS
            kl, kl_coef, reward = nothing, nothing, nothing
            if len(logprobs) > 0 and (trainable or (steps and kl_everywhere)):
                kl, found, limited = _penalty(kind, logprobs[t], ref_logprobs[t], limits)
                cut += limited
                kl_coef = per_sequence[1][sequence]
                if found >= 0:
                    fault = min(fault, offset + found)
                    kl = nothing if zero else kl
            if not math.isfinite(values[t]):
                fault = min(fault, offset + _VALUES)
            if steps and len(token_rewards) > 0:
                reward = token_rewards[t]
                if not math.isfinite(reward):
                    fault = min(fault, offset + _REWARDS)
                    reward = nothing if zero else reward
            score = per_sequence[0][sequence] if t == place else nothing
            rewards[t] = _shaped_reward(reward, score, kl, kl_coef)
            if trainable:
                kls[t] = kl
                total += kl
        counts[0][sequence], counts[1][sequence], kl_sums[sequence] = fault, cut, total
