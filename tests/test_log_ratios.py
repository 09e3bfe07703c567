"""Importance ratios of V-trace and Retrace at their extremes, and expected values over many actions."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import device_of
from estimator_samples import DTYPES, arguments, outputs_of

import rlhf_scan
from rlhf_scan import CreditRequest, LocalEngine

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")


@pytest.mark.parametrize("op", ["vtrace", "retrace", "retrace_from_policy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_finite_log_probability_makes_a_ratio_infinite(op: str, dtype: torch.dtype, backend: str) -> None:
    """Not even the largest: log-ratios are cut at 20, and the ratio of an action that the new policy never takes is 0."""
    largest = torch.finfo(dtype).max
    targets = torch.tensor([largest, largest, -largest, 20.5, 0.0, -math.inf], dtype=dtype, device=device_of(backend))
    behavior = torch.tensor([-largest, 0.0, largest, 0.0, largest, 0.0], dtype=dtype, device=device_of(backend))
    inputs = {name: tensor.fill_(1) for name, tensor in arguments(op, (6,), backend, dtype).items()}
    inputs |= {"behavior_logprobs": behavior, "target_logprobs": targets}
    outputs = outputs_of(op, inputs, backend, rho_bar=math.inf, c_bar=1.0, gamma=0.5, dtype=torch.float64)
    assert all(torch.isfinite(output).all() for output in outputs)
    advantages = outputs[1].tolist()
    assert advantages[2] == advantages[4] == advantages[5] == 0
    assert abs(advantages[0]) <= math.exp(2 * 20) * 20


@pytest.mark.parametrize("op", ["vtrace", "retrace", "retrace_from_policy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reports_count_the_ratios_that_were_cut(op: str, dtype: torch.dtype) -> None:
    """In the arithmetic in which they are formed: 24.125 - 4.0625 passes 20, though in bfloat16 that difference is 20."""
    tensors = arguments(op, (6,), "reference", dtype)
    tensors["target_logprobs"] = torch.tensor([0.0, 21.0, 30.0, 25.0, 24.125, 24.0], dtype=dtype)
    tensors["behavior_logprobs"] = torch.tensor([0.0, 0.0, 0.0, 10.0, 4.0625, 4.0], dtype=dtype)
    tensors["mask"] = torch.tensor([1, 1, 0, 1, 1, 1])
    assert LocalEngine("reference").run(CreditRequest(op, tensors)).report["log_ratios_cut"] == 2


@pytest.mark.parametrize("actions", [1, 3, 64, 1000, 1024])
def test_expected_values_of_many_actions(actions: int, backend: str) -> None:
    """E[Q] from the policy gives what `retrace` makes of the same expectation, taken in float64."""
    inputs = arguments("retrace", (9,), backend)
    device = inputs.pop("expected_next_q").device
    random = torch.Generator().manual_seed(1)
    next_q = torch.randn(9, actions, generator=random).to(device)
    probabilities = torch.softmax(4 * torch.randn(9, actions, generator=random), 1).to(device)
    expected = (next_q.double() * probabilities.double()).sum(1)
    exact = rlhf_scan.retrace(**inputs, expected_next_q=expected, backend="reference", dtype=torch.float64)
    found = rlhf_scan.retrace_from_policy(**inputs, next_q=next_q, target_probs=probabilities, backend=backend)
    # Each product and each sum rounds once, all terms are below 4 in magnitude and weigh 1 in all; nine tokens carry it on.
    allowed = 9 * (math.log2(actions + 1) + actions / 16 + 20) * 2.0**-24 * 4
    for got, true in zip(found, exact, strict=True):
        assert (got.double() - true).abs().max() <= allowed


@pytest.mark.parametrize(
    ("op", "reached"), [("vtrace", ([0, 1], [0, 1])), ("retrace", ([0], [1])), ("retrace_from_policy", ([0], [1]))]
)  # Retrace's ratio at 1 weighs the trace from 1 to 0, and the advantage at 1.
@pytest.mark.parametrize("name", ["behavior_logprobs", "target_logprobs"])
def test_a_log_probability_that_is_nan_shows(op: str, reached: tuple[list[int], list[int]], name: str, backend: str) -> None:
    """Its ratio is not that of a bar, but NaN."""
    inputs = arguments(op, (4,), backend)
    clean = outputs_of(op, inputs, backend)
    inputs[name][1] = math.nan
    for output, usual, tokens in zip(outputs_of(op, inputs, backend), clean, reached, strict=True):
        assert output.isnan().nonzero().flatten().tolist() == tokens
        assert torch.equal(output[~output.isnan()], usual[~output.isnan()])
