"""The Ray door: real Ray on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf_scan import BackendError, CreditRequest, CreditResult, EngineError, InputError, LocalEngine, RlhfScanError
from rlhf_scan.checks import FLOATS
from rlhf_scan.estimators import Estimator, served
from rlhf_scan.ray_actors import CreditPool, CreditWorker, RayEngine
from rlhf_scan.ray_actors.budget import TokenBudget
from rlhf_scan.ray_actors.transport import PackedTensor, tensor_over
from rlhf_scan.requests import options

REFERENCE = LocalEngine("reference")
SMALL = {"num_cpus": 0.1, "backend": "reference"}  # the reference needs no compilation, so that actors answer at once
OPS = [entry.name for entry in served()]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, running."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def engine(ray: Any) -> Iterator[RayEngine]:
    with RayEngine(**SMALL) as engine:
        yield engine


@pytest.fixture(scope="module")
def actors(ray: Any) -> list[Any]:
    """Two actors that outlive every engine and pool."""
    from rlhf_scan.ray_actors import CreditActor

    return [CreditActor.options(num_cpus=0.1).remote("reference") for _ in range(2)]


def request_for(entry: Estimator, layout: str = "rows", dtype: torch.dtype = torch.float32) -> CreditRequest:
    """A request with every tensor argument that `entry` takes."""
    random = torch.Generator().manual_seed(5)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    shape, segments = ((3, 7), 3) if layout == "rows" else ((21,), 4)
    actions = entry.expectation or ()
    tensors = {name: floats(*shape, 3) if name in actions else floats(*shape) for name in entry.arguments}
    tensors |= {name: torch.rand(segments, generator=random).to(dtype) for name in entry.rates}
    tensors |= {name: torch.rand(shape, generator=random) < 0.5 for name in entry.takes}
    if entry.end_name is not None:
        tensors[entry.end_name] = floats(segments)
    if layout == "pack":
        tensors["cu_seqlens"] = torch.tensor([0, 5, 5, 6, 21])
    return CreditRequest(entry.name, tensors, {name: words[-1] for name, words in options(entry).items()})


def returns_of(reward: float, tokens: int = 4) -> CreditRequest:
    """A request whose answer is `reward` at the last token."""
    rewards = torch.zeros(tokens)
    rewards[-1] = reward
    return CreditRequest("discounted_returns", {"rewards": rewards}, {"gamma": 0.0})


def slow(reward: float = 1.0, tokens: int = 200_000) -> CreditRequest:
    """One that keeps the reference backend busy for a while."""
    return returns_of(reward, tokens)


def reward_of(result: CreditResult) -> float:
    return float(result.tensors["returns"][-1])


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(result: CreditResult, expected: CreditResult) -> None:
    assert list(result.tensors) == list(expected.tensors)
    for name, tensor in expected.tensors.items():
        got = result.tensors[name]
        assert (got.dtype, got.shape, got.device) == (tensor.dtype, tensor.shape, tensor.device), name
        assert bits(got) == bits(tensor), name


def pids(ray: Any, engine: RayEngine | CreditPool) -> list[int]:
    actors = engine.pool.actors if isinstance(engine, RayEngine) else engine.actors
    return [info["pid"] for info in ray.get([actor.info.remote() for actor in actors], timeout=60)]


def wait_until_gone(pid: int) -> None:
    """Raise unless the process ends within 20 s; it is gone afterwards in any case."""
    try:
        for _ in range(200):
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    raise AssertionError(f"process {pid} is still there")


BAD = {
    "shape": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(5)}),
    "op": CreditRequest("gea", {"rewards": torch.zeros(4)}),
    "missing": CreditRequest("gae", {"rewards": torch.zeros(4)}),
    "tensor name": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4), "value": torch.zeros(4)}),
    "parameter": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4)}, {"gamma": 1.5}),
    "parameter name": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4)}, {"lambda": 1.0}),
    "parameter kind": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4)}, {"gamma": "0.9"}),
    "dtype": CreditRequest("gae", {"rewards": torch.zeros(4), "values": torch.zeros(4, dtype=torch.int64)}),
    "not a tensor": CreditRequest("gae", {"rewards": [0.0, 1.0], "values": torch.zeros(2)}),  # type: ignore[dict-item]
    "boundaries": CreditRequest("discounted_returns", {"rewards": torch.zeros(4), "cu_seqlens": torch.tensor([0, 3, 2, 4])}),
    "complex": CreditRequest("discounted_returns", {"rewards": torch.zeros(4, dtype=torch.complex64)}),
    "8 bits": CreditRequest("discounted_returns", {"rewards": torch.zeros(4).to(torch.float8_e4m3fn)}),
}


# The worker, without Ray


def test_worker_answers_good_requests_beside_bad_ones() -> None:
    requests = [returns_of(0.0), *BAD.values(), returns_of(1.0), "no request", returns_of(2.0)]
    answers = CreditWorker("reference").run_many(requests)
    assert len(answers) == len(requests)
    good = [answer for answer in answers if isinstance(answer, CreditResult)]
    assert [reward_of(answer) for answer in good] == [0.0, 1.0, 2.0]
    for request, answer in zip(BAD.values(), answers[1:], strict=False):
        with pytest.raises(InputError) as alone:
            REFERENCE.run(request)
        assert isinstance(answer, InputError)
        assert str(answer) == str(alone.value)
    unforeseen = answers[-2]
    assert isinstance(unforeseen, EngineError)
    assert "AttributeError" in str(unforeseen)
    assert CreditWorker().run_many([]) == []


def test_worker_packs_good_requests_into_one_launch() -> None:
    answers = CreditWorker("reference").run_many([returns_of(float(i), 3 + i) for i in range(5)])
    assert [answer.report["shared_with"] for answer in answers if isinstance(answer, CreditResult)] == [4] * 5


def test_worker_raises_for_a_single_request() -> None:
    with pytest.raises(InputError, match=r"gae: values must have shape \[4\]"):
        CreditWorker("reference").run(BAD["shape"])


def test_worker_reads_read_only_arrays_and_says_nothing() -> None:
    arrays = {name: np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32) for name in ("rewards", "values")}
    before = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = CreditWorker("reference").run(CreditRequest("gae", arrays))  # type: ignore[arg-type]
    assert_same(result, REFERENCE.run(CreditRequest("gae", {name: torch.from_numpy(array) for name, array in before.items()})))
    for name, array in arrays.items():
        assert np.array_equal(array, before[name])


def test_worker_refuses_arrays_that_torch_has_not() -> None:
    with pytest.raises(InputError, match="rewards must be"):
        CreditWorker("reference").run(CreditRequest("discounted_returns", {"rewards": np.array(["a", "b"])}))  # type: ignore[dict-item]


def test_worker_checks_contents_when_asked() -> None:
    request = CreditRequest("discounted_returns", {"rewards": torch.tensor([0.0, float("nan")])})
    with pytest.raises(InputError, match="rewards must be finite"):
        CreditWorker("reference", validate="full").run(request)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_worker_without_a_gpu_says_so() -> None:
    with pytest.raises(BackendError, match="install torch with CUDA"):
        CreditWorker(device="cuda")


# Transport


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_tensors_keep_every_bit(dtype: torch.dtype) -> None:
    if dtype == torch.bool:
        whole = torch.tensor([[True, False, True], [False, False, True]])
    else:  # every bit pattern that 240 random bytes make, NaNs with payloads among them
        whole = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (5, 48), dtype=np.uint8)).view(dtype)
    for tensor in (whole, whole.T, whole[:, ::2], whole[:0], whole[0, 0], whole[:1].expand(4, -1)):
        back = PackedTensor.of(tensor).tensor()
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert bits(back) == bits(tensor)
    assert PackedTensor.of(whole).array.__array_interface__["data"][0] == whole.data_ptr()  # no copy


def test_a_read_only_array_is_viewed_without_a_copy() -> None:
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = tensor_over(array)
    assert tensor.data_ptr() == array.__array_interface__["data"][0]
    assert not array.flags.writeable


# Back-pressure


def test_budget_admits_in_order_and_one_that_is_too_large_alone() -> None:
    budget = TokenBudget(10)
    budget.acquire(8, 0)
    entered: list[int] = []

    def enter(tokens: int) -> None:
        budget.acquire(tokens, 10)
        entered.append(tokens)

    threads = []
    for tokens in (50, 1):  # the small one would fit at once, but came later
        threads.append(threading.Thread(target=enter, args=[tokens]))
        threads[-1].start()
        time.sleep(0.05)
    assert entered == []
    budget.release(8)
    threads[0].join(10)
    assert entered == [50]
    budget.release(50)
    threads[1].join(10)
    assert entered == [50, 1]
    with pytest.raises(EngineError, match="max_tokens_in_flight is 10"):
        budget.acquire(10, 0)
    budget.acquire(9, 0)  # whoever gave up waiting stands in nobody's way


def test_a_closed_budget_turns_away_those_who_wait() -> None:
    budget = TokenBudget(1)
    budget.acquire(1, 0)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(budget.acquire, 1, 30)
        closing = threads.submit(budget.close)
        with pytest.raises(EngineError, match="closed"):
            waiting.result(10)
        assert not closing.done()
        budget.release(1)
        closing.result(10)


# The engine


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


# Actors that die or hang


def test_the_death_of_a_lone_actor_is_an_error_that_says_what_to_do(ray: Any) -> None:
    with RayEngine(**SMALL) as engine, ThreadPoolExecutor() as threads:
        (pid,) = pids(ray, engine)
        running = threads.submit(engine.run, slow(tokens=1_000_000))
        time.sleep(0.2)
        assert not running.done()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"the actor died before it answered.*create a new RayEngine, or use a CreditPool"):
            running.result(60)
        with pytest.raises(EngineError, match="no actor is left"):
            engine.run(returns_of(1.0))


def test_a_hung_actor_is_an_error_in_time(ray: Any) -> None:
    with RayEngine(timeout=1.0, **SMALL) as engine:
        (pid,) = pids(ray, engine)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(EngineError, match="no answer within timeout=1 s; raise timeout"):
            engine.run(returns_of(1.0))
        assert time.monotonic() - started < 10
        wait_until_gone(pid)


def test_the_pool_sends_the_requests_of_a_dead_actor_again(ray: Any) -> None:
    with CreditPool(2, **SMALL) as pool:
        doomed = pids(ray, pool)[0]
        futures = [pool.submit(slow(float(i), 500_000)) for i in range(4)]
        time.sleep(0.2)
        assert not futures[0].done()
        os.kill(doomed, signal.SIGKILL)
        assert [reward_of(future.result(60)) for future in futures] == [float(i) for i in range(4)]
        assert len(pool.actors) == 2
        assert doomed not in pids(ray, pool)


def test_the_pool_waits_for_an_actor_that_ray_restarts(ray: Any) -> None:
    from rlhf_scan.ray_actors import CreditActor

    actor = CreditActor.options(num_cpus=0.1, max_restarts=1).remote("reference")
    with CreditPool([actor]) as pool:
        (pid,) = pids(ray, pool)
        futures = [pool.submit(slow(1.0, 500_000)), pool.submit(returns_of(2.0))]
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        assert [reward_of(future.result(60)) for future in futures] == [1.0, 2.0]
        assert pid not in pids(ray, pool)
    ray.kill(actor)


class Deadly:
    """Ends the process that reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


def test_a_request_that_kills_its_actor_takes_no_other_along(ray: Any) -> None:
    deadly = CreditRequest("gae", {}, {"gamma": Deadly()})
    with CreditPool(1, retries=1, **SMALL) as pool:
        first, killer, last = pool.submit_batch([returns_of(1.0), deadly, returns_of(2.0)])
        after = pool.submit(returns_of(3.0))
        assert [reward_of(future.result(60)) for future in (first, last, after)] == [1.0, 2.0, 3.0]
        with pytest.raises(EngineError, match=r"2 of 2 tries.*raise retries"):
            killer.result(60)


# The pool


def test_the_pool_answers_each_of_many_requests_once(ray: Any, actors: list[Any]) -> None:
    answered: list[float] = []

    def ask(first: int) -> list[Future[CreditResult]]:
        futures = [pool.submit(returns_of(float(i), 1 + i % 7)) for i in range(first, first + 25)]
        for future in futures:
            future.add_done_callback(lambda done: answered.append(reward_of(done.result())))
        return futures

    with CreditPool(actors, max_tokens_in_flight=64) as pool, ThreadPoolExecutor(8) as threads:
        futures = [future for asked in threads.map(ask, range(0, 200, 25)) for future in asked]
        results = [future.result(60) for future in futures]
    assert [reward_of(result) for result in results] == [float(i) for i in range(200)]
    assert sorted(answered) == [float(i) for i in range(200)]
    assert len({result.report["actor"] for result in results}) == 2


def test_the_pool_sends_to_the_actor_with_the_fewest_tokens(ray: Any, actors: list[Any]) -> None:
    with CreditPool(actors) as pool:
        large = pool.submit(slow())
        small = [pool.submit(returns_of(1.0)) for _ in range(5)]
        assert {future.result(60).report["actor"] for future in small}.isdisjoint({large.result(60).report["actor"]})


def test_the_pool_lets_no_more_tokens_in_than_it_may(ray: Any, actors: list[Any]) -> None:
    with CreditPool(actors, max_tokens_in_flight=150_000) as pool:
        large = pool.submit(slow())  # more than the limit, but alone
        with pytest.raises(EngineError, match=r"no room for 4 more tokens within 0 s.*max_tokens_in_flight is 150000"):
            pool.submit(returns_of(1.0), timeout=0)
        waited = pool.submit(returns_of(2.0))
        assert reward_of(large.result(1)) == 1.0
        assert reward_of(waited.result(60)) == 2.0


def test_what_is_submitted_is_a_copy(ray: Any, actors: list[Any]) -> None:
    request = slow(7.0)
    with CreditPool(actors) as pool:
        future = pool.submit(request)
        request.tensors["rewards"].zero_()
        assert reward_of(future.result(60)) == 7.0


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
