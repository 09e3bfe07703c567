"""How the compiled sweeps of the CPU backend read and write arrays: all those of an estimator at once, as tuples."""

# mypy: disallow-untyped-defs=false, disallow-untyped-calls=false, disallow-untyped-decorators=false
# pyright: basic

from __future__ import annotations

from typing import Any

import numpy as np

from .cpu_compile import inlined

# No reference counts: nothing here makes or keeps an array, and counting costs more than the arithmetic. Products and sums may fuse.
# A division by 0 is infinite or NaN, as on the GPU.
OPTIONS: dict[str, Any] = {"_nrt": False, "fastmath": {"contract"}, "error_model": "numpy"}
compiled = inlined(**OPTIONS)


@compiled
def at(array, t):
    """Its entry at t >= 0. The index is unsigned: of a signed one every access would ask whether it counts from the end."""
    return array[np.uintp(t)]


@compiled
def index(kind, segment, t):
    """Where the number for a token lies, as its kind has it."""
    return 0 if kind == 0 else (segment if kind == 1 else t)


def reader(indices: tuple[int, ...]) -> Any:
    """(arrays, t, on, otherwise) -> those arrays' entries at t, or what stands in for them."""
    if not indices:
        return compiled(lambda arrays, t, on, otherwise: ())
    head, last = reader(indices[:-1]), indices[-1]
    return compiled(lambda arrays, t, on, otherwise: head(arrays, t, on, otherwise) + ((at(arrays[last], t) if on else otherwise),))


def rate_reader(first: int, count: int, following: tuple[int, ...], number: type) -> Any:
    """(arrays, kinds, segment, t, preceding) -> `count` rates from `first` on; those `following` at `preceding`, 0 where it is -1."""
    if count == 0:
        return compiled(lambda arrays, kinds, segment, t, preceding: ())
    head, last, zero = rate_reader(first, count - 1, following, number), first + count - 1, number(0)

    @compiled
    def read(arrays, kinds, segment, t, preceding):
        return head(arrays, kinds, segment, t, preceding) + (at(arrays[last], index(kinds[last], segment, t)),)

    @compiled
    def read_following(arrays, kinds, segment, t, preceding):
        there = kinds[last] != 2 or preceding >= 0
        return head(arrays, kinds, segment, t, preceding) + ((at(arrays[last], index(kinds[last], segment, preceding)) if there else zero),)

    return read_following if count - 1 in following else read


def writer(count: int) -> Any:
    """(arrays, t, on, values): write each value to its array, or 0."""
    if count == 0:
        return compiled(lambda arrays, t, on, values: None)
    head, last = writer(count - 1), count - 1

    @compiled
    def write(arrays, t, on, values):
        head(arrays, t, on, values)
        arrays[last][np.uintp(t)] = values[last] if on else 0

    return write


def blanker(count: int) -> Any:
    """(arrays, t): write 0 to each array."""
    if count == 0:
        return compiled(lambda arrays, t: None)
    head, last = blanker(count - 1), count - 1

    @compiled
    def blank(arrays, t):
        head(arrays, t)
        arrays[last][np.uintp(t)] = 0

    return blank
