"""Where rewards that belong to a step go: never on padding, never lost without being counted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .ppo_options import PPOOptions
from .ppo_step_rewards import StepRewards
from .shaping import Placed, ShapingCall


def with_step_rewards(call: ShapingCall, steps: StepRewards, options: PPOOptions, placed: Placed) -> tuple[ShapingCall, dict[str, Tensor]]:
    """The call with step rewards among its token rewards; how many were carried back to a trainable token, and how many lost."""
    bounds, sequence = call.boundaries, steps.sequences.clamp(0, max(call.segments - 1, 0))
    start = bounds[sequence]
    token = start + steps.tokens
    there = (steps.sequences == sequence) & (steps.tokens >= 0) & (token < bounds[sequence + 1])
    target = torch.where(there, token, 0)
    carried = torch.zeros_like(there)
    if call.mask is not None:
        live = call.mask != 0
        trainable = live[target]
        if options.trailing == "stay":
            there = there & (trainable | (target <= placed.end[sequence]))
        elif options.trailing == "drop":
            there = there & trainable
        else:
            before = torch.where(live, torch.arange(call.tokens, device=live.device), -1).cummax(0).values[target]
            carried = there & ~trainable & (before >= start)
            there = there & (before >= start)
            target = torch.where(there, before, 0)
    rewards = torch.zeros_like(call.values, dtype=call.dtype) if call.rewards is None else call.rewards.to(call.dtype, copy=True)
    # Sorted by place before it adds, so that the same call gives the same bits.
    rewards.index_put_((target,), torch.where(there, steps.rewards, 0.0), accumulate=True)
    return replace(call, rewards=rewards), {"step_rewards_carried_back": carried.sum(), "step_rewards_lost": (~there).sum()}
