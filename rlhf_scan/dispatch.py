"""From a caller's arguments to a backend: resolve, validate, dispatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks, ops, repeats
from .backend_choice import backend_module, choose_backend
from .call import BACKENDS, BOUNDARIES, MASK_MODES, Call, channel_rates
from .contents import check_contents
from .estimators import Estimator, estimator
from .segments import Segments


def estimate(
    name: str,
    tensors: Mapping[str, Any],
    rates: Mapping[str, Any],
    *,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    masked: str = "skip",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
    boundary: str = "ends_at",
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
    op: str | None = None,
) -> tuple[Tensor, ...]:
    """Run the estimator `name`; every public function and every engine ends here.

    `bootstrap` is its value after the end, whatever it calls it; `op` is what messages call the estimator.
    """
    op = op or name
    entry = estimator(name)
    given = *tensors.values(), mask, terminated, truncated, bootstrap, *rates.values()
    key = None
    if validate == "shapes" and not repeats.intercepted():
        key = repeats.key_of((entry, op, masked, boundary, dtype, backend, *tensors, *rates), given, segments)
        repeated = None if key is None else repeats.run(key, given, segments)
        if repeated is not None:
            return tuple(repeated)
    checks.check_option(op, "backend", backend, BACKENDS)
    checks.check_option(op, "masked", masked, MASK_MODES)
    checks.check_option(op, "boundary", boundary, BOUNDARIES)
    checks.check_option(op, "validate", validate, ("shapes", "full"))
    checks.check_dtype(op, dtype)
    if entry.choices:
        tensors = checks.check_choices(op, entry, tensors)
    layout = checks.resolve_layout(op, entry, tensors[entry.inputs[0]], segments)
    chosen = choose_backend(backend, layout.device, op)
    inputs = _inputs(layout, entry, tensors, chosen)
    resolved = {
        key: None if rates[key] is None and rate.default is None else checks.resolve_rate(layout, key, rates[key], rate.largest)
        for key, rate in entry.rates.items()
    }
    call = Call(
        estimator=entry,
        inputs=tuple(inputs),
        rates=channel_rates(entry, list(resolved.values())),
        segments=layout.segments,
        length=layout.length,
        cu_seqlens=None if layout.boundaries is None else layout.boundaries.on(layout.device),
        mask=checks.resolve_flag(layout, "mask", mask, segment_form=False),
        masked=masked,
        terminated=checks.resolve_flag(layout, "terminated", terminated, segment_form=True),
        truncated=checks.resolve_flag(layout, "truncated", truncated, segment_form=True),
        bootstrap=checks.resolve_end(layout, entry, bootstrap),
        starts=boundary == "starts_at",
        dtype=dtype or _output_dtype([tensor for tensor in tensors.values() if tensor.is_floating_point()]),
    )
    if validate == "full":
        check_contents(layout, call, {key: rate for key, rate in resolved.items() if isinstance(rate, Tensor)}, tensors)
    names = *tensors, "mask", "terminated", "truncated", "bootstrap", *rates
    outputs = ops.through_op(call, list(resolved.values()), chosen) if key is None else _directly(call, chosen, key, names, given)
    return tuple(output.reshape(layout.shape) for output in outputs)


def _inputs(layout: checks.Layout, entry: Estimator, tensors: Mapping[str, Any], backend: str) -> list[Tensor]:
    """The estimator's inputs, [N] each."""
    if not entry.per_action:
        return [checks.per_token(layout, key, tensors[key]) for key in entry.inputs]
    per_action = checks.per_action(layout, [key for key in entry.per_action if key in tensors], tensors)
    made: dict[str, Tensor] = {}
    if entry.expectation is not None and entry.continuation is not None:
        made[entry.continuation] = ops.expectation(per_action[entry.expectation[0]], per_action[entry.expectation[1]], backend)
    chosen = {key: checks.per_token_action(layout, key, tensors[key]) for _, key in entry.choices.values() if key in tensors}
    made |= made_choices(entry, {**tensors, **per_action, **chosen}, backend)
    return [made[key] if key in made else checks.per_token(layout, key, tensors[key]) for key in entry.inputs]


def made_choices(entry: Estimator, tensors: Mapping[str, Tensor], backend: str) -> dict[str, Tensor]:
    """The inputs that checked `tensors` give as probabilities and actions, in the shape of the actions."""
    made: dict[str, Tensor] = {}
    for key, (probabilities, actions) in entry.choices.items():
        if key not in tensors:
            logprobs = ops.chosen_logprobs(tensors[probabilities], tensors[actions].contiguous().flatten(), backend)
            made[key] = logprobs.reshape(tensors[actions].shape)
    return made


def _output_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    dtype = inputs[0].dtype
    for tensor in inputs[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _directly(call: Call, backend: str, key: repeats.Key, names: Sequence[str], given: Sequence[Any]) -> Sequence[Tensor]:
    """The outputs of `call`; what its backend made for it is there for the next one like it."""
    solve = repeats.solver(key)
    if solve is not None:
        return solve(call.tensors)
    module = backend_module(backend)
    solve = module.prepare(call) if call.tokens else None
    if solve is None:
        return ops.run(call, module)
    outputs = solve(call.tensors)
    repeats.remember(key, call, names, given, solve)
    return outputs
