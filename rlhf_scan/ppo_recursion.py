"""The recursion of `ppo_advantages`: GAE of rewards that were shaped before it, or are on the way to it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from . import ops
from .backend_choice import backend_module
from .call import Call, Rate, channel_rates, is_per_segment
from .checks import resolve_rate
from .estimator_class import Estimator
from .estimators import estimator
from .ppo_inputs import PPOInputs
from .ppo_options import PPOOptions
from .shaping import Located, Sequences, ShapingCall, Solved, one_pass


def solved_in_stages(
    inputs: PPOInputs, options: PPOOptions, sequences: Sequences, rewards: Tensor, steps: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of shaped rewards, [N] each, in the dtype of the arithmetic."""
    values = _finite(inputs.call.values) if options.nonfinite == "zero" else inputs.call.values
    call = _gae(inputs, options, sequences.located, {"rewards": rewards, "values": values}, steps)
    if sequences.trimmed is not None:
        call = _trimmed(call, sequences.trimmed)
    advantages, returns = ops.run(call, backend_module(inputs.backend))
    return advantages, returns


def solved_in_one_pass(
    inputs: PPOInputs, options: PPOOptions, shaping: ShapingCall, sequences: Sequences, steps: Tensor | None, *, tallied: bool
) -> Solved | None:
    """Everything from log-probabilities to advantages, where the backend can do it in one pass; None: in stages."""
    solve = one_pass(inputs.backend)
    if solve is None or shaping.tokens == 0 or options.nonfinite == "zero":
        return None
    given = {
        "logprobs": shaping.logprobs,
        "ref_logprobs": shaping.ref_logprobs,
        "values": shaping.values,
        "rewards": shaping.rewards,
    }
    call = _gae(inputs, options, sequences.located, {name: tensor for name, tensor in given.items() if tensor is not None}, steps)
    if sequences.trimmed is not None:
        call = _trimmed(call, sequences.trimmed)
    dtypes = (inputs.call.dtype if tallied else inputs.dtype, *[inputs.dtype] * 3)
    return solve(call, shaping, sequences, post_eos=options.score_at == "post_eos" and steps is not None, tallied=tallied, dtypes=dtypes)


@lru_cache(maxsize=16)
def _estimator(inputs: tuple[str, ...]) -> Estimator:
    """GAE of these inputs, of which the backend makes rewards."""
    return replace(estimator("gae"), inputs=inputs)


def _gae(inputs: PPOInputs, options: PPOOptions, located: Located, tensors: dict[str, Tensor], steps: Tensor | None) -> Call:
    """The call of the recursion over whole sequences."""
    rates: list[Rate | None] = [
        None if rate is None else resolve_rate(inputs.layout, name, rate)
        for name, rate in (("gamma", options.gamma), ("lam", options.lam), ("lam_value", options.lam_value))
    ]
    if options.length_adaptive_alpha:
        length = (options.length_adaptive_alpha * located.trainable.to(inputs.call.dtype)).clamp(min=1.0)
        rates = [rates[0], (1.0 - 1.0 / length).unsqueeze(1), rates[1] if rates[2] is None else rates[2]]
    bootstrap = inputs.bootstrap
    if bootstrap is not None and options.nonfinite == "zero":
        bootstrap = _finite(bootstrap)
    entry = _estimator(tuple(tensors))
    return Call(
        estimator=entry,
        inputs=tuple(tensors.values()),
        rates=channel_rates(entry, rates),
        segments=inputs.call.segments,
        length=inputs.call.length,
        cu_seqlens=inputs.call.cu_seqlens,
        mask=steps,
        masked=options.masked,
        terminated=inputs.terminated,
        truncated=inputs.truncated,
        bootstrap=bootstrap,
        starts=False,
        dtype=inputs.call.dtype,
    )


def _finite(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def _trimmed(call: Call, boundaries: Tensor) -> Call:
    """Each sequence as two segments: what comes up to its last step, and padding, which has no end flags and no bootstrap."""

    def doubled(rate: Rate) -> Rate:
        return rate.repeat_interleave(2, 0) if isinstance(rate, Tensor) and is_per_segment(rate) else rate

    def ends(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not is_per_segment(tensor):
            return tensor
        return torch.stack([tensor, torch.zeros_like(tensor)], 1).reshape(-1, 1)

    return replace(
        call,
        rates=tuple(tuple(doubled(rate) for rate in channel) for channel in call.rates),
        segments=2 * call.segments,
        length=None,
        cu_seqlens=boundaries,
        terminated=ends(call.terminated),
        truncated=ends(call.truncated),
        bootstrap=ends(call.bootstrap),
    )
