"""Reward shaping by plain float64 loops, token by token: the definition that the other backends are checked against."""

# mypy: disallow-untyped-calls=false

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from ..reward_formulas import KL_ESTIMATORS, clamped, shaped_reward
from ..shaping import FAULTS, NO_FAULT, Kept, Located, Placed, ScoreCall, Sequences, Shaped, ShapingCall
from .torch_places import placed


def place(call: ShapingCall, scores: ScoreCall) -> Sequences:
    """Where each sequence ends, and what there is once per sequence."""
    mask, attention, has_eos = (_flags(flag) for flag in (call.mask, call.attention, call.has_eos))
    found: list[list[int]] = []
    for start, stop in pairwise(call.boundaries.tolist()):
        trainable = [t for t in range(start, stop) if mask is None or mask[t]]
        last = max(trainable, default=-1)
        real = [last] if call.padded else [stop - 1]
        if attention is not None:
            real = [t for t in range(start, stop) if attention[t]]
        found.append(
            [
                last,
                -1 if last < 0 else max([last, *real]),
                len(trainable),
                0 if has_eos is None else sum(has_eos[t] for t in trainable),
            ]
        )
    table = torch.tensor(found, dtype=torch.int64, device=call.values.device).reshape(-1, 4)
    return placed(call, scores, Located(*table.unbind(1)))


def shape(call: ShapingCall, sequences: Sequences) -> Shaped:
    """Rewards and KL of each token."""
    outputs = _Outputs(call, sequences)
    for sequence, (start, stop) in enumerate(pairwise(call.boundaries.tolist())):
        for t in range(start, stop):
            outputs.visit(sequence, t, start)
    return outputs.shaped()


def kept(call: ShapingCall, placed: Placed, fault: Tensor, *, slots: bool, drops: bool) -> Kept:
    """Which tokens count."""
    mask, faults, slot = _flags(call.mask), fault.tolist(), placed.slot.tolist()
    steps, counted, counted_steps = (torch.zeros(call.tokens, dtype=torch.bool) for _ in range(3))
    for sequence, (start, stop) in enumerate(pairwise(call.boundaries.tolist())):
        sound = not drops or faults[sequence] == NO_FAULT
        for t in range(start, stop):
            trainable = mask is None or mask[t]
            steps[t] = trainable or (slots and t == slot[sequence])
            counted[t], counted_steps[t] = trainable and sound, steps[t] and sound
    device = call.values.device
    return Kept(call.mask, *(flags.to(device) for flags in (steps, counted, counted_steps)))


class _Outputs:
    """While they are filled."""

    def __init__(self, call: ShapingCall, sequences: Sequences) -> None:
        self.call, placed = call, sequences.placed
        self.mask = _flags(call.mask)
        self.score, self.place, self.slot, self.end = (x.tolist() for x in (placed.score, placed.place, placed.slot, placed.end))
        self.kl_coef = sequences.kl_coef.tolist()
        self.logprobs, self.ref_logprobs = _numbers(call.logprobs), _numbers(call.ref_logprobs)
        self.values, self.token_rewards = _numbers(call.values), _numbers(call.rewards)
        self.rewards, self.kl = [0.0] * call.tokens, [0.0] * call.tokens
        self.fault, self.clamped, self.kl_sum = sequences.fault.tolist(), [0] * call.segments, [0.0] * call.segments

    def visit(self, sequence: int, t: int, start: int) -> None:
        """Shape the reward of token t."""
        trainable = self.mask is None or self.mask[t]
        steps = trainable or (self.call.ignores_mask and t <= self.end[sequence])
        if not steps and t != self.slot[sequence]:
            return
        faults: list[str] = []
        kl = reward = kl_coef = 0.0
        if self.logprobs and (trainable or (steps and self.call.kl_everywhere)):
            kl, cut = _penalty(self.call, self.logprobs[t], self.ref_logprobs[t], faults)
            self.clamped[sequence] += cut
            kl_coef = self.kl_coef[sequence]
        if not math.isfinite(self.values[t]):
            faults.append("values")
        if steps and self.token_rewards:
            reward = self.token_rewards[t]
            if not math.isfinite(reward):
                faults.append("rewards")
                reward = 0.0 if self.call.zero_faults else reward
        score = self.score[sequence] if t == self.place[sequence] else 0.0
        self.rewards[t] = shaped_reward(reward, score, kl, kl_coef)
        if trainable:
            self.kl[t] = kl
            self.kl_sum[sequence] += kl
        self.fault[sequence] = min([self.fault[sequence], *((t - start) * len(FAULTS) + FAULTS.index(name) for name in faults)])

    def shaped(self) -> Shaped:
        """As tensors."""
        device = self.call.values.device
        rewards, kl, kl_sum = (torch.tensor(x, dtype=torch.float64, device=device) for x in (self.rewards, self.kl, self.kl_sum))
        fault, cut = (torch.tensor(x, dtype=torch.int64, device=device) for x in (self.fault, self.clamped))
        return Shaped(rewards, kl, fault, cut, kl_sum)


def _penalty(call: ShapingCall, logprob: float, ref_logprob: float, faults: list[str]) -> tuple[float, bool]:
    """KL, and whether a limit cut it; what is not finite in it joins `faults`."""
    log_ratio = logprob - ref_logprob
    try:
        raw = KL_ESTIMATORS[call.kl](clamped(log_ratio, call.log_ratio_limit))
    except OverflowError:
        raw = math.inf
    kl: float = clamped(raw, call.kl_limit)
    parts = {"logprobs": logprob, "ref_logprobs": ref_logprob, "kl": kl}
    found = [name for name, number in parts.items() if not math.isfinite(number)]
    faults += found
    return 0.0 if found and call.zero_faults else kl, abs(log_ratio) > call.log_ratio_limit or abs(raw) > call.kl_limit


def _flags(flag: Tensor | None) -> list[bool] | None:
    return None if flag is None else (flag != 0).tolist()


def _numbers(tensor: Tensor | None) -> list[float]:
    return [] if tensor is None else [float(x) for x in tensor.double().tolist()]
