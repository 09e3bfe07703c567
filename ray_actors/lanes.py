"""The actors in service, and what each was sent: routing, and what happens when one dies or hangs."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlhf_scan import EngineError

from .cluster import Creation, Session, brief, ray_module, resources, start_actor
from .work import Batch

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Lane:
    """One actor and the batches it was sent, which it answers in that order.

    Attributes:
        actor: its handle.
        owned: whether the pool created it, and ends it.
        tokens: sent and not answered.
        sent: batches with the reference to their answers; None ends the lane.
        ready: done when the actor runs.
        thread: hands out the answers.
    """

    actor: Any
    owned: bool
    tokens: int = 0
    sent: queue.SimpleQueue[tuple[Batch, Any] | None] = field(default_factory=queue.SimpleQueue)
    ready: Future[None] = field(default_factory=Future)
    thread: threading.Thread = field(init=False)


class Lanes:
    """All lanes of a pool, each served by a thread. Every batch that is sent is answered once, with results or errors.

    Args:
        creation: how to create an actor.
        retries, timeout, start_timeout: as in `CreditPool`.
        answered: called with the tokens of each request before its answer is handed out.
    """

    def __init__(self, creation: Creation, retries: int, timeout: float, start_timeout: float, answered: Callable[[int], None]) -> None:
        self._creation = creation
        self._retries = retries
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._answered = answered
        self._loss = "was never there"
        self._session = Session()
        self._lock = threading.Lock()
        self._lanes: list[Lane] = []

    @property
    def actors(self) -> list[Any]:
        """Handles of the actors in service."""
        with self._lock:
            return [lane.actor for lane in self._lanes]

    def create(self, count: int) -> None:
        """Put new actors into service and wait until they run."""
        with self._lock:
            new = [self._open(start_actor(**self._creation), owned=True) for _ in range(count)]
        for lane in new:
            lane.ready.result()

    def adopt(self, actor: Any) -> None:
        """Put an actor of the caller's into service."""
        with self._lock:
            self._open(actor, owned=False, ready=True)

    def check(self) -> None:
        """Raise EngineError if Ray was shut down."""
        self._session.check()

    def send(self, *batches: Batch) -> None:
        """Send each batch to the actor with the fewest tokens outstanding, of those that run if any does. A failure becomes the answer."""
        for batch in batches:
            try:
                self.check()
                with self._lock:
                    if not self._lanes:
                        raise EngineError(f"no actor is left, the last one {self._loss}; create a new engine or pool")
                    lane = min(self._lanes, key=lambda lane: (not lane.ready.done(), lane.tokens))
                    self._lanes.append(self._lanes.pop(self._lanes.index(lane)))  # among equals, the one used longest ago is next
                    reference = lane.actor.run_packed.remote(*[item.stored for item in batch.items])
                    lane.tokens += batch.tokens
                    lane.sent.put((batch, reference))
            except Exception as error:
                self._fail(batch, brief(error), error)

    def close(self) -> None:
        """End the actors that were created. Only when everything sent was answered."""
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.sent.put(None)
            self._end(lane)
        for lane in lanes:
            lane.thread.join()

    def _open(self, actor: Any, *, owned: bool, ready: bool = False) -> Lane:
        """A new lane. Hold the lock."""
        lane = Lane(actor, owned)
        if ready:
            lane.ready.set_result(None)
        lane.thread = threading.Thread(target=self._serve, args=[lane], name="credit-lane", daemon=True)
        self._lanes.append(lane)
        lane.thread.start()
        return lane

    def _serve(self, lane: Lane) -> None:
        """A lane's thread."""
        if lane.ready.done() or self._started(lane):
            while self._answer_next(lane):
                pass

    def _started(self, lane: Lane) -> bool:
        """Wait until the lane's actor runs. One that does not is not replaced, lest this go on for ever."""
        ray = ray_module()
        deadline = time.monotonic() + self._start_timeout
        why = ""
        while not why:
            try:
                self._session.get(lane.actor.info.remote(), deadline - time.monotonic())
                lane.ready.set_result(None)
                return True
            except ray.exceptions.ActorUnavailableError as error:  # Ray is restarting it
                if time.monotonic() > deadline:
                    why = f"did not come back within start_timeout={self._start_timeout:g} s: {brief(error)}"
                time.sleep(0.1)
            except ray.exceptions.GetTimeoutError:
                why = f"did not start within start_timeout={self._start_timeout:g} s; it asks for {resources(self._creation)}; "
                why += "ask for less, free some, or raise start_timeout"
            except Exception as error:
                why = f"failed to start: {brief(error)}"
        left = self._retire(lane, why)
        lane.ready.set_exception(EngineError(f"a credit actor {why}"))
        self.send(*left)
        return False

    def _answer_next(self, lane: Lane) -> bool:
        """Wait for the lane's next answers and hand them out; False where the lane was closed or its actor lost."""
        ray = ray_module()
        sent = lane.sent.get()
        if sent is None:
            return False
        batch, reference = sent
        try:
            answers = list(zip(batch.items, self._session.get(reference, self._timeout), strict=True))
        except ray.exceptions.GetTimeoutError as error:
            why = f"no answer within timeout={self._timeout:g} s"
            left = self._retire(lane, f"hung: {why}", error)
            self._fail(batch, f"{why}; raise timeout or send smaller requests", error)
            self.send(*left)
            return False
        except ray.exceptions.RayActorError as error:
            left = self._retire(lane, f"died: {brief(error)}", error)
            self._retry(batch, error)
            self.send(*left)
            return False
        except Exception as error:
            ours = isinstance(error, EngineError)
            why = str(error) if ours else f"the actor could not answer: {brief(error)}; try again, and report this if it stays"
            self._fail(batch, why, error)
        else:
            for item, answer in answers:
                self._answered(item.tokens)
                item.settle(answer)
        with self._lock:
            lane.tokens -= batch.tokens
        return True

    def _retire(self, lane: Lane, loss: str, error: Exception | None = None) -> list[Batch]:
        """Take a lane out of service, put a successor there if `error` allows for one; returns what else it had to answer."""
        left: list[Batch] = []
        with self._lock:
            if lane not in self._lanes:  # closed
                return left
            self._lanes.remove(lane)
            while not lane.sent.empty():
                sent = lane.sent.get()
                left += [sent[0]] if sent is not None else []
            try:
                self._succeed(lane, error)
            except Exception as failure:
                loss += f"; it could not be replaced: {brief(failure)}"
            self._loss = loss
        _log.warning("a credit actor %s", loss)
        self._end(lane)
        return left

    def _succeed(self, lane: Lane, error: Exception | None) -> None:
        """A new actor for one of ours that died or hung; for one of the caller's that Ray restarts, itself."""
        if lane.owned and self._retries and error is not None:
            self._session.check()
            self._open(start_actor(**self._creation), owned=True)
        elif not lane.owned and isinstance(error, ray_module().exceptions.ActorUnavailableError):
            self._open(lane.actor, owned=False)

    def _retry(self, batch: Batch, error: Exception) -> None:
        """Send what an actor was working on when it died again, each request alone, or give up on it."""
        if batch.deaths < self._retries:
            self.send(*batch.alone())
            return
        remedy = (
            "raise retries or look into the actor's log" if self._retries else "create a new RayEngine, or use a CreditPool, which retries"
        )
        tries = f"{batch.deaths + 1} of {self._retries + 1} tries"
        self._fail(batch, f"the actor died before it answered ({tries}): {brief(error)}; {remedy}", error)

    def _fail(self, batch: Batch, why: str, error: Exception) -> None:
        for item in batch.items:
            failure = EngineError(f"{item.op}: {why}")
            failure.__cause__ = error
            self._answered(item.tokens)
            item.settle(failure)

    def _end(self, lane: Lane) -> None:
        if lane.owned and self._session.alive():
            with contextlib.suppress(Exception):  # it is gone already
                ray_module().kill(lane.actor)
