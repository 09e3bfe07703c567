"""`retrace_from_policy` with the policy's probabilities and the actions taken in place of the log-probability: here, in requests and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import device_of
from service import SAFETENSORS, running
from torch import Tensor
from typer.testing import CliRunner

import rlhf_scan
from rlhf_scan import CreditRequest, InputError, LocalEngine, Segments, execute
from rlhf_scan.estimators import estimator
from rlhf_scan.rollout import read_result, request_to_bytes, result_from_bytes, write_request

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

OP = "retrace_from_policy"
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64)


def rollout(shape: tuple[int, ...], count: int = 5, backend: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The policy at all T + 1 states, and the target's probabilities as views of it; one action taken has no probability."""
    random, device = torch.Generator().manual_seed(7), device_of(backend)
    *rows, steps = shape
    probabilities = torch.softmax(2 * torch.randn((*rows, steps + 1, count), generator=random), -1).to(dtype)
    actions = torch.randint(0, count, shape, generator=random)
    probabilities.view(-1, count)[0, actions.view(-1)[0]] = 0
    found = {name: torch.randn(shape, generator=random).to(dtype) for name in ("rewards", "q_values")}
    found |= {
        "next_q": torch.randn((*shape, count), generator=random).to(dtype),
        "target_probs": probabilities[..., 1:, :],
        "behavior_logprobs": -torch.rand(shape, generator=random).to(dtype),
        "policy_probs": probabilities[..., :-1, :],
        "actions": actions,
    }
    moved = probabilities.to(device)
    views = {"target_probs": moved[..., 1:, :], "policy_probs": moved[..., :-1, :]}
    return {name: views[name] if name in views else tensor.to(device) for name, tensor in found.items()}


def with_logprobs(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same call, with the log-probabilities taken by hand in float64."""
    others = {name: tensor for name, tensor in given.items() if name not in ("policy_probs", "actions")}
    chosen = given["policy_probs"].double().gather(-1, given["actions"].long().unsqueeze(-1)).squeeze(-1)
    return {**others, "target_logprobs": chosen.log().to(others["rewards"].dtype)}


def assert_close(found: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    """Some dozens of roundings of numbers below 64."""
    for got, want in zip(found, expected, strict=True):
        assert want.isfinite().all()
        assert (got.double() - want.double()).abs().max() <= 64 * 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("shape", [(12,), (3, 7), (1, 1), (2, 70)])
def test_views_of_one_tensor_of_probabilities(shape: tuple[int, ...], backend: str) -> None:
    given = rollout(shape, backend=backend)
    assert shape[0] == 1 or len(shape) == 1 or not given["policy_probs"].is_contiguous()
    found = rlhf_scan.retrace_from_policy(**given, gamma=0.9, lam=0.8, backend=backend)
    expected = rlhf_scan.retrace_from_policy(
        **with_logprobs(given), gamma=0.9, lam=0.8, backend="reference" if backend != "triton" else backend
    )
    assert_close(found, expected)
    copied = {name: tensor.contiguous() for name, tensor in given.items()}
    again = rlhf_scan.retrace_from_policy(**copied, gamma=0.9, lam=0.8, backend=backend)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_actions_of_any_integer_dtype(dtype: torch.dtype, backend: str) -> None:
    given = rollout((2, 5), backend=backend)
    found = rlhf_scan.retrace_from_policy(**{**given, "actions": given["actions"].to(dtype)}, backend=backend)
    assert all(torch.equal(*pair) for pair in zip(found, rlhf_scan.retrace_from_policy(**given, backend=backend), strict=True))


@pytest.mark.parametrize("count", [1, 2, 1000, 1024])
def test_up_to_many_actions(count: int, backend: str) -> None:
    given = rollout((2, 4), count, backend, torch.float64)
    found = rlhf_scan.retrace_from_policy(**given, gamma=0.9, backend=backend)
    assert_close(found, rlhf_scan.retrace_from_policy(**with_logprobs(given), gamma=0.9, backend=backend), torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_of_outputs(dtype: torch.dtype, backend: str) -> None:
    given = rollout((2, 3), backend=backend, dtype=dtype)
    assert {output.dtype for output in rlhf_scan.retrace_from_policy(**given, backend=backend)} == {dtype}
    wider = {**given, "policy_probs": given["policy_probs"].double()}
    assert {output.dtype for output in rlhf_scan.retrace_from_policy(**wider, backend=backend)} == {torch.float64}


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_zero_size(shape: tuple[int, ...], backend: str) -> None:
    zeros = torch.zeros(shape, device=device_of(backend))
    each = torch.zeros(*shape, 4, device=zeros.device)
    inputs = {"rewards": zeros, "q_values": zeros, "next_q": each, "target_probs": each, "behavior_logprobs": zeros}
    found = rlhf_scan.retrace_from_policy(**inputs, policy_probs=each, actions=zeros.long(), backend=backend, validate="full")
    assert [output.shape for output in found] == [shape] * 2


@pytest.mark.parametrize("action", [-1, 5, -100, 2**62, -(2**63)])
@pytest.mark.parametrize("masked", ["skip", "zero"])
def test_an_action_that_there_is_not(action: int, masked: str, backend: str) -> None:
    """Where a step is taken its ratio is NaN, and full validation names it; at a masked token nobody looks."""
    given = rollout((2, 4), backend=backend)
    clean = rlhf_scan.retrace_from_policy(**given, backend=backend)
    given["actions"][1, 2] = action
    found = rlhf_scan.retrace_from_policy(**given, backend=backend)
    assert found.targets.isnan().nonzero().tolist() == [[1, 0], [1, 1]]
    assert found.advantages.isnan().nonzero().tolist() == [[1, 0], [1, 2]]
    assert torch.equal(found.targets[0], clean.targets[0])
    message = (
        rf"^{OP}: actions must be from 0 to 4 where a step is taken, as policy_probs has 5 actions, got {action} at \[1, 2\] \(1 in all\); "
    )
    with pytest.raises(InputError, match=message):
        rlhf_scan.retrace_from_policy(**given, backend=backend, validate="full")
    mask = torch.ones(2, 4, device=device_of(backend))
    mask[1, 2] = 0
    checked = rlhf_scan.retrace_from_policy(**given, mask=mask, masked=masked, backend=backend, validate="full")
    assert all(output.isfinite().all() for output in checked)


@pytest.mark.parametrize("number", [math.nan, math.inf, -0.5])
def test_full_validation_of_the_probability_of_an_action_taken(number: float) -> None:
    """Of no other: what is not taken is not read. 0 is one."""
    given = rollout((6,))
    taken = given["actions"][3]
    given["policy_probs"] = given["policy_probs"].clone()
    given["policy_probs"][3, (taken + 1) % 5] = number
    rlhf_scan.retrace_from_policy(**given, validate="full")
    given["policy_probs"][3, taken] = number
    with pytest.raises(
        InputError, match=rf"^{OP}: the logarithm of policy_probs at actions must be finite, or -inf for probability 0.* at token 3"
    ):
        rlhf_scan.retrace_from_policy(**given, validate="full")


NEITHER = "target_logprobs must be given, or policy_probs and actions in place of it, got neither; add one or the other"
BESIDE = "target_logprobs must be given as such or as policy_probs and actions, got {} beside it; drop one or the other"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy_probs": None, "actions": None}, NEITHER),
        (
            {"actions": None},
            "policy_probs and actions must be given together, got no actions; add it, or pass target_logprobs in place of both",
        ),
        ({"policy_probs": None}, "policy_probs and actions must be given together, got no policy_probs; add it"),
        ({"target_logprobs": torch.zeros(6)}, BESIDE.format("policy_probs and actions")),
        ({"target_logprobs": torch.zeros(6), "actions": None}, BESIDE.format("policy_probs")),
        ({"target_logprobs": torch.zeros(6), "policy_probs": None}, BESIDE.format("actions")),
        (
            {"policy_probs": torch.zeros(6, 4)},
            "policy_probs must have shape [6, 5] to match rewards and next_q, got [6, 4]; pass one entry per",
        ),
        ({"policy_probs": torch.zeros(6)}, "policy_probs must have shape [6, 5] to match rewards and next_q, got [6]; pass one entry per"),
        (
            {"policy_probs": torch.zeros(6, 5, dtype=torch.int32)},
            "policy_probs must be float32, float64, bfloat16 or float16, got torch.int32",
        ),
        ({"actions": torch.zeros(6)}, "actions must be an integer dtype, got torch.float32; convert it with .long()"),
        ({"actions": torch.zeros(6, dtype=torch.bool)}, "actions must be an integer dtype, got torch.bool; convert it with .long()"),
        ({"actions": torch.zeros(7, dtype=torch.int64)}, "actions must have shape [6] to match rewards, got [7]; pass one entry per token"),
        ({"actions": [0] * 6}, "actions must be a torch.Tensor, got list; convert it with torch.as_tensor"),
        (
            {"actions": torch.zeros(6, dtype=torch.int64, device="meta")},
            "actions must be on cpu like rewards, got meta; move it with .to('cpu')",
        ),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        rlhf_scan.retrace_from_policy(**{**rollout((6,)), **changes})
    assert str(caught.value).startswith(f"{OP}: {message}")


def test_the_compiler_sees_an_op(backend: str) -> None:
    given = rollout((2, 4), backend=backend)
    torch.library.opcheck(torch.ops.rlhf_scan.chosen_logprobs.default, (given["policy_probs"], given["actions"].flatten(), backend))
    compiled = torch.compile(rlhf_scan.retrace_from_policy, backend="eager", fullgraph=True)
    expected = rlhf_scan.retrace_from_policy(**given, backend=backend)
    assert all(torch.equal(*pair) for pair in zip(compiled(**given, backend=backend), expected, strict=True))
    torch._dynamo.reset()


# As requests


def request(seed: int = 0, **changes: Any) -> CreditRequest:
    """A pack in which one log-ratio is cut."""
    tensors = {name: tensor.clone() for name, tensor in rollout((9,)).items()}
    tensors["behavior_logprobs"][4] = -30.0
    tensors["rewards"] += seed
    return CreditRequest(OP, {**tensors, "lengths": torch.tensor([4, 0, 5]), "mask": torch.arange(9) != 2, **changes}, {"gamma": 0.5})


def test_requests_share_a_launch() -> None:
    requests = [request(seed) for seed in range(3)]
    other = CreditRequest(OP, {**with_logprobs(rollout((9,))), "lengths": torch.tensor([9])}, {"gamma": 0.5})
    results = execute([*requests, other], backend="cpu")
    assert [result.report["shared_with"] for result in results] == [2, 2, 2, 0]
    assert [result.report["log_ratios_cut"] for result in results] == [1, 1, 1, 0]
    for result, sent in zip(results, requests, strict=False):
        arguments = {name: tensor for name, tensor in sent.tensors.items() if name not in ("lengths", "mask")}
        alone = rlhf_scan.retrace_from_policy(**arguments, gamma=0.5, segments=Segments.from_lengths([4, 0, 5]), mask=sent.tensors["mask"])
        assert torch.equal(result.tensors["targets"], alone.targets)
        assert torch.equal(result.tensors["advantages"], alone.advantages)


def test_a_request_with_neither_or_both() -> None:
    without = {name: tensor for name, tensor in request().tensors.items() if name not in ("actions", "policy_probs")}
    for tensors, message in (
        (without, NEITHER),
        ({**request().tensors, "target_logprobs": torch.zeros(9)}, BESIDE.format("policy_probs and actions")),
    ):
        with pytest.raises(InputError) as caught:
            LocalEngine().run(CreditRequest(OP, tensors))
        assert str(caught.value) == f"{OP}: {message}"


def test_the_command_line(tmp_path: Path) -> None:
    from rlhf_scan import cli

    write_request(request(), tmp_path / "rollout")
    done = CliRunner().invoke(cli.app, ["compute", str(tmp_path / "rollout"), "-o", str(tmp_path / "out"), "--backend", "cpu"])
    assert done.exit_code == 0, done.output
    want = LocalEngine("cpu").run(request()).tensors
    assert all(torch.equal(tensor, want[name]) for name, tensor in read_result(tmp_path / "out").tensors.items())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from rlhf_scan.server import Settings

    with running(Settings(backend="cpu")) as address:
        yield address


def test_both_formats_of_the_service(url: str) -> None:
    want = LocalEngine("cpu").run(request())
    file = result_from_bytes(httpx.post(f"{url}/v1/{OP}", content=request_to_bytes(request()), headers=SAFETENSORS, timeout=60).content)
    body = {"tensors": {name: tensor.tolist() for name, tensor in request().tensors.items()}, "params": {"gamma": 0.5}}
    text = httpx.post(f"{url}/v1/{OP}", json=body, timeout=60).json()
    for name, tensor in want.tensors.items():
        assert torch.equal(file.tensors[name], tensor)
        assert torch.equal(torch.tensor(text["tensors"][name]), tensor)
    assert file.report["log_ratios_cut"] == text["report"]["log_ratios_cut"] == 1


def test_the_service_says_what_is_wrong(url: str) -> None:
    tensors = {name: tensor.tolist() for name, tensor in request().tensors.items()}

    def detail(**changes: Any) -> str:
        sent = {name: value for name, value in {**tensors, **changes}.items() if value is not None}
        answer = httpx.post(f"{url}/v1/{OP}", json={"tensors": sent}, timeout=60)
        assert answer.status_code == 422
        return str(answer.json()["detail"])

    assert detail(actions=[0.5] * 9) == f"{OP}: actions must hold integers, got a number; send a list [..] for a pack or one row, or " + (
        "equally long lists [[..], [..]] for rows"
    )
    assert detail(actions=[9] * 9).startswith(
        f"{OP}: actions must be from 0 to 4 where a step is taken, as policy_probs has 5 actions, got 9 at token 0"
    )
    assert detail(actions=None).startswith(f"{OP}: policy_probs and actions must be given together, got no actions")
    assert detail(rewards=None) == (
        f"{OP}: tensors must hold ['rewards', 'q_values', 'next_q', 'target_probs', 'behavior_logprobs'], got no rewards; add it"
    )


def test_openapi_describes_both_ways(url: str) -> None:
    operation = httpx.get(f"{url}/openapi.json").json()["paths"][f"/v1/{OP}"]["post"]
    content = operation["requestBody"]["content"]
    tensors = content["application/json"]["schema"]["properties"]["tensors"]
    assert tensors["required"] == list(estimator(OP).required)
    assert tensors["allOf"] == [{"oneOf": [{"required": ["target_logprobs"]}, {"required": ["policy_probs", "actions"]}]}]
    assert tensors["dependentRequired"] == {"policy_probs": ["actions"], "actions": ["policy_probs"]}
    assert "integer" in json.dumps(tensors["properties"]["actions"])
    assert "[B, T, A]" in tensors["properties"]["policy_probs"]["description"]
    file = content["application/x-safetensors"]["schema"]["description"]
    assert "behavior_logprobs, and target_logprobs or policy_probs and actions must be there" in file
