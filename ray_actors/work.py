"""What is under way: requests, and who waits for their answers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_scan import CreditRequest, CreditResult, EngineError, RlhfScanError
from rlhf_scan.requests import LAYOUTS

from .cluster import ray_module
from .transport import packed_request, unpacked_result


@dataclass(frozen=True)
class Item:
    """One request.

    Attributes:
        op: the estimator's name.
        tokens: how many.
        device: where the caller's tensors lie, and the results shall.
        stored: the packed request in Ray's object store: a snapshot, so that it can be sent again whatever the caller does meanwhile.
        future: the answer to come.
    """

    op: str
    tokens: int
    device: torch.device
    stored: Any
    future: Future[CreditResult]

    @classmethod
    def of(cls, request: CreditRequest) -> Item:
        """`request`, packed and stored."""
        tokens, device = size_and_device(request)
        future: Future[CreditResult] = Future()
        future.set_running_or_notify_cancel()
        return cls(request.op, tokens, device, ray_module().put(packed_request(request)), future)

    def settle(self, answer: CreditResult | RlhfScanError) -> None:
        """Hand the answer to whoever waits: a packed result, or an error."""
        try:
            if isinstance(answer, RlhfScanError):
                self.future.set_exception(answer)
            else:
                self.future.set_result(unpacked_result(answer, self.device))
        except Exception as error:
            self.future.set_exception(
                EngineError(f"{self.op}: the result could not be brought to {self.device}: {error}; free memory there")
            )


@dataclass(frozen=True)
class Batch:
    """Requests that go to an actor together; `deaths` counts the actors that died with them."""

    items: Sequence[Item]
    deaths: int = 0

    @property
    def tokens(self) -> int:
        """Of all items."""
        return sum(item.tokens for item in self.items)

    def alone(self) -> list[Batch]:
        """Each item by itself, after an actor died with them: the one that killed it shall not take the others along."""
        return [Batch([item], self.deaths + 1) for item in self.items]


def size_and_device(request: CreditRequest) -> tuple[int, torch.device]:
    """(numbers, device) of the largest tensor but the layout's: how many tokens a request counts for (at least 1), and where they lie."""
    sizes: list[tuple[int, torch.device]] = []
    for name, value in request.tensors.items():
        if isinstance(value, Tensor) and name not in LAYOUTS:
            sizes.append((value.numel(), value.device))
        elif isinstance(value, np.ndarray) and name not in LAYOUTS:
            sizes.append((value.size, torch.device("cpu")))
    numbers, device = max(sizes, key=lambda size: size[0], default=(1, torch.device("cpu")))
    return max(1, numbers), device
