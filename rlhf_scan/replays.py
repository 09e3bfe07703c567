"""Calls that are recorded as what they launch: from then on one like them allocates and launches, and does nothing else.

A call that launches kernels, and of torch takes but memory and views, does the same again whenever its tensors have the same shapes, dtypes and
device: only addresses differ. What cannot be repeated so, an operator that computes, copies or reads, or memory of unknown origin, refuses the
replay, and such calls run in full every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import combinations, count
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .locks import Lock
from .recordings import Recording, address, recording, tensors_in
from .repeats import intercepted, key_of
from .segments import Segments

Key = tuple[Any, ...]
Facts = Callable[[], Any]
Result = tuple[Sequence[Tensor], Facts]

# The oldest is forgotten beyond this.
_KEPT = 256
_ONCE, _NEVER = "called once", "cannot be replayed"
_known: dict[Key, Any] = {}  # one of these, or a replay
_writing = Lock()
_BEGIN = 256  # bytes, at a multiple of which each piece of an allocation begins
_HERE: AbstractContextManager[Any] = nullcontext()


def likeness(options: Sequence[Any], arguments: Mapping[str, Any], segments: Segments | None) -> tuple[Key | None, list[Tensor]]:
    """Of a call: what is equal for those that are alike but for what their tensors hold, None where no other is; and all tensors that it reads.

    `arguments` are tensors, numbers and None, `options` all else that makes a difference.
    """
    given = tuple(arguments.values())
    key = None if intercepted() else key_of(options, given, segments)
    read = [value for value in given if isinstance(value, Tensor)]
    if key is None or not read:
        return None, []
    numbers = [value for value in given if isinstance(value, int | float)]
    strides = [tensor.stride() for tensor in read if not tensor.is_contiguous()]
    if segments is not None:
        read.append(segments.on(read[0].device))
    return (key, *numbers, *strides), read


def repeated(key: Key | None, inputs: Sequence[Tensor], call: Callable[[], Result]) -> Result:
    """What `call` returns: outputs, and a function that makes the facts, which perhaps nobody wants. `key` and `inputs` are those of `likeness`."""
    if key is None or recording() is not None:  # what a replay launches no recording would see
        return call()
    if not _aligned(inputs):  # other code is compiled for these
        key = *key, *[tensor.data_ptr() & 15 for tensor in inputs]
    try:
        known = _known.get(key)
    except TypeError:  # an option of a type that no option has
        return call()
    if known is None:
        _put(key, _ONCE)  # most calls of ever new shapes never come again
        return call()
    if known is _NEVER:
        return call()
    if known is not _ONCE:
        replayed: Result | None = known(inputs)
        return replayed or call()
    with Recording() as watching:
        outputs, facts = call()
    _put(key, _replay_of(watching, inputs, outputs, facts()) or _NEVER)
    return outputs, facts


def _aligned(inputs: Sequence[Tensor]) -> bool:
    addresses = 0
    for tensor in inputs:
        addresses |= tensor.data_ptr()
    return addresses & 15 == 0


def _put(key: Key, value: Any) -> None:
    with _writing:
        _known[key] = value
        if len(_known) > _KEPT:
            del _known[next(iter(_known))]


def _replay_of(recording: Recording, inputs: Sequence[Tensor], outputs: Sequence[Tensor], facts: Any) -> Replay | None:
    if recording.refused or not recording.launches:
        return None
    try:
        return Replay(recording, inputs, outputs, facts)
    except Unplaced:
        return None


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: bytes after the beginning of a piece of memory, which are numbered."""

    memory: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def within(self, memory: Tensor) -> Tensor:
        """The tensor there."""
        first = (memory.storage_offset() * memory.element_size() + self.offset) // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=memory.device).set_(memory.untyped_storage(), first, self.shape, self.stride)


class Unplaced(Exception):
    """A tensor lies in memory that no replay has."""


class Memory:
    """The pieces of memory of a call: its inputs, its outputs, what only launches use, what facts are made of, and of all these the cleared ones.

    Outputs have allocations of their own, so that none keeps another's memory; the rest is three.
    """

    def __init__(self, recording: Recording, inputs: Sequence[Tensor], outputs: Sequence[Tensor], facts: Any) -> None:
        self._inputs = [(tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)) for tensor in inputs]
        # Of two that share memory it cannot be told which one is meant: both must lie to each other as they do here.
        self.shared = [
            (one, other, self._inputs[other][0] - self._inputs[one][0])
            for one, other in combinations(range(len(inputs)), 2)
            if self._inputs[one][0] < self._inputs[other][1] and self._inputs[other][0] < self._inputs[one][1]
        ]
        known = {address(tensor) for tensor in tensors_in(facts)}
        numbers = {address(output): len(inputs) + i for i, output in enumerate(outputs)}
        for output in outputs:
            whole = output.is_contiguous() and output.untyped_storage().nbytes() == output.nbytes
            if not whole or address(output) not in recording.allocated or recording.allocated[address(output)][1]:
                raise Unplaced
        if len(numbers) < len(outputs):
            raise Unplaced
        self.outputs = [(tuple(output.shape), output.dtype) for output in outputs]
        self.sizes = [0, 0, 0]  # of used, known, cleared
        self._beginnings = {where: (number, 0) for where, number in numbers.items()}
        for where, (tensor, cleared) in recording.allocated.items():
            if where not in numbers:
                kind = 2 if cleared else int(where in known)
                self._beginnings[where] = len(inputs) + len(outputs) + kind, self.sizes[kind]
                self.sizes[kind] += -(-tensor.untyped_storage().nbytes() // _BEGIN) * _BEGIN

    def place_of(self, tensor: Tensor, first: int = 0) -> Place | Tensor:
        """Where it lies, in a piece from `first` on; one without numbers lies nowhere."""
        if not tensor.numel():
            return tensor
        start, stop = tensor.data_ptr(), tensor.data_ptr() + _extent(tensor)
        shape = tensor.dtype, tuple(tensor.shape), tensor.stride()
        if address(tensor) in self._beginnings:
            number, beginning = self._beginnings[address(tensor)]
            if number < first:
                raise Unplaced
            return Place(number, beginning + start - address(tensor), *shape)
        for number, (begin, end) in enumerate(self._inputs):
            if number >= first and begin <= start and stop <= end:
                return Place(number, start - begin, *shape)
        raise Unplaced


class Picks:
    """How the arguments of all launches come out of one list, the pool: places, then constants, then tuples of what stands before them."""

    def __init__(self, launches: Sequence[tuple[Any, ...]]) -> None:
        leaves = [leaf for arguments in launches for leaf in _leaves(arguments)]
        self.places = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Place)))
        self.constants = [leaf for leaf in leaves if not isinstance(leaf, Place)]
        self.tuples: list[Callable[[Sequence[Any]], Any]] = []
        self._numbers = {place: number for number, place in enumerate(self.places)}
        self._constant = count(len(self.places))
        self.launches = [self._pick(arguments) for arguments in launches]

    def _pick(self, arguments: tuple[Any, ...]) -> Callable[[Sequence[Any]], Any]:
        numbers = [self._number(argument) for argument in arguments]
        return itemgetter(*numbers) if len(numbers) > 1 else lambda pool: (pool[numbers[0]],)

    def _number(self, argument: Any) -> int:
        if isinstance(argument, Place):
            return self._numbers[argument]
        if not _holds_places(argument):
            return next(self._constant)
        self.tuples.append(self._pick(argument))
        return len(self.places) + len(self.constants) + len(self.tuples) - 1


class Replay:
    """What replays a call that was recorded, and made `outputs` and `facts` of `inputs`."""

    def __init__(self, recording: Recording, inputs: Sequence[Tensor], outputs: Sequence[Tensor], facts: Any) -> None:
        memory = Memory(recording, inputs, outputs, facts)
        self._device, self._outputs, self._sizes, self._shared = inputs[0].device, memory.outputs, memory.sizes, memory.shared
        self._first_known = len(inputs) + len(outputs) + 1
        self._facts = _mapped(facts, partial(memory.place_of, first=self._first_known))
        self._how = recording.launches[0][0]
        arguments = [_mapped(arguments, memory.place_of) for _, _, arguments in recording.launches]
        if self._how.takes_addresses:  # that of a tensor without numbers is never used
            arguments = [_mapped(each, lambda value: value if isinstance(value, Place) else 0) for each in arguments]
        self._picks = Picks(arguments)
        launches = zip(recording.launches, self._picks.launches, strict=True)
        self._launches = [(launch, programs, pick) for (launch, programs, _), pick in launches]

    def __call__(self, inputs: Sequence[Tensor]) -> Result | None:
        """Outputs and facts of a call on `inputs`; None: it must run in full."""
        if self._how.is_observed():
            return None
        for one, other, distance in self._shared:
            if inputs[other].data_ptr() - inputs[one].data_ptr() != distance:
                return None
        device, (used, known, cleared) = self._device, self._sizes
        with _on(device):
            outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._outputs]
            own = [torch.empty(size, dtype=torch.uint8, device=device) for size in (used, known)]
            own.append(torch.zeros(cleared, dtype=torch.uint8, device=device))
            pool = self._pool([*inputs, *outputs, *own])
            for launch, programs, pick in self._launches:
                launch(programs, pick(pool))
        return outputs, partial(self._facts_in, own[1:])

    def _pool(self, memory: Sequence[Tensor]) -> list[Any]:
        picks = self._picks
        if self._how.takes_addresses:
            addresses = [piece.data_ptr() for piece in memory]
            pool: list[Any] = [addresses[place.memory] + place.offset for place in picks.places]
        else:
            pool = [place.within(memory[place.memory]) for place in picks.places]
        pool += picks.constants
        for pick in picks.tuples:
            pool.append(pick(pool))
        return pool

    def _facts_in(self, known: Sequence[Tensor]) -> Any:
        def within(value: Any) -> Any:
            return value.within(known[value.memory - self._first_known]) if isinstance(value, Place) else value

        return _mapped(self._facts, within)


def _extent(tensor: Tensor) -> int:
    """Bytes from its first number to its last one."""
    if not tensor.numel():
        return 0
    return (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches are on the current device: within this it is that one."""
    return _HERE if device.type != "cuda" or device.index == torch.cuda.current_device() else torch.cuda.device(device)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with each tensor or place in it changed."""
    if isinstance(value, Tensor | Place):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _mapped(getattr(value, field.name), change) for field in fields(value)})
    if isinstance(value, Mapping):
        return {key: _mapped(part, change) for key, part in value.items()}
    return tuple([_mapped(part, change) for part in value]) if type(value) is tuple else value


def _holds_places(value: Any) -> bool:
    return isinstance(value, Place) or (isinstance(value, tuple) and any(map(_holds_places, value)))


def _leaves(arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Places and constants; a tuple without places is one."""
    for argument in arguments:
        if isinstance(argument, tuple) and _holds_places(argument):
            yield from _leaves(argument)
        else:
            yield argument
