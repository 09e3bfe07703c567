"""Machine code of the CPU backend's loops, kept on disk between processes.

Numba's own `cache=True` does not notice a change of a function that the compiled one calls, may take one entry for another where processes write at
once, and makes the same symbol of two functions of one name, so that a process may run the wrong one.
"""

# mypy: disallow-untyped-calls=false

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba.core import config
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

from .cpu_fingerprint import Unknown, fingerprint

# Of about 0.1 MB each; what was written first goes first.
KEPT_FILES = 256
_DIGEST_BYTES = 32

# What this process has compiled or loaded. It is there until the process ends, and must not be there twice.
_known: dict[str, Any] = {}

_config: Any = config


@lru_cache(maxsize=1)
def directory() -> Path | None:
    """In $NUMBA_CACHE_DIR, or else the user's cache directory. None where there is none, or where others could put files: these hold code."""
    path = Path(_config.CACHE_DIR, "rlhf_scan") if _config.CACHE_DIR else Path(AppDirs("rlhf_scan", appauthor=False).user_cache_dir)
    if not path.is_absolute() or not hasattr(os, "geteuid"):  # no home; Windows, whose permissions are not looked at here
        return None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path if _is_ours_alone(path.stat()) else None
    except OSError:
        return None


def _is_ours_alone(status: os.stat_result) -> bool:
    """Whether no other user could have written it."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


class DiskCache(NullCache):
    """What numba asks before it compiles a function, and tells what came of it."""

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        self._qualname = dispatcher.py_func.__qualname__
        self._fingerprint = ""  # empty where it cannot be told

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for arguments of these types, if it is known."""
        self._fingerprint = ""
        with contextlib.suppress(Unknown):
            self._fingerprint = fingerprint(self._dispatcher)
        if not self._fingerprint:
            return None
        # Numba makes symbols of this name. No two functions may have the same, in whatever processes they were compiled.
        self._dispatcher.py_func.__qualname__ = f"{self._qualname}_{self._fingerprint}"
        entry = self._entry(sig, target_context.codegen())
        if entry not in _known:
            payload = _read(entry)
            if payload is None:
                return None
            target_context.refresh()
            _known[entry] = CompileResult._rebuild(target_context, *pickle.loads(payload))
        return _known[entry]

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it, unless it holds an address in this process, symbols of other functions, or constants that were made for these."""
        if not self._fingerprint:
            return
        entry = self._entry(sig, data.codegen)
        _known[entry] = data._replace(metadata=None)  # as of a loaded one: numba writes the times of one compilation there
        symbols = [defined.name for defined in data.library.get_defined_functions()]
        alone = all(self._fingerprint in symbol or symbol.startswith("NRT_") for symbol in symbols)  # NRT: numba's runtime
        *reduced, environments = data._reduce()
        constants = any(environment.consts for environment in environments)
        if alone and not constants and not (data.library.has_dynamic_globals or data.lifted or data.reload_init):
            _write(entry, dumps((*reduced, ())))

    def _entry(self, sig: Any, codegen: Any) -> str:
        return hashlib.sha256(repr((self._fingerprint, sig, codegen.magic_tuple())).encode()).hexdigest()


def _read(entry: str) -> bytes | None:
    """What was written, if none of it is missing or changed."""
    path = directory()
    if path is None:
        return None
    try:
        with (path / entry).open("rb") as file:
            if not _is_ours_alone(os.fstat(file.fileno())):  # where others may rename directories, the one that was looked at is gone
                return None
            data = file.read()
    except OSError:
        return None
    payload = data[_DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == data[:_DIGEST_BYTES] else None


def _write(entry: str, payload: bytes) -> None:
    """Whole or not at all, whoever reads or writes it meanwhile; a disk that takes nothing more is no error."""
    path = directory()
    if path is None:
        return
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(dir=path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(temporary, path / entry)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        for oldest in sorted(path.iterdir(), key=lambda each: each.stat().st_mtime)[:-KEPT_FILES]:
            oldest.unlink()
