"""What the tests of the Ray door ask for, good and bad, and how they compare what they get."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_scan import CreditRequest, CreditResult, LocalEngine
from rlhf_scan.estimators import Estimator
from rlhf_scan.requests import options

REFERENCE = LocalEngine("reference")
SMALL = {"num_cpus": 0.1, "backend": "reference"}  # the reference needs no compilation, so that actors answer at once


def request_for(entry: Estimator, layout: str = "rows", dtype: torch.dtype = torch.float32) -> CreditRequest:
    """A request with every tensor argument that `entry` takes."""
    random = torch.Generator().manual_seed(5)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    shape, segments = ((3, 7), 3) if layout == "rows" else ((21,), 4)
    actions = entry.expectation or ()
    tensors = {name: floats(*shape, 3) if name in actions else floats(*shape) for name in entry.arguments}
    tensors |= {name: torch.rand(segments, generator=random).to(dtype) for name in entry.rates}
    tensors |= {name: torch.rand(shape, generator=random) < 0.5 for name in entry.takes}
    if entry.end_name is not None:
        tensors[entry.end_name] = floats(segments)
    if layout == "pack":
        tensors["cu_seqlens"] = torch.tensor([0, 5, 5, 6, 21])
    return CreditRequest(entry.name, tensors, {name: words[-1] for name, words in options(entry).items()})


def returns_of(reward: float, tokens: int = 4) -> CreditRequest:
    """A request whose answer is `reward` at the last token."""
    rewards = torch.zeros(tokens)
    rewards[-1] = reward
    return CreditRequest("discounted_returns", {"rewards": rewards}, {"gamma": 0.0})


def slow(reward: float = 1.0, tokens: int = 200_000) -> CreditRequest:
    """One that keeps the reference backend busy for a while."""
    return returns_of(reward, tokens)


def reward_of(result: CreditResult) -> float:
    return float(result.tensors["returns"][-1])


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(result: CreditResult, expected: CreditResult) -> None:
    assert list(result.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        got = result.tensors[name]
        assert (got.dtype, got.shape, got.device) == (tensor.dtype, tensor.shape, tensor.device), name
        assert bits(got) == bits(tensor), name


BAD = {
    "shape": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(5)}),
    "op": CreditRequest("gea", {"rewards": torch.zeros(4)}),
    "missing": CreditRequest("gae", {"rewards": torch.zeros(4)}),
    "tensor name": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4), "value": torch.zeros(4)}),
    "parameter": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4)}, {"gamma": 1.5}),
    "parameter name": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4)}, {"lambda": 1.0}),
    "parameter kind": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4)}, {"gamma": "0.9"}),
    "dtype": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4, dtype=torch.int64)}),
    "not a tensor": CreditRequest("gae", {"rewards": [0.0, 1.0], "values": torch.zeros(2)}),  # type: ignore[dict-item]
    "boundaries": CreditRequest("discounted_returns", {"rewards": torch.zeros(4), "cu_seqlens": torch.tensor([0, 3, 2, 4])}),
    "complex": CreditRequest("discounted_returns", {"rewards": torch.zeros(4, dtype=torch.complex64)}),
    "8 bits": CreditRequest("discounted_returns", {"rewards": torch.zeros(4).to(torch.float8_e4m3fn)}),
}
