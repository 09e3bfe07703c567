"""Arguments of a wrong kind, which Python or torch would take for something else, and rates that only ``validate="full"`` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of

import rlhf_scan
from rlhf_scan import CreditRequest, InputError, Segments, execute
from rlhf_scan.server.json_format import result_to_json
from rlhf_scan.whitening import Whitening

ROWS = torch.tensor([[-1.0, -0.5, -0.2], [-1.0, -2.0, -3.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
SCORES = torch.tensor([1.0, 2.0])
CLOCK = torch.tensor([[0, 0, 1], [0, -1, -1]])
HUGE = 10**400  # no float holds it
NESTED, BROKEN = torch.nested.nested_tensor([ROWS[0], ROWS[1, :2]]), torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
SPARSE, ENTRIES = ROWS.to_sparse(), torch.tensor([0, 1]).to_sparse()


def ppo(device: torch.device | None = None, **given: Any) -> rlhf_scan.PPOAdvantages:
    """A sound call but for what is `given`."""
    call = {"logprobs": ROWS, "ref_logprobs": ROWS / 2, "values": ROWS, "scores": SCORES, "mask": MASK, **given}
    return rlhf_scan.ppo_advantages(
        **{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    )


def request(op: str, tensors: dict[str, torch.Tensor], **params: Any) -> Callable[[], Any]:
    return lambda: execute([CreditRequest(op, tensors, params)])


GROUPED = {"scores": SCORES, "groups": torch.tensor([0, 0])}

WRONG: list[tuple[Callable[[], Any], str]] = [
    # A word is no switch: "false" would be true.
    (request("grpo", GROUPED, unbiased="false"), "grpo: unbiased must be True or False, got 'false'"),
    (request("whiten", {"x": ROWS}, scale="true"), "whiten: scale must be True or False, got 'true'"),
    (lambda: rlhf_scan.grpo(SCORES, [0, 0], scale=SCORES), "grpo: scale must be True or False"),  # type: ignore[arg-type]
    (lambda: rlhf_scan.whiten(ROWS, shift_mean=None), "whiten: shift_mean must be True or False, got None"),  # type: ignore[arg-type]
    (lambda: rlhf_scan.whiten(ROWS, allow_whitened="no"), "whiten: allow_whitened must be True or False"),  # type: ignore[arg-type]
    (lambda: rlhf_scan.reinforce_plus_plus(SCORES, unbiased=1), "reinforce_plus_plus: unbiased must be True or False, got 1"),
    (lambda: ppo(whiten_advantages=Whitening(scale="no")), "ppo_advantages: scale must be True or False"),  # type: ignore[arg-type]
    # Not every integer fits a float.
    (lambda: rlhf_scan.vtrace(ROWS, ROWS, ROWS, ROWS, rho_bar=HUGE), "vtrace: rho_bar must be a number or a tensor below 1e308"),
    (lambda: rlhf_scan.whiten(ROWS, eps=HUGE), "whiten: eps must be a number from 0 on below 1e308, got an integer of 1329 bits"),
    (lambda: rlhf_scan.clock_rate(HUGE, CLOCK), "clock_rate: rate must be a number or a tensor below 1e308"),
    (lambda: ppo(kl_coef=HUGE), "ppo_advantages: kl_coef must be a number below 1e308"),
    (lambda: ppo(score_clip=HUGE), "ppo_advantages: score_clip must be a number below 1e308"),
    (lambda: ppo(step_rewards=[(0, 1, HUGE)]), "ppo_advantages: step_rewards must be"),
    # Stop reasons are in the order of the sequences.
    (lambda: ppo(stop_reasons={"stop", "length"}), "stop_reasons must have 2 entries, one per sequence, got {"),
    (lambda: ppo(stop_reasons=iter(["stop", "length"])), "stop_reasons must have 2 entries, one per sequence, got <list_iterator"),
    (request("ppo_advantages", {"logprobs": ROWS, "values": ROWS}, stop_reasons=5), "stop_reasons must have 2 entries, .*, got 5;"),
    # A place is a whole number, in a dtype that holds it.
    (lambda: ppo(step_rewards=[(0, 1.5, 1.0)]), "step_rewards must name tokens of the batch, .*in whole numbers"),
    (lambda: ppo(step_rewards=[(0, float("nan"), 1.0)]), "step_rewards must name tokens of the batch, .*in whole numbers"),
    (lambda: ppo(step_rewards=[(2**63, 0, 1.0)]), "step_rewards must name tokens of the batch"),
    (lambda: ppo(step_rewards=torch.ones(1, 3).bfloat16()), "sequences and tokens as integers, float32 or float64"),
    (lambda: ppo(step_rewards=torch.ones(1, 3, dtype=torch.complex64)), "sequences and tokens as integers, float32 or float64"),
    (lambda: rlhf_scan.expand_to_tokens(SCORES, [[1, 1]]), "expand_to_tokens: mask must be a torch.Tensor, got list"),  # type: ignore[arg-type]
    (lambda: rlhf_scan.expand_to_tokens(SCORES, segments=[0, 1]), "expand_to_tokens: mask must be given where segments do not say"),  # type: ignore[arg-type]
    # A sparse tensor is none that memory holds.
    (lambda: rlhf_scan.gae(SPARSE, SPARSE), "gae: rewards must be dense, got torch.sparse_coo; convert it with .to_dense()"),
    (lambda: rlhf_scan.gae(ROWS, ROWS, mask=SPARSE), "gae: mask must be dense"),
    (lambda: rlhf_scan.gae(ROWS, ROWS, lam=SPARSE), "gae: lam must be dense"),
    (lambda: rlhf_scan.whiten(SPARSE), "whiten: x must be dense"),
    (lambda: rlhf_scan.whiten(ROWS, SPARSE), "whiten: mask must be dense"),
    (lambda: ppo(values=SPARSE), "ppo_advantages: values must be dense"),
    (lambda: ppo(scores=SCORES.to_sparse()), "ppo_advantages: scores must be dense"),
    (lambda: rlhf_scan.grpo(SCORES, ENTRIES), "grpo: groups must be dense"),
    (lambda: rlhf_scan.clock_rate(0.5, CLOCK.to_sparse()), "clock_rate: clock must be dense"),
    (lambda: Segments.from_lengths(ENTRIES), "Segments.from_lengths: lengths must be dense"),
    (lambda: Segments.from_segment_ids(ENTRIES), "Segments.from_segment_ids: segment_ids must be dense"),
    # Nor is a nested one.
    (lambda: rlhf_scan.gae(NESTED, ROWS), "gae: rewards must be dense, got a nested tensor"),
    (lambda: rlhf_scan.gae(ROWS, ROWS, mask=NESTED), "gae: mask must be dense, got a nested tensor"),
    (lambda: ppo(rewards=NESTED), "ppo_advantages: rewards must be dense, got a nested tensor"),
    (lambda: rlhf_scan.whiten(NESTED), "whiten: x must be dense, got a nested tensor"),
    # What is no list of requests.
    (lambda: execute(CreditRequest("gae", {})), r"execute: requests must be a list of CreditRequest, got CreditRequest; pass \[request\]"),  # type: ignore[arg-type]
    (lambda: execute(None), "execute: requests must be a list of CreditRequest, got NoneType"),  # type: ignore[arg-type]
    (lambda: execute([{"op": "gae"}]), "execute: each request must be a CreditRequest, got dict"),  # type: ignore[list-item]
    (lambda: execute("gae"), "execute: each request must be a CreditRequest, got str"),  # type: ignore[arg-type]
    (lambda: execute([CreditRequest("gae", None)]), "gae: tensors must be a mapping of names, got NoneType"),  # type: ignore[arg-type]
    (lambda: execute([CreditRequest("gae", {}, [0.9])]), "gae: params must be a mapping of names, got list"),  # type: ignore[arg-type]
    (lambda: rlhf_scan.linear_scan(ROWS, ROWS, reverse="no"), "linear_scan: reverse must be True or False, got 'no'"),  # type: ignore[arg-type]
    # Messages name the caller's argument, and a remedy that there is.
    (
        lambda: rlhf_scan.turn_returns(BROKEN, CLOCK, validate="full"),
        r"turn_returns: turn_rewards must be finite, got nan at \[1, 0\] \(1 in all\)",
    ),
    (lambda: ppo(rewards=rlhf_scan.whiten(ROWS), whiten_rewards=True), "rewards must not be whitened yet, .*; drop one of the two$"),
    # Nothing to do is no reason to take what is wrong.
    (lambda: rlhf_scan.turn_returns(torch.zeros(0, 3), CLOCK[:0], backend="none"), "turn_returns: backend must be one of"),
    (lambda: rlhf_scan.turn_returns(torch.zeros(2, 0), CLOCK * 0 - 1, gamma=7), r"turn_returns: gamma must lie in \[0, 1\], got 7"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_kinds(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_a_repeated_call_refuses_what_the_first_one_refuses() -> None:
    for _ in range(2):
        rlhf_scan.vtrace(ROWS, ROWS, ROWS, ROWS, rho_bar=3)
    with pytest.raises(InputError, match="rho_bar must be a number or a tensor below 1e308"):
        rlhf_scan.vtrace(ROWS, ROWS, ROWS, ROWS, rho_bar=HUGE)


def test_requests_of_any_iterable() -> None:
    requests = (CreditRequest("discounted_returns", {"rewards": ROWS}) for _ in range(2))
    assert len(execute(requests)) == 2  # type: ignore[arg-type]


def test_a_rate_without_dimensions_is_a_number() -> None:
    assert torch.equal(rlhf_scan.clock_rate(torch.tensor(0.5), CLOCK), rlhf_scan.clock_rate(0.5, CLOCK))


@pytest.mark.parametrize("large", [1e200, 1.5e308])
def test_numbers_whose_squares_no_float_holds(backend: str, large: float) -> None:
    """The variance is infinite: told to whom asks, no other error."""
    x = torch.tensor([large, large, -large], dtype=torch.float64, device=device_of(backend))
    assert rlhf_scan.whiten(x, backend=backend).shape == (3,)
    with pytest.raises(InputError, match="whiten: x must be finite"):
        rlhf_scan.whiten(x, backend=backend, validate="full")


def test_a_single_number_is_whitened() -> None:
    (result,) = execute([CreditRequest("whiten", {"x": torch.tensor(5.0)})])
    assert result.tensors["whitened"] == 0
    assert result.report["segments"] == 1
    assert json.loads(result_to_json("whiten", result))["tensors"] == {"whitened": 0.0}


@pytest.mark.parametrize("reasons", [["stop", "length"], ("stop", "length"), np.array(["stop", "length"])])
def test_stop_reasons_in_any_sequence(reasons: Any) -> None:
    assert ppo(stop_reasons=reasons).report["truncated"] == 1


RATES: list[tuple[dict[str, Any], str]] = [
    ({"gamma": torch.tensor([0.9, 2.0])}, r"gamma must lie in \[0, 1\], got 2.0 at segment 1"),
    ({"lam": torch.tensor([-1.0, 0.5])}, r"lam must lie in \[0, 1\], got -1.0 at segment 0"),
    ({"lam_value": torch.tensor([[0.5, float("nan"), 1.0], [1.0, 1.0, 1.0]])}, r"lam_value must lie in \[0, 1\], got nan at \[0, 1\]"),
    ({"kl_coef": torch.tensor([0.1, -1.0])}, "kl_coef must be >= 0, got -1.0 at sequence 1"),
]


@pytest.mark.parametrize(("masked", "nonfinite"), [("skip", "propagate"), ("zero", "drop"), ("keep", "zero")])
@pytest.mark.parametrize(("rates", "message"), RATES)
def test_rates_out_of_their_range(backend: str, rates: dict[str, Any], message: str, masked: str, nonfinite: str) -> None:
    options = {**rates, "masked": masked, "nonfinite": nonfinite, "backend": backend, "device": device_of(backend)}
    ppo(**options)
    with pytest.raises(InputError, match=message):
        ppo(**options, validate="full")


@pytest.mark.parametrize("masked", ["skip", "zero", "keep"])
@pytest.mark.parametrize("packed", [False, True])
def test_rates_of_padding_are_not_read(backend: str, masked: str, packed: bool) -> None:
    lam = torch.tensor([[0.5, 0.5, 0.5], [0.5, float("nan"), 7.0]])
    given: dict[str, Any] = {"lam": lam, "attention_mask": MASK}
    if packed:
        given |= {name: numbers.flatten() for name, numbers in {**given, "logprobs": ROWS, "values": ROWS, "mask": MASK}.items()}
        given |= {"ref_logprobs": None, "segments": Segments.from_lengths([3, 3])}
    found = ppo(**given, masked=masked, backend=backend, device=device_of(backend), validate="full")
    assert bool(found.advantages.isfinite().all())
