"""The engine: requests in, results out, synchronously, as with `rlhf_scan.LocalEngine`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from rlhf_scan import CreditRequest, CreditResult, InputError

from .cluster import Creation
from .pool import CreditPool
from .work import size_and_device

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RayEngine:
    """Runs requests in Ray actors: an `rlhf_scan.Engine`. Results come back on the device of the inputs, with the bits of `LocalEngine`.

        with RayEngine(num_gpus=1) as engine:
            result = engine.run(CreditRequest("gae", {"rewards": rewards, "values": values}))

    Without `actor`, `actors` or `pool` it creates one actor of its own, which is not replaced when it dies. Where Ray is not initialised
    yet it does that first: at RAY_ADDRESS if that is set, else as a new instance on this machine, which lasts until the process ends or
    calls `ray.shutdown()`.

    Args:
        actor: a `CreditActor` handle to use.
        actors: several; a request whose actor died is sent to another.
        pool: a `CreditPool` to use; it is not closed with the engine.
        timeout: seconds that an actor may take for a request (default 300), then EngineError; see `CreditPool`.
        start_timeout: seconds that an actor of its own may take to start (default 60).
        **creation: of an actor of its own: `num_cpus` (1), `num_gpus` (0), `backend` ("auto"), `validate` ("shapes"), `actor_options`; see
            `cluster.start_actor`.

    Raises:
        InputError: an argument is wrong.
        EngineError: Ray is not installed, could not be started, or has no room for the actor.
    """

    def __init__(
        self,
        actor: Any = None,
        *,
        actors: Sequence[Any] | None = None,
        pool: CreditPool | None = None,
        timeout: float | None = None,
        start_timeout: float | None = None,
        **creation: Unpack[Creation],
    ) -> None:
        given = {name: value for name, value in (("actor", actor), ("actors", actors), ("pool", pool)) if value is not None}
        if len(given) > 1:
            raise InputError(f"RayEngine: actors must be given once, got {list(given)}; keep one of them")
        options: dict[str, Any] = {"timeout": timeout, "start_timeout": start_timeout, **creation}
        options = {name: value for name, value in options.items() if value is not None}
        self._owned = pool is None
        if pool is not None:
            if options:
                raise InputError(f"RayEngine: {next(iter(options))} must be left out with a pool; set it where you create the pool")
            self.pool = pool
            return
        handles = [actor] if actor is not None else actors
        self.pool = CreditPool(1, retries=0, **options) if handles is None else CreditPool(handles, **options)

    def run(self, request: CreditRequest) -> CreditResult:
        """Run one request.

        Raises:
            InputError: the request is wrong.
            BackendError: the backend cannot run where the actor is.
            EngineError: the actor died, took too long, or could not be reached; the message says what to do.
        """
        return self.pool.submit(request).result()

    @overload
    def run_many(self, requests: Iterable[CreditRequest], *, return_exceptions: Literal[False] = False) -> list[CreditResult]: ...

    @overload
    def run_many(self, requests: Iterable[CreditRequest], *, return_exceptions: Literal[True]) -> list[CreditResult | BaseException]: ...

    def run_many(self, requests: Iterable[CreditRequest], *, return_exceptions: bool = False) -> list[Any]:
        """Run requests in batches over all actors; results in the order of the requests.

        A bad request spoils no other. Its error is raised once all are done, or with `return_exceptions` stands in its place.
        """
        futures = [future for batch in self._batches(list(requests)) for future in self.pool.submit_batch(batch)]
        answers = [future.exception() or future.result() for future in futures]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors and not return_exceptions:
            raise errors[0]
        return answers

    def close(self) -> None:
        """End the actor that this engine created. Actors and pools that were given, and Ray, live on."""
        if self._owned:
            self.pool.close()

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _batches(self, requests: Sequence[CreditRequest]) -> list[list[CreditRequest]]:
        """Runs of requests with about equal numbers of tokens, one per actor, none larger than its share of what may be in flight."""
        sizes = [size_and_device(request)[0] for request in requests]
        actors = max(1, len(self.pool.actors))
        share = max(1, min(-(-sum(sizes) // actors), self.pool.max_tokens_in_flight // actors))
        batches: list[list[CreditRequest]] = []
        filled = share
        for request, size in zip(requests, sizes, strict=True):
            if filled + size > share or not batches:
                batches.append([])
                filled = 0
            batches[-1].append(request)
            filled += size
        return batches
