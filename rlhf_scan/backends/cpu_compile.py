"""How the CPU backend compiles: loops, which are kept on disk between processes, and what is inlined in them."""

# mypy: disallow-untyped-calls=false

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba

# The versions in which was read what a cache must do, and that it may take another's place. With any other every process compiles.
_KNOWN = (0, 60), (0, 68)

_njit: Any = numba.njit  # its annotations leave out options that it takes


def inlined(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `numba.njit`, for what compiled functions alone call: no wrapper for Python or C is compiled."""
    decorate: Callable[[Callable[..., Any]], Any] = _njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)
    return decorate


def compiled_once(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """As `numba.njit`, for a function that calls none but `inlined` ones: what one process compiles, later ones find on disk."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = _njit(nogil=True, no_cfunc_wrapper=True, **options)(function)
        if keeps() and not getattr(numba.config, "DISABLE_JIT", False):
            from .cpu_disk_cache import DiskCache

            compiled._cache = DiskCache(compiled)
        return compiled

    return decorate


@lru_cache(maxsize=1)
def keeps() -> bool:
    """Whether this numba's compiled code can be kept."""
    return _KNOWN[0] <= tuple(int(part) for part in numba.__version__.split(".")[:2]) <= _KNOWN[1]


def kept_in() -> Path | None:
    """Where compiled code is kept; None: it is not."""
    from .cpu_disk_cache import directory

    return directory() if keeps() else None
