"""`validate="full"` refuses what is read and is not a number, names it, and refuses nothing else: random calls, and each estimator by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from estimator_oracle import ORACLES, Case
from estimator_samples import arguments, outputs_of, run, sample
from torch import Tensor

import rlhf_scan
from rlhf_scan import CreditRequest, InputError, LocalEngine, Segments
from rlhf_scan.estimators import estimator, served

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

nan = math.nan
SHOWN = {"expected_next_q": "next_q * target_probs", "policy_probs": "the logarithm of policy_probs at actions"}


def spoilt(op: str, case: Case, random: np.random.Generator) -> tuple[str, Case] | None:
    """One number of one argument made NaN, of actions -1, and which argument that is."""
    places: dict[str, Any] = {**case.inputs, **{name: rate for name, rate in case.rates.items() if isinstance(rate, np.ndarray)}}
    places |= {} if case.end is None else {"end": case.end}
    places = {name: numbers.copy() for name, numbers in places.items() if numbers.size}
    if not places:
        return None
    name = str(random.choice(sorted(places)))
    places[name].flat[random.integers(places[name].size)] = -1.0 if name == "actions" else nan
    case = replace(
        case,
        inputs={key: places.get(key, numbers) for key, numbers in case.inputs.items()},
        rates={key: places.get(key, rate) for key, rate in case.rates.items()},
        end=places.get("end", case.end),
    )
    shown = {"end": estimator(op).end_name, "next_q": SHOWN["expected_next_q"], "target_probs": SHOWN["expected_next_q"]}
    return str({**shown, "policy_probs": SHOWN["policy_probs"]}.get(name, name)), case


@pytest.mark.parametrize("op", ORACLES)
def test_a_number_is_refused_just_where_it_shows(op: str) -> None:
    """What passes changes no bit; what is refused, and named, would show where the mask hides no step of its own."""
    refused = 0
    for seed in range(5000, 5120):
        case, layout, dtype = sample(op, seed)
        found = spoilt(op, case, np.random.default_rng(seed))
        if found is None:
            continue
        name, bad = found
        outputs, message = run(op, bad, layout, dtype, "cpu"), refusal(lambda: run(op, bad, layout, dtype, "cpu", validate="full"))  # noqa: B023
        if message is None:
            clean = run(op, case, layout, dtype, "cpu")
            assert all(torch.equal(*pair) for pair in zip(outputs, clean, strict=True)), f"seed {seed}: {name}"
        else:
            refused += 1
            assert message.startswith(f"{op}: {name} must ")
            assert case.masked != "skip" or any(output.isnan().any() for output in outputs), f"seed {seed}: {message}"
    assert refused > 15


def refusal(call: Callable[[], Any]) -> str | None:
    """What an InputError says, if `call` raises one."""
    try:
        call()
    except InputError as error:
        return str(error)
    return None


PACK = Segments.from_lengths([4, 0, 2])
TERMINATED = torch.tensor([0, 1, 0, 0, 0, 1])  # also the pack's last token
MASK = torch.tensor([1, 1, 0, 1, 1, 1])

# Tokens that are not read, where token 1 terminates and token 2 is masked out: episodes 0-1, 2-3 (its one step is 3), 4-5.
STEPS = {2}
UNREAD: dict[str, dict[str, set[int]]] = {
    "gae": {"rewards": STEPS, "values": STEPS, "gamma": STEPS, "lam": {1, 2, 3, 5}, "lam_value": {1, 2, 3, 5}},
    "discounted_returns": {"rewards": STEPS, "gamma": {1, 2, 3, 5}},
    "lambda_returns": {"rewards": STEPS, "values": {0, 2, 3, 4}, "gamma": STEPS, "lam": STEPS},
    "vtrace": {
        **dict.fromkeys(("rewards", "values", "behavior_logprobs", "target_logprobs", "gamma", "rho_bar"), STEPS),
        "lam": {1, 2, 3, 5},
        "c_bar": {1, 2, 3, 5},
    },
    "retrace": {
        **dict.fromkeys(("rewards", "q_values", "behavior_logprobs", "target_logprobs", "gamma", "rho_bar"), STEPS),
        "expected_next_q": {1, 2, 5},
        "lam": {1, 2, 3, 5},
        "c_bar": {0, 2, 3, 4},
    },
    "eligibility_traces": {"inputs": STEPS, "gamma": {0, 2, 3, 4}, "lam": {0, 2, 3, 4}},
    "episodic_cumsum": {"inputs": set()},
}
UNREAD["retrace_from_policy"] = {
    **{name: tokens for name, tokens in UNREAD["retrace"].items() if name != "expected_next_q"},
    **dict.fromkeys(("next_q", "target_probs"), UNREAD["retrace"]["expected_next_q"]),
    **dict.fromkeys(("policy_probs", "actions"), STEPS),
}
CASES = [(op, name) for op, names in UNREAD.items() for name in names]


def test_every_argument_of_every_estimator_is_here() -> None:
    for entry in served():
        assert set(UNREAD[entry.name]) == {*entry.arguments, *entry.chosen, *entry.rates}, entry.name


@pytest.mark.parametrize(("op", "name"), CASES)
def test_each_argument_token_by_token(op: str, name: str) -> None:
    entry = estimator(op)
    given: dict[str, Tensor] = arguments(op, (6,), "cpu")
    if name in entry.chosen:
        del given["target_logprobs"]
        given |= {"policy_probs": torch.rand(6, 4), "actions": torch.zeros(6, dtype=torch.int64)}
    given |= {"mask": MASK, "terminated": TERMINATED} if "mask" in entry.takes else {"terminated": TERMINATED}
    if name in entry.rates:
        given[name] = torch.full((6,), 0.5)
    for token in range(6):
        tensor = given[name].clone()
        tensor[token] = -1 if name == "actions" else nan
        message = refusal(lambda: outputs_of(op, {**given, name: tensor}, "cpu", segments=PACK, validate="full"))  # noqa: B023
        if token in UNREAD[op][name]:
            assert message is None
        else:
            assert message is not None
            assert f"at token {token} (1 in all)" in message


def test_rates_of_masked_steps_are_read_unless_they_are_skipped() -> None:
    rewards, mask = torch.ones(3), torch.tensor([1, 0, 1])
    gamma = torch.tensor([0.5, nan, 0.5])
    options: dict[str, Any] = {"gamma": gamma, "mask": mask, "validate": "full"}
    assert rlhf_scan.discounted_returns(rewards, **options).tolist() == [1.5, 0, 1]
    for masked in ("zero", "keep"):
        with pytest.raises(InputError, match=r"gamma must lie in \[0, 1\], got nan at token 1"):
            rlhf_scan.discounted_returns(rewards, masked=masked, **options)


def test_the_bootstrap_of_an_episode_without_a_step_is_not_read() -> None:
    """Nor the second of two ends after a step, nor a segment's whose last episode takes none."""
    rewards, values = torch.ones(4), torch.zeros(4)
    mask, truncated = torch.tensor([1, 0, 0, 0]), torch.tensor([0, 1, 1, 0])
    options: dict[str, Any] = {"mask": mask, "truncated": truncated, "validate": "full"}
    found = rlhf_scan.gae(rewards, values, bootstrap=torch.tensor([nan, 2.0, nan, nan]), **options)
    assert found.returns.tolist() == [3, 0, 0, 0]
    assert rlhf_scan.gae(rewards, values, bootstrap=torch.tensor([nan]), **options).returns.tolist() == [1, 0, 0, 0]
    with pytest.raises(InputError, match=r"bootstrap must be finite .* got nan at token 1"):
        rlhf_scan.gae(rewards, values, bootstrap=torch.tensor([2.0, nan, 2.0, 2.0]), **options)


def test_a_probability_of_zero_is_served() -> None:
    """The new policy never takes the action: ratio 0, no advantage, and no trace back past it."""
    tensors = {name: torch.ones(3) for name in ("rewards", "q_values", "expected_next_q", "behavior_logprobs", "target_logprobs")}
    tensors["target_logprobs"] = torch.tensor([1.0, -math.inf, 1.0])
    found = LocalEngine("cpu", validate="full").run(CreditRequest("retrace", tensors)).tensors
    assert found["targets"].tolist() == [2, 3, 2]
    assert found["advantages"].tolist() == [3, 0, 1]
    tensors["behavior_logprobs"] = tensors["target_logprobs"]
    with pytest.raises(InputError, match=r"^retrace: behavior_logprobs must be finite at trainable tokens, got -inf at token 1"):
        LocalEngine("cpu", validate="full").run(CreditRequest("retrace", tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    rewards = torch.tensor([largest, 0.0, -largest], dtype=dtype)
    rlhf_scan.discounted_returns(rewards, gamma=0.0, validate="full")
    with pytest.raises(InputError, match="got -inf at token 1"):
        rlhf_scan.discounted_returns(torch.tensor([largest, -math.inf, 0.0], dtype=dtype), gamma=0.0, validate="full")
