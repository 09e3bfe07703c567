"""What ``validate="full"`` checks of the rates of a `ppo_advantages` call. Reads the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import Call, channel_rates
from .checks import resolve_rate
from .contents import check_contents
from .errors import InputError
from .estimators import estimator
from .ppo_inputs import OP, PPOInputs
from .ppo_options import PPOOptions
from .shaping import Located, Sequences


def wrong_rates(inputs: PPOInputs, options: PPOOptions, sequences: Sequences) -> str | None:
    """What is wrong with a rate that is read, for a message; None: nothing."""
    negative = (sequences.kl_coef < 0).nonzero()
    if len(negative):
        at = int(negative[0])
        return f"kl_coef must be >= 0, got {float(sequences.kl_coef[at])} at sequence {at}; pass a value in that range"
    try:
        _check(inputs, options, sequences.located)
    except InputError as error:
        return str(error).removeprefix(f"{OP}: ")
    return None


def _check(inputs: PPOInputs, options: PPOOptions, located: Located) -> None:
    """Raise for gamma or a lambda out of its range."""
    call, entry = inputs.call, estimator("gae")
    given = {"gamma": options.gamma, "lam": options.lam, "lam_value": options.lam_value}
    rates = {name: None if rate is None else resolve_rate(inputs.layout, name, rate) for name, rate in given.items()}
    steps = call.mask
    if steps is not None and options.masked != "skip":  # all but padding
        token = torch.arange(call.tokens, device=steps.device)
        steps = token <= located.end[torch.searchsorted(call.boundaries[1:].contiguous(), token, right=True)]
    zeros = torch.zeros_like(call.values)
    alone = Call(
        estimator=entry,
        inputs=(zeros, zeros),
        rates=channel_rates(entry, list(rates.values())),
        segments=call.segments,
        length=call.length,
        cu_seqlens=call.cu_seqlens,
        mask=steps,
        masked="skip",
        terminated=inputs.terminated,
        truncated=inputs.truncated,
        bootstrap=None,
        starts=False,
        dtype=inputs.dtype,
    )
    check_contents(inputs.layout, alone, {name: rate for name, rate in rates.items() if isinstance(rate, Tensor)}, {})
