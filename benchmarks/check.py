"""Whether a provider computes what it should, on the very inputs that it is timed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rlhf_scan

from .batches import Batch

ALLOWANCE = 8.0  # times the error of a float32 loop: other orders of summation, another exp


@dataclass(frozen=True)
class Expected:
    """Outputs in float64 on the CPU, and how far from them float32 arithmetic and the output's dtype may be."""

    outputs: Mapping[str, Tensor]
    bounds: Mapping[str, float]


def call_ours(batch: Batch, **options: Any) -> dict[str, Tensor]:
    """The public function of the batch's estimator, its results by name."""
    entry = batch.estimator
    if batch.segments is not None:
        options = {"segments": batch.segments, **options}
    result = getattr(rlhf_scan, entry.name)(**batch.tensors, **batch.ends, **batch.rates, **options)
    return dict(zip(entry.outputs, (result,) if isinstance(result, Tensor) else result, strict=True))


def expected(batch: Batch) -> Expected:
    """The float64 loop of the CPU backend, and the measured error of its float32 loop over the same inputs."""
    segments = None if batch.segments is None else rlhf_scan.Segments.from_cu_seqlens(batch.segments.cu_seqlens.cpu())
    host = batch.changed(lambda tensor: tensor.cpu(), segments=segments)
    exact = call_ours(host.changed(lambda t: t.double() if t.is_floating_point() else t), backend="cpu")
    single = call_ours(host.changed(lambda t: t.float() if t.is_floating_point() else t), backend="cpu")
    rounding = torch.finfo(batch.first.dtype).eps
    bounds = {}
    for name, want in exact.items():
        largest = float(want.abs().max()) if want.numel() else 0.0
        error = float((single[name].double() - want).abs().max()) if want.numel() else 0.0
        bounds[name] = ALLOWANCE * max(error, torch.finfo(torch.float32).eps * largest) + rounding * largest
    return Expected(exact, bounds)


def poison(batch: Batch) -> None:
    """Fill with NaN the memory that the outputs are likely to be allocated in, so that what is not written is seen."""
    kept = [torch.full_like(batch.first, math.nan) for _ in range(2 * len(batch.estimator.outputs))]
    del kept


def difference(outputs: Mapping[str, Tensor], wanted: Expected, comparable: Callable[[str, Tensor], Tensor]) -> str | None:
    """How the outputs differ from what was expected, if they do; at least one must be there."""
    if not outputs:
        return "it returned nothing"
    for name, got in outputs.items():
        want = wanted.outputs[name]
        if got.numel() != want.numel():
            return f"{name} has shape {list(got.shape)}, expected {list(want.shape)}"
        found = got.detach().cpu().double().reshape(want.shape)
        error = float((comparable(name, found) - comparable(name, want)).abs().max())
        if not error <= wanted.bounds[name]:
            return f"{name} is off by {error:.3g}, more than {wanted.bounds[name]:.3g}"
    return None
