"""The one place that launches the scan's kernels: the first time as `kernel[grid](...)`, then what Triton compiled for it, directly.

Triton's own launch binds, inspects and hashes every argument on each call, constants included, which takes longer than a small kernel. A
`Launcher` holds the constants and looks at the arguments alone. Whatever Triton specialises a kernel on is in its key.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from .tiles import INTERPRETED

# The versions in which this was read: CompiledKernel.run takes the numbers of programs in three dimensions, stream, function, metadata, what
# hooks are told, the two hooks, and the kernel's parameters in order.
_KNOWN = (3, 3), (3, 7)

# Kernel, constants, options -> specialization of the arguments -> how what was compiled for them is launched.
_COMPILED: dict[tuple[Any, ...], dict[tuple[Any, ...], tuple[Any, ...]]] = {}
_HERE: AbstractContextManager[Any] = nullcontext()


class Launcher:
    """A kernel with its constants.

    Args:
        kernel: from `triton.jit`; its first parameters are a launch's arguments, the others constants.
        constants: by name.
        options: of the launch: num_warps, ...
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: Any) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = options
        self._compiled = _COMPILED.setdefault((kernel, *constants.items(), *options.items()), {})

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launch on the current device and stream. An argument is a tensor, None, an int, a float, or a tuple of them."""
        if INTERPRETED:
            self._kernel[(programs,)](*arguments, **self._constants, **self._options)
            return
        active = driver.active
        device = active.get_current_device()
        key, values = specialization(arguments)
        found = self._compiled.get((device, key))
        if found is None or _observed():
            self._launch_by_triton(programs, arguments, (device, key))
            return
        run, function, metadata, constants = found
        run(programs, 1, 1, active.get_current_stream(device), function, metadata, None, None, None, *values, *constants)

    def _launch_by_triton(self, programs: int, arguments: tuple[Any, ...], key: tuple[Any, ...]) -> None:
        """As Triton's users do; keeps what it compiled."""
        compiled = self._kernel[(programs,)](*arguments, **self._constants, **self._options)
        if isinstance(compiled, CompiledKernel) and why_not_direct() is None:
            constants = [self._constants[name] for name in self._kernel.arg_names[len(arguments) :]]
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, constants


def specialization(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]]:
    """What Triton may compile different code for, and the arguments as compiled code takes them.

    That is a tensor's dtype and whether its address is a multiple of 16; the width of an int, whether it is 1 and a multiple of 16; the type
    of anything else.
    """
    key: list[Any] = []
    values: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if argument is None:
            key.append(None)
        elif kind is tuple:
            within, argument = specialization(argument)
            key.append(within)
            argument = tuple(argument)
        elif kind is int:
            key.append((-(2**31) <= argument < 2**31, argument == 1, argument & 15 == 0))
        elif kind is float:
            key.append(float)
        else:
            key.append(argument.dtype)
            argument = argument.data_ptr()
            key.append(argument & 15 == 0)
        values.append(argument)
    return tuple(key), values


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: within this it is the tensor's."""
    index = tensor.get_device()
    if INTERPRETED or index < 0 or index == driver.active.get_current_device():
        return _HERE
    return torch.cuda.device(index)


@lru_cache(maxsize=1)
def why_not_direct() -> str | None:
    """Why every launch is left to Triton; None if repeated ones are direct."""
    if INTERPRETED:
        return "Triton's interpreter runs the kernels"
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not _KNOWN[0] <= version <= _KNOWN[1]:
        return f"Triton {triton.__version__} is not among the versions whose launch was read, {_KNOWN[0]} to {_KNOWN[1]}"
    if driver.active.get_current_target().backend != "cuda":
        return "the GPU is not NVIDIA's"
    return None


def _observed() -> bool:
    """Whether somebody, say a profiler, asked to be told of launches."""
    runtime = triton.knobs.runtime if hasattr(triton, "knobs") else CompiledKernel
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
