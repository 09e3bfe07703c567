"""The two formats of a body, and which one a request asks for."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_scan.errors import InputError
from rlhf_scan.requests import CreditRequest, CreditResult, parse_params
from rlhf_scan.rollout import contents, result_to_bytes

from .json_format import request_from_json, result_to_json
from .problems import Problem

SAFETENSORS = "application/x-safetensors"
JSON = "application/json"
FORMATS = (SAFETENSORS, JSON)


def sent_format(op: str, headers: Mapping[str, str]) -> str:
    """The format of the body, by Content-Type."""
    content_type = headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in FORMATS:
        raise Problem(
            415,
            f"{op}: Content-Type must be {SAFETENSORS} or {JSON}, got {content_type or 'none'!r}; set the header to what the body is",
            {"Accept": ", ".join(FORMATS)},
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise Problem(
            415, f"{op}: Content-Encoding must be identity, got {encoding!r}; send the body uncompressed", {"Accept-Encoding": "identity"}
        )
    return media_type


def wanted_format(op: str, headers: Mapping[str, str], sent: str) -> str:
    """The format of the answer: what Accept likes best, the request's own format where it likes both."""
    accept = headers.get("accept", "").strip().lower()
    if not accept:
        return sent
    liking = {media_type: _liking(accept, media_type) for media_type in sorted(FORMATS, key=lambda media_type: media_type != sent)}
    best = max(liking, key=lambda media_type: liking[media_type])
    if liking[best] <= 0:
        raise Problem(
            406, f"{op}: Accept must allow {SAFETENSORS} or {JSON}, got {accept!r}; leave it out to get the format of the request"
        )
    return best


def decode(op: str, body: bytes, media_type: str) -> CreditRequest:
    """The request that a body holds; a Problem or InputError says what is wrong with it."""
    if not body:
        raise Problem(400, f"{op}: the body must hold the request's tensors, got no bytes; send a rollout file or a JSON object")
    if media_type == JSON:
        return request_from_json(op, body)
    try:
        tensors, metadata = contents(body)
    except InputError as error:
        raise Problem(400, f"{op}: {error}") from error
    named = metadata.pop("op", op)
    if named != op:
        raise InputError(f"{op}: the op in the metadata must be that of the path, got {named!r}; POST to /v1/{named} or write {op!r} there")
    return CreditRequest(op, tensors, parse_params(op, metadata))


def encode(op: str, result: CreditResult, media_type: str) -> bytes:
    """The body that holds `result`."""
    return result_to_json(op, result) if media_type == JSON else result_to_bytes(result)


def _liking(accept: str, media_type: str) -> float:
    """The q-value of the most specific range of `accept` that covers `media_type`; 0 where none does."""
    covering = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")
    found: dict[str, float] = {}
    for part in accept.split(","):
        media_range, *parameters = (piece.strip() for piece in part.split(";"))
        found[media_range] = _q_value(parameters)
    return next((found[media_range] for media_range in covering if media_range in found), 0.0)


def _q_value(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
