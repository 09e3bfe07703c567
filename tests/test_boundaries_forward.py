"""What each boundary means for forward scans, worked by hand, so that equality is exact. Inputs are 1, 2, 4; gamma and lambda 1/2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import device_of
from test_boundaries import HALF, Cases, cases, listed, packed_and_row, tensors

import rlhf_scan

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

nan = float("nan")

# e_t = x_t + e_before / 4
TRACES: Cases = [
    ("natural start", {}, [1, 2.25, 4.5625]),
    ("initial stands before the first step", {"initial": [64]}, [17, 6.25, 5.5625]),
    ("terminated inside: 0 follows", {"terminated": [0, 1, 0], "initial": [64]}, [17, 6.25, 4]),
    ("truncated inside: 0 follows", {"truncated": [0, 1, 0], "initial": [64]}, [17, 6.25, 4]),
    ("both flags", {"terminated": [0, 1, 0], "truncated": [0, 1, 0]}, [1, 2.25, 4]),
    ("terminated first", {"terminated": [1, 0, 0], "initial": [64]}, [17, 2, 4.5]),
    ("terminated last", {"terminated": [0, 0, 1], "truncated": [1]}, [1, 2.25, 4.5625]),
    ("skip", {"mask": [1, 0, 1]}, [1, 0, 4.25]),
    ("skip: first masked, initial passes over it", {"mask": [0, 1, 1], "initial": [64]}, [0, 18, 8.5]),
    ("skip: terminated at a masked token", {"mask": [1, 0, 1], "terminated": [0, 1, 0]}, [1, 0, 4]),
    ("skip: truncated at a masked token", {"mask": [1, 0, 1], "truncated": [0, 1, 0]}, [1, 0, 4]),
    ("skip: terminated at a masked first token", {"mask": [0, 1, 1], "terminated": [1, 0, 0], "initial": [64]}, [0, 2, 4.5]),
    ("zero", {"mask": [1, 0, 1], "masked": "zero"}, [1, 0, 4.0625]),
    ("zero: first masked", {"mask": [0, 1, 1], "masked": "zero", "initial": [64]}, [0, 6, 5.5]),
    ("zero: terminated at a masked token", {"mask": [1, 0, 1], "masked": "zero", "terminated": [0, 1, 0]}, [1, 0, 4]),
    ("keep", {"mask": [1, 0, 1], "masked": "keep"}, [1, 0, 4.5625]),
    ("keep: terminated at a masked token", {"mask": [1, 0, 1], "masked": "keep", "terminated": [0, 1, 0]}, [1, 0, 4]),
    ("one-token episodes, terminated", {"terminated": [1, 1, 1], "initial": [64]}, [17, 2, 4]),
    ("one-token episodes, truncated", {"truncated": [1, 1, 1]}, [1, 2, 4]),
    ("gamma per token is read at t", {"gamma": [1.0, 0.5, 0.25], "initial": [64]}, [33, 10.25, 5.28125]),
]

CUMSUM: Cases = [
    ("natural start", {}, [1, 3, 7]),
    ("initial", {"initial": [64]}, [65, 67, 71]),
    ("ends at t", {"terminated": [0, 1, 0], "initial": [64]}, [65, 67, 4]),
    ("starts at t", {"terminated": [0, 1, 0], "initial": [64], "boundary": "starts_at"}, [65, 2, 6]),
    ("ends at the first", {"terminated": [1, 0, 0], "initial": [64]}, [65, 2, 6]),
    (
        "starts at the first: initial belongs to another episode",
        {"terminated": [1, 0, 0], "initial": [nan], "boundary": "starts_at"},
        [1, 3, 7],
    ),
    ("ends at the last", {"terminated": [0, 0, 1]}, [1, 3, 7]),
    ("starts at the last", {"terminated": [0, 0, 1], "boundary": "starts_at"}, [1, 3, 4]),
    ("[S] ends at the last", {"terminated": [1]}, [1, 3, 7]),
    ("[S] starts at the last", {"terminated": [1], "boundary": "starts_at"}, [1, 3, 4]),
    ("one-token episodes, ends", {"terminated": [1, 1, 1], "initial": [64]}, [65, 2, 4]),
    ("one-token episodes, starts", {"terminated": [1, 1, 1], "initial": [nan], "boundary": "starts_at"}, [1, 2, 4]),
]


@packed_and_row
@cases(TRACES)
def test_eligibility_traces(case: Any, backend: str, shape: tuple[int, ...]) -> None:
    _, options, expected = case
    found = rlhf_scan.eligibility_traces(**tensors({"inputs": [1.0, 2.0, 4.0], **HALF, **options}, backend, shape))
    assert listed(found, shape) == expected


@packed_and_row
@cases(CUMSUM)
def test_episodic_cumsum(case: Any, backend: str, shape: tuple[int, ...]) -> None:
    _, options, expected = case
    assert listed(rlhf_scan.episodic_cumsum(**tensors({"inputs": [1.0, 2.0, 4.0], **options}, backend, shape)), shape) == expected


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 128, 198, 199])
@pytest.mark.parametrize("boundary", ["ends_at", "starts_at"])
def test_forward_episodes_that_span_tiles(cut: int, boundary: str, backend: str) -> None:
    device = device_of(backend)
    ones, flag, initial = torch.ones(200, device=device), torch.zeros(200, device=device), torch.tensor([1000.0], device=device)
    flag[cut] = 1
    sums = rlhf_scan.episodic_cumsum(ones, terminated=flag, initial=initial, boundary=boundary, backend=backend).tolist()
    expected, total = [], 1000.0
    for token in range(200):
        total = 0.0 if token == cut + (boundary == "ends_at") else total
        total += 1
        expected.append(total)
    assert sums == expected
    if boundary == "ends_at":
        found = rlhf_scan.eligibility_traces(ones, gamma=1.0, lam=1.0, truncated=flag, initial=initial, backend=backend)
        assert found.tolist() == expected


def test_forward_episodes_with_a_masked_span_over_tiles(backend: str) -> None:
    device = device_of(backend)
    mask = torch.cat([torch.ones(30), torch.zeros(130), torch.ones(40)]).to(device)
    inputs, flag = torch.where(mask != 0, 1.0, nan), torch.zeros(200, device=device)
    options: dict[str, Any] = {"mask": mask, "gamma": 1.0, "lam": 1.0, "initial": torch.tensor([1000.0], device=device), "backend": backend}
    before, gap = [1001.0 + t for t in range(30)], [0.0] * 130
    assert rlhf_scan.eligibility_traces(inputs, **options).tolist() == before + gap + [1031.0 + t for t in range(40)]
    flag[100] = 1
    assert rlhf_scan.eligibility_traces(inputs, terminated=flag, **options).tolist() == before + gap + [1.0 + t for t in range(40)]
