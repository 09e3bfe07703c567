"""The recursion of `ppo_advantages`: GAE of rewards that were shaped before it, or are on the way to it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

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
from .shaping import FAULTS, NO_FAULT, RESULT_FAULT, Sequences, ShapingCall, Solved, one_pass


def solved(
    inputs: PPOInputs, options: PPOOptions, sequences: Sequences, rewards: Tensor, fault: Tensor, steps: Tensor | None, *, tallied: bool
) -> Solved:
    """From shaped rewards [N] to advantages; `fault` is that of the shaping."""
    zero = options.nonfinite == "zero"
    values = _finite(inputs.call.values) if zero else inputs.call.values
    call = _gae(inputs, options, sequences, {"rewards": rewards, "values": values}, steps)
    solve = one_pass(inputs.backend)
    if solve is not None and inputs.call.tokens:
        shape = replace(sequences, fault=fault)
        return solve(call, None, shape, **_wanted(inputs, options, steps, tallied=tallied))
    advantages, returns = ops.run(call, backend_module(inputs.backend))
    if _checked(options, tallied=tallied):
        fault = torch.minimum(fault, _faults_of_result(inputs, advantages))
    return Solved(advantages, returns, None, fault, None)


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
    call = _gae(inputs, options, sequences, {name: tensor for name, tensor in given.items() if tensor is not None}, steps)
    return solve(call, shaping, sequences, **_wanted(inputs, options, steps, tallied=tallied))


def _wanted(inputs: PPOInputs, options: PPOOptions, steps: Tensor | None, *, tallied: bool) -> dict[str, Any]:
    """What the pass is to do beside solving."""
    return {
        "post_eos": options.score_at == "post_eos" and steps is not None,
        "checked": _checked(options, tallied=tallied),
        "tallied": tallied and options.nonfinite != "zero",
        "dtypes": (inputs.call.dtype if tallied else inputs.dtype, *[inputs.dtype] * 3),
    }


def _checked(options: PPOOptions, *, tallied: bool) -> bool:
    """Whether advantages that are not finite matter to more than their sequence."""
    return options.nonfinite in ("raise", "drop") or (tallied and options.nonfinite == "propagate")


def _faults_of_result(inputs: PPOInputs, advantages: Tensor) -> Tensor:
    """Where those of a sequence are not finite first, as in `Shaped.fault`."""
    boundaries = inputs.call.boundaries
    start, nowhere = boundaries[:-1], inputs.call.tokens
    bad = ~advantages.isfinite()
    if not bool(bad.any()):  # on the CPU nobody waits for that
        return torch.full_like(start, NO_FAULT)
    token = bad.nonzero().flatten()
    sequence = torch.searchsorted(boundaries[1:].contiguous(), token, right=True)
    first = torch.full_like(start, nowhere).scatter_reduce(0, sequence, token, "amin")
    code = RESULT_FAULT + (first - start) * len(FAULTS) + FAULTS.index("advantages")
    return torch.where(first < nowhere, code, NO_FAULT)


@lru_cache(maxsize=16)
def _estimator(inputs: tuple[str, ...]) -> Estimator:
    """GAE of these inputs, of which the backend makes rewards."""
    return replace(estimator("gae"), inputs=inputs)


def _gae(inputs: PPOInputs, options: PPOOptions, sequences: Sequences, tensors: dict[str, Tensor], steps: Tensor | None) -> Call:
    """The call of the recursion."""
    rates: list[Rate | None] = [
        None if rate is None else resolve_rate(inputs.layout, name, rate)
        for name, rate in (("gamma", options.gamma), ("lam", options.lam), ("lam_value", options.lam_value))
    ]
    if options.length_adaptive_alpha:
        length = (options.length_adaptive_alpha * sequences.located.trainable.to(inputs.call.dtype)).clamp(min=1.0)
        rates = [rates[0], (1.0 - 1.0 / length).unsqueeze(1), rates[1] if rates[2] is None else rates[2]]
    bootstrap = inputs.bootstrap
    if bootstrap is not None and options.nonfinite == "zero":
        bootstrap = _finite(bootstrap)
    entry = _estimator(tuple(tensors))
    call = Call(
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
    return call if sequences.trimmed is None else _trimmed(call, sequences.trimmed)


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
