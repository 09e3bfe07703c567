"""The service as a process."""

from __future__ import annotations

import socket

import uvicorn

from rlhf_scan.errors import InputError

from .app import create_app
from .settings import Settings

# Longer than clients keep an idle connection, so that it is they who close it.
_KEEP_ALIVE_SECONDS = 30


def serve(settings: Settings | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests in flight. Prints the address it listens on.

    Raises:
        InputError: a setting cannot be used, such as a port that is taken.
        BackendError: the backend cannot run here.
    """
    settings = settings or Settings.from_environment()
    config = uvicorn.Config(create_app(settings), access_log=False, timeout_keep_alive=_KEEP_ALIVE_SECONDS)
    with _listen(settings) as listener:
        host, port = listener.getsockname()[:2]
        print(f"rlhf-scan listens on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        uvicorn.Server(config).run(sockets=[listener])


def _listen(settings: Settings) -> socket.socket:
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((settings.host, settings.port), family=family)
    except OSError as error:
        raise InputError(
            f"serve: host and port must be free to listen on, got {settings.host}:{settings.port}: {error}; choose another host or port"
        ) from error
