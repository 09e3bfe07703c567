"""What each boundary means for Retrace, worked by hand as in test_boundaries.py, with E[Q] and the ratio given, or made from probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import device_of
from test_boundaries import RATIOS, PairCases, cases, listed, packed_and_row, tensors

import rlhf_scan

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

nan = float("nan")

# target_t = r_t + E_t / 2 + (target_next - Q_next) / 8, advantages (r_t + target_next / 2 - Q_t) / 2
RETRACE: PairCases = [
    ("the segment's end: E[Q] follows", {}, [9.3125, 18.5, 36], [1.125, 2, 2]),
    ("terminated last: 0 follows", {"terminated": [0, 0, 1], "expected_next_q": [16, 32, nan]}, [8.8125, 14.5, 4], [0.125, -6, -14]),
    ("terminated [S]", {"terminated": [1], "expected_next_q": [16, 32, nan]}, [8.8125, 14.5, 4], [0.125, -6, -14]),
    ("truncated last", {"truncated": [0, 0, 1]}, [9.3125, 18.5, 36], [1.125, 2, 2]),
    ("truncated inside: E[Q] is value and target", {"truncated": [0, 1, 0]}, [9.25, 18, 36], [1, 1, 2]),
    ("terminated inside", {"terminated": [0, 1, 0], "expected_next_q": [16, nan, 64]}, [7.25, 2, 36], [-3, -7, 2]),
    (
        "both flags: terminated wins",
        {"terminated": [0, 1, 0], "truncated": [0, 1, 0], "expected_next_q": [16, nan, 64]},
        [7.25, 2, 36],
        [-3, -7, 2],
    ),
    (
        "both last",
        {"terminated": [0, 0, 1], "truncated": [0, 0, 1], "expected_next_q": [16, 32, nan]},
        [8.8125, 14.5, 4],
        [0.125, -6, -14],
    ),
    ("skip", {"mask": [1, 0, 1], "expected_next_q": [16, nan, 64]}, [9.5, 0, 36], [5.5, 0, 2]),
    ("skip: last masked", {"mask": [1, 1, 0], "expected_next_q": [16, 32, nan]}, [9.25, 18, 0], [1, 1, 0]),
    (
        "skip: terminated at a masked last token",
        {"mask": [1, 1, 0], "terminated": [1], "expected_next_q": [16, nan, nan]},
        [7.25, 2, 0],
        [-3, -7, 0],
    ),
    (
        "skip: terminated at a masked token",
        {"mask": [1, 0, 1], "terminated": [0, 1, 0], "expected_next_q": [nan, nan, 64]},
        [1, 0, 36],
        [-3.5, 0, 2],
    ),
    (
        "skip: truncated at a masked token",
        {"mask": [1, 0, 1], "truncated": [0, 1, 0], "expected_next_q": [16, nan, 64]},
        [9, 0, 36],
        [0.5, 0, 2],
    ),
    (
        "skip: both at a masked token",
        {"mask": [1, 0, 1], "terminated": [0, 1, 0], "truncated": [0, 1, 0], "expected_next_q": [nan, nan, 64]},
        [1, 0, 36],
        [-3.5, 0, 2],
    ),
    (
        "zero: a step with Q = E[Q] = 0 and ratio 1",
        {"mask": [1, 0, 1], "masked": "zero", "expected_next_q": [16, nan, 64]},
        [9.0625, 0, 36],
        [-3.375, 0, 2],
    ),
    (
        "zero: terminated at a masked token",
        {"mask": [1, 0, 1], "masked": "zero", "terminated": [0, 1, 0], "expected_next_q": [16, nan, 64]},
        [9, 0, 36],
        [-3.5, 0, 2],
    ),
    (
        "zero: truncated at a masked token",
        {"mask": [1, 0, 1], "masked": "zero", "truncated": [0, 1, 0], "expected_next_q": [16, nan, 64]},
        [9, 0, 36],
        [-3.5, 0, 2],
    ),
    ("keep", {"mask": [1, 0, 1], "masked": "keep"}, [9.3125, 0, 36], [1.125, 0, 2]),
    ("keep: truncated at a masked token", {"mask": [1, 0, 1], "masked": "keep", "truncated": [0, 1, 0]}, [9.25, 0, 36], [1, 0, 2]),
    (
        "keep: terminated at a masked token",
        {"mask": [1, 0, 1], "masked": "keep", "terminated": [0, 1, 0], "expected_next_q": [16, nan, 64]},
        [7.25, 0, 36],
        [-3, 0, 2],
    ),
    ("one-token episodes, terminated", {"terminated": [1, 1, 1], "expected_next_q": [nan] * 3}, [1, 2, 4], [-3.5, -7, -14]),
    ("one-token episodes, truncated", {"truncated": [1, 1, 1]}, [9, 18, 36], [0.5, 1, 2]),
    # A bar per token is that of the ratio beside it: token 0's is none's, token 2's carries back what was learnt there.
    ("bars per token", {"c_bar": [nan, 0.25, 0.5], "rho_bar": [0.5, 0.25, 0.5]}, [9.375, 19, 36], [1.25, 1, 2]),
    (
        "bars per token, terminated inside: none passes",
        {"c_bar": [nan, 0.25, nan], "terminated": [0, 1, 0], "expected_next_q": [16, nan, 64]},
        [7.25, 2, 36],
        [-3, -7, 2],
    ),
    ("bars per token, truncated inside", {"c_bar": [nan, 0.5, nan], "truncated": [0, 1, 0]}, [9.5, 18, 36], [1, 1, 2]),
    (
        "bars per token, skip: that of the next trainable token",
        {"c_bar": [nan, nan, 0.5], "mask": [1, 0, 1], "expected_next_q": [16, nan, 64]},
        [10, 0, 36],
        [5.5, 0, 2],
    ),
    (
        "bars per token, zero: also those of masked steps, whose ratio is 1",
        {"c_bar": [nan, 0.5, 0.25], "mask": [1, 0, 1], "masked": "zero", "expected_next_q": [16, nan, 64]},
        [9.125, 0, 36],
        [-3.375, 0, 2],
    ),
    ("bars per token, keep", {"c_bar": [nan, 0.25, 0.5], "mask": [1, 0, 1], "masked": "keep"}, [9.375, 0, 36], [1.25, 0, 2]),
]


@packed_and_row
@cases(RETRACE)
@pytest.mark.parametrize("policy", [False, True], ids=["given", "policy"])
def test_retrace(case: Any, policy: bool, backend: str, shape: tuple[int, ...]) -> None:
    """Also with E[Q] as the mean of an action 8 above it and one 8 below, and the ratio from the probability of a third; 77 is no action."""
    _, options, targets, advantages = case
    options = {"rewards": [1.0, 2.0, 4.0], "q_values": [8.0, 16.0, 32.0], "expected_next_q": [16.0, 32.0, 64.0], **RATIOS, **options}
    arguments = tensors(options, backend, shape)
    if policy:
        expected, logprobs = arguments.pop("expected_next_q"), arguments.pop("target_logprobs")
        arguments["next_q"] = torch.stack([expected + 8, expected - 8, torch.full_like(expected, nan)], -1)
        arguments["target_probs"] = torch.tensor([0.5, 0.5, 0.0], device=device_of(backend)).expand(*shape, 3)
        arguments["actions"] = torch.where(logprobs.isnan(), 77, 2)
        arguments["policy_probs"] = torch.stack([torch.full_like(logprobs, nan), torch.zeros_like(logprobs), logprobs.exp()], -1)
    found = (rlhf_scan.retrace_from_policy if policy else rlhf_scan.retrace)(**arguments)
    assert listed(found.targets, shape) == targets
    assert listed(found.advantages, shape) == advantages
