"""What is wrong with an estimator's description is said where it is registered, not where it is first used."""

from __future__ import annotations

import inspect
import keyword
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from .estimator_class import Estimator, Rate

ENDS = ("value", "carry", "initial", "none")
FLAGS = ("mask", "terminated", "truncated")
# What requests and calls hold beside an estimator's own tensors and rates.
_TAKEN = {
    *(*FLAGS, "masked", "boundary", "bootstrap", "initial", "dtype", "backend", "validate", "op"),
    *("segments", "cu_seqlens", "lengths", "position_ids", "segment_ids"),
}


def check_rate(rate: Rate) -> None:
    """Raise InputError for a range or default that no rate can have."""
    if not _is_number(rate.largest) or not rate.largest > 0:
        raise InputError(f"Rate: largest must be a number > 0, got {rate.largest!r}; pass 1.0, or math.inf for a rate without bound")
    if rate.default is not None and not (_is_number(rate.default) and 0 <= rate.default <= rate.largest):
        raise InputError(f"Rate: default must lie in [0, {rate.largest:g}], got {rate.default!r}; pass such a number, or raise largest")


def check_estimator(entry: Estimator) -> None:
    """Raise InputError for what no backend could run, or what one would run without saying that it makes no sense."""
    if not _is_name(entry.name):
        raise InputError(f"Estimator: name must be a Python identifier, got {entry.name!r}; write it like my_returns")
    _check_names(entry)
    _check_channels(entry)
    _check_references(entry)
    _check_end(entry)
    _check_functions(entry)


def _check_names(entry: Estimator) -> None:
    """Those of tensors and rates: identifiers, each once, and none that has another meaning."""
    for field in ("inputs", "outputs"):
        _check_tuple(entry, field, getattr(entry, field))
        if not getattr(entry, field):
            raise InputError(f"{entry.name}: {field} must hold one name at least, got (); add one")
    if not isinstance(entry.rates, Mapping):
        raise InputError(f"{entry.name}: rates must map names to Rate, got {entry.rates!r}; write {{'gamma': Rate(1.0)}}")
    for name, rate in entry.rates.items():
        if type(rate).__name__ != "Rate":
            raise InputError(f"{entry.name}: rates must map names to Rate, got {rate!r} for {name!r}; write Rate({rate!r})")
    if entry.expectation is not None:
        _check_pair(entry, "expectation", entry.expectation)
    if not isinstance(entry.choices, Mapping):
        raise InputError(f"{entry.name}: choices must map inputs to pairs of names, got {entry.choices!r}; pass a dict")
    for name, pair in entry.choices.items():
        _check_pair(entry, f"choices[{name!r}]", pair)
    for field, names in (
        ("inputs, rates, expectation and choices", (*entry.inputs, *entry.rates, *(entry.expectation or ()), *entry.chosen)),
        ("outputs", entry.outputs),
    ):
        for name in names:
            if not _is_name(name) or (name in _TAKEN and field != "outputs"):
                why = f"none of {sorted(_TAKEN)}" if name in _TAKEN else "Python identifiers"
                raise InputError(f"{entry.name}: names of {field} must be {why}, got {name!r}; rename it")
            if names.count(name) > 1:
                raise InputError(f"{entry.name}: names of {field} must differ, got {name!r} twice; rename one")


def _check_channels(entry: Estimator) -> None:
    """One or two, which take as many rates each, all of them known and used."""
    name, channels = entry.name, entry.channels
    if not isinstance(channels, tuple) or len(channels) not in (1, 2) or not all(isinstance(rates, tuple) for rates in channels):
        raise InputError(f'{name}: channels must be one or two tuples of rates, got {channels!r}; write (("gamma", "lam"),)')
    for rates in channels:
        _check_among(entry, "channels", rates, "rates", entry.rates)
    first, last = channels[0], channels[-1]
    if len(first) != len(last):
        raise InputError(f"{name}: channels must take as many rates each, got {channels!r}; both go to the same builder")
    if len(set(first)) != len(first) or len(set(last)) != len(last):
        raise InputError(f"{name}: channels must name each rate once, got {channels!r}; drop one")
    unused = [rate for rate in entry.rates if rate not in first and rate not in last]
    if unused:
        raise InputError(f"{name}: channels must name every rate, got no {unused[0]!r}; add it to a channel or drop it from rates")
    absent = [rate for rate in first if entry.rates[rate].default is None]
    if absent:
        raise InputError(f"{name}: the rates of the first channel must have a default, got None for {absent[0]!r}; pass a number")


def _check_references(entry: Estimator) -> None:
    """What is named among the inputs, rates and flags is there."""
    inputs = entry.inputs
    for field, kind, known in (
        ("following", "inputs", inputs),
        ("rates_following", "rates of the first channel", entry.channels[0]),
        ("minus_infinity", "inputs", inputs),
        ("takes", "flags", FLAGS),
    ):
        _check_tuple(entry, field, getattr(entry, field))
        _check_among(entry, field, getattr(entry, field), kind, known)
    for rate in entry.rates_following:
        if entry.channels[-1][entry.channels[0].index(rate)] != rate:
            raise InputError(f"{entry.name}: rates_following must stand at the same place in each channel, got {rate!r}; reorder them")
    _check_among(entry, "choices", entry.choices, "inputs", inputs)
    if entry.continuation is not None:
        _check_among(entry, "continuation", (entry.continuation,), "inputs", inputs)
        if entry.continuation in entry.following:
            raise InputError(f"{entry.name}: following must not hold the continuation, got {entry.continuation!r}; it is added as the last")
    elif entry.expectation is not None:
        raise InputError(f"{entry.name}: expectation must stand in place of a continuation, got none; name the input it gives")


def _check_end(entry: Estimator) -> None:
    name = entry.name
    if entry.end not in ENDS:
        raise InputError(f"{name}: end must be one of {list(ENDS)}, got {entry.end!r}; choose one of these")
    if entry.end == "value" and not entry.following:
        raise InputError(
            f'{name}: end must be one of {list(ENDS[1:])} where following is empty, got "value", which stands in for nothing; '
            'choose "carry" if bootstrap is the x after the last step'
        )
    if entry.starts and (entry.reverse or "terminated" not in entry.takes):
        raise InputError(f'{name}: starts must be False unless reverse is False and takes holds "terminated", got True; drop it')


def _check_functions(entry: Estimator) -> None:
    for field in ("coefficients", "results", "naive"):
        if not callable(getattr(entry, field)):
            raise InputError(f"{entry.name}: {field} must be a function, got {getattr(entry, field)!r}; see docs/estimators.md for one")
    if not isinstance(entry.counts, Mapping) or not all(_is_name(key) and callable(it) for key, it in entry.counts.items()):
        raise InputError(f"{entry.name}: counts must map names to functions, got {entry.counts!r}; pass a dict")
    signature = inspect.signature(entry.naive)
    try:
        signature.bind(None, *entry.inputs, **entry.rates)
    except TypeError as error:
        wanted = ", ".join(("steps", *entry.inputs, *(("*", *entry.rates) if entry.rates else ())))
        raise InputError(f"{entry.name}: naive must take ({wanted}), got {signature}: {error}; mend its parameters") from None


def _check_tuple(entry: Estimator, field: str, names: Any) -> None:
    if not isinstance(names, tuple):
        example = f'("{names}",)' if isinstance(names, str) else '("rewards", "values")'
        raise InputError(f"{entry.name}: {field} must be a tuple of names, got {names!r}; write {example}")


def _check_pair(entry: Estimator, field: str, names: Any) -> None:
    if not isinstance(names, tuple) or len(names) != 2:
        raise InputError(f'{entry.name}: {field} must be a pair of names, got {names!r}; write ("probabilities", "actions")')


def _check_among(entry: Estimator, field: str, names: Iterable[Any], kind: str, known: Iterable[str]) -> None:
    for name in names:
        if name not in tuple(known):
            raise InputError(f"{entry.name}: {field} must be among {kind} {list(known)}, got {name!r}; correct the name or add it there")


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _is_number(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and not math.isnan(number)
