"""One sequence with a number that is not finite, wherever it comes from, spoils no other one of `ppo_advantages`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import device_of
from ppo_samples import on_device
from torch import Tensor

from rlhf_scan import InputError, Segments, ppo_advantages

NAN = math.nan
LENGTHS = [3, 200, 5]  # the second longer than a tile of the interpreter


def batch(**others: Any) -> dict[str, Any]:
    """Three sequences."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    call: dict[str, Any] = {name: torch.randn(tokens, generator=generator) for name in ("logprobs", "ref_logprobs", "values")}
    return call | {"scores": torch.randn(3, generator=generator)} | others


def at(token: int, number: float) -> Tensor:
    """0 but at one token."""
    return torch.zeros(sum(LENGTHS)).index_fill(0, torch.tensor([token]), number)


# Of the second sequence, whose first token is the third: what is wrong, and the token and the argument that the report names.
CAUSES: dict[str, tuple[dict[str, Any], int, str]] = {
    "values": ({"values": at(103, NAN)}, 100, "values"),
    "rewards": ({"rewards": at(150, math.inf)}, 147, "rewards"),
    "kl_coef": ({"kl_coef": torch.tensor([0.1, NAN, 0.1])}, 199, "kl_coef"),
    "bootstrap": ({"bootstrap": torch.tensor([1.0, NAN, 1.0])}, 199, "bootstrap"),
    "bootstrap within": ({"bootstrap": at(103, NAN), "truncated": at(103, 1.0) != 0}, 0, "advantages"),
    "gamma": ({"gamma": torch.tensor([0.9, NAN, 0.9])}, 0, "advantages"),
    "lam": ({"lam": 0.9 + at(50, NAN)}, 0, "advantages"),
}
each_cause = pytest.mark.parametrize("cause", CAUSES)


def run(backend: str, call: dict[str, Any], **options: Any) -> Any:
    segments = Segments.from_lengths(LENGTHS)
    tensors = {name: value.to(device_of(backend)) if isinstance(value, Tensor) else value for name, value in call.items()}
    return ppo_advantages(**tensors, segments=segments, backend=backend, **options)


@each_cause
@pytest.mark.parametrize(
    "whitening", [{}, {"whiten_advantages": "off"}, {"whiten_rewards": "keep_mean"}], ids=["advantages", "off", "rewards"]
)
def test_a_bad_sequence_spoils_no_other_and_is_named(cause: str, whitening: dict[str, Any], backend: str) -> None:
    wrong, token, argument = CAUSES[cause]
    for nonfinite in ("propagate", "drop"):
        result = run(backend, batch(**wrong), nonfinite=nonfinite, **whitening)
        others = torch.cat([result.advantages[:3], result.advantages[-5:]])
        assert bool(others.isfinite().all())
        if nonfinite == "drop" or whitening.get("whiten_advantages") != "off":
            assert result.report.first_nonfinite() == (1, token, argument)
            assert result.report.nonfinite_sequences.tolist() == [False, True, False]
        if nonfinite == "drop":
            assert not result.advantages[3:-5].any()
    with pytest.raises(
        InputError, match=f"ppo_advantages: {argument} must be finite where it counts, got a number that is not at token {token} of"
    ):
        run(backend, batch(**wrong), nonfinite="raise", **whitening)


def test_a_coefficient_that_is_not_finite_counts_as_zero_if_wanted(backend: str) -> None:
    wrong = batch(kl_coef=torch.tensor([0.1, NAN, 0.1]))
    zeroed = run(backend, wrong, nonfinite="zero")
    wanted = run(backend, {**wrong, "kl_coef": torch.tensor([0.1, 0.0, 0.1])})
    torch.testing.assert_close(zeroed.advantages, wanted.advantages)


def test_a_token_reward_after_the_end_is_no_reward(backend: str) -> None:
    """The step after the end gets the score alone; what stands there is not read."""
    zeros = torch.zeros(1, 3)
    call = {"logprobs": zeros, "ref_logprobs": None, "values": zeros, "scores": torch.zeros(1), "mask": torch.tensor([[1, 1, 0]])}
    for number in (4.0, NAN):
        rewards = torch.tensor([[1.0, 2.0, number]])
        result = ppo_advantages(**on_device({**call, "rewards": rewards}, backend), preset="trl", whiten_advantages="off", backend=backend)
        assert result.rewards.tolist() == [[1.0, 2.0, 0.0]]
        assert result.report.first_nonfinite() is None


@pytest.mark.parametrize("nonfinite", ["propagate", "drop", "raise", "zero"])
@pytest.mark.parametrize("whitened", ["off", "unbiased"])
def test_a_coefficient_that_no_kl_is_multiplied_by(whitened: str, nonfinite: str, backend: str) -> None:
    """An empty response has one step after its end, with its score and without KL."""
    zeros, mask = torch.zeros(2, 3), torch.tensor([[True, True, False], [False, False, False]])
    call = {"logprobs": zeros + 0.5, "ref_logprobs": zeros, "values": zeros + 1, "scores": torch.ones(2), "mask": mask}
    options: dict[str, Any] = {"score_at": "post_eos", "nonfinite": nonfinite, "whiten_rewards": whitened, "backend": backend}
    bad, good = (ppo_advantages(**on_device(call | {"kl_coef": torch.tensor([0.1, number])}, backend), **options) for number in (NAN, 0.1))
    for name in ("advantages", "returns", "rewards"):
        torch.testing.assert_close(getattr(bad, name), getattr(good, name), rtol=0, atol=0)
    assert bad.report["nonfinite_sequences"] == 0


def test_an_infinite_coefficient_is_not_multiplied_by_the_kl_of_masked_tokens(backend: str) -> None:
    ones, mask = torch.ones(1, 4), torch.tensor([[True, False, True, True]])
    call = {
        "logprobs": ones,
        "ref_logprobs": ones * 0.5,
        "values": ones,
        "scores": torch.ones(1),
        "mask": mask,
        "kl_coef": torch.tensor([math.inf]),
    }
    found = ppo_advantages(**on_device(call, backend), masked="zero", whiten_advantages="off", backend=backend)
    assert found.rewards.tolist() == [[-math.inf, 0.0, -math.inf, -math.inf]]
    assert found.advantages.tolist() == [[-math.inf, 0.0, -math.inf, -math.inf]]
