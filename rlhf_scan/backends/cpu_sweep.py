"""The scan core of the CPU backend: one sweep over a piece of a segment, compiled around an estimator's formulas. It knows no RL."""

# mypy: disallow-untyped-defs=false, disallow-untyped-calls=false, disallow-untyped-decorators=false
# pyright: basic

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..call import MASK_MODES
from ..estimators import Estimator
from .cpu_arrays import OPTIONS, at, blanker, compiled, index, rate_reader, reader, writer
from .cpu_compile import compiled_once
from .cpu_formula_errors import formula_error
from .formulas import compiled_formula

SKIP, ZERO, KEEP = (MASK_MODES.index(mode) for mode in ("skip", "zero", "keep"))


@lru_cache(maxsize=256)
def compiled_sweep(
    entry: Estimator, following: tuple[int, ...], rates_following: tuple[int, ...], rates: tuple[int, ...], number: type, aggregate: bool
) -> Callable[..., None]:
    """The sweep of `entry` in `number` arithmetic, for channels that take so many `rates` each, those at `rates_following` at the next step.

    Called as ``sweep(pieces, carries, outputs, inputs, rates, rate_kinds, flags, kinds, masked, starts, bootstrap, bounds)`` it reads the carry that
    enters each piece from `carries` and writes the outputs; an `aggregate` sweep writes to `carries` what each piece does to a carry.
    Kinds tell how a number is indexed: by nothing (0), segment (1) or token (2). It raises FormulaError where numba cannot compile a formula.
    """
    read = reader(tuple(range(len(entry.inputs))))
    coefficients, results = (compiled_formula(formula, _OWN, compiled, number) for formula in (entry.coefficients, entry.results))
    read_following = _following(entry, following, number)
    read_rates = [rate_reader(sum(rates[:channel]), count, rates_following, number) for channel, count in enumerate(rates)]
    build = _coefficients(coefficients, read_rates, number)
    steps = [_step(build, read_following, entry.end in ("carry", "initial"), number, aggregate, select) for select in (True, False)]
    outputs = _outputs(results, writer(len(entry.outputs)), read_rates[0])
    sweep: Callable[..., None] = _sweep(steps, read, outputs, blanker(len(entry.outputs)), entry.reverse, number, aggregate)

    def explained(*arguments: Any) -> None:
        try:
            sweep(*arguments)
        except Exception:  # numba's are of many kinds
            mistake = formula_error(entry, coefficients, results, rates[0], number)
            if mistake is None:
                raise
            raise mistake from None

    return explained


@compiled
def _minimum(x, y):
    return x if x < y or x != x else y


@compiled
def _exp(x):
    return math.exp(x)


_OWN = {"minimum": _minimum, "exp": _exp}


def _following(entry: Estimator, following: tuple[int, ...], number: type) -> Any:
    """(arrays, here, preceding, on, end, terminated) -> what the builder reads of the next step, `preceding`, or -1 where the segment ends."""
    read, zero = reader(following), number(0)
    if entry.continuation is None:

        @compiled
        def without(arrays, here, preceding, on, end, terminated):
            return read(arrays, preceding, preceding >= 0 and on, zero if preceding >= 0 else end)

        return without
    continuation = entry.inputs.index(entry.continuation)

    @compiled
    def with_continuation(arrays, here, preceding, on, end, terminated):
        continues = preceding >= 0
        value = zero if terminated and not continues else here[continuation]
        return read(arrays, preceding, continues and on, zero if continues else value) + (value,)

    return with_continuation


def _coefficients(formula: Any, read_rates: list[Any], number: type) -> Any:
    """(here, following, rates, kinds, segment, t, preceding) -> (a, b) of both channels; a channel that is not run is the first again."""
    read_first, read_second = read_rates[0], read_rates[-1]

    @compiled
    def coefficients(here, following, rates):
        # A literal in a formula is a float64, and so is all that it meets. The recurrence must not wait for conversions.
        a, b = formula(here, following, rates)
        return number(a), number(b)

    if len(read_rates) == 1:

        @compiled
        def one(here, following, arrays, kinds, segment, t, preceding):
            first = coefficients(here, following, read_first(arrays, kinds, segment, t, preceding))
            return first, first

        return one

    @compiled
    def two(here, following, arrays, kinds, segment, t, preceding):
        return (
            coefficients(here, following, read_first(arrays, kinds, segment, t, preceding)),
            coefficients(here, following, read_second(arrays, kinds, segment, t, preceding)),
        )

    return two


@compiled
def _flushed(decay, tiny):
    """`decay`, or 0 once it is subnormal: it would never reach 0 by rounding, and each step would take a hundred cycles."""
    return decay if abs(decay) >= tiny else decay * 0


@compiled
def _is_finite(state):
    return math.isfinite(state[0]) and math.isfinite(state[1]) and math.isfinite(state[2]) and math.isfinite(state[3])


@compiled
def _flagged(flag, kind, segment, t, last):
    if kind == 0:
        return False
    if kind == 1:
        return t == last and at(flag, segment)
    return at(flag, t)


@compiled
def _ends_before(t, segment, first, last, flags, kinds, direction):
    """Whether an end separates t from what precedes it in scan order: backward it is flagged at t, forward at the token before."""
    reverse, starts = direction
    if t == (last if reverse else first):
        return True
    at = t if reverse or starts else t - 1
    return _flagged(flags[1], kinds[1], segment, at, last) or _flagged(flags[2], kinds[2], segment, at, last)


@compiled
def _end_at(t, segment, first, last, flags, kinds, bootstrap, direction):
    """(-1, the value that follows, whether it terminates) for an end found by `_ends_before`."""
    reverse, starts = direction
    absent = bootstrap.dtype.type(0)
    if (reverse or starts) and _flagged(flags[1], kinds[1], segment, t, last):
        return -1, absent, True
    if kinds[3] == 1 and t != (last if reverse else first):
        return -1, absent, False
    return -1, at(bootstrap, index(kinds[3], segment, t)), False


@compiled
def _plain(t, count, segment, first, last, flags, kinds, direction):
    """How many of the `count` tokens from t on, in scan order, are trainable and follow no end."""
    if kinds[0] == 0 and kinds[1] == 0 and kinds[2] == 0:
        return count
    for i in range(count):
        if (kinds[0] != 0 and not at(flags[0], t)) or _ends_before(t, segment, first, last, flags, kinds, direction):
            return i
        t += -1 if direction[0] else 1
    return count


@compiled
def _precedes(t, count, segment, first, last, flags, kinds, masked, bootstrap, direction):
    """What a piece finds beside it, where the scan has taken `count` tokens, the last at t: (the step or -1, value after the end, terminated)."""
    for _ in range(count):
        if kinds[0] == 0 or masked != SKIP or at(flags[0], t):
            return t, bootstrap.dtype.type(0), False
        if _ends_before(t, segment, first, last, flags, kinds, direction):
            return _end_at(t, segment, first, last, flags, kinds, bootstrap, direction)
        t += 1 if direction[0] else -1
    return -1, bootstrap.dtype.type(0), False


def _step(coefficients: Any, read_following: Any, end_is_carry: bool, number: type, aggregate: bool, select: bool) -> Any:
    """One step of both channels: their x and decay before it -> after it. Only an `aggregate` keeps track of the decays.

    One that does not `select` multiplies what it must not read by b = 0: it is right where x comes out finite.
    """
    zero, tiny = number(0), np.finfo(number).tiny

    @compiled
    def passed(a, b, x):
        if select and b == zero:
            return a
        return a + b * x

    @compiled
    def step(t, here, end, on_preceding, state, inputs, rates, rate_kinds, segment):
        x, y, decay_x, decay_y = state
        preceding, value, terminated = end
        following = read_following(inputs, here, preceding, on_preceding, value, terminated)
        (a, b), (c, d) = coefficients(here, following, rates, rate_kinds, segment, t, preceding)
        if preceding >= 0:
            if aggregate:
                decay_x, decay_y = _flushed(passed(zero, b, decay_x), tiny), _flushed(passed(zero, d, decay_y), tiny)
            return (passed(a, b, x), passed(c, d, y), decay_x, decay_y), following, (x, y), preceding
        # Where nothing follows (0), nothing is carried, whatever b is.
        if end_is_carry and value != zero:
            return (passed(a, b, value), passed(c, d, value), zero, zero), following, (zero, zero), preceding
        return (a, c, zero, zero), following, (zero, zero), preceding

    return step


def _outputs(results: Any, write: Any, read_rates: Any) -> Any:
    """Write the results of one step."""

    @compiled
    def outputs(arrays, t, on, step, here, rates, rate_kinds, segment):
        state, following, next_x, preceding = step
        taken = read_rates(rates, rate_kinds, segment, t, preceding)
        write(arrays, t, on, results(here, following, (state[0], state[1]), next_x, taken))

    return outputs


def _sweep(steps: Any, read: Any, write: Any, blank: Any, reverse: bool, number: type, aggregate: bool) -> Any:
    """The loop over a piece's tokens, in the order of the scan."""
    zero, one = number(0), number(1)
    forward = -1 if reverse else 1
    step, plain_step = steps

    @compiled_once(**OPTIONS)
    def sweep(pieces, carries, outputs, inputs, rates, rate_kinds, flags, kinds, masked, starts, bootstrap, bounds):
        direction = (reverse, starts)
        for row in range(len(pieces)):
            piece, segment, begin, stop = pieces[row, 0], pieces[row, 1], pieces[row, 2], pieces[row, 3]
            first, last = bounds[segment], bounds[segment + 1] - 1
            beside, count = (stop, last + 1 - stop) if reverse else (begin - 1, begin - first)
            end = _precedes(beside, count, segment, first, last, flags, kinds, masked, bootstrap, direction)
            state = (carries[piece, 0], carries[piece, 1], one, one)
            t, left = (stop - 1 if reverse else begin), stop - begin
            resume = left
            while left > 0:
                if _ends_before(t, segment, first, last, flags, kinds, direction):
                    end = _end_at(t, segment, first, last, flags, kinds, bootstrap, direction)
                trainable = kinds[0] == 0 or at(flags[0], t)
                if trainable or masked != SKIP:
                    here = read(inputs, t, trainable or masked == KEEP, zero)
                    on_preceding = kinds[0] == 0 or masked != ZERO or at(flags[0], max(end[0], 0))
                    taken = step(t, here, end, on_preceding, state, inputs, rates, rate_kinds, segment)
                    state, end = taken[0], (t, zero, False)
                    if not aggregate:
                        write(outputs, t, trainable, taken, here, rates, rate_kinds, segment)
                elif not aggregate:
                    blank(outputs, t)
                t, left = t + forward, left - 1
                if left > resume or not trainable or end[0] != t - forward:
                    continue
                # The common case, tokens that nothing sets apart from the one before, in a loop without a branch.
                plain = _plain(t, left, segment, first, last, flags, kinds, direction)
                before = state
                for u in range(t, t + plain * forward, forward):
                    here = read(inputs, u, True, zero)
                    taken = plain_step(u, here, (u - forward, zero, False), True, state, inputs, rates, rate_kinds, segment)
                    state = taken[0]
                    if not aggregate:
                        write(outputs, u, True, taken, here, rates, rate_kinds, segment)
                if _is_finite(state):
                    t, left = t + plain * forward, left - plain
                    end = (t - forward, zero, False)
                else:
                    # NaN and inf stay once they are there, maybe beyond a b of 0: take these tokens one by one.
                    state, resume = before, left - plain
            if aggregate:
                carries[piece, 0], carries[piece, 1], carries[piece, 2], carries[piece, 3] = state

    return sweep
