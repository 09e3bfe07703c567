"""Engines: where requests are run. `execute` runs many at once; each gets the bits it would get alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from .backend_choice import choose_backend
from .batching import Batch, batches
from .dispatch import estimate, made_choices
from .errors import InputError
from .estimators import Estimator, estimator
from .operations import Operation
from .requests import CreditRequest, CreditResult, call_arguments, check_names, estimate_arguments
from .segments import Segments
from .version import __version__


class Engine(Protocol):
    """Something that runs requests: here, in a Ray actor, behind HTTP. Integrations know nothing else of where the work is done."""

    def run(self, request: CreditRequest) -> CreditResult:
        """Run one request; raises InputError for a bad one, EngineError where the engine could not do the work."""
        ...


class LocalEngine:
    """Runs requests in this process.

    Args:
        backend: as in `gae`.
        validate: as in `gae`.
    """

    def __init__(self, backend: str = "auto", validate: str = "shapes") -> None:
        self.backend = backend
        self.validate = validate

    def run(self, request: CreditRequest) -> CreditResult:
        """Run one request."""
        return execute([request], backend=self.backend, validate=self.validate)[0]


def execute(requests: Sequence[CreditRequest], *, backend: str = "auto", validate: str = "shapes") -> list[CreditResult]:
    """Run many requests, those that can share a launch in one; each result has exactly the bits it would have alone.

    Raises:
        InputError: a request is wrong. No result is returned then: run untrusted requests one by one.
        BackendError: the backend cannot run here.
    """
    if isinstance(requests, CreditRequest) or not isinstance(requests, Iterable):
        raise InputError(f"execute: requests must be a list of CreditRequest, got {type(requests).__name__}; pass [request] for one")
    requests = list(requests)
    results: dict[int, CreditResult] = {}
    entries = [check_names(request) for request in requests]
    sharing = [index for index, entry in enumerate(entries) if entry.run is None]
    calls = [estimate_arguments(requests[index]) for index in sharing]
    for batch in batches(calls):
        try:
            shared = _run(batch, backend, validate)
        except InputError:
            for member in batch.members:  # alone, so that the error counts the tokens of the request that is wrong
                _run(batches([calls[member]])[0], backend, validate)
            raise
        results |= {sharing[member]: result for member, result in zip(batch.members, shared, strict=True)}
    for index, entry in enumerate(entries):
        if entry.run is not None:
            results[index] = _run_alone(entry, entry.run, requests[index], backend, validate)
    return [results[index] for index in range(len(requests))]


def _run_alone(entry: Operation, run: Callable[..., Any], request: CreditRequest, backend: str, validate: str) -> CreditResult:
    """A request that shares nothing: what it computes may depend on all its tokens together."""
    arguments = call_arguments(request)
    started = time.perf_counter()
    where = {"backend": backend, "validate": validate} if entry.takes_backend else {}
    found = run(**arguments, **where)
    outputs = found._asdict() if hasattr(found, "_asdict") else {entry.outputs[0]: found}
    tensors = {name: outputs[name] for name in entry.outputs}
    first = request.tensors[entry.required[0]]
    report = _report(started, first.device, choose_backend(backend, first.device) if entry.takes_backend else "torch", 0)
    segments: Segments | None = arguments.get("segments")
    count = segments.count if segments is not None else (1 if first.dim() < 2 else len(first))
    extra = {} if entry.report is None else entry.report(found)
    return CreditResult(tensors, {**report, "segments": count, "tokens": first.numel(), **extra})


def _run(batch: Batch, backend: str, validate: str) -> list[CreditResult]:
    arguments = batch.arguments
    entry = estimator(arguments["name"])
    started = time.perf_counter()
    outputs = estimate(**arguments, backend=backend, validate=validate)
    device = outputs[0].device
    chosen = choose_backend(backend, device)
    report = _report(started, device, chosen, len(batch.members) - 1)
    parts = batch.split(outputs)
    counts = _counts(entry, batch, chosen)
    return [
        CreditResult(dict(zip(entry.outputs, tensors, strict=True)), {**report, "segments": segments, "tokens": tokens, **counted})
        for tensors, (segments, tokens), counted in zip(parts, batch.sizes, counts, strict=True)
    ]


def _report(started: float, device: torch.device, backend: str, shared_with: int) -> dict[str, Any]:
    """What each result says of how it was made, once it is."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return {
        "backend": backend,
        "device": str(device),
        "milliseconds": round((time.perf_counter() - started) * 1e3, 3),
        "shared_with": shared_with,
        "version": __version__,
    }


def _counts(entry: Estimator, batch: Batch, backend: str) -> list[dict[str, int]]:
    """What `Estimator.counts` counts at the trainable tokens of each member."""
    counted: list[dict[str, int]] = [{} for _ in batch.members]
    tensors = batch.arguments["tensors"] | (made_choices(entry, batch.arguments["tensors"], backend) if entry.counts else {})
    for name, where in entry.counts.items():
        found = where(tensors)
        if batch.arguments["mask"] is not None:
            found = found & (batch.arguments["mask"] != 0)
        for member, (part,) in zip(counted, batch.split([found]), strict=True):
            member[name] = int(part.sum())
    return counted
