"""Engines: where requests are run. `execute` runs many at once; each gets the bits it would get alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from .batching import Batch, batches
from .dispatch import choose_backend, estimate, made_choices
from .errors import InputError
from .estimators import Estimator, estimator
from .requests import CreditRequest, CreditResult, estimate_arguments
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
    results: list[CreditResult | None] = [None] * len(requests)
    calls = [estimate_arguments(request) for request in requests]
    for batch in batches(calls):
        try:
            shared = _run(batch, backend, validate)
        except InputError:
            for index in batch.members:  # alone, so that the error counts the tokens of the request that is wrong
                _run(batches([calls[index]])[0], backend, validate)
            raise
        for index, result in zip(batch.members, shared, strict=True):
            results[index] = result
    return [result for result in results if result is not None]


def _run(batch: Batch, backend: str, validate: str) -> list[CreditResult]:
    arguments = batch.arguments
    entry = estimator(arguments["name"])
    started = time.perf_counter()
    outputs = estimate(**arguments, backend=backend, validate=validate)
    device = outputs[0].device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elapsed = time.perf_counter() - started
    chosen = choose_backend(backend, device)
    report = {
        "backend": chosen,
        "device": str(device),
        "milliseconds": round(elapsed * 1e3, 3),
        "shared_with": len(batch.members) - 1,
        "version": __version__,
    }
    parts = batch.split(outputs)
    counts = _counts(entry, batch, chosen)
    return [
        CreditResult(dict(zip(entry.outputs, tensors, strict=True)), {**report, "segments": segments, "tokens": tokens, **counted})
        for tensors, (segments, tokens), counted in zip(parts, batch.sizes, counts, strict=True)
    ]


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
