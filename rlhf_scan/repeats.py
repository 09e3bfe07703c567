"""Calls like an earlier one: of the same estimator, shapes, dtypes, devices and options. What follows from those is checked and made once.

A repeated call checks its numbers and hands its tensors to the backend. For small tensors on a GPU the rest is most of what a call costs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call, Solver, Tensors
from .locks import Lock
from .recordings import recording
from .segments import Segments

Key = tuple[Any, ...]

# The oldest is forgotten beyond this. One is small, and calls of ever new shapes would gain nothing from more.
_KEPT = 512
_known: dict[Key, Repeat] = {}
_solvers: dict[Key, Solver] = {}  # for the keys whose calls are checked every time
_writing = Lock()


def intercepted() -> bool:
    """Whether something wants to see torch's operators: torch.compile, torch.export, a mode, a functorch transform, torch.jit.trace.

    A recording takes what it sees.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > (recording() is not None)
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
    )


def key_of(options: Sequence[Any], given: Sequence[Any], segments: Segments | None) -> Key | None:
    """Equal for calls that are alike; None where no other is."""
    key = [*options]
    shape = device = None
    for value in given:
        kind = type(value)
        if kind is Tensor:
            if value.is_neg() or value.layout is not torch.strided:  # torch negates what its memory holds; or it has none to be read
                return None
            key.append(value.dtype)
            try:
                contiguous, its_shape = value.is_contiguous(), value.shape
            except RuntimeError:  # a nested tensor has no shape
                return None
            if not contiguous:
                key.append(False)
            if its_shape != shape:
                shape = its_shape
                key.append(shape)
            if value.device != device:
                device = value.device
                key.append(device)
        elif value is None:
            key.append(None)
        elif kind is float or kind is int:
            key.append(kind)
        else:
            return None
    if segments is not None:
        if type(segments) is not Segments:
            return None
        key.append(segments.count)
        key.append(segments.total)
    return tuple(key)


def run(key: Key, given: Sequence[Any], segments: Segments | None) -> Sequence[Tensor] | None:
    """The outputs, in the shape of the first input; None where no call like it was remembered or a number is out of its range."""
    try:
        repeat = _known.get(key)
    except TypeError:  # an option of a type that no option has
        return None
    return None if repeat is None else repeat(given, segments)


def solver(key: Key) -> Solver | None:
    """What a backend made for calls of that key, if it is remembered."""
    return _solvers.get(key)


def remember(key: Key, call: Call, names: Sequence[str], given: Sequence[Any], solve: Solver) -> None:
    """From now on `solve` runs the calls of that key; unchecked, if their arguments alone make up its tensors.

    `names` are those of the arguments `given`, among them mask, terminated, truncated and bootstrap.
    """
    place = {name: i for i, name in enumerate(names)}
    made = any(place.get(name) is None or given[place[name]] is None for name in call.estimator.inputs)  # some input, from others
    checked = made or any(isinstance(value, Tensor) and value.dim() == 0 for value in given)
    with _writing:
        if checked:
            _put(_solvers, key, solve)
        else:
            _put(_known, key, Repeat(call, place, given, solve))


def _put(kept: dict[Key, Any], key: Key, value: Any) -> None:
    kept[key] = value
    if len(kept) > _KEPT:
        del kept[next(iter(kept))]


class Repeat:
    """Runs calls like one that was checked; `place` tells where among the arguments each stands."""

    def __init__(self, call: Call, place: Mapping[str, int], given: Sequence[Any], solve: Solver) -> None:
        entry = call.estimator
        self._solve = solve
        self._device = call.inputs[0].device
        self._inputs = [place[name] for name in entry.inputs]
        self._rates = [place[name] for channel in entry.channels[: len(call.rates)] for name in channel]
        self._optional = place["mask"], place["terminated"], place["truncated"], place["bootstrap"]
        self._ranges = [
            # Not every integer fits a float.
            (place[name], min(rate.largest, sys.float_info.max) if isinstance(given[place[name]], int) else rate.largest)
            for name, rate in entry.rates.items()
            if isinstance(given[place[name]], int | float)
        ]
        self._made: list[tuple[int, Callable[[Any], Any]]] = [
            (i, float if isinstance(value, int) else _contiguous)
            for i, value in enumerate(given)
            if isinstance(value, int) or (isinstance(value, Tensor) and not value.is_contiguous())
        ]

    def __call__(self, given: Sequence[Any], segments: Segments | None) -> Sequence[Tensor] | None:
        """The outputs, in the shape of the first input; None where a number is out of its range."""
        for place, largest in self._ranges:
            if not 0.0 <= given[place] <= largest:
                return None
        if self._made:
            given = list(given)
            for place, make in self._made:
                given[place] = make(given[place])
        mask, terminated, truncated, bootstrap = self._optional
        tensors = Tensors(
            tuple([given[place] for place in self._inputs]),
            tuple([given[place] for place in self._rates]),
            (given[mask], given[terminated], given[truncated]),
            given[bootstrap],
            None if segments is None else segments.on(self._device),
        )
        return self._solve(tensors)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()
