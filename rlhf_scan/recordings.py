"""A call that is watched: which kernels it launches on what, what it allocates, and whether torch did anything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}
_CLEARED = {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}


class Launch(Protocol):
    """How one kernel is launched on arguments like those it was compiled for; nothing looks at them."""

    takes_addresses: bool  # in place of tensors

    def __call__(self, programs: int, arguments: tuple[Any, ...]) -> None:
        """Launch on the current device and stream. Arguments may be tuples of others."""
        ...

    def is_observed(self) -> bool:
        """Whether somebody, say a profiler, is to be told of launches, which this one would not do."""
        ...


class _Here(threading.local):
    recording: Recording | None = None


_here = _Here()


def recording() -> Recording | None:
    """What is being recorded in this thread."""
    return _here.recording


class Recording(TorchDispatchMode):
    """A call that is watched, within ``with``.

    Attributes:
        allocated: by address, what torch allocated, and whether it is cleared.
        launches: of kernels, how many programs and on what.
        refused: it did what cannot be repeated.
    """

    def __init__(self) -> None:
        """Of one call."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocated: dict[int, tuple[Tensor, bool]] = {}
        self.launches: list[tuple[Launch, int, tuple[Any, ...]]] = []
        self.refused = False
        self._looks = True

    def __enter__(self) -> Recording:
        """From now on."""
        _here.recording = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """No longer."""
        _here.recording = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of torch, and see whether it allocates, is a view, or cannot be repeated."""
        found = func(*args, **(kwargs or {}))
        name = func._schema.name
        if not self._looks:
            return found
        if name in _EMPTY or name in _CLEARED:
            # Kept, so that no address is used twice.
            self.allocated[address(found)] = found, name in _CLEARED
        else:
            given, made = ({address(tensor) for tensor in tensors_in(value)} for value in ((args, kwargs), found))
            is_view = made and made <= given
            self.refused |= func._schema.is_mutable or bool(given or made) != bool(is_view)  # one without tensors may be anything
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it torch's operators are not looked at: they are a launch's."""
        self._looks = False
        try:
            yield
        finally:
            self._looks = True

    def launched(self, launch: Launch | None, programs: int, arguments: tuple[Any, ...]) -> None:
        """A kernel was; None: in a way that cannot be repeated."""
        if launch is None:
            self.refused = True
        else:
            self.launches.append((launch, programs, arguments))


def address(tensor: Tensor) -> int:
    """Of the memory that the tensor is a part of."""
    return tensor.untyped_storage().data_ptr()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
