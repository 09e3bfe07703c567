"""`execute`: what shares a launch, that it changes no bit, and what a report says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor

from rlhf_scan import CreditRequest, CreditResult, LocalEngine, __version__, engine, execute
from rlhf_scan.estimators import estimator, served

OPS = [entry.name for entry in served()]
each_op = pytest.mark.parametrize("op", OPS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each estimator that `execute` calls, in order."""
    names: list[str] = []

    def counted(name: str, *arguments: Any, **options: Any) -> Any:
        names.append(name)
        return real(name, *arguments, **options)

    real = engine.estimate
    monkeypatch.setattr(engine, "estimate", counted)
    return names


def request_for(op: str, shape: tuple[int, ...], seed: int, lengths: list[int] | None = None, **params: Any) -> CreditRequest:
    """A request with every optional tensor, by the registry; `shape` is [B, T], or [N] with or without `lengths`."""
    entry = estimator(op)
    generator = torch.Generator().manual_seed(seed)
    segments = len(lengths) if lengths is not None else 1 if len(shape) == 1 else shape[0]
    actions = entry.expectation or ()
    tensors = {name: torch.randn((*shape, 3) if name in actions else shape, generator=generator) for name in entry.arguments}
    for name, share in (("mask", 0.7), ("terminated", 0.1), ("truncated", 0.1)):
        if name in entry.takes:
            tensors[name] = torch.rand(shape, generator=generator) < share
    if entry.end_name is not None:
        tensors[entry.end_name] = torch.randn(segments, generator=generator)
    if lengths is not None:
        tensors["lengths"] = torch.tensor(lengths, dtype=torch.int64)
    return CreditRequest(op, tensors, params)


def with_tensors(request: CreditRequest, **tensors: Tensor) -> CreditRequest:
    return replace(request, tensors={**request.tensors, **tensors})


def on(request: CreditRequest, backend: str) -> CreditRequest:
    return replace(request, tensors={name: tensor.to(device_of(backend)) for name, tensor in request.tensors.items()})


def assert_same_bits(got: CreditResult, alone: CreditResult) -> None:
    assert list(got.tensors) == list(alone.tensors)
    for name, tensor in alone.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name], tensor), name
    differ = {"milliseconds", "shared_with"}
    assert {k: v for k, v in got.report.items() if k not in differ} == {k: v for k, v in alone.report.items() if k not in differ}


def mixed_layouts(op: str) -> list[CreditRequest]:
    """Requests of one estimator that can share a launch, in every layout."""
    return [
        request_for(op, (30,), 0, [7, 0, 1, 22]),
        request_for(op, (3, 9), 1),
        request_for(op, (17,), 2),
        request_for(op, (70,), 3, [66, 4]),
        request_for(op, (1, 40), 4),
    ]


@each_op
def test_all_layouts_share_one_launch_and_each_gets_its_own_bits(calls: list[str], op: str) -> None:
    requests = mixed_layouts(op)
    results = execute(requests, validate="full")
    assert calls == [op]
    for request, result in zip(requests, results, strict=True):
        first = request.tensors[estimator(op).inputs[0]]
        assert all(tensor.shape == first.shape for tensor in result.tensors.values())
        assert list(result.tensors) == list(estimator(op).outputs)
        assert result.report["shared_with"] == 4
        assert_same_bits(result, LocalEngine().run(request))


@pytest.mark.parametrize("op", ["gae", "eligibility_traces"])
def test_the_same_on_every_backend(calls: list[str], backend: str, op: str) -> None:
    requests = [on(request, backend) for request in mixed_layouts(op)]
    results = execute(requests, backend=backend)
    assert calls == [op]
    for request, result in zip(requests, results, strict=True):
        assert result.report["backend"] == backend
        assert_same_bits(result, LocalEngine(backend).run(request))


@pytest.mark.parametrize("kind", ["segment", "token"])
def test_rates_as_tensors_share_a_launch(calls: list[str], kind: str) -> None:
    requests = []
    for seed, request in enumerate(mixed_layouts("gae")):
        shape, ends = request.tensors["rewards"].shape, request.tensors["bootstrap"].shape
        generator = torch.Generator().manual_seed(seed)
        rates = {name: torch.rand(ends if kind == "segment" else shape, generator=generator) for name in ("gamma", "lam")}
        requests.append(with_tensors(request, **rates))
    results = execute(requests)
    assert calls == ["gae"]
    for request, result in zip(requests, results, strict=True):
        assert_same_bits(result, LocalEngine().run(request))


@pytest.mark.parametrize("name", ["gamma", "terminated", "bootstrap"])
def test_as_many_segments_as_tokens_together(calls: list[str], name: str) -> None:
    """A tensor per token stays one, whatever the pack of all requests looks like; one request may have as many segments as tokens by itself."""
    flag = name == "terminated"
    given = torch.tensor([[1.0, 0.0, 0.0]] if flag else [[0.5, 0.25, 0.125]])
    long = CreditRequest("discounted_returns", {"rewards": torch.ones(1, 3), name: given})
    short = CreditRequest("discounted_returns", {"rewards": torch.ones(1), "lengths": torch.tensor([1, 0, 0]), name: given[0, :1]})
    assert sum(len(request.tensors.get("lengths", [0])) for request in (long, short)) == 4  # segments, and tokens
    results = execute([long, short])
    assert calls == ["discounted_returns"]
    for request, result in zip((long, short), results, strict=True):
        assert_same_bits(result, LocalEngine().run(request))

    even = CreditRequest("discounted_returns", {"rewards": torch.ones(2), "lengths": torch.tensor([2, 0]), name: given[0, :2]})
    for request, result in zip((even, long, even), execute([even, long, even]), strict=True):
        assert_same_bits(result, LocalEngine().run(request))


def test_a_bootstrap_per_token_shares_with_its_like_alone(calls: list[str]) -> None:
    per_token = [with_tensors(request_for("gae", (2, 9), seed), bootstrap=torch.full((2, 9), float(seed))) for seed in range(2)]
    requests = [per_token[0], request_for("gae", (2, 9), 5), per_token[1]]
    results = execute(requests)
    assert calls == ["gae", "gae"]
    assert [result.report["shared_with"] for result in results] == [1, 0, 1]
    for request, result in zip(requests, results, strict=True):
        assert_same_bits(result, LocalEngine().run(request))


def change_flags(request: CreditRequest) -> CreditRequest:
    return replace(request, tensors={name: tensor for name, tensor in request.tensors.items() if name != "mask"})


def change_dtype(request: CreditRequest) -> CreditRequest:
    return replace(request, tensors={name: t.double() if t.is_floating_point() else t for name, t in request.tensors.items()})


@pytest.mark.parametrize(
    "change",
    [
        lambda request: replace(request, params={"gamma": 0.9}),
        lambda request: replace(request, params={"lam_value": 1.0}),
        lambda request: replace(request, params={"masked": "keep"}),
        lambda request: replace(request, params={"dtype": "float64"}),
        lambda request: with_tensors(request, gamma=torch.tensor([0.5])),
        lambda request: replace(request_for("lambda_returns", (8,), 1), params={}),
        change_flags,
        change_dtype,
    ],
    ids=["gamma", "lam_value", "masked", "dtype", "gamma per segment", "op", "no mask", "dtype of the tensors"],
)
def test_requests_that_differ_do_not_mix(calls: list[str], change: Callable[[CreditRequest], CreditRequest]) -> None:
    like = [request_for("gae", (8,), seed) for seed in range(2)]
    other = change(request_for("gae", (8,), 7))
    requests = [like[0], other, like[1]]
    results = execute(requests, backend="reference")
    assert len(calls) == 2
    assert [result.report["shared_with"] for result in results] == [1, 0, 1]
    for request, result in zip(requests, results, strict=True):
        assert_same_bits(result, LocalEngine("reference").run(request))


def test_boundaries_do_not_mix(calls: list[str]) -> None:
    flags = torch.tensor([False, False, True, False, False])
    requests = [
        with_tensors(request_for("episodic_cumsum", (5,), 0, boundary=word), terminated=flags)
        for word in ("ends_at", "starts_at", "ends_at")
    ]
    results = execute(requests, backend="reference")
    assert len(calls) == 2
    assert not torch.equal(results[0].tensors["sums"], results[1].tensors["sums"])
    for request, result in zip(requests, results, strict=True):
        assert_same_bits(result, LocalEngine("reference").run(request))


def test_numbers_of_actions_do_not_mix(calls: list[str]) -> None:
    requests = [request_for("retrace_from_policy", (4,), seed) for seed in range(3)]
    wide = {name: torch.rand(4, 5) for name in ("next_q", "target_probs")}
    requests[1] = with_tensors(requests[1], **wide)
    results = execute(requests, backend="reference")
    assert len(calls) == 2
    for request, result in zip(requests, results, strict=True):
        assert_same_bits(result, LocalEngine("reference").run(request))


@pytest.mark.parametrize("op", ["gae", "retrace_from_policy"])
def test_requests_without_tokens_among_others(calls: list[str], op: str) -> None:
    requests = [
        request_for(op, (5,), 0),
        request_for(op, (0,), 1, [0, 0]),
        request_for(op, (0,), 2),
        request_for(op, (3, 0), 3),
        request_for(op, (0,), 4, []),
        request_for(op, (0, 6), 5),
    ]
    results = execute(requests, backend="reference", validate="full")
    for request, result in zip(requests, results, strict=True):
        assert_same_bits(result, LocalEngine("reference").run(request))
    assert [(result.report["segments"], result.report["tokens"]) for result in results] == [(1, 5), (2, 0), (1, 0), (3, 0), (0, 0), (0, 0)]


def test_no_requests(calls: list[str]) -> None:
    assert execute([]) == []
    assert calls == []


def test_results_share_no_memory_with_the_request() -> None:
    request = request_for("gae", (6,), 0)
    before = {name: tensor.clone() for name, tensor in request.tensors.items()}
    for result in execute([request, request], backend="reference"):
        for tensor in result.tensors.values():
            tensor.fill_(7.0)
    assert all(torch.equal(request.tensors[name], tensor) for name, tensor in before.items())


def test_a_report_is_plain_and_says_how_the_result_was_made() -> None:
    (report,) = [dict(result.report) for result in execute([request_for("gae", (7,), 0, [3, 0, 4])])]
    assert report.pop("milliseconds") > 0
    assert report == {"backend": "cpu", "device": "cpu", "shared_with": 0, "version": __version__, "segments": 3, "tokens": 7}
    assert all(type(value) in (int, float, str) for value in report.values())


@pytest.mark.parametrize("op", [entry.name for entry in served() if "log_ratios_cut" in entry.counts])
def test_a_report_counts_the_cut_log_ratios_of_its_own_request(calls: list[str], op: str) -> None:
    requests = [request_for(op, (6,), seed) for seed in range(3)]
    mask = torch.tensor([True, True, True, True, False, False])
    for index, count in enumerate((2, 0, 3)):
        target = torch.zeros(6)
        target[:count] = 50.0
        target[5] = 50.0  # masked: not counted
        requests[index] = with_tensors(requests[index], behavior_logprobs=torch.zeros(6), target_logprobs=target, mask=mask)
    assert [result.report["log_ratios_cut"] for result in execute(requests, backend="reference")] == [2, 0, 3]
    assert calls == [op]
    unmasked = {name: tensor for name, tensor in requests[0].tensors.items() if name != "mask"}
    assert LocalEngine("reference").run(replace(requests[0], tensors=unmasked)).report["log_ratios_cut"] == 3
