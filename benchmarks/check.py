"""Whether a provider computes what it should, on the very inputs that it is timed on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rlhf_scan

from .batches import Batch

ALLOWANCE = 8.0  # times the error of a float32 loop: other orders of summation, another exp


class Expected:
    """Outputs in float64, made by loops on the CPU and kept where the batch is; and how far from them an output may be.

    As far as its dtype rounds, and `ALLOWANCE` times as far as float32 arithmetic is. That is one rounding of the largest output at the least;
    how far it is for float32 loops over these inputs is found out when that does not do.
    """

    def __init__(self, batch: Batch) -> None:
        segments = None if batch.segments is None else rlhf_scan.Segments.from_cu_seqlens(batch.segments.cu_seqlens.cpu())
        self._host = batch.changed(lambda tensor: tensor.cpu(), segments=segments)
        self._rounding = torch.finfo(batch.first.dtype).eps
        self._errors: dict[str, float] | None = None
        self.outputs = {name: output.to(batch.first.device) for name, output in self._in(torch.float64).items()}
        self.largest = {name: float(output.abs().max()) if output.numel() else 0.0 for name, output in self.outputs.items()}

    def bound(self, name: str, measured: bool) -> float:
        """How far an output may be; `measured` with the error of float32 loops, else at least so far."""
        error = torch.finfo(torch.float32).eps * self.largest[name]
        if measured:
            if self._errors is None:
                single = self._in(torch.float32)
                self._errors = {name: _distance(single[name].to(want.device), want) for name, want in self.outputs.items()}
            error = max(error, self._errors[name])
        return ALLOWANCE * error + self._rounding * self.largest[name]

    def _in(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return call_ours(self._host.changed(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor), backend="cpu")


def ours(batch: Batch, **options: Any) -> Callable[..., Any]:
    """A call of our public function on the batch."""
    if batch.work.preset:
        options = {"preset": batch.work.preset, **options}
    if batch.segments is not None:
        options = {"segments": batch.segments, **options}
    return partial(getattr(rlhf_scan, batch.work.estimator), **batch.tensors, **batch.ends, **batch.rates, **options)


def named(batch: Batch, result: Any) -> dict[str, Tensor]:
    """What such a call returned, by the names of the outputs."""
    names = batch.operation.outputs
    return dict(zip(names, (result,) if isinstance(result, Tensor) else result[: len(names)], strict=True))  # a report may follow


def call_ours(batch: Batch, **options: Any) -> dict[str, Tensor]:
    """Both."""
    return named(batch, ours(batch, **options)())


def poison(batch: Batch) -> None:
    """Fill with NaN the memory that the outputs are likely to be allocated in, so that what is not written is seen."""
    kept = [torch.full_like(batch.first, math.nan) for _ in range(2 * len(batch.operation.outputs))]
    del kept


def difference(outputs: Mapping[str, Tensor], wanted: Expected, comparable: Callable[[str, Tensor], Tensor]) -> str | None:
    """How the outputs differ from what was expected, if they do; at least one must be there."""
    if not outputs:
        return "it returned nothing"
    for name, got in outputs.items():
        want = wanted.outputs[name]
        if got.numel() != want.numel():
            return f"{name} has shape {list(got.shape)}, expected {list(want.shape)}"
        error = _distance(comparable(name, got.detach().reshape(want.shape)), comparable(name, want))
        if not error <= wanted.bound(name, measured=False) and not error <= wanted.bound(name, measured=True):
            return f"{name} is off by {error:.3g}, more than {wanted.bound(name, measured=True):.3g}"
    return None


def _distance(got: Tensor, want: Tensor) -> float:
    """The largest, NaN where one is NaN."""
    return float((got.to(want.dtype) - want).abs().max()) if want.numel() else 0.0
