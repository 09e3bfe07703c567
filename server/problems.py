"""Errors as problem+json (RFC 9457): every one says what to do."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from rlhf_scan.errors import InputError, RlhfScanError
from rlhf_scan.operations import operations

MEDIA_TYPE = "application/problem+json"
# A message may quote what was sent.
_LONGEST_DETAIL = 1000

_log = logging.getLogger("rlhf_scan.server")


class Problem(Exception):
    """An answer other than the result.

    Args:
        status: HTTP status.
        detail: what was wrong with this request, and what to do.
        headers: more headers of the answer.
    """

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        """Keep what the answer says."""
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})


def install(app: FastAPI) -> None:
    """Answer every error of `app` with problem+json."""
    app.add_exception_handler(Exception, _answer)
    for kind in (Problem, RlhfScanError, HTTPException, ClientDisconnect):
        app.add_exception_handler(kind, _answer)


def _answer(request: Request, error: Exception) -> Response:
    problem = _as_problem(request, error)
    status = HTTPStatus(problem.status)
    detail = problem.detail if len(problem.detail) <= _LONGEST_DETAIL else problem.detail[:_LONGEST_DETAIL] + " [...]"
    content = {
        "type": f"urn:rlhf-scan:problem:{status.phrase.lower().replace(' ', '-')}",
        "title": status.phrase,
        "status": problem.status,
        "detail": detail,
        "instance": request.url.path,
    }
    return Response(json.dumps(content), problem.status, problem.headers, MEDIA_TYPE)


def _as_problem(request: Request, error: Exception) -> Problem:
    if isinstance(error, Problem):
        return error
    if isinstance(error, InputError):
        return Problem(422, str(error))
    if isinstance(error, HTTPException):
        return Problem(error.status_code, _advice(request, error), error.headers)
    if isinstance(error, ClientDisconnect):
        return Problem(400, "the client went away before the body was complete; send it again")
    _log.error("%s failed", request.url.path, exc_info=error)
    if isinstance(error, RlhfScanError):
        return Problem(500, f"{error}; this is for whoever runs the service")
    return Problem(500, f"the service failed with {type(error).__name__}; its log says where. Report it with the request that caused it")


def _advice(request: Request, error: HTTPException) -> str:
    path = request.url.path
    if error.status_code == 404 and path.startswith("/v1/"):
        return f"op must be one of {sorted(entry.name for entry in operations())}, got {path.removeprefix('/v1/')!r}; POST to /v1/<op>"
    if error.status_code == 404:
        return f"there is nothing at {path}; see /openapi.json for what there is"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{path} takes {allowed}, got {request.method}; use {allowed}"
    return str(error.detail)
