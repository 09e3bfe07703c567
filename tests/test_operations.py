"""Functions that are no estimators, through every door: requests, files, the command line, HTTP, Ray. No door knows one of them by name."""

from __future__ import annotations

import inspect
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from ppo_samples import random_call
from service import running
from torch import Tensor
from typer.testing import CliRunner

import rlhf_scan
from rlhf_scan import CreditRequest, CreditResult, InputError, LocalEngine, execute
from rlhf_scan.operations import Operation, operation, operations, register_operation, unregister_operation
from rlhf_scan.rollout import read_result, request_from_bytes, request_to_bytes, write_request

FUNCTIONS = [entry for entry in operations() if entry.run is not None]
NAMES = [entry.name for entry in FUNCTIONS]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def request_for(op: str, seed: int = 0) -> CreditRequest:
    """With as much in it as goes together."""
    ids = torch.tensor([2**40, 2**40 + 1, 2**40, 2**40 + 1, 7, 7])
    if op == "ppo_advantages":
        call = random_call(random.Random(seed), packed=True)
        cu_seqlens, steps = call.pop("segments").cu_seqlens, call.pop("step_rewards", None)
        call |= {"cu_seqlens": cu_seqlens} | ({} if steps is None else {"step_rewards": torch.tensor(steps)})
        params = {"preset": "nemo-rl", "whiten_rewards": True, "score_clip": [-1.0, 0.1], "lam": 1 / 3, "missing_eos_penalty": 0.7}
        return CreditRequest(op, call, params)
    tensors: dict[str, dict[str, Tensor]] = {
        "whiten": {"x": normal(3, 5), "mask": normal(3, 5) > -1},
        "turn_returns": {
            "clock": torch.tensor([[-1, 0, 0, 1], [0, 1, 2, -1]]),
            "turn_rewards": normal(2, 3),
            "gamma": torch.tensor([0.5, 1.0]),
        },
    }
    scores = {"scores": normal(6), "groups": ids, "keep": torch.tensor([1, 1, 1, 1, 1, 0])}
    options: dict[str, dict[str, Any]] = {"grpo": {"scale": False}, "whiten": {"shift_mean": False, "eps_at": "floor", "eps": 1 / 3}}
    return CreditRequest(op, tensors.get(op, scores), options.get(op, {"dtype": "float64"}))


def by_the_function(request: CreditRequest) -> dict[str, Tensor]:
    """What the public function returns for what the request holds."""
    arguments = {**request.tensors, **request.params}
    if "cu_seqlens" in arguments:
        arguments["segments"] = rlhf_scan.Segments.from_cu_seqlens(arguments.pop("cu_seqlens"))
    if "dtype" in arguments:
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    found = getattr(rlhf_scan, request.op)(**arguments)
    if isinstance(found, Tensor):
        return {operation(request.op).outputs[0]: found}
    return {name: value for name, value in found._asdict().items() if isinstance(value, Tensor)}


def assert_same(result: CreditResult, want: dict[str, Tensor]) -> None:
    assert set(result.tensors) == set(want)
    for name, tensor in want.items():
        assert result.tensors[name].dtype == tensor.dtype
        assert torch.equal(result.tensors[name], tensor)


@pytest.mark.parametrize("op", NAMES)
def test_a_request_is_a_call_of_the_function(op: str) -> None:
    request = request_for(op)
    want = by_the_function(request)
    assert_same(LocalEngine().run(request), want)
    again = request_from_bytes(request_to_bytes(request))
    assert again.params == request.params
    assert_same(LocalEngine().run(again), want)
    report = LocalEngine().run(request).report
    assert report["tokens"] == request.tensors[operation(op).required[0]].numel()
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("entry", FUNCTIONS, ids=NAMES)
def test_all_that_the_function_takes_can_be_asked_for(entry: Operation) -> None:
    parameters = inspect.signature(getattr(rlhf_scan, entry.name)).parameters
    not_sent = {"segments", "process_group", "allow_whitened", "backend", "validate"}
    assert {*entry.tensors, *entry.options} == set(parameters) - not_sent
    assert entry.packs == ("segments" in parameters)
    assert entry.takes_backend == ("backend" in parameters)
    for name, option in entry.options.items():
        given = parameters[name].default
        assert option.default == (None if given is inspect.Parameter.empty else given)


def test_requests_run_together_have_the_bits_they_have_alone() -> None:
    requests = [request_for("ppo_advantages", seed) for seed in range(4)]
    requests += [CreditRequest("gae", {"rewards": normal(4), "values": normal(4)})] * 2 + [request_for("grpo"), requests[0]]
    together = execute(requests)
    for request, result in zip(requests, together, strict=True):
        assert_same(result, dict(LocalEngine().run(request).tensors))
    assert [result.report["shared_with"] for result in together] == [0, 0, 0, 0, 1, 1, 0, 0]
    assert together[0].report["advantages_count"] != together[2].report["advantages_count"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, p: t.pop("values"), r"^ppo_advantages: tensors must hold \['logprobs', 'values'\], got no values; add it"),
        (lambda t, p: t.update(value=t["values"]), "^ppo_advantages: tensor names must be among .*, got 'value'"),
        (lambda t, p: p.update(beta=1.0), "^ppo_advantages: parameter names must be among .*, got 'beta'"),
        (lambda t, p: p.update(process_group="world"), "parameter names must be among"),
        (lambda t, p: (t.update(gamma=torch.ones(3)), p.update(gamma=1.0)), "gamma must be given once"),
        (lambda t, p: p.update(kl="k9"), "^ppo_advantages: kl must be one of"),
        (lambda t, p: p.update(dtype="int8"), "^ppo_advantages: dtype must be one of"),
        (lambda t, p: t.update(lengths=torch.ones(3)), "^ppo_advantages: the pack must be described once"),
        (
            lambda t, p: t["values"].__setitem__(0, float("nan")),
            r"^ppo_advantages: values must be finite where it counts, got .* token 0 of sequence 0",
        ),
    ],
)
def test_a_wrong_request(change: Callable[[dict[str, Any], dict[str, Any]], Any], message: str) -> None:
    tensors: dict[str, Any] = {name: torch.zeros(4) for name in ("logprobs", "ref_logprobs", "values")}
    tensors |= {"scores": torch.zeros(2), "cu_seqlens": torch.tensor([0, 3, 4])}
    params: dict[str, Any] = {}
    change(tensors, params)
    with pytest.raises(InputError, match=message):
        LocalEngine(validate="full").run(CreditRequest("ppo_advantages", tensors, params))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"whiten_advantages": "maybe"}, "whiten_advantages must be one of"),
        ({"kl_coef": "little"}, "kl_coef must be a number, got 'little'"),
        ({"score_clip": "1,two"}, "score_clip must be a number, got 'two'"),
    ],
)
def test_wrong_text(text: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=f"^ppo_advantages: {message}"):
        LocalEngine().run(request_from_bytes(request_to_bytes(request_for("ppo_advantages")), params=text))
    with pytest.raises(InputError, match=r"^grpo: scale must be true or false, got '1'"):
        request_from_bytes(request_to_bytes(request_for("grpo")), params={"scale": "1"})


def test_two_cannot_have_one_name() -> None:
    for known in ("gae", "whiten"):
        with pytest.raises(InputError, match=f"one named '{known}' exists"):
            register_operation(Operation(known, "", {}, {}, ()))
    register_operation(Operation("scores_alone", "", {}, {}, ()))
    unregister_operation("scores_alone")
    with pytest.raises(InputError, match=r"op must be one of .*'ppo_advantages'.*, got 'scores_alone'"):
        operation("scores_alone")


@pytest.mark.parametrize("op", NAMES)
def test_command_line(op: str, tmp_path: Path) -> None:
    from rlhf_scan.cli import app

    request = request_for(op)
    write_request(request, tmp_path / "in.safetensors")
    outcome = CliRunner().invoke(app, ["compute", str(tmp_path / "in.safetensors"), "-o", str(tmp_path / "out.safetensors")])
    assert outcome.exit_code == 0, outcome.output
    assert_same(read_result(tmp_path / "out.safetensors"), by_the_function(request))


def test_http() -> None:
    from rlhf_scan.server import Settings
    from rlhf_scan.server.client import HttpEngine

    with running(Settings(backend="cpu", warm="gae")) as url:
        with HttpEngine(url) as engine:
            for op in NAMES:
                assert_same(engine.run(request_for(op)), by_the_function(request_for(op)))
        answer = httpx.post(
            f"{url}/v1/ppo_advantages",
            json={
                "tensors": {
                    "logprobs": [[0, 0, 0]],
                    "ref_logprobs": [[-1, -1, -1]],
                    "values": [[0, 0, 0]],
                    "scores": [2],
                    "mask": [[1, True, 0]],
                    "step_rewards": [[0, 0, 5]],
                },
                "params": {"kl_coef": 0.5, "whiten_advantages": False, "lam": 1, "stop_reasons": ["stop"], "score_clip": [-1, 1]},
            },
            timeout=60,
        ).json()
        assert answer["tensors"] == {"advantages": [[5, 0.5, 0]], "returns": [[5, 0.5, 0]], "rewards": [[4.5, 0.5, 0]], "kl": [[1, 1, 0]]}
        assert (answer["report"]["trainable_tokens"], answer["report"]["nonfinite_row"]) == (2, None)
        ids = {"tensors": {"scores": [1, 3, 5, 5], "groups": [2**40, 2**40, 2**40 + 1, 2**40 + 1]}, "params": {"scale": False}}
        grouped = httpx.post(f"{url}/v1/grpo", json=ids).json()["tensors"]
        assert grouped == {"advantages": [-1, 1, 0, 0], "degenerate": [0, 0, 1, 1]}
        wrong = httpx.post(f"{url}/v1/grpo", json={"tensors": {"scores": [1.0], "groups": [1.5]}})
        assert (wrong.status_code, "groups must hold integers" in wrong.json()["detail"]) == (422, True)
        schema = httpx.get(f"{url}/openapi.json").json()["paths"]["/v1/ppo_advantages"]["post"]["requestBody"]["content"]
        body = schema["application/json"]["schema"]["properties"]
        assert body["tensors"]["required"] == ["logprobs", "values"]
        assert body["params"]["properties"]["preset"]["anyOf"][0]["enum"] == ["trl", "verl", "openrlhf", "nemo-rl", "slime", "areal"]
        assert {"type": "boolean"} in body["params"]["properties"]["whiten_rewards"]["anyOf"]


def test_ray() -> None:
    ray = pytest.importorskip("ray")
    from rlhf_scan.ray_actors import RayEngine

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False, address="local")
    try:
        with RayEngine(num_cpus=0.1, backend="cpu") as engine:
            for op in NAMES:
                assert_same(engine.run(request_for(op)), by_the_function(request_for(op)))
            with pytest.raises(InputError, match=r"^ppo_advantages: kl must be one of"):
                engine.run(CreditRequest("ppo_advantages", request_for("ppo_advantages").tensors, {"kl": "k9"}))
    finally:
        ray.shutdown()
