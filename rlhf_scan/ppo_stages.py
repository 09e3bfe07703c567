"""The stages of `ppo_advantages` after shaping: reward whitening, the recursion, advantage whitening."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import whitening
from .call import is_per_segment
from .dispatch import estimate
from .ppo_inputs import OP, PPOInputs
from .ppo_options import PPOOptions, whitenings
from .ppo_places import last_steps
from .ppo_report import PPOReport
from .segments import Segments
from .shaping import Kept, Located, Placed, shaping_backend
from .whitening import Whitening

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def kept_tokens(inputs: PPOInputs, options: PPOOptions, placed: Placed, fault: Tensor) -> Kept:
    """Which tokens count in a batch with those faults."""
    whitens = any(definition is not None for definition in whitenings(OP, options))
    drops = options.nonfinite == "drop" or (whitens and options.nonfinite != "zero")
    return shaping_backend(inputs.backend).kept(inputs.call, placed, fault, slots=options.score_at == "post_eos", drops=drops)


def whitened(
    inputs: PPOInputs,
    report: PPOReport,
    name: str,
    numbers: Tensor,
    counted: Tensor | None,
    written: Tensor | None,
    definition: Whitening,
    group: ProcessGroup | None,
) -> Tensor:
    """`numbers` [N] whitened at the tokens `written` with the statistics of the tokens `counted`, which the report tells."""
    found = whitening.statistics(numbers, counted, process_group=group, backend=inputs.backend, op=OP)
    report.add_statistics(name, found)
    return whitening.apply(numbers, written, found, definition, backend=inputs.backend, op=OP)


def recursion(
    inputs: PPOInputs, options: PPOOptions, located: Located, placed: Placed, rewards: Tensor, steps: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of shaped rewards, [N] each, in the dtype of the arithmetic."""
    values = inputs.call.values
    ends = {"terminated": inputs.terminated, "truncated": inputs.truncated, "bootstrap": inputs.bootstrap}
    if options.nonfinite == "zero":
        values = _finite(values)
        ends["bootstrap"] = None if inputs.bootstrap is None else _finite(inputs.bootstrap)
    rates: dict[str, Any] = {"gamma": options.gamma, "lam": options.lam, "lam_value": options.lam_value}
    if options.length_adaptive_alpha:
        length = (options.length_adaptive_alpha * located.trainable.to(inputs.call.dtype)).clamp(min=1.0)
        rates |= {"lam": 1.0 - 1.0 / length, "lam_value": options.lam if options.lam_value is None else options.lam_value}
    shape = inputs.layout.shape
    segments = inputs.layout.boundaries
    if _needs_trimming(inputs, options):
        segments, ends, rates = _trimmed(inputs, placed, ends, rates)
    outputs = estimate(
        "gae",
        {"rewards": rewards.reshape(shape), "values": values.reshape(shape)},
        rates,
        segments=segments,
        mask=None if steps is None else steps.reshape(shape),
        masked=options.masked,
        terminated=_shaped(ends["terminated"], shape),
        truncated=_shaped(ends["truncated"], shape),
        bootstrap=_shaped(ends["bootstrap"], shape),
        dtype=inputs.call.dtype,
        backend=inputs.backend,
        op=OP,
    )
    advantages, returns = (output.flatten() for output in outputs)
    return advantages, returns


def _finite(tensor: Tensor) -> Tensor:
    return torch.nan_to_num(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def _shaped(tensor: Tensor | None, shape: torch.Size) -> Tensor | None:
    """As a caller of an estimator gives it."""
    if tensor is None:
        return None
    return tensor.flatten() if is_per_segment(tensor) else tensor.reshape(shape)


def _needs_trimming(inputs: PPOInputs, options: PPOOptions) -> bool:
    """Whether padding must be cut off a sequence, so that nothing is read there and what follows the end follows the last token."""
    if inputs.call.mask is None:
        return False
    divided = any(flag is not None and not is_per_segment(flag) for flag in (inputs.terminated, inputs.truncated, inputs.bootstrap))
    return options.masked != "skip" or (inputs.bootstrap is not None and divided)


def _trimmed(
    inputs: PPOInputs, placed: Placed, ends: Mapping[str, Tensor | None], rates: Mapping[str, Any]
) -> tuple[Segments, dict[str, Tensor | None], dict[str, Any]]:
    """Each sequence as two segments: what comes up to its last step, and padding, which has no end flags and no bootstrap."""
    bounds, count = inputs.call.boundaries, inputs.call.segments
    stops = torch.maximum(last_steps(placed) + 1, bounds[:-1])
    segments = Segments(torch.cat([torch.stack([bounds[:-1], stops], 1).flatten(), bounds[-1:]]))

    def both(tensor: Tensor, padding: Tensor) -> Tensor:
        return torch.stack([tensor.flatten(), padding.flatten()], 1).reshape(-1, 1)

    doubled = {
        name: both(tensor, torch.zeros_like(tensor)) if tensor is not None and is_per_segment(tensor) else tensor
        for name, tensor in ends.items()
    }
    per_sequence = {name: rate for name, rate in rates.items() if isinstance(rate, Tensor) and rate.shape == (count,)}
    return segments, doubled, {**rates, **{name: both(rate, rate).flatten() for name, rate in per_sequence.items()}}


def cleared(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """0 where `kept` is."""
    return tensor if kept is None else torch.where(kept != 0, tensor, 0.0)


def without_what_does_not_count(
    options: PPOOptions, kept: Kept, advantages: Tensor, returns: Tensor, rewards: Tensor, kl: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four outputs with 0 at masked tokens and in dropped sequences; passes over what is 0 there already are not made."""
    if options.nonfinite == "drop":
        return (
            cleared(advantages, kept.counted),
            cleared(returns, kept.counted_steps),
            cleared(rewards, kept.counted_steps),
            cleared(kl, kept.counted),
        )
    if options.masked == "keep":
        rewards = cleared(rewards, kept.steps)
    if options.score_at == "post_eos":
        advantages = cleared(advantages, kept.trainable)
    return advantages, returns, rewards, kl
