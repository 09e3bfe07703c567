"""OpenAPI, from the registry."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import Response

from rlhf_scan.operations import PER_ACTION, Operation, Option
from rlhf_scan.requests import tensor_names

from .formats import JSON, SAFETENSORS
from .problems import MEDIA_TYPE

_LAYOUT_MEANINGS = {
    "cu_seqlens": "Cumulative sequence lengths of a pack: 0, then the end of each segment.",
    "lengths": "Length of each segment of a pack.",
    "position_ids": "Position of each token in its segment.",
    "segment_ids": "Id of each token's segment.",
}
_ERRORS = {
    400: "The body cannot be read",
    406: "Accept allows no format that there is",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "Content-Type names no format that there is",
    422: "The request is wrong; the detail names the argument and says what to do",
    503: "Too many requests are waiting",
}


def describe(entry: Operation) -> dict[str, Any]:
    """Keyword arguments of the route that serves `entry`."""
    return {
        "summary": entry.summary,
        "operation_id": entry.name,
        "response_class": Response,
        "openapi_extra": {"requestBody": {"required": True, "content": _content(_request(entry), _file(entry))}},
        "responses": {
            200: {
                "description": "The result, in the format of the request unless Accept says otherwise",
                "content": _content(_result(entry), _BYTES),
            },
            **{status: {"description": text, "content": {MEDIA_TYPE: {"schema": _PROBLEM}}} for status, text in _ERRORS.items()},
        },
    }


def _content(json_schema: dict[str, Any], file_schema: dict[str, Any]) -> dict[str, Any]:
    return {SAFETENSORS: {"schema": file_schema}, JSON: {"schema": json_schema}}


def _request(entry: Operation) -> dict[str, Any]:
    tensors = _object({name: _tensor(entry, name) for name in tensor_names(entry)}, required=list(entry.required))
    if entry.choices:
        # Each input in one of its ways.
        tensors["allOf"] = [{"oneOf": [{"required": [name]}, {"required": list(pair)}]} for name, pair in entry.choices.items()]
        tensors["dependentRequired"] = {name: [other] for a, b in entry.choices.values() for name, other in ((a, b), (b, a))}
    params = _object({name: _option(option) for name, option in entry.options.items()})
    return _object({"tensors": tensors, "params": params}, required=["tensors"])


def _file(entry: Operation) -> dict[str, Any]:
    return {
        **_BYTES,
        "description": f"A safetensors file with the tensors {', '.join(tensor_names(entry))}, of which "
        f"{', '.join(entry.required)}{_ways(entry)} must be there, "
        "and the parameters as strings in its metadata.",
    }


def _ways(entry: Operation) -> str:
    return "".join(f", and {name} or {' and '.join(pair)}" for name, pair in entry.choices.items())


def _result(entry: Operation) -> dict[str, Any]:
    kinds = {name: "boolean" if name in entry.flags else "number" for name in entry.outputs}
    tensors = _object({name: _numbers(kind) for name, kind in kinds.items()}, required=list(entry.outputs))
    return _object({"tensors": tensors, "report": {"type": "object"}}, required=["tensors", "report"])


def _tensor(entry: Operation, name: str) -> dict[str, Any]:
    argument = entry.tensors.get(name)
    if argument is None:
        return {**_numbers("integer"), "description": _LAYOUT_MEANINGS[name]}
    description = argument.shape + (f": {argument.meaning}" if argument.meaning else "") + "."
    if argument.shape == PER_ACTION:
        return {"description": description}
    kinds: dict[str, str | list[str]] = {"number": "number", "flag": ["number", "boolean"], "integer": "integer"}
    return {**_numbers(kinds[argument.kind]), "description": description}


def _option(option: Option) -> dict[str, Any]:
    number: dict[str, Any] = {"type": "number"}
    if math.isfinite(option.least):
        number["minimum"] = option.least
    if math.isfinite(option.largest):
        number["maximum"] = option.largest
    words = {"type": "string", "enum": list(option.words)}
    schemas: dict[str, list[dict[str, Any]]] = {
        "number": [number],
        "word": [words],
        "dtype": [words],
        "switch": [{"type": "boolean"}],
        "word or switch": [words, {"type": "boolean"}],
        "words": [{"type": "array", "items": words}],
        "range": [number, {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}],
    }
    ways = schemas[option.kind] + ([{"type": "null"}] if option.default is None and option.kind != "dtype" else [])
    schema = ways[0] if len(ways) == 1 else {"anyOf": ways}
    default = {} if option.default is None and option.kind == "dtype" else {"default": option.default}
    return {**schema, **default, "description": option.meaning}


def _numbers(kind: str | list[str]) -> dict[str, Any]:
    row = {"type": "array", "items": {"type": kind}}
    return {"anyOf": [row, {"type": "array", "items": row}]}


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


_BYTES = {"type": "string", "format": "binary"}
_PROBLEM = _object(
    {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string"},
    }
)
