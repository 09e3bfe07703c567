"""The Ray door: `RayEngine`, with real Ray on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ray_requests import BAD, REFERENCE, SMALL, assert_same, bits, request_for, returns_of, reward_of

from rlhf_scan import CreditRequest, CreditResult, EngineError, InputError, LocalEngine, RlhfScanError
from rlhf_scan.checks import FLOATS
from rlhf_scan.estimators import served
from rlhf_scan.ray_actors import CreditPool, RayEngine

OPS = [entry.name for entry in served()]


@pytest.fixture(scope="module")
def engine(ray: Any) -> Iterator[RayEngine]:
    with RayEngine(**SMALL) as engine:
        yield engine


@pytest.mark.parametrize("layout", ["rows", "pack"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_engine_gives_the_bits_of_the_local_engine(engine: RayEngine, op: str, dtype: torch.dtype, layout: str) -> None:
    entry = next(entry for entry in served() if entry.name == op)
    request = request_for(entry, layout, dtype)
    before = {name: tensor.clone() for name, tensor in request.tensors.items()}
    result = engine.run(request)
    assert_same(result, REFERENCE.run(request))
    assert result.report["backend"] == "reference"
    for name, tensor in request.tensors.items():
        assert bits(tensor) == bits(before[name]), name


def test_probabilities_and_actions_in_place_of_log_probabilities(engine: RayEngine) -> None:
    given = request_for(next(entry for entry in served() if entry.choices), "pack")
    tensors = {name: tensor for name, tensor in given.tensors.items() if name != "target_logprobs"}
    actions = torch.arange(len(tensors["rewards"]), dtype=torch.uint8) % tensors["target_probs"].shape[-1]
    request = CreditRequest(given.op, {**tensors, "policy_probs": tensors["target_probs"].abs(), "actions": actions}, given.params)
    assert_same(engine.run(request), REFERENCE.run(request))


def test_default_backend_gives_the_bits_of_the_local_engine(ray: Any) -> None:
    request = request_for(next(served()), "pack")
    with RayEngine(num_cpus=0.1) as engine:
        result = engine.run(request)
    assert_same(result, LocalEngine().run(request))
    assert result.report["backend"] == "cpu"


def test_large_tensors_that_pass_through_the_object_store(engine: RayEngine) -> None:
    rewards = torch.randn(8, 5000, generator=torch.Generator().manual_seed(2))
    request = CreditRequest("discounted_returns", {"rewards": rewards.bfloat16()}, {"gamma": 0.99, "dtype": "float32"})
    first = engine.run(request)
    assert_same(first, REFERENCE.run(request))
    for tensor in first.tensors.values():
        tensor.zero_()  # results are the caller's own
    assert_same(engine.run(request), REFERENCE.run(request))


def test_tensors_that_are_not_plain(engine: RayEngine) -> None:
    rewards = torch.randn(5, 4, requires_grad=True)
    tensors = {
        "rewards": rewards.T,
        "values": torch.tensor(0.5).expand(4, 5),
        "gamma": torch.tensor([0.9, 0.1, 0.8, 0.1, 0.7, 0.1, 0.6])[::2],
    }
    request = CreditRequest("gae", tensors)
    assert_same(engine.run(request), REFERENCE.run(request))
    empty = CreditRequest("gae", {"rewards": torch.zeros(0, 3), "values": torch.zeros(0, 3)})
    assert_same(engine.run(empty), REFERENCE.run(empty))


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_request_raises_what_the_local_engine_raises(engine: RayEngine, kind: str) -> None:
    with pytest.raises(RlhfScanError) as local:
        REFERENCE.run(BAD[kind])
    with pytest.raises(RlhfScanError) as remote:
        engine.run(BAD[kind])
    assert type(remote.value) is type(local.value) is InputError
    assert str(remote.value) == str(local.value)


def test_run_many_answers_in_order_and_isolates(engine: RayEngine) -> None:
    requests = [returns_of(float(i), 3 + i) for i in range(9)]
    results = engine.run_many(iter(requests))
    assert [reward_of(result) for result in results] == [float(i) for i in range(9)]
    assert all(result.report["shared_with"] == 8 for result in results)
    mixed = [returns_of(1.0), BAD["shape"], BAD["op"], returns_of(2.0)]
    answers = engine.run_many(mixed, return_exceptions=True)
    assert [type(answer) for answer in answers] == [CreditResult, InputError, InputError, CreditResult]
    with pytest.raises(InputError, match="gae: values must have shape"):
        engine.run_many(mixed)
    assert engine.run_many([]) == []


def test_actors_of_the_callers_own_outlive_the_engine(ray: Any, actors: list[Any]) -> None:
    with RayEngine(actor=actors[0]) as engine:
        assert reward_of(engine.run(returns_of(3.0))) == 3.0
    with RayEngine(actors=actors) as engine:
        results = engine.run_many([returns_of(float(i)) for i in range(6)])
        assert len({result.report["actor"] for result in results}) == 2
    with CreditPool(actors) as pool:
        with RayEngine(pool=pool) as engine:
            assert reward_of(engine.run(returns_of(4.0))) == 4.0
        assert reward_of(pool.submit(returns_of(5.0)).result(60)) == 5.0
    with pytest.raises(EngineError, match="closed; create a new one"):
        pool.submit(returns_of(6.0))
    assert [info["device"] for info in ray.get([actor.info.remote() for actor in actors], timeout=60)] == ["cpu", "cpu"]


def test_the_actor_by_itself(ray: Any, actors: list[Any]) -> None:
    arrays: dict[str, Any] = {name: np.full((2, 40_000), 0.5, np.float32) for name in ("rewards", "values")}
    expected = REFERENCE.run(CreditRequest("gae", {name: torch.from_numpy(array) for name, array in arrays.items()}))
    for tensors in (arrays, {name: torch.from_numpy(array) for name, array in arrays.items()}):
        stored = ray.put(CreditRequest("gae", tensors))
        assert_same(ray.get(actors[0].run.remote(stored), timeout=60), expected)
    with pytest.raises(InputError, match="gae: values must have shape"):
        ray.get(actors[0].run.remote(BAD["shape"]), timeout=60)


def test_arguments_that_cannot_be(ray: Any, actors: list[Any]) -> None:
    with CreditPool(actors) as pool:
        for arguments, message in (
            ({"actor": actors[0], "actors": actors}, r"given once, got \['actor', 'actors'\]"),
            ({"pool": pool, "timeout": 1.0}, "timeout must be left out with a pool"),
            ({"actor": actors[0], "num_gpus": 1}, "num_gpus must be left out with actors of your own"),
            ({"actors": []}, "must be a list of CreditActor handles"),
            ({"actor": object()}, "must be a list of CreditActor handles"),
            ({"timeout": 0}, "timeout must be > 0"),
            ({"num_cpus": -1}, "num_cpus"),
            ({"bogus": 1}, "bogus"),
            ({"actor_options": {"bogus": 1}}, "bogus"),
        ):
            with pytest.raises(InputError, match=message):
                RayEngine(**arguments)
    for arguments, message in (
        ({"retries": -1}, "retries must be >= 0"),
        ({"max_tokens_in_flight": 0}, "must be >= 1"),
        ({"actors": 0}, "must be >= 1"),
    ):
        with pytest.raises(InputError, match=message):
            CreditPool(**arguments)


def test_a_request_that_cannot_travel(engine: RayEngine) -> None:
    with pytest.raises(InputError, match="plain data"):
        engine.run(CreditRequest("gae", {}, {"gamma": threading.Lock()}))
    assert reward_of(engine.run(returns_of(1.0))) == 1.0


def test_no_room_for_the_actor(ray: Any) -> None:
    with pytest.raises(EngineError, match=r"start_timeout=1 s; it asks for 64 CPU \(of 2, .* free\); ask for less"):
        RayEngine(num_cpus=64, start_timeout=1)


# Fresh interpreters


def run_python(code: str, **environment: str) -> None:
    settings = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**settings, **environment})
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_ray_the_error_says_how_to_install_it() -> None:
    run_python("""
import sys
sys.modules["ray"] = None
import torch
import rlhf_scan.ray_actors as door
from rlhf_scan import CreditRequest, EngineError
for use in (door.RayEngine, door.CreditPool, lambda: door.CreditActor):
    try:
        use()
    except EngineError as error:
        assert "pip install 'rlhf-scan[ray]'" in str(error), error
    else:
        raise SystemExit("no error")
door.CreditWorker("reference").run(CreditRequest("discounted_returns", {"rewards": torch.zeros(3)}))
""")


def test_the_engine_starts_ray_where_it_is_not_running() -> None:
    pytest.importorskip("ray")
    run_python(
        """
import time
import ray, torch
from rlhf_scan import CreditRequest, EngineError
from rlhf_scan.ray_actors import RayEngine
request = CreditRequest("discounted_returns", {"rewards": torch.ones(3)})
with RayEngine(backend="reference") as engine:
    assert ray.is_initialized()
    assert engine.run(request).tensors["returns"].tolist() == [3, 2, 1]
    under_way = engine.pool.submit(CreditRequest("discounted_returns", {"rewards": torch.ones(5_000_000)}))
    time.sleep(0.2)
    ray.shutdown()
    for ask in (lambda: engine.run(request), lambda: under_way.result(30)):
        try:
            ask()
        except EngineError as error:
            assert "create a new" in str(error), error
        else:
            raise SystemExit("no error")
    assert not ray.is_initialized()
""",
        RAY_USAGE_STATS_ENABLED="0",
    )


# On the GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_gpu_actor_runs_triton(ray: Any, where: str) -> None:
    if not ray.cluster_resources().get("GPU"):
        pytest.skip("Ray sees no GPU")
    with RayEngine(num_gpus=1) as engine:
        for entry in served():
            for layout, dtype in (("rows", torch.float32), ("pack", torch.bfloat16), ("pack", torch.float64)):
                request = request_for(entry, layout, dtype)
                there = CreditRequest(entry.name, {name: tensor.to(where) for name, tensor in request.tensors.items()}, request.params)
                result = engine.run(there)
                assert result.report["backend"] == "triton"
                assert str(result.report["device"]).startswith("cuda")
                # Some 20 steps with numbers below 10, rounded once more to the output's dtype.
                working = 64 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
                for name, expected in REFERENCE.run(request).tensors.items():
                    got = result.tensors[name]
                    assert (got.device.type, got.dtype) == (where, dtype)
                    torch.testing.assert_close(got.cpu(), expected, rtol=torch.finfo(dtype).eps + working, atol=working)
        with pytest.raises(InputError, match="gae: values must have shape"):
            engine.run(BAD["shape"])
        with pytest.raises(InputError, match="cu_seqlens must not decrease"):
            engine.run(BAD["boundaries"])
