"""A real server on a free loopback port, for tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn

from rlhf_scan.server import Settings, create_app

SAFETENSORS = {"Content-Type": "application/x-safetensors"}
JSON = {"Content-Type": "application/json"}


@contextmanager
def running(settings: Settings) -> Iterator[str]:
    """The address of a server in this process; it is stopped in the end."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive()


def wait_until(url: str, status: int, seconds: float = 60.0) -> httpx.Response:
    """The first answer of `url` with that status."""
    until = time.monotonic() + seconds
    while True:
        try:
            response = httpx.get(url)
            if response.status_code == status:
                return response
        except httpx.TransportError:
            response = None
        assert time.monotonic() < until, f"{url} did not answer {status}: {response and response.text}"
        time.sleep(0.02)
