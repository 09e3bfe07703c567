"""JSON bodies: ``{"tensors": {...}, "params": {...}}`` in, ``{"tensors": {...}, "report": {...}}`` out."""

from __future__ import annotations

import re
from array import array
from itertools import chain
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from rlhf_scan.errors import InputError
from rlhf_scan.operations import operation
from rlhf_scan.requests import LAYOUTS, CreditRequest, CreditResult

from .problems import Problem

_KEY = re.compile(rb'"(\w+)"\s*:')
_NO_NUMBER = re.compile(rb"NaN|nan|[Ii]nf")
_BODY = '{"tensors": {"<name>": [..]}, "params": {..}}'
_SHAPE = "a list [..] for a pack or one row, or equally long lists [[..], [..]] for rows"
_ALLOWED: dict[str, tuple[set[type], str]] = {
    "integer": ({int}, "integers"),
    "flag": ({int, float, bool}, "numbers or booleans"),
    "number": ({int, float}, "numbers"),
}
_DEEPEST = 3  # [B, T, A]; deeper lists could exhaust the stack


def request_from_json(op: str, body: bytes) -> CreditRequest:
    """The request that a JSON body holds: float32 numbers, bool flags, int64 boundaries and actions; a list of lists is [B, T]."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        keys = _KEY.findall(body, 0, error.pos)
        where = f" after the key {keys[-1].decode()!r}" if keys else ""
        number = _NO_NUMBER.search(body, max(0, error.pos - 2), error.pos + 9)
        remedy = "NaN and Infinity are no JSON: write 0 there and mask it" if number else "check its brackets, quotes and commas there"
        raise Problem(
            400,
            f"{op}: the body must be JSON in UTF-8, got {error.msg} at character {error.pos}{where}; {remedy}",
        ) from error
    document = _object(op, "the body", document)
    unknown = [key for key in document if key not in ("tensors", "params")]
    if unknown:
        raise InputError(
            f'{op}: the body must be {{"tensors": {{..}}, "params": {{..}}}}, got the key {unknown[0]!r}; put it into one of these'
        )
    if "tensors" not in document:
        got = f"only {', '.join(map(repr, document))}" if document else "an empty object"
        raise InputError(f'{op}: the body must hold the key "tensors", got {got}; send {_BODY}')
    tensors = _object(op, "tensors", document["tensors"])
    params = _object(op, "params", document.get("params", {}))
    known = operation(op).tensors
    kinds = {name: known[name].kind if name in known else "integer" if name in LAYOUTS else "number" for name in tensors}
    return CreditRequest(op, {name: _tensor(op, name, value, kinds[name]) for name, value in tensors.items()}, params)


def result_to_json(op: str, result: CreditResult) -> bytes:
    """The JSON body that holds `result`; a Problem where a number is not finite, which JSON cannot say."""
    arrays: dict[str, Any] = {}
    for name, tensor in result.tensors.items():
        numbers = tensor.detach().cpu()
        if numbers.dtype in (torch.bfloat16, torch.float16):
            numbers = numbers.float()
        if not bool(numbers.isfinite().all()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise Problem(
                422, f"{op}: {name} must be finite to be JSON, but overflows {dtype}; send smaller numbers or ask for a wider dtype"
            )
        arrays[name] = numbers.contiguous().numpy()[()]  # a tensor without dimensions becomes a number
    return orjson.dumps({"tensors": arrays, "report": dict(result.report)}, option=orjson.OPT_SERIALIZE_NUMPY)


def _object(op: str, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{op}: {name} must be a JSON object, got {_kind(value)}; send {_BODY}")
    return value


def _tensor(op: str, name: str, value: Any, kind: str) -> Tensor:
    """A number, a list or equally long lists, nested at most _DEEPEST deep, as a tensor of the dtype that its kind has."""
    numbers, shape = _flatten(op, name, value)
    integer = kind == "integer"
    allowed, what = _ALLOWED[kind]
    wrong = next((number for number in numbers if type(number) not in allowed), None) if set(map(type, numbers)) - allowed else 0
    if type(wrong) not in allowed:
        raise InputError(f"{op}: {name} must hold {what}, got {_kind(wrong)}; send {_SHAPE}")
    try:
        dense = torch.from_numpy(np.asarray(array("q" if integer else "d", numbers))).reshape(shape)
    except OverflowError as error:
        raise InputError(f"{op}: {name} must fit int64, got a larger integer; send smaller ones") from error
    if integer:
        return dense
    if kind == "flag":
        return dense != 0
    tensor = dense.float()
    if bool(tensor.isinf().any()):
        largest = float(dense.abs().max())
        raise InputError(f"{op}: {name} must fit float32 in JSON, got {largest:g}; scale it or send float64 as safetensors")
    return tensor


def _flatten(op: str, name: str, value: Any, depth: int = 1) -> tuple[list[Any], tuple[int, ...]]:
    if not isinstance(value, list):
        return [value], ()
    if depth == _DEEPEST or list not in set(map(type, value)):
        return value, (len(value),)
    lengths = {len(row) if isinstance(row, list) else -1 for row in value}
    if len(lengths) > 1:
        at = next(index for index, row in enumerate(value) if not isinstance(row, list) or len(row) != len(value[0] or []))
        raise InputError(f"{op}: {name} must have rows of one length, got another one at row {at}; pad the rows and mask, or send a pack")
    rows = [_flatten(op, name, row, depth + 1) for row in value]
    if len({shape for _, shape in rows}) > 1:
        raise InputError(f"{op}: {name} must have rows of one shape, got {rows[0][1]} and another; pad the rows and mask, or send a pack")
    return list(chain.from_iterable(numbers for numbers, _ in rows)), (len(value), *rows[0][1])


def _kind(value: Any) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}
    return "null" if value is None else names[type(value)]
