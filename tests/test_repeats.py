"""A call like an earlier one is neither checked nor prepared again, and still is the call that it is: its own results, its own errors."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import rlhf_scan
from rlhf_scan import InputError, Segments, repeats
from rlhf_scan.dispatch import estimate
from rlhf_scan.estimators import Estimator, estimator, register, served, unregister

ROWS, LENGTH = 3, 5
FAST = ("cpu", "triton")  # the backends that prepare
Arguments = dict[str, Any]


def forget() -> None:
    repeats._known.clear()
    repeats._solvers.clear()


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    forget()
    yield
    forget()


def arguments(entry: Estimator, backend: str, seed: int = 0, segments: Segments | None = None) -> Arguments:
    """A call of `estimate` with every optional tensor; other numbers for every seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, LENGTH) if segments is None else (ROWS * LENGTH,)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device_of(backend))

    return {
        "name": entry.name,
        "tensors": {key: normal(*shape, *((2,) if key in entry.per_action else ())) for key in entry.arguments},
        "rates": {key: None if rate.default is None else 0.2 + 0.6 / (1 + seed) for key, rate in entry.rates.items()},
        "segments": segments,
        "bootstrap": None if entry.end_name is None else normal(ROWS),
        "backend": backend,
        **{key: normal(*shape) > 0 for key in entry.takes},
    }


def fresh(call: Arguments) -> tuple[Tensor, ...]:
    """Its outputs where nothing came before it."""
    forget()
    return estimate(**call)


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for output, other in zip(found, expected, strict=True):
        assert (output.shape, output.dtype, output.requires_grad) == (other.shape, other.dtype, False)
        assert torch.equal(output, other)


@pytest.mark.parametrize("lengths", [None, [5, 0, 10]], ids=["rows", "pack"])
@pytest.mark.parametrize("name", [entry.name for entry in served()])
@pytest.mark.parametrize("backend", FAST)
def test_a_repeat_has_its_own_results(name: str, backend: str, lengths: list[int] | None) -> None:
    entry = estimator(name)
    segments = None if lengths is None else Segments.from_lengths(lengths)
    second = arguments(entry, backend, 1, segments)
    expected = fresh(second)
    fresh(arguments(entry, backend, 0, segments))
    assert len(repeats._known) == (not entry.per_action)
    assert_same(estimate(**second), expected)
    assert len(repeats._known) == (not entry.per_action), "it was a repeat, or one that no other is like"
    assert len(repeats._solvers) == bool(entry.per_action), "what its backend made was there"


def with_tensor(name: str, change: Callable[[Tensor], Any]) -> Callable[[Arguments], Arguments]:
    return lambda call: {**call, "tensors": {**call["tensors"], name: change(call["tensors"][name])}}


def with_rate(name: str, rate: Any) -> Callable[[Arguments], Arguments]:
    def changed(call: Arguments) -> Arguments:
        value = rate(call["tensors"]["rewards"]) if callable(rate) else rate
        return {**call, "rates": {**call["rates"], name: value}}

    return changed


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


def elsewhere(tensor: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


CHANGES: dict[str, Callable[[Arguments], Arguments]] = {
    "other numbers": with_rate("gamma", 0.123),
    "an int": with_rate("gamma", 1),
    "another int": with_rate("gamma", 0),
    "a rate for all": with_rate("gamma", lambda like: torch.tensor(0.3, device=like.device)),
    "a rate per segment": with_rate("gamma", lambda like: torch.rand(ROWS, device=like.device)),
    "a rate per token": with_rate("gamma", torch.rand_like),
    "an expanded rate": with_rate("gamma", lambda like: torch.rand(ROWS, 1, device=like.device).expand(ROWS, LENGTH)),
    "a second lambda": with_rate("lam_value", 0.5),
    "float64": with_tensor("values", Tensor.double),
    "bfloat16": with_tensor("rewards", Tensor.bfloat16),
    "strided": with_tensor("values", strided),
    "unaligned": with_tensor("rewards", elsewhere),
    "in a graph": with_tensor("values", lambda tensor: tensor.clone().requires_grad_()),
    "a parameter": with_tensor("values", lambda tensor: torch.nn.Parameter(tensor.clone())),
    "negated": with_tensor("rewards", torch._neg_view),
    "masked": lambda call: {**call, "masked": "zero"},
    "dtype": lambda call: {**call, "dtype": torch.float16},
    "no mask": lambda call: {**call, "mask": None},
    "a mask of ints": lambda call: {**call, "mask": call["mask"].int() * 2},
    "flags per segment": lambda call: {**call, "terminated": call["terminated"][:, -1].contiguous()},
    "strided flags per segment": lambda call: {**call, "terminated": call["terminated"][:, -1]},
    "no flags": lambda call: {**call, "terminated": None, "truncated": None},
    "swapped flags": lambda call: {**call, "terminated": None},
    "no bootstrap": lambda call: {**call, "bootstrap": None},
    "a bootstrap per token": lambda call: {**call, "bootstrap": call["tensors"]["values"] + 1},
    "fully checked": lambda call: {**call, "validate": "full"},
    "one row": lambda call: {**call, "segments": Segments.from_lengths([15]), "bootstrap": None},
    "a pack": lambda call: {**call, "segments": Segments.from_lengths([7, 0, 8])},
    "another pack": lambda call: {**call, "segments": Segments.from_lengths([2, 12, 1])},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", FAST)
def test_a_call_that_differs_is_no_repeat(change: str, backend: str) -> None:
    """Whatever came before it, also the same once more and the other one again."""
    first = arguments(estimator("gae"), backend)
    second = CHANGES[change](first)
    expected_first, expected = fresh(first), fresh(second)
    forget()
    for call, outputs in ((first, expected_first), (second, expected), (second, expected), (first, expected_first), (second, expected)):
        assert_same(estimate(**call), outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_rate("gamma", 1.5), r"gamma must lie in \[0, 1\], got 1.5"),
        (with_rate("gamma", -1), r"gamma must lie in \[0, 1\], got -1"),
        (with_rate("gamma", math.nan), r"gamma must lie in \[0, 1\], got nan"),
        (with_rate("gamma", True), "gamma must be a number or a tensor, got bool"),
        (with_rate("gamma", None), "gamma must be a number or a tensor, got NoneType"),
        (with_tensor("values", lambda tensor: tensor[:, :-1]), r"values must have shape \[3, 5\]"),
        (with_tensor("values", lambda tensor: tensor.T), "transpose it"),
        (with_tensor("values", Tensor.long), "values must be float32"),
        (with_tensor("values", lambda tensor: tensor.tolist()), "values must be a torch.Tensor, got list"),
        (lambda call: {**call, "masked": ["skip"]}, "masked must be one of"),
        (lambda call: {**call, "masked": "no"}, "masked must be one of"),
        (lambda call: {**call, "dtype": torch.int32}, "dtype must be one of"),
        (lambda call: {**call, "backend": {}}, "backend must be one of"),
        (lambda call: {**call, "bootstrap": call["bootstrap"][:-1]}, "bootstrap must have shape"),
        (lambda call: {**call, "segments": Segments.from_lengths([7, 7])}, "segments must cover the 15 tokens"),
        (lambda call: {**call, "segments": [7, 8]}, "segments must be a Segments, got list"),
    ],
)
def test_errors_after_a_good_call(change: Callable[[Arguments], Arguments], message: str) -> None:
    good = arguments(estimator("gae"), "cpu")
    estimate(**good)
    for _ in range(2):
        with pytest.raises(InputError, match=f"^gae: .*{message}"):
            estimate(**change(good))
        estimate(**good)


@pytest.mark.parametrize("backend", FAST)
def test_no_tensor_is_kept(backend: str) -> None:
    call = arguments(estimator("gae"), backend)
    for _ in range(2):
        estimate(**call)
    assert repeats._known
    kept = [weakref.ref(tensor) for tensor in (*call["tensors"].values(), call["mask"], call["bootstrap"])]
    del call
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_KEPT", 4)
    for length in (1, 2, 3, 4, 5, 6):
        rlhf_scan.discounted_returns(torch.ones(length), backend="cpu")
    assert len(repeats._known) == 4
    assert rlhf_scan.discounted_returns(torch.ones(1), backend="cpu").tolist() == [1.0]


def test_an_estimator_that_took_a_name_over_is_another() -> None:
    call: Arguments = {"name": "taken", "tensors": {"rewards": torch.ones(3)}, "rates": {"gamma": 0.5}, "backend": "cpu"}
    found = []
    for source in ("discounted_returns", "eligibility_traces"):
        entry = estimator(source)
        inputs, rates = ("rewards",), {"gamma": entry.rates["gamma"]}
        forward = replace(estimator("discounted_returns"), name="taken", inputs=inputs, rates=rates, reverse=entry.reverse, end="none")
        register(forward)
        try:
            found.append([estimate(**call)[0].tolist() for _ in range(2)])
        finally:
            unregister("taken")
    assert found == [[[1.75, 1.5, 1.0]] * 2, [[1.0, 1.5, 1.75]] * 2]


class Seen(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


def test_who_watches_sees_an_op() -> None:
    call = arguments(estimator("gae"), "cpu")
    expected = fresh(call)
    with Seen() as seen:
        assert_same(estimate(**call), expected)
    assert seen.names.count("rlhf_scan.estimate.default") == 1
    traced = make_fx(lambda rewards: rlhf_scan.discounted_returns(rewards, backend="cpu"))(torch.ones(3))
    assert [node.target for node in traced.graph.nodes].count(torch.ops.rlhf_scan.estimate.default) == 1
    assert traced(torch.full((3,), 2.0)).tolist() == [6.0, 4.0, 2.0]
