"""accelerated-scan's CUDA kernel: the plain recurrence x_t = tokens_t + gates_t * x_{t-1} over rows of a power of two."""

from __future__ import annotations

from torch import Tensor

from ..batches import Batch
from ..works import Work
from . import Prepared, Provider, register
from .peers import importable, imported, needs_cuda

MODULE = "accelerated_scan.warp"


def prepare(batch: Batch) -> Prepared:
    """Its forward function, [1, rows, T]."""
    scan = imported(MODULE).scan_forward
    batch = batch.rows()
    gates, tokens = batch.tensors["b"][None], batch.tensors["a"][None]

    def run() -> Tensor:
        found: Tensor = scan(gates, tokens)
        return found

    return Prepared(run, lambda x: {"x": x})


def refuses(work: Work) -> str | None:
    """What its kernel is compiled for."""
    if work.length & (work.length - 1) or not 32 <= work.length <= 65536:
        return "it takes rows of a power of two from 32 to 65536"
    return None


register(
    Provider(
        "accelerated-scan",
        prepare,
        needs_cuda(lambda: importable(MODULE)),
        frozenset({"linear_scan"}),
        refuses,
        build=lambda: imported(MODULE),
        about="its `warp` kernel",
    )
)
