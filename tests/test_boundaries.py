"""What each boundary means for the estimators beside GAE and returns (those: test_meaning.py), worked by hand, so that equality is exact.

Rewards are 1, 2, 4, values 8, 16, 32, E[Q] 16, 32, 64; gamma is 1/2. The policies are so far apart that every ratio is its bar.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor

import rlhf_scan

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

nan = float("nan")
HALF = {"gamma": 0.5, "lam": 0.5}
RATIOS = {"behavior_logprobs": [-10.0] * 3, "target_logprobs": [-1.0] * 3, "gamma": 0.5, "rho_bar": 0.5, "c_bar": 0.25}
Cases = list[tuple[str, dict[str, Any], list[float]]]
PairCases = list[tuple[str, dict[str, Any], list[float], list[float]]]

# G_t = r_t + V_next / 4 + G_next / 4
LAMBDA_RETURNS: Cases = [
    ("natural end: 0 follows", {}, [7.75, 11, 4]),
    ("window's last step: the bootstrap follows, once", {"bootstrap": [64]}, [9.75, 19, 36]),
    ("window's last step, per token", {"bootstrap": [nan, nan, 64]}, [9.75, 19, 36]),
    ("truncated, value supplied", {"truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]}, [13.5, 34, 4]),
    ("truncated, [S] is not for it", {"truncated": [0, 1, 0], "bootstrap": [64]}, [5.5, 2, 36]),
    ("truncated, none supplied", {"truncated": [0, 1, 0]}, [5.5, 2, 4]),
    ("terminated inside", {"terminated": [0, 1, 0], "bootstrap": [nan, nan, 64]}, [5.5, 2, 36]),
    ("both flags: terminated wins", {"terminated": [0, 1, 0], "truncated": [0, 1, 0], "bootstrap": [nan, nan, 64]}, [5.5, 2, 36]),
    ("terminated last", {"terminated": [0, 0, 1], "bootstrap": [nan]}, [7.75, 11, 4]),
    ("truncated last", {"truncated": [0, 0, 1], "bootstrap": [64]}, [9.75, 19, 36]),
    ("both last", {"terminated": [1], "truncated": [1], "bootstrap": [nan]}, [7.75, 11, 4]),
    ("skip", {"mask": [1, 0, 1]}, [10, 0, 4]),
    ("skip: last masked", {"mask": [1, 1, 0], "bootstrap": [64]}, [13.5, 34, 0]),
    ("skip: terminated at a masked token", {"mask": [1, 0, 1], "terminated": [0, 1, 0]}, [1, 0, 4]),
    ("skip: truncated at a masked token", {"mask": [1, 0, 1], "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]}, [33, 0, 4]),
    (
        "skip: both at a masked token",
        {"mask": [1, 0, 1], "terminated": [0, 1, 0], "truncated": [0, 1, 0], "bootstrap": [nan, nan, 0]},
        [1, 0, 4],
    ),
    ("zero", {"mask": [1, 0, 1], "masked": "zero"}, [3.25, 0, 4]),
    ("zero: terminated at a masked token", {"mask": [1, 0, 1], "masked": "zero", "terminated": [0, 1, 0]}, [1, 0, 4]),
    (
        "zero: truncated at a masked token",
        {"mask": [1, 0, 1], "masked": "zero", "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]},
        [9, 0, 4],
    ),
    ("keep", {"mask": [1, 0, 1], "masked": "keep"}, [7.75, 0, 4]),
    ("keep: terminated at a masked token", {"mask": [1, 0, 1], "masked": "keep", "terminated": [0, 1, 0]}, [5.5, 0, 4]),
    (
        "keep: truncated at a masked token",
        {"mask": [1, 0, 1], "masked": "keep", "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]},
        [13.5, 0, 4],
    ),
    ("one-token episodes, terminated", {"terminated": [1, 1, 1], "bootstrap": [nan] * 3}, [1, 2, 4]),
    ("one-token episodes, truncated", {"truncated": [1, 1, 1], "bootstrap": [2, 4, 8]}, [2, 4, 8]),
    ("gamma per token", {"gamma": [1.0, 0.5, 0.25], "bootstrap": [64]}, [16.5, 15, 20]),
    ("lambda per token", {"lam": [1.0, 0.0, 0.25]}, [10, 18, 4]),
]

# x_t = (r_t + V_next / 2 - V_t) / 2 + x_next / 8, targets V_t + x_t, advantages (r_t + target_next / 2 - V_t) / 2
VTRACE: PairCases = [
    ("natural end", {}, [8.40625, 15.25, 18], [0.3125, -2.5, -14]),
    ("window's last step: value and target follow", {"bootstrap": [64]}, [8.65625, 17.25, 34], [0.8125, 1.5, 2]),
    ("window's last step, per token", {"bootstrap": [nan, nan, 64]}, [8.65625, 17.25, 34], [0.8125, 1.5, 2]),
    ("truncated, value supplied", {"truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]}, [9.625, 25, 18], [2.75, 9, -14]),
    ("truncated, [S] is not for it", {"truncated": [0, 1, 0], "bootstrap": [64]}, [7.625, 9, 34], [-1.25, -7, 2]),
    ("truncated, none supplied", {"truncated": [0, 1, 0]}, [7.625, 9, 18], [-1.25, -7, -14]),
    ("terminated inside", {"terminated": [0, 1, 0], "bootstrap": [nan, nan, 64]}, [7.625, 9, 34], [-1.25, -7, 2]),
    (
        "both flags: terminated wins",
        {"terminated": [0, 1, 0], "truncated": [0, 1, 0], "bootstrap": [nan, nan, 64]},
        [7.625, 9, 34],
        [-1.25, -7, 2],
    ),
    ("terminated last", {"terminated": [0, 0, 1], "bootstrap": [nan]}, [8.40625, 15.25, 18], [0.3125, -2.5, -14]),
    ("truncated last", {"truncated": [0, 0, 1], "bootstrap": [64]}, [8.65625, 17.25, 34], [0.8125, 1.5, 2]),
    ("both last", {"terminated": [1], "truncated": [1], "bootstrap": [nan]}, [8.40625, 15.25, 18], [0.3125, -2.5, -14]),
    ("skip", {"mask": [1, 0, 1]}, [10.75, 0, 18], [1, 0, -14]),
    ("skip: last masked", {"mask": [1, 1, 0], "bootstrap": [64]}, [9.625, 25, 0], [2.75, 9, 0]),
    ("skip: terminated at a masked token", {"mask": [1, 0, 1], "terminated": [0, 1, 0]}, [4.5, 0, 18], [-3.5, 0, -14]),
    (
        "skip: truncated at a masked token",
        {"mask": [1, 0, 1], "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]},
        [20.5, 0, 18],
        [12.5, 0, -14],
    ),
    (
        "skip: both at a masked token",
        {"mask": [1, 0, 1], "terminated": [0, 1, 0], "truncated": [0, 1, 0], "bootstrap": [nan, nan, 0]},
        [4.5, 0, 18],
        [-3.5, 0, -14],
    ),
    ("zero: a step whose ratio is 1", {"mask": [1, 0, 1], "masked": "zero"}, [5.28125, 0, 18], [-1.9375, 0, -14]),
    ("zero: terminated at a masked token", {"mask": [1, 0, 1], "masked": "zero", "terminated": [0, 1, 0]}, [4.5, 0, 18], [-3.5, 0, -14]),
    (
        "zero: truncated at a masked token",
        {"mask": [1, 0, 1], "masked": "zero", "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]},
        [6.5, 0, 18],
        [0.5, 0, -14],
    ),
    ("keep", {"mask": [1, 0, 1], "masked": "keep"}, [8.40625, 0, 18], [0.3125, 0, -14]),
    (
        "keep: terminated at a masked token",
        {"mask": [1, 0, 1], "masked": "keep", "terminated": [0, 1, 0], "bootstrap": [nan, nan, 64]},
        [7.625, 0, 34],
        [-1.25, 0, 2],
    ),
    (
        "keep: truncated at a masked token",
        {"mask": [1, 0, 1], "masked": "keep", "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]},
        [9.625, 0, 18],
        [2.75, 0, -14],
    ),
    ("one-token episodes, terminated", {"terminated": [1, 1, 1], "bootstrap": [nan] * 3}, [4.5, 9, 18], [-3.5, -7, -14]),
    ("one-token episodes, truncated", {"truncated": [1, 1, 1], "bootstrap": [2, 4, 8]}, [5, 10, 20], [-3, -6, -12]),
    ("bars per token", {"rho_bar": [0.5, 0.25, 0.5], "c_bar": [0.25, 0.0, 0.0]}, [8.5625, 16.5, 18], [0.625, -1.25, -14]),
]


def cases(which: Any) -> Any:
    return pytest.mark.parametrize("case", which, ids=[case[0] for case in which])


packed_and_row = pytest.mark.parametrize("shape", [(3,), (1, 3)], ids=["packed", "row"])


def tensors(options: dict[str, Any], backend: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Lists as tensors, one number standing for the segment; what a masked token holds is NaN unless "keep" reads it."""
    spoilt = options.get("mask") if options.get("masked") != "keep" else None
    found: dict[str, Any] = {"backend": backend}
    for name, value in options.items():
        if isinstance(value, list):
            is_input = name in ("rewards", "values", "q_values", "expected_next_q", "inputs", "behavior_logprobs", "target_logprobs")
            numbers = [nan if spoilt and is_input and not live else x for x, live in zip(value, spoilt or value, strict=False)]
            tensor = torch.tensor(numbers, dtype=torch.float32, device=device_of(backend))
            value = tensor if len(value) == 1 else tensor.reshape(shape)
        found[name] = value
    return found


def listed(outputs: Tensor, shape: tuple[int, ...]) -> list[float]:
    assert outputs.shape == shape
    return [float(x) for x in outputs.flatten().tolist()]


@packed_and_row
@cases(LAMBDA_RETURNS)
def test_lambda_returns(case: Any, backend: str, shape: tuple[int, ...]) -> None:
    _, options, expected = case
    options = {"rewards": [1.0, 2.0, 4.0], "values": [8.0, 16.0, 32.0], **HALF, **options}
    assert listed(rlhf_scan.lambda_returns(**tensors(options, backend, shape)), shape) == expected


@packed_and_row
@cases(VTRACE)
def test_vtrace(case: Any, backend: str, shape: tuple[int, ...]) -> None:
    _, options, targets, advantages = case
    found = rlhf_scan.vtrace(**tensors({"rewards": [1.0, 2.0, 4.0], "values": [8.0, 16.0, 32.0], **RATIOS, **options}, backend, shape))
    assert listed(found.targets, shape) == targets
    assert listed(found.advantages, shape) == advantages


def counting(op: str, backend: str, cut: int, flag: str, mask: Tensor | None) -> list[float]:
    """Steps of 1 without discount, 200 tokens, an episode that ends at `cut`; 1000 follows the last token, 500 the truncated one."""
    device = device_of(backend)
    ends = torch.zeros(200, device=device)
    ends[cut] = 1
    live = torch.ones(200, device=device) if mask is None else mask.to(device)
    ones, zeros = torch.where(live != 0, 1.0, nan), torch.where(live != 0, 0.0, nan)
    follows = torch.full((200,), nan, device=device)
    follows[199] = 1000
    follows[cut] = 500 if flag == "truncated" else nan
    options: dict[str, Any] = {flag: ends, "mask": mask if mask is None else live, "backend": backend}
    if op == "lambda_returns":
        return rlhf_scan.lambda_returns(ones, zeros, lam=1.0, bootstrap=follows, **options).tolist()
    if op == "vtrace":
        return rlhf_scan.vtrace(ones, zeros, zeros, zeros, bootstrap=follows, **options).targets.tolist()
    # E[Q] is read at each step; only where credit is cut does it stay, for elsewhere the correction takes the next Q = 0 off again.
    expected = torch.where(follows.isfinite(), follows, zeros)
    return rlhf_scan.retrace(ones, zeros, expected, zeros, zeros, **options).targets.tolist()


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 128, 198, 199])
@pytest.mark.parametrize("flag", ["terminated", "truncated"])
@pytest.mark.parametrize("op", ["lambda_returns", "vtrace", "retrace"])
def test_backward_episodes_that_span_tiles(op: str, cut: int, flag: str, backend: str) -> None:
    counted = counting(op, backend, cut, flag, None)
    steps = 1000.0
    for token in reversed(range(200)):
        if token == cut:
            steps = 500.0 if flag == "truncated" else 0.0
        steps += 1
        assert counted[token] == steps


@pytest.mark.parametrize("op", ["lambda_returns", "vtrace", "retrace"])
def test_backward_episodes_with_a_masked_span_over_tiles(op: str, backend: str) -> None:
    """Tokens 30 to 159 take no step; the flag at 100, among them, ends the episode of the 30 before."""
    cut_value = 0.0 if op == "retrace" else 500.0  # E[Q] of the last step before the cut is what follows, here 0
    mask = torch.cat([torch.ones(30), torch.zeros(130), torch.ones(40)])
    counted = counting(op, backend, 100, "truncated", mask)
    assert counted == [cut_value + 30 - t for t in range(30)] + [0.0] * 130 + [1000.0 + 40 - t for t in range(40)]
