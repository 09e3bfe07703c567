"""The work, without Ray: requests in, results or errors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_scan import BackendError, CreditRequest, CreditResult, EngineError, LocalEngine, RlhfScanError, execute
from rlhf_scan.requests import LAYOUTS

from .transport import PackedTensor, tensor_over


class CreditWorker:
    """Runs requests on one device; results come back on the CPU.

    A request's tensors may be torch tensors, NumPy arrays (read-only ones too) or packed for transport. None is written to.

    Args:
        backend: as in `rlhf_scan.gae`.
        validate: as in `rlhf_scan.gae`.
        device: where the work is done; tensors are moved there.

    Raises:
        BackendError: torch cannot use that device.
    """

    def __init__(self, backend: str = "auto", validate: str = "shapes", device: str = "cpu") -> None:
        self.engine = LocalEngine(backend, validate)
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise BackendError(
                f"device {device!r} needs a GPU, and torch {torch.__version__} sees none; install torch with CUDA or use the CPU"
            )

    def run(self, request: CreditRequest) -> CreditResult:
        """Run one request; raises InputError, BackendError or EngineError."""
        (answer,) = self.run_many([request])
        if isinstance(answer, RlhfScanError):
            raise answer
        return answer

    def run_many(self, requests: Sequence[CreditRequest]) -> list[CreditResult | RlhfScanError]:
        """Run requests in as few launches as possible; one that fails gets its error as the answer and spoils no other."""
        try:
            results = execute([self._here(request) for request in requests], backend=self.engine.backend, validate=self.engine.validate)
            return [_on_cpu(result) for result in results]
        except Exception as error:
            if len(requests) > 1:
                half = len(requests) // 2
                return self.run_many(requests[:half]) + self.run_many(requests[half:])
            return [_answer(requests[0], error)] if requests else []

    def _here(self, request: CreditRequest) -> CreditRequest:
        return CreditRequest(request.op, self._moved(request.tensors), self._moved(request.params))

    def _moved(self, values: Mapping[str, Any]) -> dict[str, Any]:
        # Boundaries stay on the CPU, where their contents are checked at no cost.
        return {name: _tensor(value, torch.device("cpu") if name in LAYOUTS else self.device) for name, value in values.items()}


def _tensor(value: Any, device: torch.device) -> Any:
    """Tensors and arrays as a tensor on `device`; anything else as it is, for the checks to speak of."""
    if isinstance(value, PackedTensor):
        return value.tensor().to(device)
    if isinstance(value, np.ndarray):
        try:
            return tensor_over(value).to(device)
        except (TypeError, ValueError):
            return value
    return value.to(device) if isinstance(value, Tensor) else value


def _on_cpu(result: CreditResult) -> CreditResult:
    return CreditResult({name: tensor.cpu() for name, tensor in result.tensors.items()}, result.report)


def _answer(request: CreditRequest, error: Exception) -> RlhfScanError:
    if isinstance(error, RlhfScanError):
        return error
    failed = EngineError(
        f"{getattr(request, 'op', 'request')}: the worker failed with {type(error).__name__}: {error}; "
        "send smaller requests if memory ran out, else report this as a bug"
    )
    failed.__cause__ = error
    return failed
