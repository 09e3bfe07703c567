"""The handed cases: mistakes made elsewhere, each with the right answer; through functions and engine, packed and as rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of
from torch import Tensor

import rlhf_scan
from rlhf_scan import CreditRequest, Segments, execute
from rlhf_scan.estimators import estimator, served

Case = dict[str, Any]

CASES: list[Case] = json.loads((Path(__file__).parent / "cases" / "handed.json").read_text())
KNOWN = {entry.name for entry in served()}

each_case = pytest.mark.parametrize("case", [case for case in CASES if case["op"] in KNOWN], ids=lambda case: case["name"])


def tensors_of(case: Case, backend: str, shape: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensor arguments, those per token in `shape`; numbers and options."""
    device, tokens = device_of(backend), case["cu_seqlens"][-1]
    tensors, params = {}, {}
    for name, value in {**case["tensors"], **case["params"]}.items():
        if isinstance(value, list):
            tensor = torch.tensor([float(number) for number in value], device=device)
            tensors[name] = tensor.reshape(shape) if len(value) == tokens else tensor
        else:
            params[name] = value
    return tensors, params


def assert_as_expected(case: Case, outputs: dict[str, Tensor], shape: tuple[int, ...]) -> None:
    assert set(case["expect"]) == set(outputs)
    for name, expected in case["expect"].items():
        assert outputs[name].shape == shape
        np.testing.assert_allclose(outputs[name].flatten().cpu(), expected, rtol=0, atol=case["tolerance"], err_msg=name)


def call(case: Case, backend: str, shape: tuple[int, ...], segments: Segments | None) -> dict[str, Tensor]:
    tensors, params = tensors_of(case, backend, shape)
    entry = estimator(case["op"])
    inputs = [tensors.pop(name) for name in entry.arguments]
    found = getattr(rlhf_scan, case["op"])(*inputs, **tensors, **params, segments=segments, backend=backend, validate="full")
    return dict(zip(entry.outputs, [found] if isinstance(found, Tensor) else found, strict=True))


@each_case
def test_packed(case: Case, backend: str) -> None:
    shape = (case["cu_seqlens"][-1],)
    assert_as_expected(case, call(case, backend, shape, Segments.from_cu_seqlens(case["cu_seqlens"])), shape)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["op"] in KNOWN and len(case["cu_seqlens"]) == 2], ids=lambda case: case["name"]
)
def test_as_a_row(case: Case, backend: str) -> None:
    tokens = case["cu_seqlens"][-1]
    for shape in ((tokens,), (1, tokens)):
        assert_as_expected(case, call(case, backend, shape, None), shape)


@each_case
def test_through_the_engine(case: Case, backend: str) -> None:
    assert_as_expected(case, dict(execute([request(case, backend)], backend=backend)[0].tensors), (case["cu_seqlens"][-1],))


def test_all_at_once(backend: str) -> None:
    cases = [case for case in CASES if case["op"] in KNOWN]
    results = execute([request(case, backend) for case in cases], backend=backend, validate="full")
    for case, result in zip(cases, results, strict=True):
        assert_as_expected(case, dict(result.tensors), (case["cu_seqlens"][-1],))


def request(case: Case, backend: str) -> CreditRequest:
    tensors, params = tensors_of(case, backend, (case["cu_seqlens"][-1],))
    return CreditRequest(case["op"], {**tensors, "cu_seqlens": torch.tensor(case["cu_seqlens"])}, params)
