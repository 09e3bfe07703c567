"""A GPU that is not there: kernels are compiled for an H200, launches do nothing. What remains of a call is the host's part, but for CUDA's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime import driver  # type: ignore[import-untyped]

from rlhf_scan.backends import triton_backend


class Driver:
    """What Triton asks of a GPU's driver."""

    def __init__(self, capability: int) -> None:
        self.launched: list[str] = []
        self.utils = self
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """What kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The only one."""
        return 0

    def get_device_interface(self) -> Any:
        """Nothing is waited for."""
        return torch.cpu

    def map_python_to_cpp_type(self, name: str) -> str:
        """Asked for a launcher in C, which there is none of."""
        return name

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Of an H200."""
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, most threads."""
        return 1, 1, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What launches a kernel."""
        name = str(metadata.name)
        return lambda *arguments: self.launched.append(name)


def stand_in(capability: int = 90) -> Driver:
    """From now on the Triton backend takes CPU tensors, and its outputs are never written. `capability` is a GPU's, 90 an H200's."""
    found = Driver(capability)
    driver.set_active(found)
    triton_backend.why_not = lambda device: None
    return found
