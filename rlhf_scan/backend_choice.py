"""What a backend is, and which one runs."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Protocol, cast

import torch
from torch import Tensor

from .call import Call, Solver
from .errors import BackendError


class Backend(Protocol):
    """A module of `rlhf_scan.backends`."""

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run tensors of `device` here, with the remedy; None if it can."""
        ...

    def note(self) -> str:
        """How it works here, in a few words."""
        ...

    def run(self, call: Call) -> list[Tensor]:
        """One [N] tensor of ``call.dtype`` per output."""
        ...

    def prepare(self, call: Call) -> Solver | None:
        """What runs every call with the shapes, dtypes and options of `call`, which it does not keep; None if `run` is as fast."""
        ...

    def expectation(self, values: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
        """Sum over the actions, [.., A] -> [N], of values * probabilities; an action of probability 0 adds 0, whatever its value."""
        ...

    def chosen_logprobs(self, probabilities: Tensor, actions: Tensor, dtype: torch.dtype) -> Tensor:
        """log probabilities[.., actions], [.., A] and integers [N] -> [N]; NaN where an action is none of the A, which is never read."""
        ...


@lru_cache
def backend_module(name: str) -> Backend:
    """The module behind a backend's name; BackendError where what it needs is not installed."""
    try:
        return cast(Backend, importlib.import_module(f".backends.{name}_backend", __package__))
    except ImportError as error:
        raise BackendError(f"backend {name!r} needs {error.name}, which is not installed; install it or choose another backend") from error


def choose_backend(name: str, device: torch.device, op: str | None = None) -> str:
    """The backend that runs, given what was asked for: "auto" is triton for CUDA tensors, else cpu.

    Raises BackendError, which speaks for `op` if that is given, if it cannot run there.
    """
    chosen = name if name != "auto" else ("triton" if device.type == "cuda" else "cpu")
    speaker = f"{op}: " if op else ""
    try:
        reason = backend_module(chosen).why_not(device)
    except BackendError as error:
        raise BackendError(f"{speaker}{error}") from error
    if reason is not None:
        raise BackendError(f"{speaker}backend {chosen!r} {reason}")
    return chosen


# torch.compile cannot trace an import. This is torch.compiler.assume_constant_result, which itself imports torch._dynamo: as long as torch.
choose_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]
