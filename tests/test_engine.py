"""Requests and `execute`: what shares a launch, that it changes no bit, and what a report and an error say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor

import rlhf_scan
from rlhf_scan import BackendError, CreditRequest, CreditResult, InputError, LocalEngine, __version__, engine, execute
from rlhf_scan.estimators import estimator, served
from rlhf_scan.requests import parse_params

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


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"tensors": {"values": torch.ones(5)}}, "gae: values must have shape [4] to match rewards, got [5]; pass V(s_T) as bootstrap="),
        ({"tensors": {"mask": torch.ones(3)}}, "gae: mask must have shape [4]"),
        ({"tensors": {"bootstrap": torch.ones(2)}}, "gae: bootstrap must have shape [1]"),
        ({"tensors": {"values": torch.ones(4, dtype=torch.int64)}}, "gae: values must be float32"),
        ({"tensors": {"values": [1.0] * 4}}, "gae: values must be a torch.Tensor"),
        ({"tensors": {"rewards": 1.0}}, "gae: rewards must be a torch.Tensor"),
        ({"tensors": {"lengths": torch.tensor([3])}}, "gae: segments must cover the 4 tokens of rewards, got 3"),
        ({"tensors": {"lengths": torch.tensor([4.0])}}, "gae: Segments.from_lengths: lengths must be an integer tensor"),
        ({"tensors": {"lengths": torch.tensor([4]), "cu_seqlens": torch.tensor([0, 4])}}, "gae: the pack must be described once"),
        ({"tensors": {"rewardz": torch.ones(4)}}, "gae: tensor names must be among"),
        ({"tensors": {"initial": torch.ones(1)}}, "gae: tensor names must be among"),
        ({"tensors": {"gamma": torch.tensor([2.0])}}, "gae: gamma must lie in [0, 1], got 2"),
        (
            {"tensors": {"values": torch.tensor([0.0, math.nan, 0, 0])}},
            "gae: values must be finite at trainable tokens, got nan at token 1",
        ),
        ({"params": {"gamma": 2}}, "gae: gamma must lie in [0, 1], got 2"),
        ({"params": {"gamma": "0.5"}}, "gae: gamma must be a number, got str"),
        ({"params": {"gama": 0.5}}, "gae: parameter names must be among"),
        ({"params": {"boundary": "ends_at"}}, "gae: parameter names must be among"),
        ({"params": {"masked": "drop"}}, "gae: masked must be one of"),
        ({"params": {"dtype": "int8"}}, "gae: dtype must be one of"),
        ({"op": "gea"}, "op must be one of"),
        ({"op": "linear_scan"}, "op must be one of"),
        ({"op": None}, "op must be one of"),
    ],
)
def test_one_bad_request_among_good_ones_is_named(bad: dict[str, Any], words: str) -> None:
    good = CreditRequest("gae", {"rewards": torch.ones(4), "values": torch.ones(4)})
    wrong = CreditRequest(bad.get("op", "gae"), {**good.tensors, **bad.get("tensors", {})}, bad.get("params", {}))
    for requests in ([wrong], [good, wrong, good]):
        with pytest.raises(InputError) as error:
            execute(requests, backend="reference", validate="full")
        assert words in str(error.value)


@each_op
def test_a_missing_tensor_is_named(op: str) -> None:
    request = request_for(op, (4,), 0)
    for name in estimator(op).required:
        missing = replace(request, tensors={key: tensor for key, tensor in request.tensors.items() if key != name})
        with pytest.raises(InputError, match=f"^{op}: tensors must hold .*, got no {name}; add it"):
            LocalEngine().run(missing)


def test_a_backend_that_cannot_run() -> None:
    request = request_for("gae", (4,), 0)
    with pytest.raises(InputError, match="backend must be one of"):
        LocalEngine("gpu").run(request)
    meta = replace(request, tensors={name: tensor.to("meta") for name, tensor in request.tensors.items()})
    with pytest.raises(BackendError, match="backend 'cpu' takes CPU tensors, got meta"):
        LocalEngine("cpu").run(meta)


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


@each_op
def test_a_request_is_the_public_function(op: str) -> None:
    entry = estimator(op)
    request = request_for(op, (9,), 0, [4, 5])
    function = getattr(rlhf_scan, op)
    rates = dict.fromkeys(entry.rates, 0.75)
    options = {name: tensor for name, tensor in request.tensors.items() if name not in (*entry.arguments, "lengths")}
    segments = rlhf_scan.Segments.from_lengths(request.tensors["lengths"])
    outputs = function(*(request.tensors[name] for name in entry.arguments), **rates, **options, segments=segments, backend="reference")
    got = LocalEngine("reference").run(replace(request, params=rates))
    for tensor, output in zip(got.tensors.values(), [outputs] if isinstance(outputs, Tensor) else outputs, strict=True):
        assert torch.equal(tensor, output)


@each_op
def test_parameters_as_text(op: str) -> None:
    rates = estimator(op).rates
    assert parse_params(op, dict.fromkeys(rates, "0.1")) == dict.fromkeys(rates, 0.1)
    assert parse_params(op, {"dtype": "bfloat16"}) == {"dtype": "bfloat16"}
    assert parse_params(op, {}) == {}
    for name, rate in rates.items():
        assert parse_params(op, {name: "none"}) == {name: None}
        with pytest.raises(InputError, match=f"{op}: {name} must be a number, got 'high'; pass a value such as 0.99"):
            parse_params(op, {name: "high"})
        with pytest.raises(InputError, match=f"{op}: {name} must be a number, got 'nan'"):
            parse_params(op, {name: "nan"})
        unbounded = CreditRequest(op, request_for(op, (3,), 0).tensors, parse_params(op, {name: "inf"}))
        if math.isinf(rate.largest):
            LocalEngine("reference").run(unbounded)
        else:
            with pytest.raises(InputError, match=f"{op}: {name} must lie in"):
                LocalEngine("reference").run(unbounded)
    with pytest.raises(InputError, match=f"{op}: parameter names must be among"):
        parse_params(op, {"gama": "0.5"})


def test_parameters_of_an_unknown_estimator() -> None:
    with pytest.raises(InputError, match="op must be one of"):
        parse_params("linear_scan", {})
