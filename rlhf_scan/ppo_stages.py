"""The stages of `ppo_advantages` around the recursion: which tokens count, whitening, what is cleared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import whitening
from .ppo_inputs import OP, PPOInputs
from .ppo_options import PPOOptions, whitenings
from .shaping import Kept, Sequences, shaping_backend
from .whitening import Whitening

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def kept_tokens(inputs: PPOInputs, options: PPOOptions, sequences: Sequences, fault: Tensor | None) -> Kept:
    """Which tokens count in a batch with those faults; None: whatever they are."""
    whitens = any(definition is not None for definition in whitenings(OP, options))
    drops = fault is not None and (options.nonfinite == "drop" or (whitens and options.nonfinite != "zero"))
    found = sequences.fault if fault is None else fault
    return shaping_backend(inputs.backend).kept(inputs.call, sequences.placed, found, slots=options.score_at == "post_eos", drops=drops)


def whitened(
    inputs: PPOInputs, numbers: Tensor, found: Tensor, written: Tensor | None, definition: Whitening, dtype: torch.dtype | None = None
) -> Tensor:
    """`numbers` [N] whitened at the tokens `written` with the statistics `found`."""
    return whitening.apply(numbers, written, found, definition, dtype=dtype, backend=inputs.backend, op=OP)


def statistics(
    inputs: PPOInputs, numbers: Tensor, counted: Tensor | None, group: ProcessGroup | None, found: Tensor | None = None
) -> Tensor:
    """Those of the tokens `counted`, if this rank has not `found` them yet, over all ranks."""
    if found is None:
        found = whitening.statistics(numbers, counted, backend=inputs.backend, op=OP)
    return whitening.over_ranks(found, group, backend=inputs.backend)


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
