"""The third loop: the meanings of each estimator and boundary, written token by token, sharing nothing with the library.

Each token asks forward for what follows it instead of carrying state backward, so that a mistake about a boundary in the library's
loops would have to be made here again in another form. Everything is numpy over packed tokens; `Batch.lengths` says where segments are.

It computes with `Number`, which also counts the roundings that a backend may make, so that every comparison has its tolerance from
arithmetic: see `Number.error`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Rate = float | Floats


@dataclass(frozen=True)
class Number:
    """A sum of products: its value, the sum of the terms' magnitudes, and the sum of magnitude times roundings over the terms.

    In arithmetic of unit roundoff u, a term that went through k operations is off by at most k * u * magnitude (to first order; Higham,
    Accuracy and Stability, 3.1). A scan adds in another order: no term sees more products, and at most a tree's depth more sums.
    """

    value: float
    magnitude: float
    roundings: float = 0.0

    def __add__(self, other: Number) -> Number:
        magnitude = self.magnitude + other.magnitude
        return Number(self.value + other.value, magnitude, self.roundings + other.roundings + magnitude)

    def __sub__(self, other: Number) -> Number:
        return self + Number(-other.value, other.magnitude, other.roundings)

    def __mul__(self, other: Number) -> Number:
        magnitude = self.magnitude * other.magnitude
        roundings = self.roundings * other.magnitude + self.magnitude * other.roundings + magnitude
        return Number(self.value * other.value, magnitude, roundings)

    def error(self, unit_roundoff: float, tokens: int) -> float:
        """The most by which a scan over `tokens` tokens in that arithmetic may be off. Doubled for the oracle's own rounding in float64."""
        depth = 2 * math.ceil(math.log2(tokens + 1)) + 4
        return 2 * unit_roundoff * (self.roundings + depth * self.magnitude)


def exact(value: float) -> Number:
    """An input, which the backend has as it is."""
    return Number(value, abs(value))


def rounded(value: float) -> Number:
    """A Python number, which the backend rounds to its arithmetic."""
    return Number(value, abs(value), abs(value))


ZERO = exact(0.0)


@dataclass
class Batch:
    """The arguments of one call. A rate, a flag or the bootstrap is per segment where `per_segment` names it, else per token."""

    lengths: list[int]
    inputs: dict[str, Floats]
    rates: dict[str, Rate | None]
    mask: Flags | None = None
    masked: str = "skip"
    terminated: Flags | None = None
    truncated: Flags | None = None
    bootstrap: Floats | None = None
    per_segment: frozenset[str] = frozenset()
    ends: list[int] = field(init=False)
    segment_of: list[int] = field(init=False)
    read: set[int] = field(init=False, default_factory=set)  # the tokens after which an oracle asked for the bootstrap

    def __post_init__(self) -> None:
        self.ends = [int(end) for end in np.cumsum(self.lengths)]
        self.segment_of = [segment for segment, length in enumerate(self.lengths) for _ in range(length)]

    @property
    def tokens(self) -> int:
        return len(self.segment_of)

    def live(self, token: int) -> bool:
        return self.mask is None or bool(self.mask[token])

    def steps_at(self, token: int) -> bool:
        """Whether the recursion takes a step at this token."""
        return self.masked != "skip" or self.live(token)

    def last(self, token: int) -> bool:
        return token + 1 == self.ends[self.segment_of[token]]

    def flag(self, name: str, token: int) -> bool:
        flags: Flags | None = getattr(self, name)
        if flags is None:
            return False
        if name in self.per_segment:
            return self.last(token) and bool(flags[self.segment_of[token]])
        return bool(flags[token])

    def rate(self, name: str, token: int) -> Number:
        rate = self.rates[name]
        assert rate is not None
        if isinstance(rate, float):
            return rounded(rate)
        return exact(float(rate[self.segment_of[token] if name in self.per_segment else token]))

    def at(self, name: str, token: int) -> Number:
        """An input as the recursion sees it at a step: 0 at a masked token, unless the mask is ignored."""
        return exact(float(self.inputs[name][token])) if self.masked == "keep" or self.live(token) else ZERO

    def supplied(self, token: int) -> Number:
        """The bootstrap after this token, which is truncated or ends its segment."""
        self.read.add(token)
        if self.bootstrap is None:
            return ZERO
        if "bootstrap" in self.per_segment:
            return exact(float(self.bootstrap[self.segment_of[token]])) if self.last(token) else ZERO
        return exact(float(self.bootstrap[token]))

    def after(self, token: int) -> tuple[Number, int | None]:
        """What follows a step at `token`: (the supplied value, None) where credit is cut, else (0, the token of the next step)."""
        while True:
            if self.flag("terminated", token):
                return ZERO, None
            if self.flag("truncated", token) or self.last(token):
                return self.supplied(token), None
            token += 1
            if self.steps_at(token):
                return ZERO, token

    def backward(self) -> Iterable[int]:
        """The tokens where the recursion takes a step, the last one first."""
        return (token for token in reversed(range(self.tokens)) if self.steps_at(token))

    def shown(self, found: dict[int, Number]) -> list[Number]:
        """Outputs: 0 at masked tokens."""
        return [found[token] if self.live(token) else ZERO for token in range(self.tokens)]


def gae(batch: Batch) -> list[list[Number]]:
    """delta_t = r_t + gamma * V_next - V_t,  A_t = delta_t + gamma * lam * A_next,  returns = A_t + V_t."""
    advantages = _advantages(batch, "lam")
    for_returns = advantages if batch.rates["lam_value"] is None else _advantages(batch, "lam_value")
    returns = {token: advantage + batch.at("values", token) for token, advantage in for_returns.items()}
    return [batch.shown(advantages), batch.shown(returns)]


def _advantages(batch: Batch, lam: str) -> dict[int, Number]:
    found: dict[int, Number] = {}
    for token in batch.backward():
        supplied, source = batch.after(token)
        next_value = supplied if source is None else batch.at("values", source)
        gamma = batch.rate("gamma", token)
        found[token] = batch.at("rewards", token) + gamma * next_value - batch.at("values", token)
        if source is not None:
            found[token] += gamma * batch.rate(lam, token) * found[source]
    return found


def discounted_returns(batch: Batch) -> list[list[Number]]:
    """G_t = r_t + gamma * G_next, with the bootstrap as the return that follows a cut."""
    found: dict[int, Number] = {}
    for token in batch.backward():
        supplied, source = batch.after(token)
        found[token] = batch.at("rewards", token) + batch.rate("gamma", token) * (supplied if source is None else found[source])
    return [batch.shown(found)]


ORACLES: dict[str, Callable[[Batch], list[list[Number]]]] = {"gae": gae, "discounted_returns": discounted_returns}


def linear_scan(a: Floats, b: Floats, lengths: list[int], *, reverse: bool, initial: Floats | None) -> list[Number]:
    """x_t = a_t + b_t * x_before(t), the token before in scan order; `initial` [S] stands before a segment's first."""
    found: dict[int, Number] = {}
    start = 0
    for segment, length in enumerate(lengths):
        carry = ZERO if initial is None else exact(float(initial[segment]))
        tokens = range(start, start + length)
        for token in reversed(tokens) if reverse else tokens:
            carry = exact(float(a[token])) + exact(float(b[token])) * carry
            found[token] = carry
        start += length
    return [found[token] for token in range(start)]
