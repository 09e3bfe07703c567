"""Where rewards that belong to a sequence or a step go: never on padding, never lost without being counted. One entry per sequence or step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .ppo_inputs import PPOInputs, StepRewards
from .ppo_options import PPOOptions
from .shaping import FAULTS, NO_FAULT, Located, Placed, ShapingCall


def place_scores(inputs: PPOInputs, options: PPOOptions, located: Located) -> tuple[Placed, Tensor | None]:
    """Each sequence's score and the token that gets it; and which sequences pay for a missing end, bool [S], if any may."""
    last, end = located.last, located.end
    empty = last < 0
    nowhere = torch.full_like(last, -1)
    slot = nowhere
    if options.score_at == "post_eos":
        first, stop = inputs.call.boundaries[:-1], inputs.call.boundaries[1:]
        after = torch.where(empty, first, end + 1)  # an empty response ends before its first token
        slot = torch.where(after < stop, after, nowhere)
    place = last
    if options.trailing == "drop":
        place = torch.where(end > last, nowhere, last)
    elif options.trailing == "stay":
        place = end
    place = torch.where(slot >= 0, slot, place)
    low, high = options.score_range
    score = ((inputs.scores + options.score_bias) * options.score_scale).clamp(low, high)
    missing = None
    if options.missing_eos_penalty:
        has_eos = inputs.has_eos if inputs.has_eos is not None else located.eos > 0
        missing = ~has_eos & (~empty | (slot >= 0))
        score = torch.where(missing, score - options.missing_eos_penalty, score)
    return Placed(score, place, slot, end), missing


def sound(placed: Placed) -> Placed:
    """With 0 for a score that is not finite."""
    return replace(placed, score=torch.nan_to_num(placed.score, nan=0.0, posinf=0.0, neginf=0.0))


def sequence_faults(inputs: PPOInputs, placed: Placed) -> Tensor:
    """As `Shaped.fault`, of what there is once per sequence."""
    start = inputs.call.boundaries[:-1]
    fault = torch.full_like(start, NO_FAULT)
    checked = [("scores", placed.place, ~placed.score.isfinite()), ("kl_coef", placed.end, ~inputs.call.kl_coef.isfinite())]
    read = bootstrap_of_ends(inputs, placed)
    if read is not None:
        checked.append(("bootstrap", last_steps(placed), ~read.isfinite()))
    for name, token, bad in checked:
        code = (token - start) * len(FAULTS) + FAULTS.index(name)
        fault = torch.minimum(fault, torch.where(bad & (token >= 0), code, NO_FAULT))
    return fault


def last_steps(placed: Placed) -> Tensor:
    """The last token of each sequence that takes a step or is passed over, int64 [S]; -1 where it has none."""
    return torch.maximum(placed.slot, placed.end)


def bootstrap_of_ends(inputs: PPOInputs, placed: Placed) -> Tensor | None:
    """The value after each sequence, [S]; 0 where it terminates."""
    if inputs.bootstrap is None:
        return None
    at = last_steps(placed).clamp(min=0)

    def at_ends(tensor: Tensor) -> Tensor:
        return tensor.flatten() if tensor.dim() == 2 else tensor[at]

    value = at_ends(inputs.bootstrap)
    return value if inputs.terminated is None else torch.where(at_ends(inputs.terminated) != 0, torch.zeros_like(value), value)


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


def truncated_count(inputs: PPOInputs) -> Tensor | None:
    """How many flags say truncated and not terminated."""
    if inputs.truncated is None:
        return None
    cut = inputs.truncated != 0
    both = inputs.terminated is not None and inputs.terminated.shape == cut.shape
    return (cut & (inputs.terminated == 0) if both else cut).sum()
