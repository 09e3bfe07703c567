"""Several actors behind one queue: placement, routing, back-pressure, retry."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlhf_scan import CreditRequest, CreditResult, EngineError, InputError

from .budget import TokenBudget
from .cluster import Creation, brief, ensure_ray, ray_module
from .lanes import Lanes
from .work import Batch, Item, size_and_device

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CreditPool:
    """Runs requests on several `CreditActor`s. Safe to use from many threads.

    A request goes to the actor with the fewest tokens outstanding. When an actor dies, its requests are sent to others, which is safe as
    they are pure functions of their inputs; each request is answered once. A dead actor that the pool created is replaced.

        with CreditPool(4, num_gpus=1) as pool:
            futures = [pool.submit(request) for request in requests]
            results = [future.result() for future in futures]

    Args:
        actors: how many to create (spread over the nodes), or handles of your own, which the pool never ends.
        max_tokens_in_flight: how many tokens may be submitted and not answered; a larger request enters alone.
        retries: how often a request is sent again because its actor died; with 0 dead actors are not replaced either.
        timeout: seconds that an actor may take for a request (or batch), not counting those before it in the queue; an actor that takes
            longer counts as hung: the request gets EngineError, an actor of the pool's own is ended.
        start_timeout: seconds that a new actor may take to start.
        **creation: `num_cpus`, `num_gpus` (each actor), `backend`, `validate`, `actor_options`; see `cluster.start_actor`.

    Raises:
        InputError: an argument is wrong.
        EngineError: Ray is not installed, could not be started, or has no room for the actors.
    """

    def __init__(
        self,
        actors: int | Sequence[Any] = 2,
        *,
        max_tokens_in_flight: int = 1 << 24,
        retries: int = 2,
        timeout: float = 300.0,
        start_timeout: float = 60.0,
        **creation: Unpack[Creation],
    ) -> None:
        for name, number, least in (("max_tokens_in_flight", max_tokens_in_flight, 1), ("retries", retries, 0)):
            if number < least:
                raise InputError(f"CreditPool: {name} must be >= {least}, got {number}; leave it out for the default")
        for name, seconds in (("timeout", timeout), ("start_timeout", start_timeout)):
            if not seconds > 0:
                raise InputError(f"CreditPool: {name} must be > 0 seconds, got {seconds}; leave it out for the default")
        self._timeout = timeout
        self._budget = TokenBudget(max_tokens_in_flight)
        if isinstance(actors, int):
            self._create(actors, creation, retries, start_timeout)
        else:
            _check_handles(actors, creation)
            self._lanes = Lanes(creation, retries, timeout, start_timeout, self._budget.release)
            for actor in actors:
                self._lanes.adopt(actor)

    @property
    def actors(self) -> list[Any]:
        """Handles of the actors in service."""
        return self._lanes.actors

    @property
    def max_tokens_in_flight(self) -> int:
        """As given."""
        return self._budget.limit

    def submit(self, request: CreditRequest, timeout: float | None = None) -> Future[CreditResult]:
        """Send one request; the future holds its result or raises its InputError, BackendError or EngineError.

        The request is copied: its tensors may be changed afterwards. Where `max_tokens_in_flight` are under way this waits for room,
        at most `timeout` seconds (None: the pool's; 0: not at all), then raises EngineError.
        """
        return self.submit_batch([request], timeout)[0]

    def submit_batch(self, requests: Sequence[CreditRequest], timeout: float | None = None) -> list[Future[CreditResult]]:
        """Send requests to one actor together, which runs them in as few launches as possible; a future for each, as in `submit`."""
        tokens = sum(size_and_device(request)[0] for request in requests)
        self._budget.acquire(tokens, self._timeout if timeout is None else timeout)
        try:
            self._lanes.check()
            batch = Batch([Item.of(request) for request in requests])
        except BaseException as error:
            self._budget.release(tokens)
            if isinstance(error, ray_module().exceptions.RayError):
                raise EngineError(f"Ray could not store the request: {brief(error)}; lower max_tokens_in_flight") from error
            if isinstance(error, TypeError):
                raise InputError(
                    f"requests must hold tensors and plain data, which Ray can send, got: {brief(error)}; drop that"
                ) from error
            raise
        self._lanes.send(batch)
        return [item.future for item in batch.items]

    def close(self) -> None:
        """Take no more requests, wait for those under way, and end the actors that the pool created."""
        self._budget.close()
        self._lanes.close()

    def __enter__(self) -> CreditPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _create(self, count: int, creation: Creation, retries: int, start_timeout: float) -> None:
        if count < 1:
            raise InputError(f"CreditPool: actors must be >= 1 or a list of handles, got {count}; pass how many to create")
        ensure_ray()
        if count > 1:
            creation["actor_options"] = {"scheduling_strategy": "SPREAD", **creation.get("actor_options", {})}
        self._lanes = Lanes(creation, retries, self._timeout, start_timeout, self._budget.release)
        try:
            self._lanes.create(count)
        except BaseException as error:
            self.close()
            if isinstance(error, TypeError | ValueError):
                raise InputError(f"CreditPool: the options of its actors must be as Ray takes them: {error}; mend that one") from error
            raise


def _check_handles(actors: Sequence[Any], creation: Creation) -> None:
    if creation:
        raise InputError(f"CreditPool: {next(iter(creation))} must be left out with actors of your own; set it where you create them")
    if not isinstance(actors, Sequence) or not actors or not all(hasattr(actor, "run_packed") for actor in actors):
        raise InputError(f"CreditPool: actors must be a list of CreditActor handles, got {actors!r}; make them with CreditActor.remote()")
