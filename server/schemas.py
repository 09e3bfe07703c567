"""OpenAPI, from the registry."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import Response

from rlhf_scan.estimators import Estimator, Rate
from rlhf_scan.requests import DTYPES, integer_names, options, tensor_names

from .formats import JSON, SAFETENSORS
from .json_format import FLAGS
from .problems import MEDIA_TYPE

_MEANINGS = {
    "mask": "Nonzero at trainable tokens, in the shape of the inputs.",
    "terminated": "Nonzero where the episode ends, per token, or per segment for its last token.",
    "truncated": "Nonzero where the episode is cut, per token, or per segment for its last token.",
    "bootstrap": "The value that follows: per segment, or per token (read at truncated and last tokens).",
    "initial": "The value before the first step of each segment.",
    "cu_seqlens": "Cumulative sequence lengths of a pack: 0, then the end of each segment.",
    "lengths": "Length of each segment of a pack.",
    "position_ids": "Position of each token in its segment.",
    "segment_ids": "Id of each token's segment.",
    "masked": "What a masked token does to the recursion.",
    "boundary": "Whether `terminated` marks the last token of an episode or the first.",
    "dtype": "Of the outputs; without it, that of the inputs.",
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


def describe(entry: Estimator) -> dict[str, Any]:
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


def _request(entry: Estimator) -> dict[str, Any]:
    tensors = _object({name: _tensor(entry, name) for name in tensor_names(entry)}, required=list(entry.required))
    if entry.choices:
        # Each input in one of its ways.
        tensors["allOf"] = [{"oneOf": [{"required": [name]}, {"required": list(pair)}]} for name, pair in entry.choices.items()]
        tensors["dependentRequired"] = {name: [other] for a, b in entry.choices.values() for name, other in ((a, b), (b, a))}
    params: dict[str, dict[str, Any]] = {name: _rate(rate) for name, rate in entry.rates.items()}
    params |= {name: {"enum": list(words), "default": words[0], "description": _MEANINGS[name]} for name, words in options(entry).items()}
    params["dtype"] = {"enum": list(DTYPES), "description": _MEANINGS["dtype"]}
    return _object({"tensors": tensors, "params": _object(params)}, required=["tensors"])


def _file(entry: Estimator) -> dict[str, Any]:
    return {
        **_BYTES,
        "description": f"A safetensors file with the tensors {', '.join(tensor_names(entry))}, of which "
        f"{', '.join(entry.required)}{_ways(entry)} must be there, "
        "and the parameters as strings in its metadata.",
    }


def _ways(entry: Estimator) -> str:
    return "".join(f", and {name} or {' and '.join(pair)}" for name, pair in entry.choices.items())


def _result(entry: Estimator) -> dict[str, Any]:
    tensors = _object({name: _numbers("number") for name in entry.outputs}, required=list(entry.outputs))
    return _object({"tensors": tensors, "report": {"type": "object"}}, required=["tensors", "report"])


def _tensor(entry: Estimator, name: str) -> dict[str, Any]:
    if name in entry.per_action:
        return {"description": "[B, T, A], or packed [N, A]: one entry per action."}
    for replaced, pair in entry.choices.items():
        if name == pair[1]:
            return {
                **_numbers("integer"),
                "description": f"[B, T], or packed [N]: which action was taken; with {pair[0]} in place of {replaced}.",
            }
    if name in entry.arguments:
        return {**_numbers("number"), "description": "[B, T], or packed [N]."}
    if name in entry.rates:
        return {**_numbers("number"), "description": f"{name} per segment or per token, instead of the parameter."}
    kind = "integer" if name in integer_names(entry) else ["number", "boolean"] if name in FLAGS else "number"
    return {**_numbers(kind), "description": _MEANINGS[name]}


def _rate(rate: Rate) -> dict[str, Any]:
    schema = {"type": "number" if rate.default is not None else ["number", "null"], "minimum": 0, "default": rate.default}
    return {**schema, **({"maximum": rate.largest} if math.isfinite(rate.largest) else {}), "description": rate.meaning}


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
