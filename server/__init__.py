"""The HTTP door: `create_app` and `serve` need rlhf-scan[server]; `HttpEngine` needs httpx alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .client import HttpEngine
    from .serving import serve
    from .settings import Settings

__all__ = ["HttpEngine", "Settings", "create_app", "serve"]

_HOME = {"HttpEngine": "client", "Settings": "settings", "create_app": "app", "serve": "serving"}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and no more: a client needs no FastAPI."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
