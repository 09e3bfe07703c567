"""What every test file may use: the backends, and where their tensors lie on this machine."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

BACKENDS = ("reference", "cpu", "triton")


def device_of(backend: str) -> torch.device:
    """Where the tests of `backend` put their tensors: triton's on the GPU where there is one, else on the CPU (it is interpreted there)."""
    return torch.device("cuda" if backend == "triton" and CUDA else "cpu")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    return str(request.param)


@pytest.fixture
def nan_filled() -> Iterator[None]:
    """torch.empty and its like return NaN, so that an output nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def no_hang() -> Iterator[None]:
    """End the run with a traceback rather than wait for ever for a carry that no program publishes."""
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, running."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def actors(ray: Any) -> list[Any]:
    """Two actors that outlive every engine and pool."""
    from rlhf_scan.ray_actors import CreditActor

    return [CreditActor.options(num_cpus=0.1).remote("reference") for _ in range(2)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu run where there is a CUDA device."""
    for item in items:
        if not CUDA and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
