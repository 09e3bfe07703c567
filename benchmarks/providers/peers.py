"""Where peers are found: installed, or in the folder `peers/` that `scripts/fetch_peers.py` fills."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from ..batches import Batch
from . import Prepared

INSIDE = ("rl-triton/src", "site")
WITH_RETURNS = "its advantages, and returns as its callers make them, advantages + values in one torch operator: the outputs that ours has"


def folder() -> Path:
    """RLHF_SCAN_PEERS, or `peers/` in the working directory."""
    return Path(os.environ.get("RLHF_SCAN_PEERS", "peers")).resolve()


@lru_cache(maxsize=1)
def on_path() -> None:
    """Let what lies in the folder be imported, after all that is installed."""
    sys.path += [str(folder() / name) for name in INSIDE if (folder() / name).is_dir()]


def imported(module: str) -> Any:
    """The module, from wherever it is."""
    on_path()
    return importlib.import_module(module)


@lru_cache(maxsize=64)
def importable(module: str) -> str | None:
    """Why the module cannot be imported; None if it can."""
    try:
        imported(module)
    except Exception as error:  # a peer may raise anything where something it needs is missing
        return f"it cannot be imported ({reason(error)})"
    return None


def reason(error: Exception) -> str:
    """What it is, and its first line."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def needs_cuda(then: Callable[[], str | None]) -> Callable[[str], str | None]:
    """A reason for a peer that runs on a GPU alone."""
    return lambda device: then() if device == "cuda" else "it runs on a GPU alone"


def with_returns(prepare: Callable[[Batch], Prepared]) -> Callable[[Batch], Prepared]:
    """What `prepare` prepares, advantages, and the returns from them."""

    def prepared(batch: Batch) -> Prepared:
        alone, values = prepare(batch), batch.rows().tensors["values"]

        def run() -> tuple[Tensor, Tensor]:
            advantages = alone.run()
            return advantages, advantages + values

        return Prepared(run, lambda found: dict(zip(("advantages", "returns"), found, strict=True)), alone.comparable)

    return prepared
