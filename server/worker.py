"""Where the service computes: a few threads off the event loop, and a bounded number of requests in the house."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlhf_scan.engine import execute
from rlhf_scan.requests import CreditRequest, CreditResult
from rlhf_scan.rollout import device_for, on_device

from .formats import decode, encode
from .problems import Problem
from .settings import Settings

# Requests that wait are run together while their bodies are not larger than this: a large one gains nothing and would delay the rest.
_SHARED_BYTES = 1 << 20


@dataclass(frozen=True)
class Answer:
    """An encoded result, and how many tokens it took."""

    body: bytes
    tokens: int


@dataclass(frozen=True)
class Job:
    """A body to answer: its chunks, their size, the formats it came in and is wanted in."""

    op: str
    chunks: Sequence[bytes]
    size: int
    sent: str
    wanted: str
    answer: Future[Answer] = field(default_factory=Future)


class Worker:
    """Decodes, runs and encodes jobs; those that wait together in one `execute`, where each gets the bits it would get alone."""

    def __init__(self, settings: Settings) -> None:
        """Start no thread before the first job."""
        self._backend = settings.backend
        self._device = device_for(settings.backend)
        self._limit = settings.queue
        self._admitted = 0
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="rlhf-scan-http")
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()

    @contextmanager
    def admitted(self, op: str) -> Iterator[None]:
        """Hold one of the places; a Problem where all are taken. Use it on the event loop alone."""
        if self._admitted >= self._limit:
            raise Problem(
                503,
                f"{op}: the service holds {self._limit} requests, its limit; send this one again in a second, or raise its --queue",
                {"Retry-After": "1"},
            )
        self._admitted += 1
        try:
            yield
        finally:
            self._admitted -= 1

    async def run(self, job: Job) -> Answer:
        """The job's answer; raises what was wrong with it."""
        with self._lock:
            self._waiting.append(job)
        self._threads.submit(self._work)
        return await asyncio.wrap_future(job.answer)

    def close(self) -> None:
        """Finish what has begun."""
        self._threads.shutdown(wait=True)

    def _work(self) -> None:
        """Answer the jobs that wait. There is one call per job, so the last calls may find none."""
        ready: list[tuple[Job, CreditRequest]] = []
        for job in self._take():
            if not job.answer.set_running_or_notify_cancel():
                continue
            try:
                ready.append((job, on_device(decode(job.op, b"".join(job.chunks), job.sent), self._device)))
            except Exception as error:
                job.answer.set_exception(error)
        for (job, _), result in zip(ready, self._run([request for _, request in ready]), strict=True):
            try:
                if isinstance(result, Exception):
                    raise result
                job.answer.set_result(Answer(encode(job.op, result, job.wanted), result.report["tokens"]))
            except Exception as error:
                job.answer.set_exception(error)

    def _take(self) -> list[Job]:
        """The job that waited longest, and those after it that may share its call."""
        taken: list[Job] = []
        with self._lock:
            while self._waiting and (not taken or sum(job.size for job in taken) + self._waiting[0].size <= _SHARED_BYTES):
                taken.append(self._waiting.popleft())
        return taken

    def _run(self, requests: Sequence[CreditRequest]) -> list[CreditResult | Exception]:
        """A result or error per request; where running them together fails, each is run alone, so that a bad one fails no other."""
        try:
            return list(execute(requests, backend=self._backend, validate="full"))
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [outcome for request in requests for outcome in self._run([request])]
