"""The one place that launches the kernels: the first time as `kernel[grid](...)`, then what Triton compiled for it, directly.

Triton's own launch binds, inspects and hashes every argument on each call, constants included, which takes longer than a small kernel. A
`Launcher` holds the constants and looks at the arguments alone. Whatever Triton specialises a kernel on is in its key.

From Hopper on a launch may put its programs in place before the one before it is done (programmatic dependent launch), which saves about a
microsecond between two of them. So every kernel begins with `await_previous`.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from ..recordings import recording
from .tiles import INTERPRETED

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_OLDEST = (3, 6)  # that compiles the kernels
# The versions in which this was read: CompiledKernel.run takes the numbers of programs in three dimensions, stream, function, metadata, what
# hooks are told, the two hooks, and the kernel's parameters in order.
_KNOWN = _OLDEST, (3, 7)

# Kernel, constants, options -> specialization of the arguments -> how what was compiled for them is launched.
_COMPILED: dict[tuple[Any, ...], dict[tuple[Any, ...], tuple[Any, ...]]] = {}
_ABSENT: dict[int, tuple[None, ...]] = {}
_HOOKS = triton.knobs.runtime if hasattr(triton, "knobs") else CompiledKernel  # one that is too old says so, it does not fail here
_HERE: AbstractContextManager[Any] = nullcontext()
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def await_previous():
    """The first line of every kernel: wait until all that was launched before is done and can be read, and let the next launch come this far."""
    if not _INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


class Launcher:
    """A kernel with its constants.

    Args:
        kernel: from `triton.jit`; its first parameters are a launch's arguments, the others constants; its first line is `await_previous()`.
        constants: by name.
        alike: all its launches have the same ints and the same dtypes of tensors, whose addresses are multiples of 16, and lack the same ones,
            so that what was compiled for one serves all.
        options: of the launch: num_warps, ... The compiler fuses no multiplication with an addition unless told to: its choice, which differs
            from kernel to kernel, would change bits.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], *, alike: bool = False, **options: Any) -> None:
        self._alike = alike
        self._kernel = kernel
        self._constants = constants
        self._options = {"enable_fp_fusion": False, **options}
        self._compiled = _COMPILED.setdefault((kernel, *constants.items(), *options.items()), {})
        self._by_device: dict[int, tuple[Any, ...]] = {}

    def __call__(self, programs: int, *arguments: Any) -> None:
        """Launch on the current device and stream. An argument is a tensor, None, an int, a float, or a tuple of them."""
        watching = recording()
        if INTERPRETED:
            with nullcontext() if watching is None else watching.paused():
                self._kernel[(programs,)](*arguments, **self._constants, **self._options)
            if watching is not None:
                watching.launched(_Interpreted(self), programs, arguments)
            return
        active = driver.active
        device = active.get_current_device()
        found, values = self._by_device.get(device), arguments
        if found is None:
            key: list[Any] = [device]
            values = specialized(arguments, key)
            found = self._compiled.get(tuple(key))
        if found is None:
            found = self._compile_and_launch(programs, arguments)
            if found is not None:
                self._compiled[tuple(key)] = found
        elif _observed():
            self._compile_and_launch(programs, arguments)
        else:
            if self._alike:
                self._by_device[device] = found
            run, function, metadata, constants = found
            run(programs, 1, 1, active.get_current_stream(device), function, metadata, None, None, None, *values, *constants)
        if watching is not None:
            watching.launched(None if found is None else _Direct(device, *found), programs, arguments)

    def _compile_and_launch(self, programs: int, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """As Triton's users do; how to launch directly what it compiled, if that can be done."""
        target = driver.active.get_current_target()
        early = target.backend == "cuda" and target.arch >= 90
        compiled = self._kernel[(programs,)](*arguments, **self._constants, **self._options, launch_pdl=early)
        if not isinstance(compiled, CompiledKernel) or why_not_direct() is not None:
            return None
        constants = [self._constants[name] for name in self._kernel.arg_names[len(arguments) :]]
        return compiled.run, compiled.function, compiled.packed_metadata, constants


class _Direct:
    """A launch of what was compiled (`rlhf_scan.recordings.Launch`)."""

    takes_addresses = True

    def __init__(self, device: int, run: Any, function: Any, metadata: Any, constants: list[Any]) -> None:
        self._device, self._run, self._of, self._constants = device, run, (function, metadata, None, None, None), constants

    def __call__(self, programs: int, arguments: tuple[Any, ...]) -> None:
        self._run(programs, 1, 1, driver.active.get_current_stream(self._device), *self._of, *arguments, *self._constants)

    def is_observed(self) -> bool:
        return _observed()


class _Interpreted:
    """Likewise in the interpreter."""

    takes_addresses = False

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def __call__(self, programs: int, arguments: tuple[Any, ...]) -> None:
        self._launcher(programs, *arguments)

    def is_observed(self) -> bool:
        return False


def absent(count: int) -> tuple[None, ...]:
    """That many arguments that are not there; always the same object, at which a launch need not look twice."""
    return _ABSENT.setdefault(count, (None,) * count)


def specialized(arguments: tuple[Any, ...], key: list[Any]) -> list[Any]:
    """The arguments as compiled code takes them; adds to `key` what Triton may compile different code for.

    That is a tensor's dtype and whether its address is a multiple of 16; the width of an int, whether it is 1 and a multiple of 16; the type
    of anything else.
    """
    values: list[Any] = []
    for argument in arguments:
        kind = type(argument)
        if argument is None:
            key.append(None)
        elif kind is tuple:
            if argument is _ABSENT.get(len(argument)):
                key.append(-len(argument))
            else:
                key.append(len(argument))
                argument = tuple(specialized(argument, key))
        elif kind is int:
            key.append(_int_kind(argument))
        elif kind is float:
            key.append(float)
        else:
            key.append(argument.dtype)
            argument = argument.data_ptr()
            key.append(argument & 15 == 0)
        values.append(argument)
    return values


@lru_cache(maxsize=4096)
def _int_kind(number: int) -> str:
    if number == 1:
        return "1"
    width = "i32" if -(2**31) <= number < 2**31 else "i64" if number < 2**63 else "u64"
    return width + "D" * (number % 16 == 0)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: within this it is the tensor's."""
    index = tensor.get_device()
    if INTERPRETED or index < 0 or index == driver.active.get_current_device():
        return _HERE
    return torch.cuda.device(index)


def too_old() -> str | None:
    """Why nothing can run, with the remedy; None where Triton compiles the kernels."""
    if VERSION >= _OLDEST:
        return None
    needed = ".".join(map(str, _OLDEST))
    return f"needs Triton {needed} or newer, got {triton.__version__}; install triton>={needed}, which comes with a newer torch, or run on the CPU"


@lru_cache(maxsize=1)
def why_not_direct() -> str | None:
    """Why every launch is left to Triton; None if repeated ones are direct."""
    if INTERPRETED:
        return "Triton's interpreter runs the kernels"
    if not _KNOWN[0] <= VERSION <= _KNOWN[1]:
        return f"Triton {triton.__version__} is not among the versions whose launch was read, {_KNOWN[0]} to {_KNOWN[1]}"
    if driver.active.get_current_target().backend != "cuda":
        return "the GPU is not NVIDIA's"
    return None


def _observed() -> bool:
    """Whether somebody, say a profiler, asked to be told of launches."""
    enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
    return (enter is not None and bool(getattr(enter, "calls", True))) or (leave is not None and bool(getattr(leave, "calls", True)))
