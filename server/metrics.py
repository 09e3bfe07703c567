"""Prometheus metrics of one app."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf_scan.operations import operations

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_ROUTES = "/v1/"


class Metrics:
    """Counts of one app, in a registry of its own."""

    def __init__(self) -> None:
        """Start at zero."""
        self.registry = CollectorRegistry()
        self.requests = Counter("rlhf_scan_requests", "Requests answered.", ["op", "status"], registry=self.registry)
        self.seconds = Histogram(
            "rlhf_scan_request_seconds", "From the request's head to the answer's end.", ["op"], buckets=_BUCKETS, registry=self.registry
        )
        self.in_progress = Gauge("rlhf_scan_requests_in_progress", "Requests being received or answered.", registry=self.registry)
        self.tokens = Counter("rlhf_scan_tokens", "Tokens computed.", ["op"], registry=self.registry)

    def response(self) -> Response:
        """All of them, as Prometheus reads them."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


class Measured:
    """ASGI middleware that counts what is answered under /v1/, by op ("unknown" for any other name) and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """Wrap `app`."""
        self.app = app
        self.metrics = metrics
        self.ops = {entry.name for entry in operations()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and count."""
        if scope["type"] != "http" or not scope["path"].startswith(_ROUTES):
            await self.app(scope, receive, send)
            return
        name = scope["path"].removeprefix(_ROUTES)
        op = name if name in self.ops else "unknown"
        started = time.perf_counter()
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            with self.metrics.in_progress.track_inprogress():
                await self.app(scope, receive, watch)
        finally:
            self.metrics.requests.labels(op, status).inc()
            self.metrics.seconds.labels(op).observe(time.perf_counter() - started)
