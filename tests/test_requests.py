"""Requests: that one is the public function, its parameters as text, and what an error says of a wrong one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_engine import each_op, request_for
from torch import Tensor

import rlhf_scan
from rlhf_scan import BackendError, CreditRequest, InputError, LocalEngine, execute
from rlhf_scan.estimators import estimator
from rlhf_scan.requests import parse_params


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
