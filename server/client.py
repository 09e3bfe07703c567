"""A remote service as an engine."""

from __future__ import annotations

import math
import time
from ipaddress import ip_address
from types import TracebackType
from urllib.parse import quote

import httpx
import torch

from rlhf_scan.checks import number_of
from rlhf_scan.errors import EngineError, InputError
from rlhf_scan.requests import LAYOUTS, CreditRequest, CreditResult
from rlhf_scan.rollout import request_to_bytes, result_from_bytes

_SAFETENSORS = "application/x-safetensors"
_PROBLEM = "application/problem+json"
_LONGEST_WAIT = 5.0
_QUOTED = 200


class HttpEngine:
    """Runs requests at an `rlhf-scan serve`. Threads may share one; close it, or use it in a ``with``.

    A service on this machine (localhost, 127.0.0.0/8, ::1) is asked directly; on the way to any other, HTTP_PROXY, HTTPS_PROXY, ALL_PROXY
    and NO_PROXY hold.

    Args:
        url: of the service, such as "http://127.0.0.1:8000".
        timeout: seconds to connect, and between two bytes.
        retries: how often to try again where the service cannot be reached or is full.
        backoff: seconds before the first retry, doubled each time, at most 5.

    Raises:
        InputError: url is no http or https address, or a number cannot be used.
    """

    def __init__(self, url: str, *, timeout: float = 60.0, retries: int = 4, backoff: float = 0.25) -> None:
        """Open no connection yet."""
        self.url = url.rstrip("/")
        try:
            scheme = httpx.URL(self.url).scheme
        except httpx.InvalidURL as error:
            raise InputError(
                f"HttpEngine: url must be an address, got {url!r}: {error}; pass one such as 'http://127.0.0.1:8000'"
            ) from error
        if scheme not in ("http", "https"):
            raise InputError(f"HttpEngine: url must start with http:// or https://, got {url!r}; pass one such as 'http://127.0.0.1:8000'")
        if not 0.0 < number_of("HttpEngine", "timeout", timeout, "a number of seconds", 60.0) < math.inf:
            raise InputError(f"HttpEngine: timeout must be > 0 seconds and finite, got {timeout}; leave it out for 60")
        for name, number, default in (("retries", retries, 4), ("backoff", backoff, 0.25)):
            if not 0.0 <= number_of("HttpEngine", name, number, like=default) < math.inf:
                raise InputError(f"HttpEngine: {name} must be >= 0 and finite, got {number}; leave it out for {default}")
        self._retries = retries
        self._backoff = backoff
        self._client = httpx.Client(timeout=timeout, trust_env=not _is_loopback(httpx.URL(self.url).host))

    def run(self, request: CreditRequest) -> CreditResult:
        """Run one request there; the outputs come back on the device of its tensors.

        Raises:
            InputError: the service refused the request; the message is its own.
            EngineError: it could not be reached, or failed; or this engine is closed.
        """
        response = self._post(f"{self.url}/v1/{quote(request.op, safe='')}", request_to_bytes(request))
        if response.status_code != httpx.codes.OK:
            raise _error_of(response)
        try:
            result = result_from_bytes(response.content)
        except InputError as error:
            raise EngineError(
                f"{response.url} answered with something else than a result; is this an rlhf-scan service? ({error})"
            ) from error
        device = _device_of(request)
        return CreditResult({name: tensor.to(device) for name, tensor in result.tensors.items()}, result.report)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> HttpEngine:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Close."""
        self.close()

    def _post(self, url: str, body: bytes) -> httpx.Response:
        """The answer, after retries: a request changes nothing there, so that sending it again is safe."""
        headers = {"Content-Type": _SAFETENSORS, "Accept": _SAFETENSORS}
        left, wait = self._retries, self._backoff
        while True:
            if self._client.is_closed:
                raise EngineError(f"HttpEngine: the engine for {self.url} was closed; create a new one, or run requests within its `with`")
            try:
                response = self._client.post(url, content=body, headers=headers)
            except httpx.TimeoutException as error:
                raise EngineError(
                    f"{url} did not answer in time ({type(error).__name__}); pass a longer timeout= or send smaller requests"
                ) from error
            except httpx.TransportError as error:
                if _speaks_no_tls(url, error):
                    raise EngineError(f"{url} cannot be reached: {error}; `rlhf-scan serve` speaks no TLS: pass url='http://..'") from error
                if left <= 0:
                    raise EngineError(f"{url} cannot be reached: {error}; start the service with `rlhf-scan serve` or mend url=") from error
            else:
                if response.status_code != httpx.codes.SERVICE_UNAVAILABLE or left <= 0:
                    return response
            time.sleep(min(wait, _LONGEST_WAIT))
            left, wait = left - 1, wait * 2


def _speaks_no_tls(url: str, error: httpx.TransportError) -> bool:
    """Whether what answered a handshake was no TLS, which another try would not change."""
    return url.startswith("https:") and "[SSL" in str(error) and "CERTIFICATE" not in str(error)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _error_of(response: httpx.Response) -> InputError | EngineError:
    try:
        detail = str(response.json()["detail"]) if response.headers.get("content-type", "").startswith(_PROBLEM) else None
    except (ValueError, TypeError, LookupError):
        detail = None
    if detail is None:
        said = f"{response.text[:_QUOTED]!r}; is this the address of an rlhf-scan service?"
        return EngineError(f"{response.url} answered {response.status_code}: {said}")
    if response.is_client_error:
        return InputError(detail)
    return EngineError(f"{response.url} answered {response.status_code}: {detail}")


def _device_of(request: CreditRequest) -> torch.device:
    return next((tensor.device for name, tensor in request.tensors.items() if name not in LAYOUTS), torch.device("cpu"))
