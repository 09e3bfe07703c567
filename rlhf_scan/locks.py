"""Locks that a forked child can use."""

from __future__ import annotations

import os
import threading


class Lock:
    """For `with`. It is free in a forked child, which would inherit it held by a thread that it does not have."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
