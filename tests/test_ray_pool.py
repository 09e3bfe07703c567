"""Ray actors that die or hang, and the pool of them: each request is answered, once."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from ray_requests import SMALL, returns_of, reward_of, slow

from rlhf_scan import CreditRequest, CreditResult, EngineError
from rlhf_scan.ray_actors import CreditPool, RayEngine


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
