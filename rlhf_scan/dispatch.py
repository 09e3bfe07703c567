"""From a caller's arguments to a backend: resolve, validate, dispatch. Also the one torch.library op through which every call passes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from . import checks, repeats
from .call import BACKENDS, BOUNDARIES, MASK_MODES, Call, Solver, channel_rates
from .contents import check_contents
from .errors import BackendError
from .estimators import Estimator, estimator
from .segments import Segments

_NOT_GIVEN = -1.0  # no rate is negative; the op's schema has no list of optional floats


class Backend(Protocol):
    """A module of `rlhf_scan.backends`."""

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run tensors of `device` here, with the remedy; None if it can."""
        ...

    def run(self, call: Call) -> list[Tensor]:
        """One [N] tensor of ``call.dtype`` per output."""
        ...

    def prepare(self, call: Call) -> Solver | None:
        """What runs every call with the shapes, dtypes and options of `call`, which it does not keep; None if `run` is as fast."""
        ...

    def expectation(self, values: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum over the actions, [.., A] -> [N], of values * probabilities; an action of probability 0 adds 0, whatever its value."""
        ...

    def chosen_logprobs(self, probabilities: Tensor, actions: Tensor, dtype: torch.dtype) -> Tensor:
        """log probabilities[.., actions], [.., A] and integers [N] -> [N]; NaN where an action is none of the A, which is never read."""
        ...


@lru_cache
def backend_module(name: str) -> Backend:
    """The module behind a backend's name; BackendError where what it needs is not installed."""
    try:
        return cast(Backend, importlib.import_module(f".backends.{name}_backend", __package__))
    except ImportError as error:
        raise BackendError(f"backend {name!r} needs {error.name}, which is not installed; install it or choose another backend") from error


def choose_backend(name: str, device: torch.device) -> str:
    """The backend that runs, given what was asked for: "auto" is triton for CUDA tensors, else cpu. Raises BackendError if it cannot."""
    chosen = name if name != "auto" else ("triton" if device.type == "cuda" else "cpu")
    reason = backend_module(chosen).why_not(device)
    if reason is not None:
        raise BackendError(f"backend {chosen!r} {reason}")
    return chosen


# torch.compile cannot trace an import. This is torch.compiler.assume_constant_result, which itself imports torch._dynamo: as long as torch.
choose_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
    names = *tensors, "mask", "terminated", "truncated", "bootstrap", *rates
    given = *tensors.values(), mask, terminated, truncated, bootstrap, *rates.values()
    key = None
    if validate == "shapes" and not repeats.intercepted():
        key = repeats.key_of((entry, op, masked, boundary, dtype, backend, *names), given, segments)
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
    chosen = choose_backend(backend, layout.device)
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
    outputs: Sequence[Tensor]
    if key is None:
        outputs = _through_op(call, list(resolved.values()), chosen)
    else:
        outputs, solve = _directly(call, chosen)
        if solve is not None:
            repeats.remember(key, call, names, given, solve)
    return tuple(output.reshape(layout.shape) for output in outputs)


def _inputs(layout: checks.Layout, entry: Estimator, tensors: Mapping[str, Any], backend: str) -> list[Tensor]:
    """The estimator's inputs, [N] each."""
    if not entry.per_action:
        return [checks.per_token(layout, key, tensors[key]) for key in entry.inputs]
    per_action = checks.per_action(layout, [key for key in entry.per_action if key in tensors], tensors)
    made: dict[str, Tensor] = {}
    if entry.expectation is not None and entry.continuation is not None:
        made[entry.continuation] = torch.ops.rlhf_scan.expectation(*(per_action[key] for key in entry.expectation), backend)
    chosen = {key: checks.per_token_action(layout, key, tensors[key]) for _, key in entry.choices.values() if key in tensors}
    made |= made_choices(entry, {**tensors, **per_action, **chosen}, backend)
    return [made[key] if key in made else checks.per_token(layout, key, tensors[key]) for key in entry.inputs]


def made_choices(entry: Estimator, tensors: Mapping[str, Tensor], backend: str) -> dict[str, Tensor]:
    """The inputs that checked `tensors` give as probabilities and actions, in the shape of the actions."""
    made: dict[str, Tensor] = {}
    for key, (probabilities, actions) in entry.choices.items():
        if key not in tensors:
            logprobs = torch.ops.rlhf_scan.chosen_logprobs(tensors[probabilities], tensors[actions].contiguous().flatten(), backend)
            made[key] = logprobs.reshape(tensors[actions].shape)
    return made


def _output_dtype(inputs: Sequence[Tensor]) -> torch.dtype:
    dtype = inputs[0].dtype
    for tensor in inputs[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


_SCHEMA = (
    "estimate(str name, Tensor[] inputs, Tensor?[] rate_tensors, float[] rate_numbers, SymInt segments, SymInt? length, Tensor? cu_seqlens, "
    "Tensor? mask, str masked, Tensor? terminated, Tensor? truncated, Tensor? bootstrap, bool starts, ScalarType dtype, str backend) -> Tensor[]"
)
_library = torch.library.Library("rlhf_scan", "DEF")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.define("expectation(Tensor values, Tensor probabilities, str backend) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define("chosen_logprobs(Tensor probabilities, Tensor actions, str backend) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _directly(call: Call, backend: str) -> tuple[Sequence[Tensor], Solver | None]:
    """The outputs of `call`, and what its backend made to run others like it."""
    module = backend_module(backend)
    solve = module.prepare(call) if call.tokens else None
    return (_run(call, module) if solve is None else solve(call.tensors)), solve


def _run(call: Call, module: Backend) -> list[Tensor]:
    return module.run(call) if call.tokens else _empty_outputs(call.estimator, call.inputs[0], call.dtype)


def _through_op(call: Call, rates: Sequence[float | Tensor | None], backend: str) -> list[Tensor]:
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
    return _run(call, backend_module(backend))


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
