"""The torch.library ops through which a call passes where something traces or intercepts it, so that it is one opaque node there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import checks
from .backend_choice import Backend, backend_module
from .call import Call, channel_rates
from .estimators import Estimator, estimator
from .repeats import intercepted
from .segments import Segments

_NOT_GIVEN = -1.0  # no rate is negative; an op's schema has no list of optional floats

_SCHEMA = (
    "estimate(str name, Tensor[] inputs, Tensor?[] rate_tensors, float[] rate_numbers, SymInt segments, SymInt? length, Tensor? cu_seqlens, "
    "Tensor? mask, str masked, Tensor? terminated, Tensor? truncated, Tensor? bootstrap, bool starts, ScalarType dtype, str backend) -> Tensor[]"
)
_library = torch.library.Library("rlhf_scan", "DEF")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.define("expectation(Tensor values, Tensor probabilities, str backend) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define("chosen_logprobs(Tensor probabilities, Tensor actions, str backend) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def op(name: str, directly: Callable[..., Tensor], *tensors: Tensor | None) -> Callable[..., Tensor]:
    """The op of that name; what it does, where nothing watches operators: a call of an op takes longer than a small launch."""
    watched = intercepted() or any(tensor is not None and (type(tensor) is not Tensor or tensor.is_neg()) for tensor in tensors)
    found: Callable[..., Tensor] = getattr(torch.ops.rlhf_scan, name) if watched else directly
    return found


def expectation(values: Tensor, probabilities: Tensor, backend: str) -> Tensor:
    """Sum over the actions, the last dimension, of values * probabilities, [N]."""
    return op("expectation", _expectation_op, values, probabilities)(values, probabilities, backend)


def chosen_logprobs(probabilities: Tensor, actions: Tensor, backend: str) -> Tensor:
    """The logarithm of the probability of each of the `actions` [N]."""
    return op("chosen_logprobs", _chosen_logprobs_op, probabilities, actions)(probabilities, actions, backend)


def run(call: Call, module: Backend) -> list[Tensor]:
    """The outputs, [N] each; no backend sees a call without tokens."""
    return module.run(call) if call.tokens else _empty_outputs(call.estimator, call.inputs[0], call.dtype)


def through_op(call: Call, rates: Sequence[float | Tensor | None], backend: str) -> list[Tensor]:
    """Run `call` as a torch op, so that torch.compile and torch.export see one opaque node."""
    outputs: list[Tensor] = torch.ops.rlhf_scan.estimate(
        call.estimator.name,
        list(call.inputs),
        [rate if isinstance(rate, Tensor) else None for rate in rates],
        [rate if isinstance(rate, float) else _NOT_GIVEN for rate in rates],
        call.segments,
        call.length,
        call.cu_seqlens,
        call.mask,
        call.masked,
        call.terminated,
        call.truncated,
        call.bootstrap,
        call.starts,
        call.dtype,
        backend,
    )
    return outputs


def _estimate_op(
    name: str,
    inputs: list[Tensor],
    rate_tensors: list[Tensor | None],
    rate_numbers: list[float],
    segments: int,
    length: int | None,
    cu_seqlens: Tensor | None,
    mask: Tensor | None,
    masked: str,
    terminated: Tensor | None,
    truncated: Tensor | None,
    bootstrap: Tensor | None,
    starts: bool,
    dtype: torch.dtype,
    backend: str,
) -> list[Tensor]:
    entry: Estimator = estimator(name)
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":  # made where torch traced, they could not be checked before
        boundaries = Segments(cu_seqlens)
        boundaries.check(name)
        checks.check_total(name, entry.inputs[0], boundaries, inputs[0].numel())
    rates = [
        tensor if tensor is not None else (None if number == _NOT_GIVEN else number)
        for tensor, number in zip(rate_tensors, rate_numbers, strict=True)
    ]
    call = Call(
        estimator=entry,
        inputs=tuple(inputs),
        rates=channel_rates(entry, rates),
        segments=segments,
        length=length,
        cu_seqlens=cu_seqlens,
        mask=mask,
        masked=masked,
        terminated=terminated,
        truncated=truncated,
        bootstrap=bootstrap,
        starts=starts,
        dtype=dtype,
    )
    return run(call, backend_module(backend))


def _expectation_op(values: Tensor, probabilities: Tensor, backend: str) -> Tensor:
    if values.numel() == 0:
        return _expectation_fake(values, probabilities, backend)
    return backend_module(backend).expectation(values, probabilities, _at_least_float32(values, probabilities))


def _expectation_fake(values: Tensor, probabilities: Tensor, backend: str) -> Tensor:
    return values.new_empty(values.shape[:-1].numel(), dtype=_at_least_float32(values, probabilities))


def _chosen_logprobs_op(probabilities: Tensor, actions: Tensor, backend: str) -> Tensor:
    if actions.numel() == 0:
        return _chosen_logprobs_fake(probabilities, actions, backend)
    return backend_module(backend).chosen_logprobs(probabilities, actions, _at_least_float32(probabilities))


def _chosen_logprobs_fake(probabilities: Tensor, actions: Tensor, backend: str) -> Tensor:
    return torch.empty_like(actions, dtype=_at_least_float32(probabilities))


def _at_least_float32(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _empty_outputs(entry: Estimator, like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(like, dtype=dtype) for _ in entry.outputs]


def _estimate_fake(name: str, inputs: list[Tensor], *rest: Any) -> list[Tensor]:
    return _empty_outputs(estimator(name), inputs[0], rest[-2])


_library.impl("estimate", _estimate_op, "CompositeExplicitAutograd")
torch.library.register_fake("rlhf_scan::estimate", _estimate_fake, lib=_library)
_library.impl("expectation", _expectation_op, "CompositeExplicitAutograd")
torch.library.register_fake("rlhf_scan::expectation", _expectation_fake, lib=_library)
_library.impl("chosen_logprobs", _chosen_logprobs_op, "CompositeExplicitAutograd")
torch.library.register_fake("rlhf_scan::chosen_logprobs", _chosen_logprobs_fake, lib=_library)
