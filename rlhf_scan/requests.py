"""Requests as plain data: what the CLI's file, a Ray call and an HTTP body all turn into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .checks import check_option
from .errors import InputError
from .estimators import Estimator, estimator
from .operations import DTYPES, Operation, of_estimator, operation, parse_option
from .segments import Segments

LAYOUTS = ("cu_seqlens", "lengths", "position_ids", "segment_ids")


@dataclass(frozen=True)
class CreditRequest:
    """One call of an estimator, or of another function that `rlhf_scan.operations` knows.

    Attributes:
        op: its name, such as "gae".
        tensors: its tensor arguments by name (rates may be among them), and for a pack one of `cu_seqlens`, `lengths`, `position_ids`,
            `segment_ids`.
        params: its other keyword arguments: rates as numbers, `masked`, `dtype` (a name such as "float32").
    """

    op: str
    tensors: Mapping[str, Tensor]
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CreditResult:
    """Output tensors by name, in the shape of the inputs, and a report of plain numbers and strings on how they were made."""

    tensors: Mapping[str, Tensor]
    report: Mapping[str, Any]


def tensor_names(entry: Operation) -> tuple[str, ...]:
    """Every tensor that a request for `entry` may hold."""
    return (*entry.tensors, *(LAYOUTS if entry.packs else ()))


def integer_names(entry: Operation) -> tuple[str, ...]:
    """Those of them that hold integers."""
    return (*(name for name, argument in entry.tensors.items() if argument.kind == "integer"), *(LAYOUTS if entry.packs else ()))


def options(entry: Estimator) -> dict[str, tuple[str, ...]]:
    """Which words each option of `entry` may be; the first is the default."""
    return {name: option.words for name, option in of_estimator(entry).options.items() if option.kind == "word"}


def parse_params(op: str, strings: Mapping[str, str]) -> dict[str, Any]:
    """Parameters written as text (a file's metadata, a query string) -> typed; InputError names the bad one."""
    entry = operation(op)
    _refuse_unknown(op, "parameter", strings, tuple(entry.options))
    return {name: parse_option(op, name, entry.options[name], text) for name, text in strings.items()}


def check_names(request: CreditRequest) -> Operation:
    """The operation that `request` names, after checking that it knows the names in it and has what it needs."""
    if not isinstance(request, CreditRequest):
        raise InputError(f"execute: each request must be a CreditRequest, got {type(request).__name__}; make one of op, tensors and params")
    entry = operation(request.op)
    op = entry.name
    for name in ("tensors", "params"):
        if not isinstance(getattr(request, name), Mapping):
            raise InputError(f"{op}: {name} must be a mapping of names, got {type(getattr(request, name)).__name__}; pass a dict")
    _refuse_unknown(op, "tensor", request.tensors, tensor_names(entry))
    _refuse_unknown(op, "parameter", request.params, tuple(entry.options))
    missing = [name for name in entry.required if name not in request.tensors]
    if missing:
        raise InputError(f"{op}: tensors must hold {list(entry.required)}, got no {missing[0]}; add it")
    twice = sorted(set(request.tensors) & set(request.params))
    if twice:
        raise InputError(f"{op}: {twice[0]} must be given once, got a tensor and a parameter; drop one")
    return entry


def call_arguments(request: CreditRequest) -> dict[str, Any]:
    """The keyword arguments of ``Operation.run`` that `request`, whose names are checked, stands for."""
    entry = operation(request.op)
    tensors = {name: tensor for name, tensor in request.tensors.items() if name not in LAYOUTS or name in entry.tensors}
    dtype = {"dtype": _dtype(entry.name, request.params["dtype"])} if "dtype" in request.params else {}
    return {**tensors, **request.params, **dtype, **({"segments": segments_of(request)} if entry.packs else {})}


def estimate_arguments(request: CreditRequest) -> dict[str, Any]:
    """The keyword arguments of `rlhf_scan.dispatch.estimate` that `request`, whose names are checked, stands for."""
    entry = estimator(request.op)
    op = entry.name
    rates = {name: request.tensors.get(name, _rate(op, name, request.params, rate.default)) for name, rate in entry.rates.items()}
    chosen = {name: request.params.get(name, words[0]) for name, words in options(entry).items()}
    for name, words in options(entry).items():
        check_option(op, name, chosen[name], words)
    return {
        "name": op,
        "tensors": {name: request.tensors[name] for name in (*entry.arguments, *entry.chosen) if name in request.tensors},
        "rates": rates,
        "segments": segments_of(request),
        "dtype": _dtype(op, request.params.get("dtype")),
        "bootstrap": request.tensors.get(entry.end_name or ""),
        **chosen,
        **{name: request.tensors.get(name) for name in ("mask", "terminated", "truncated")},
    }


def segments_of(request: CreditRequest) -> Segments | None:
    """The segments that the request's layout tensor describes; None where it holds rows."""
    given = [name for name in LAYOUTS if name in request.tensors]
    if len(given) > 1:
        raise InputError(f"{request.op}: the pack must be described once, got {given}; keep one of them")
    if not given:
        return None
    constructor = getattr(Segments, f"from_{given[0]}")
    try:
        segments: Segments = constructor(request.tensors[given[0]])
    except InputError as error:
        raise InputError(f"{request.op}: {error}") from error
    return segments


def _rate(op: str, name: str, params: Mapping[str, Any], default: float | None) -> Any:
    """A rate among the parameters, of a type that can be one."""
    rate = params.get(name, default)
    if rate is None and default is None:
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float | Tensor):
        raise InputError(
            f"{op}: {name} must be a number, got {type(rate).__name__}; pass a float such as 0.99, or a tensor among the tensors"
        )
    return rate


def _refuse_unknown(op: str, kind: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(f"{op}: {kind} names must be among {list(known)}, got {unknown[0]!r}; drop or rename it")


def _dtype(op: str, name: str | torch.dtype | None) -> torch.dtype | None:
    if name is None or isinstance(name, torch.dtype):
        return name
    check_option(op, "dtype", name, tuple(DTYPES))
    return DTYPES[name]
