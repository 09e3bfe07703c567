"""Ray itself: finding it, starting it, starting actors, waiting for answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Any, TypedDict

from rlhf_scan import EngineError

_SHUT_DOWN = "Ray was shut down; create a new engine or pool"

_starting = threading.Lock()


class Creation(TypedDict, total=False):
    """How to create an actor; see `start_actor`."""

    num_cpus: float
    num_gpus: float
    backend: str
    validate: str
    actor_options: Mapping[str, Any]


def ray_module() -> Any:
    """Ray, or EngineError that says how to install it."""
    try:
        import ray
    except ImportError as error:
        raise EngineError(f"rlhf_scan.ray_actors needs Ray ({error}); pip install 'rlhf-scan[ray]'") from error
    return ray


def actor_class() -> Any:
    """CreditActor."""
    ray_module()
    from .actor import CreditActor

    return CreditActor


def ensure_ray() -> Any:
    """Ray, initialised: as it is, else at RAY_ADDRESS if that is set, else a new instance on this machine, as long as the process lasts."""
    ray = ray_module()
    with _starting:
        if not ray.is_initialized():
            try:
                if os.environ.get("RAY_ADDRESS"):
                    ray.init()
                else:
                    ray.init(address="local", include_dashboard=False)
            except Exception as error:
                raise EngineError(
                    f"Ray could not be started: {type(error).__name__}: {error}; "
                    "call ray.init yourself with what your machine needs, or mend or unset RAY_ADDRESS"
                ) from error
    return ray


def start_actor(
    num_cpus: float = 1,
    num_gpus: float = 0,
    backend: str = "auto",
    validate: str = "shapes",
    actor_options: Mapping[str, Any] | None = None,
) -> Any:
    """Ask Ray for a new CreditActor; returns its handle at once.

    Args:
        num_cpus: CPUs that Ray reserves for it, and its number of threads.
        num_gpus: GPUs; a fraction shares one.
        backend: as in `rlhf_scan.gae`.
        validate: as in `rlhf_scan.gae`.
        actor_options: anything else that Ray's `.options` takes, such as `resources` or `scheduling_strategy`.
    """
    options = {"num_cpus": num_cpus, "num_gpus": num_gpus, **(actor_options or {})}
    return actor_class().options(**options).remote(backend, validate)


def resources(creation: Creation) -> str:
    """What an actor asks for and what there is, for a message."""
    ray = ray_module()
    total, free = ray.cluster_resources(), ray.available_resources()
    asked = {"CPU": creation.get("num_cpus", 1), "GPU": creation.get("num_gpus", 0)}
    return ", ".join(
        f"{amount:g} {kind} (of {total.get(kind, 0):g}, {free.get(kind, 0):g} free)" for kind, amount in asked.items() if amount
    )


class Session:
    """The Ray that this process is connected to. After a shutdown Ray starts anew on the next call, or waits for ever; this does not."""

    def __init__(self) -> None:
        self._node = _node()

    def alive(self) -> bool:
        """Whether the process is still connected to it."""
        return self._node is not None and self._node == _node()

    def check(self) -> None:
        """Raise EngineError unless it is."""
        if not self.alive():
            raise EngineError(_SHUT_DOWN)

    def get(self, reference: Any, timeout: float) -> Any:
        """What `reference` stands for; raises Ray's errors, GetTimeoutError after `timeout` seconds, EngineError where Ray is shut down."""
        ray = ray_module()
        deadline = time.monotonic() + timeout
        while True:
            self.check()
            left = deadline - time.monotonic()
            try:
                return ray.get(reference, timeout=max(0.0, min(left, 1.0)))
            except ray.exceptions.GetTimeoutError:
                if left <= 1.0:
                    raise
            except SystemExit as error:  # how Ray tells a thread that it is being shut down
                raise EngineError(_SHUT_DOWN) from error


def brief(error: BaseException) -> str:
    """The last line of Ray's often long messages, which says what happened."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _node() -> str | None:
    ray = ray_module()
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else None
