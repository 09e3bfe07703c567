"""The FastAPI app: a route per served estimator, and what operators need."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlhf_scan.backend_choice import choose_backend
from rlhf_scan.doctor import self_test
from rlhf_scan.errors import InputError
from rlhf_scan.operations import Operation, operations
from rlhf_scan.rollout import device_for
from rlhf_scan.version import __version__

from . import problems
from .formats import JSON, sent_format, wanted_format
from .metrics import Measured, Metrics
from .problems import Problem
from .schemas import describe
from .settings import Settings
from .worker import Job, Worker


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service, with a route for every estimator that the registry serves now.

    Args:
        settings: None takes the environment's.

    Raises:
        InputError: a setting cannot be used.
        BackendError: the backend cannot run here.
    """
    settings = settings or Settings.from_environment()
    choose_backend(settings.backend, device_for(settings.backend))
    worker, metrics, readiness = Worker(settings), Metrics(), Readiness(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        warming = asyncio.create_task(readiness.establish())
        yield
        readiness.give_up()
        await warming
        await asyncio.to_thread(worker.close)

    app = FastAPI(title="rlhf-scan", version=__version__, lifespan=lifespan, redirect_slashes=False, redoc_url=None)
    problems.install(app)
    app.add_middleware(Measured, metrics=metrics)
    for entry in operations():
        app.post(f"/v1/{entry.name}", **describe(entry))(_route(entry, settings, worker, metrics))

    @app.get("/healthz", summary="Whether the process answers")
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok", "version": __version__})

    @app.get("/readyz", summary="Whether the backend is warm and agrees with the reference")
    async def readyz() -> JSONResponse:
        if readiness.why_not is not None:
            raise Problem(503, readiness.why_not, {"Retry-After": "1"})
        return JSONResponse({"status": "ready", "backend": settings.backend})

    @app.get("/metrics", summary="Prometheus metrics", response_class=Response)
    async def read_metrics() -> Response:
        return metrics.response()

    return app


class Readiness:
    """Whether the backend has been warmed with the self-test of the estimators in `Settings.warm`, and passed it."""

    def __init__(self, settings: Settings) -> None:
        """Not ready."""
        self._settings = settings
        self._given_up = threading.Event()
        self.why_not: str | None = "the backend is being warmed; ask again in a second"

    async def establish(self) -> None:
        """Run the self-test off the event loop."""
        self.why_not = await asyncio.to_thread(self._test)

    def give_up(self) -> None:
        """Test no further estimator, so that the service can stop."""
        self._given_up.set()

    def _test(self) -> str | None:
        for test in self_test(self._settings.backend, self._settings.warm_ops):
            if not test.ok:
                return f"the self-test of {test.op} failed: {test.detail}; run `rlhf-scan doctor` there"
            if self._given_up.is_set():
                return "the service is stopping; ask another one"
        return None


def _route(entry: Operation, settings: Settings, worker: Worker, metrics: Metrics) -> Callable[[Request], Awaitable[Response]]:
    op = entry.name

    async def run(request: Request) -> Response:
        sent = sent_format(op, request.headers)
        wanted = wanted_format(op, request.headers, sent)
        if request.query_params:
            raise InputError(f"{op}: the query string must be empty, got {request.url.query!r}; put parameters into the body")
        with worker.admitted(op):
            chunks, size = await _receive(request, op, _Limit.of(settings, sent), settings.body_seconds)
            answer = await worker.run(Job(op, chunks, size, sent, wanted))
        metrics.tokens.labels(op).inc(answer.tokens)
        return Response(answer.body, media_type=wanted)

    return run


@dataclass(frozen=True)
class _Limit:
    """How many bytes a body may have, the option of `rlhf-scan serve` that says so, and what else than raising it helps."""

    size: int
    option: str
    remedy: str

    @classmethod
    def of(cls, settings: Settings, sent: str) -> _Limit:
        """Of a body in the format `sent`."""
        if sent != JSON:
            return cls(settings.max_body_bytes, "--max-body-bytes", "split the batch")
        remedy = "split the batch, or send safetensors, which is smaller than JSON"
        if settings.max_json_bytes < settings.max_body_bytes:
            return cls(settings.max_json_bytes, "--max-json-bytes", remedy)
        return cls(settings.max_body_bytes, "--max-body-bytes", remedy)

    def exceeded(self, op: str, got: str) -> Problem:
        """What is said of a larger one."""
        return Problem(
            413, f"{op}: the body must have at most {self.size} bytes, got {got}; {self.remedy}, or raise the service's {self.option}"
        )


async def _receive(request: Request, op: str, limit: _Limit, seconds: float) -> tuple[list[bytes], int]:
    """The body in chunks, and its size; Problems say that it is too large or too slow."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit.size:
        raise limit.exceeded(op, f"{declared} bytes")
    chunks: list[bytes] = []

    async def collect() -> int:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit.size:
                raise limit.exceeded(op, "more")
            chunks.append(chunk)
        return size

    try:
        return chunks, await asyncio.wait_for(collect(), seconds)
    except asyncio.TimeoutError as error:
        raise Problem(
            408,
            f"{op}: the body must arrive within {seconds:g} seconds, got a part of it; "
            "send it faster or in smaller requests, or raise the service's --body-seconds",
        ) from error
