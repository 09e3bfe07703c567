"""The Ray door: credit assignment in Ray actors, on this machine or a cluster.

`CreditWorker` does the work and knows no Ray; `CreditActor` is the Ray class around it; `CreditPool` spreads requests over several actors;
`RayEngine` is the `rlhf_scan.Engine` that runs requests there. Importing this package does not import Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .engine import RayEngine
from .pool import CreditPool
from .worker import CreditWorker

if TYPE_CHECKING:
    from .actor import CreditActor

__all__ = ["CreditActor", "CreditPool", "CreditWorker", "RayEngine"]


def __getattr__(name: str) -> Any:
    """CreditActor, made by Ray when it is first asked for."""
    if name == "CreditActor":
        from .cluster import actor_class

        return actor_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
