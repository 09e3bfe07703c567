"""What each boundary means, in examples worked by hand. All numbers are small fractions of powers of two, so equality is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor

import rlhf_scan
from rlhf_scan import Segments

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

nan = float("nan")
REWARDS, VALUES = [1.0, 2.0, 4.0], [8.0, 16.0, 32.0]
HALF = {"gamma": 0.5, "lam": 0.5}

# name, options, advantages with gamma = lam = 1/2
GAE_CASES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("natural end: 0 follows", {}, [-0.25, -5, -28]),
    ("bootstrap [S] follows the last token", {"bootstrap": [64]}, [1.75, 3, 4]),
    ("bootstrap per token is read at the last one only", {"bootstrap": [nan, nan, 64]}, [1.75, 3, 4]),
    ("truncated inside: the bootstrap there, once", {"truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]}, [5.5, 18, -28]),
    ("truncated inside: a bootstrap [S] is not there", {"truncated": [0, 1, 0], "bootstrap": [64]}, [-2.5, -14, 4]),
    ("truncated inside without bootstrap", {"truncated": [0, 1, 0]}, [-2.5, -14, -28]),
    ("terminated inside: 0 follows", {"terminated": [0, 1, 0], "bootstrap": [nan, nan, 64]}, [-2.5, -14, 4]),
    ("both inside: terminated wins", {"terminated": [0, 1, 0], "truncated": [0, 1, 0], "bootstrap": [nan, nan, 64]}, [-2.5, -14, 4]),
    ("terminated last", {"terminated": [0, 0, 1], "bootstrap": [nan]}, [-0.25, -5, -28]),
    ("terminated last, bootstrap per token", {"terminated": [0, 0, 1], "bootstrap": [nan, nan, nan]}, [-0.25, -5, -28]),
    ("truncated last", {"truncated": [0, 0, 1], "bootstrap": [64]}, [1.75, 3, 4]),
    ("both last: terminated wins", {"terminated": [0, 0, 1], "truncated": [0, 0, 1], "bootstrap": [nan]}, [-0.25, -5, -28]),
    ("terminated [S]", {"terminated": [1], "bootstrap": [nan]}, [-0.25, -5, -28]),
    ("truncated [S]", {"truncated": [1], "bootstrap": [64]}, [1.75, 3, 4]),
    ("terminated [S] and truncated per token", {"terminated": [1], "truncated": [0, 1, 1], "bootstrap": [nan, 64, nan]}, [5.5, 18, -28]),
    ("skip: credit and next value pass over", {"mask": [1, 0, 1]}, [2, 0, -28]),
    ("skip: the last tokens masked", {"mask": [1, 0, 0], "bootstrap": [64]}, [25, 0, 0]),
    ("skip: the last token masked, its bootstrap read", {"mask": [1, 1, 0], "bootstrap": [nan, nan, 64]}, [5.5, 18, 0]),
    ("skip: the first token masked", {"mask": [0, 1, 1]}, [0, -5, -28]),
    ("skip: terminated at a masked token", {"mask": [1, 0, 1], "terminated": [0, 1, 0]}, [-7, 0, -28]),
    ("skip: truncated at a masked token", {"mask": [1, 0, 1], "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]}, [25, 0, -28]),
    ("skip: truncated at a masked token, [S]", {"mask": [1, 0, 1], "truncated": [0, 1, 0], "bootstrap": [64]}, [-7, 0, 4]),
    ("skip: truncated at a masked token, None", {"mask": [1, 0, 1], "truncated": [0, 1, 0]}, [-7, 0, -28]),
    (
        "skip: both at a masked token",
        {"mask": [1, 0, 1], "terminated": [0, 1, 0], "truncated": [0, 1, 0], "bootstrap": [nan, nan, 0]},
        [-7, 0, -28],
    ),
    ("skip: terminated at a masked last token", {"mask": [1, 1, 0], "terminated": [0, 0, 1], "bootstrap": [nan]}, [-2.5, -14, 0]),
    (
        "skip: the first end counts, truncated",
        {"mask": [1, 0, 0], "truncated": [0, 1, 0], "terminated": [0, 0, 1], "bootstrap": [nan, 64, nan]},
        [25, 0, 0],
    ),
    (
        "skip: the first end counts, terminated",
        {"mask": [1, 0, 0], "truncated": [0, 0, 1], "terminated": [0, 1, 0], "bootstrap": [nan] * 3},
        [-7, 0, 0],
    ),
    (
        "skip: an end at the token itself comes first",
        {"mask": [1, 0, 1], "truncated": [1, 0, 0], "terminated": [0, 1, 0], "bootstrap": [64, nan, 0]},
        [25, 0, -28],
    ),
    ("zero: a step with r = 0 and V = 0", {"mask": [1, 0, 1], "masked": "zero"}, [-4.75, 0, -28]),
    ("zero: terminated at a masked token", {"mask": [1, 0, 1], "masked": "zero", "terminated": [0, 1, 0]}, [-7, 0, -28]),
    (
        "zero: truncated at a masked token",
        {"mask": [1, 0, 1], "masked": "zero", "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]},
        [1, 0, -28],
    ),
    ("zero: the last token masked", {"mask": [1, 1, 0], "masked": "zero", "bootstrap": [64]}, [-0.5, -6, 0]),
    ("keep: only outputs are cleared", {"mask": [1, 0, 1], "masked": "keep"}, [-0.25, 0, -28]),
    ("keep: terminated at a masked token", {"mask": [1, 0, 1], "masked": "keep", "terminated": [0, 1, 0]}, [-2.5, 0, -28]),
    (
        "keep: truncated at a masked token",
        {"mask": [1, 0, 1], "masked": "keep", "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]},
        [5.5, 0, -28],
    ),
    ("all masked", {"mask": [0, 0, 0], "bootstrap": [64]}, [0, 0, 0]),
    ("one-token episodes, terminated", {"terminated": [1, 1, 1], "bootstrap": [nan] * 3}, [-7, -14, -28]),
    ("one-token episodes, truncated", {"truncated": [1, 1, 1], "bootstrap": [2, 4, 8]}, [-6, -12, -24]),
    ("gamma per segment", {"gamma": [0.5]}, [-0.25, -5, -28]),
    ("gamma per token", {"gamma": [1.0, 0.5, 0.25], "bootstrap": [64]}, [1 + 16 - 8 + 0.5 * -1, 2 + 16 - 16 + 0.25 * -12, 4 + 16 - 32]),
    ("lambda per token", {"lam": [1.0, 0.0, 0.25]}, [1 + 8 - 8 + 0.5 * 2, 2 + 16 - 16, -28]),
]


def tensors(options: dict[str, Any], backend: str, shape: tuple[int, ...], per_segment: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """Lists of one number per segment or token as tensors."""

    def tensor(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=device_of(backend)).reshape(per_segment if len(numbers) == 1 else shape)

    return {name: tensor(value) if isinstance(value, list) else value for name, value in options.items()} | {"backend": backend}


@pytest.mark.parametrize("shape", [(3,), (1, 3)], ids=["packed", "row"])
@pytest.mark.parametrize(("options", "advantages"), [case[1:] for case in GAE_CASES], ids=[case[0] for case in GAE_CASES])
def test_gae(options: dict[str, Any], advantages: list[float], backend: str, shape: tuple[int, ...]) -> None:
    arguments = tensors({"rewards": REWARDS, "values": VALUES, **HALF, **options}, backend, shape)
    found = rlhf_scan.gae(**arguments)
    live = options.get("mask", [1, 1, 1])
    returns = [advantage + value if on else 0 for advantage, value, on in zip(advantages, VALUES, live, strict=True)]
    assert found.advantages.flatten().tolist() == advantages
    assert found.returns.flatten().tolist() == returns
    assert found.advantages.shape == found.returns.shape == shape


RETURNS_CASES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("natural end", {}, [3, 4, 4]),
    ("bootstrap [S]", {"bootstrap": [64]}, [11, 20, 36]),
    ("bootstrap per token", {"bootstrap": [nan, nan, 64]}, [11, 20, 36]),
    ("truncated inside", {"truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]}, [18, 34, 4]),
    ("truncated inside, [S]", {"truncated": [0, 1, 0], "bootstrap": [64]}, [2, 2, 36]),
    ("terminated inside", {"terminated": [0, 1, 0], "bootstrap": [nan, nan, 64]}, [2, 2, 36]),
    ("both", {"terminated": [0, 1, 1], "truncated": [0, 1, 1], "bootstrap": [nan] * 3}, [2, 2, 4]),
    ("skip", {"mask": [1, 0, 1]}, [3, 0, 4]),
    ("zero", {"mask": [1, 0, 1], "masked": "zero"}, [2, 0, 4]),
    ("keep", {"mask": [1, 0, 1], "masked": "keep"}, [3, 0, 4]),
    ("skip, truncated at a masked token", {"mask": [1, 0, 1], "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]}, [33, 0, 4]),
    (
        "zero, truncated at a masked token",
        {"mask": [1, 0, 1], "masked": "zero", "truncated": [0, 1, 0], "bootstrap": [nan, 64, 0]},
        [17, 0, 4],
    ),
    ("skip, terminated at a masked last token", {"mask": [1, 1, 0], "terminated": [1], "bootstrap": [nan]}, [2, 2, 0]),
    ("zero, the last token masked", {"mask": [1, 1, 0], "masked": "zero", "bootstrap": [64]}, [10, 18, 0]),
    ("gamma per token", {"gamma": [1.0, 0.5, 0.25], "bootstrap": [64]}, [13, 12, 20]),
]


@pytest.mark.parametrize("shape", [(3,), (1, 3)], ids=["packed", "row"])
@pytest.mark.parametrize(("options", "returns"), [case[1:] for case in RETURNS_CASES], ids=[case[0] for case in RETURNS_CASES])
def test_discounted_returns(options: dict[str, Any], returns: list[float], backend: str, shape: tuple[int, ...]) -> None:
    found = rlhf_scan.discounted_returns(**tensors({"rewards": REWARDS, "gamma": 0.5, **options}, backend, shape))
    assert found.flatten().tolist() == returns
    assert found.shape == shape


@pytest.mark.parametrize("lengths", [[0, 2, 1], [2, 0, 1], [2, 1, 0], [0, 0, 2, 0, 0, 1, 0], [1, 1, 1], [3]])
def test_empty_segments(lengths: list[int], backend: str) -> None:
    """They take a place in every tensor per segment, and nothing else."""
    device = device_of(backend)
    bootstrap = torch.tensor([64.0 if length else nan for length in lengths], device=device)
    gamma = torch.tensor([0.5 if length else nan for length in lengths], device=device)
    segments = Segments.from_lengths(lengths)
    found = rlhf_scan.discounted_returns(torch.ones(3, device=device), gamma=gamma, bootstrap=bootstrap, segments=segments, backend=backend)
    expected = []
    for length in lengths:
        carry, some = 64.0, []
        for _ in range(length):
            carry = 1 + 0.5 * carry
            some.append(carry)
        expected += some[::-1]
    assert found.tolist() == expected


def test_as_many_segments_as_tokens(backend: str) -> None:
    """[N] is then per segment; as a row the tokens are told apart."""
    device, segments = device_of(backend), Segments.from_lengths([2, 0, 1])
    rewards, gamma = torch.ones(3, device=device), torch.tensor([0.5, 0.25, 0.125], device=device)
    options: dict[str, Any] = {"segments": segments, "backend": backend, "bootstrap": torch.tensor([8.0, nan, 16.0], device=device)}
    assert rlhf_scan.discounted_returns(rewards, gamma=gamma, **options).tolist() == [1 + 0.5 * 5, 1 + 0.5 * 8, 1 + 0.125 * 16]
    row = rlhf_scan.discounted_returns(rewards[None], gamma=gamma[None], **options)
    assert row.tolist() == [[1 + 0.5 * 3, 1 + 0.25 * 8, 1 + 0.125 * 16]]


def test_only_empty_segments(backend: str) -> None:
    none = torch.empty(0, device=device_of(backend))
    found = rlhf_scan.gae(none, none, segments=Segments.from_lengths([0, 0]), bootstrap=torch.ones(2, device=none.device), backend=backend)
    assert found.advantages.shape == found.returns.shape == (0,)


def test_two_lambdas(backend: str) -> None:
    found = rlhf_scan.gae(**tensors({"rewards": REWARDS, "values": VALUES, **HALF, "lam_value": 1.0}, backend, (3,)))
    assert found.advantages.tolist() == [-0.25, -5, -28]
    assert found.returns.tolist() == [3, 4, 4]


@pytest.mark.parametrize("cut", [0, 1, 62, 63, 64, 65, 127, 128, 129, 198, 199])
@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_episodes_that_span_tiles(cut: int, flag: str, backend: str) -> None:
    """With gamma = lambda = 1 and rewards of 1 the advantage counts steps; a span of 130 masked tokens takes none."""
    device = device_of(backend)
    ends = torch.zeros(200, device=device)
    ends[cut] = 1
    bootstrap = torch.full((200,), nan, device=device)
    bootstrap[199], bootstrap[cut] = 1000, 500 if flag == "truncated" else nan
    for mask in (torch.ones(200), torch.cat([torch.ones(30), torch.zeros(130), torch.ones(40)])):
        mask = mask.to(device)
        rewards = torch.where(mask != 0, 1.0, nan)
        options: dict[str, Any] = {flag: ends, "bootstrap": bootstrap, "mask": mask, "lam": 1.0, "backend": backend}
        advantages = rlhf_scan.gae(rewards, torch.zeros_like(rewards).where(mask != 0, nan), **options).advantages.tolist()
        steps = 1000.0 if cut < 199 else (500.0 if flag == "truncated" else 0.0)
        for token in reversed(range(200)):
            if token == cut:
                steps = 500.0 if flag == "truncated" else 0.0
            steps += float(mask[token])
            assert advantages[token] == (steps if mask[token] else 0)


@pytest.mark.parametrize(("cut", "bad"), [(0, 1), (3, 5), (3, 12), (30, 70), (64, 65), (64, 290), (100, 200)])
@pytest.mark.parametrize("number", [nan, float("inf")])
def test_a_bad_rate_stays_in_its_episode(cut: int, bad: int, number: float, backend: str) -> None:
    """Back to where its episode begins, since no product of so few rates underflows."""
    gamma = torch.full((300,), 0.75, device=device_of(backend))
    gamma[bad] = number
    ends = torch.arange(300, device=gamma.device) == cut
    returns = rlhf_scan.discounted_returns(torch.ones_like(gamma), gamma=gamma, terminated=ends, backend=backend)
    assert returns[: cut + 1].tolist() == pytest.approx([4 * (1 - 0.75 ** (cut + 1 - token)) for token in range(cut + 1)], rel=1e-6)
    assert not returns[cut + 1 : bad + 1].isfinite().any()
    assert returns[bad + 1 :].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_are_wide(dtype: torch.dtype, backend: str) -> None:
    """Running sums of 1 pass 256, where bfloat16 steps stick, and come out as that number in the dtype of the rewards."""
    rewards = torch.ones(384, dtype=dtype, device=device_of(backend))
    returns = rlhf_scan.discounted_returns(rewards, backend=backend)
    assert returns.dtype == dtype
    assert returns[::64].tolist() == [384, 320, 256, 192, 128, 64]


def test_float64_is_not_narrowed(backend: str) -> None:
    rewards = torch.tensor([1.0, 2.0**-40], dtype=torch.float64, device=device_of(backend))
    assert rlhf_scan.discounted_returns(rewards, backend=backend).tolist() == [1 + 2.0**-40, 2.0**-40]


@pytest.mark.parametrize(
    ("rewards", "values", "asked", "got"),
    [
        (torch.bfloat16, torch.float32, None, torch.float32),
        (torch.float16, torch.bfloat16, None, torch.float32),
        (torch.float32, torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float64, torch.float16, torch.float16),
        (torch.float64, torch.float64, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes_of_outputs(rewards: torch.dtype, values: torch.dtype, asked: torch.dtype | None, got: torch.dtype, backend: str) -> None:
    options = tensors({"rewards": REWARDS, "values": VALUES, **HALF}, backend, (3,))
    options |= {"rewards": options["rewards"].to(rewards), "values": options["values"].to(values), "dtype": asked}
    found = rlhf_scan.gae(**options)
    assert found.advantages.dtype == found.returns.dtype == got
    assert found.advantages.tolist() == [-0.25, -5, -28]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ],
)
def test_dtypes_of_flags(dtype: torch.dtype, backend: str) -> None:
    """Any nonzero number is True, -1 and 0.5 too."""
    device = device_of(backend)
    true = 1 if dtype in (torch.bool, torch.uint8) else -1 if not dtype.is_floating_point else 0.5
    mask = torch.tensor([true, 0, true], device=device).to(dtype)
    ends = torch.tensor([0, true, 0], device=device).to(dtype)
    options = tensors({"rewards": REWARDS, "values": VALUES, **HALF}, backend, (3,))
    assert rlhf_scan.gae(**options, mask=mask, terminated=ends).advantages.tolist() == [-7, 0, -28]
    assert rlhf_scan.gae(**options, truncated=ends).advantages.tolist() == [-2.5, -14, -28]


def test_outputs_know_nothing_of_autograd(backend: str) -> None:
    rewards = torch.ones(3, device=device_of(backend), requires_grad=True)
    values = (rewards * 2).exp()
    gamma = torch.tensor([0.5], device=rewards.device, requires_grad=True)
    found = rlhf_scan.gae(rewards, values, gamma=gamma, bootstrap=values.sum().reshape(1), backend=backend)
    assert not found.advantages.requires_grad
    assert not found.returns.requires_grad
