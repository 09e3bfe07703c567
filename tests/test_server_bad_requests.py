from __future__ import annotations

import json
import pickle
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from service import JSON, SAFETENSORS, running

from rlhf_scan import CreditRequest
from rlhf_scan.operations import operations
from rlhf_scan.rollout import request_to_bytes
from rlhf_scan.server import Settings

LIMIT, JSON_LIMIT = 1 << 20, 1 << 18
GOOD = {"tensors": {"rewards": [0, 0, 1], "values": [0.1, 0.2, 0.3]}, "params": {"gamma": 0.9}}
REWARDS = torch.tensor([0.0, 0.0, 1.0])
FILE = request_to_bytes(CreditRequest("gae", {"rewards": REWARDS, "values": REWARDS}))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(Settings(backend="reference", max_body_bytes=LIMIT, max_json_bytes=JSON_LIMIT, body_seconds=0.5)) as address:
        yield address


def check(url: str, response: httpx.Response, status: int, words: str) -> None:
    """A problem with that status whose detail holds `words`, from a service that goes on."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert set(problem) == {"type", "title", "status", "detail", "instance"}
    assert problem["status"] == status
    assert words in problem["detail"]
    assert len(problem["detail"]) > len(words) + 15, "says no more than what was wrong"
    assert len(problem["detail"]) < 1100
    assert problem["instance"] == response.url.path
    good = httpx.post(f"{url}/v1/gae", json=GOOD)
    assert good.status_code == 200, good.text
    assert good.json()["tensors"]["advantages"] == pytest.approx([0.6515675, 0.6685, 0.7])


def body(tensors: dict[str, Any] | None = None, params: Any = None, **more: Any) -> dict[str, Any]:
    """GOOD with other tensors and params."""
    changed = {**GOOD["tensors"], **(tensors or {})}
    return {
        "tensors": {name: value for name, value in changed.items() if value is not ...},
        "params": {} if params is None else params,
        **more,
    }


def nested(depth: int) -> list[Any]:
    """[[..[1.0]..]]"""
    return [1.0] if depth == 1 else [nested(depth - 1)]


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 400, "no bytes"),
        (b"{", 400, "JSON"),
        (b'{"tensors": {"rewards": [0.0, NaN], "values": [0, 0]}}', 400, "after the key 'rewards'; NaN and Infinity are no JSON"),
        (b'{"tensors": {"rewards": [0.0, 1], "values": [0, -Infinity]}}', 400, "after the key 'values'; NaN and Infinity are no JSON"),
        (b'{"tensors": {"rewards": [0.0, 1], "values": [0, 1e400]}}', 400, "after the key 'values'"),
        (b'{"tensors": {"rewards": [0.0, 1]', 400, "after the key 'rewards'; check its brackets"),
        (b'{"tensors": {"rewards": ["\xff\xfe"]}}', 400, "UTF-8"),
        (b"\xff\xfe{\x00}\x00", 400, "UTF-8"),
        (pickle.dumps(GOOD), 400, "JSON"),
        (b"[" * 5000, 400, "JSON"),
        (b"[]", 422, "the body must be a JSON object, got a list"),
        (b"null", 422, "the body must be a JSON object, got null"),
        (b'"gae"', 422, "the body must be a JSON object, got a string"),
        (b"{}", 422, 'gae: the body must hold the key "tensors", got an empty object; send {"tensors": '),
        (b'{"params": {}}', 422, "gae: the body must hold the key \"tensors\", got only 'params'; send "),
        (b'{"tensors": null}', 422, "tensors must be a JSON object, got null"),
    ],
)
def test_bodies_that_are_no_request(url: str, content: bytes, status: int, words: str) -> None:
    check(url, httpx.post(f"{url}/v1/gae", content=content, headers=JSON), status, words)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"tensors": [1]}, "tensors must be a JSON object, got a list"),
        (body(params=[1]), "params must be a JSON object, got a list"),
        ({"rewards": [1], "values": [1]}, "got the key 'rewards'"),
        (body(op="gae"), "got the key 'op'"),
        (body({"values": ...}), "got no values"),
        (body({"rewardz": [1, 2, 3]}), "'rewardz'"),
        (body(params={"gama": 0.9}), "'gama'"),
        (body(params={"gamma": "0.9"}), "gamma must be a number"),
        (body(params={"gamma": True}), "gamma must be a number"),
        (body(params={"gamma": [0.9]}), "gamma must be a number"),
        (body(params={"gamma": None}), "gamma"),
        (body(params={"gamma": 1.5}), "gamma must lie in [0, 1], got 1.5"),
        (body(params={"lam": -0.1}), "lam must lie in [0, 1], got -0.1"),
        (body(params={"gamma": 10**400}), "JSON"),
        (body(params={"masked": "drop"}), "masked must be one of"),
        (body(params={"masked": ["skip"]}), "masked must be one of"),
        (body(params={"masked": None}), "masked must be one of"),
        (body(params={"dtype": "int64"}), "dtype must be one of"),
        (body(params={"dtype": {"a": 1}}), "dtype must be one of"),
        (body({"values": [0, 0, 0, 0]}), "values must have shape [3]"),
        (body({"values": 0.5}), "values must have shape [3]"),
        (body({"rewards": [[[1.0]]], "values": [[[1.0]]]}), "rewards must be [B, T] or packed [N], got shape [1, 1, 1]"),
        (body({"rewards": [[[[1.0]]]]}), "rewards must hold numbers, got a list"),
        (body({"rewards": nested(900)}), "rewards must hold numbers, got a list"),
        (body({"rewards": [[[1], [2]], [[3], [4, 5]]]}), "rewards must have rows of one length, got another one at row 1"),
        (body({"rewards": [[[1], [2]], [[3, 4], [5, 6]]]}), "rewards must have rows of one shape"),
        (body({"rewards": [[1, 2], [3]]}), "rewards must have rows of one length, got another one at row 1"),
        (body({"rewards": [[1, 2], 3]}), "rewards must have rows of one length, got another one at row 1"),
        (body({"rewards": [1, [2, 3]]}), "rewards must have rows of one length"),
        (body({"rewards": ["1", "2", "3"]}), "rewards must hold numbers, got a string"),
        (body({"rewards": "AAAA"}), "rewards must hold numbers, got a string"),
        (body({"rewards": {"0": 1}}), "rewards must hold numbers, got an object"),
        (body({"rewards": None}), "rewards must hold numbers, got null"),
        (body({"rewards": [1, None, 2]}), "rewards must hold numbers, got null"),
        (body({"rewards": [True, False, True]}), "rewards must hold numbers, got a boolean"),
        (body({"rewards": [0, 0, 1e39]}), "rewards must fit float32 in JSON, got 1e+39"),
        (body({"values": [0, 0, -(10**60)]}), "values must fit float32 in JSON"),
        (body({"mask": ["yes", "no", "no"]}), "mask must hold numbers or booleans, got a string"),
        (body({"mask": [1, 1]}), "mask must have shape [3]"),
        (body({"bootstrap": [1, 1]}), "bootstrap must have shape [1]"),
        (body({"gamma": [0.9, 0.9, 1.5]}), "gamma must lie in [0, 1], got 1.5"),
        (body({"gamma": [0.9] * 3}, {"gamma": 0.9}), "gamma must be given once"),
        (body({"cu_seqlens": [0, 2]}), "segments must cover the 3 tokens of rewards, got 2"),
        (body({"cu_seqlens": [0, 4, 3]}), "cu_seqlens must not decrease"),
        (body({"cu_seqlens": [1, 3]}), "cu_seqlens must start at 0, got 1"),
        (body({"cu_seqlens": []}), "cu_seqlens must be 1-D"),
        (body({"cu_seqlens": [[0, 3]]}), "cu_seqlens must be 1-D"),
        (body({"cu_seqlens": 3}), "cu_seqlens must be 1-D"),
        (body({"cu_seqlens": [0.0, 3.0]}), "cu_seqlens must hold integers, got a number"),
        (body({"cu_seqlens": [0, 2**63]}), "cu_seqlens must fit int64"),
        (body({"cu_seqlens": [0, 10**30]}), "cu_seqlens must hold integers, got a number"),
        (body({"cu_seqlens": ["0", "3"]}), "cu_seqlens must hold integers, got a string"),
        (body({"cu_seqlens": [False, True]}), "cu_seqlens must hold integers, got a boolean"),
        (body({"lengths": [4, -1]}), "lengths must be >= 0, got -1"),
        (body({"lengths": [2**63 - 1, 2**63 - 1, 5]}), "must not decrease"),
        (body({"lengths": [3], "segment_ids": [0, 0, 0]}), "the pack must be described once"),
        (body({"segment_ids": [0, 0]}), "segments must cover the 3 tokens"),
    ],
)
def test_wrong_requests_in_json(url: str, sent: dict[str, Any], words: str) -> None:
    response = httpx.post(f"{url}/v1/gae", content=json.dumps(sent), headers=JSON)
    check(url, response, 400 if words == "JSON" else 422, words)


def file_of(tensors: dict[str, torch.Tensor], op: str = "gae", **params: Any) -> bytes:
    return request_to_bytes(CreditRequest(op, {"rewards": REWARDS, "values": REWARDS, **tensors}, params))


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 400, "no bytes"),
        (FILE[:-3], 400, "torn"),
        (FILE[:30], 400, "torn"),
        (b"\xff" * 100, 400, "torn"),
        (pickle.dumps({"rewards": [1.0]}), 400, "nothing is unpickled"),
        (b"PK\x03\x04" + bytes(100), 400, "nothing is unpickled"),
        (json.dumps(GOOD).encode(), 400, "got JSON"),
        (file_of({}, op="discounted_returns"), 422, "the op in the metadata must be that of the path"),
        (file_of({}, gama=0.9), 422, "'gama'"),
        (file_of({}, gamma="nan"), 422, "gamma must be a number, got 'nan'"),
        (file_of({}, gamma=1.25), 422, "gamma must lie in [0, 1], got 1.25"),
        (file_of({"rewardz": REWARDS}), 422, "'rewardz'"),
        (request_to_bytes(CreditRequest("gae", {"rewards": REWARDS})), 422, "got no values"),
        (file_of({"values": REWARDS[:2]}), 422, "values must have shape [3]"),
        (file_of({"values": torch.cat([REWARDS, REWARDS[:1]])}), 422, "pass V(s_T) as bootstrap="),
        (file_of({"values": REWARDS.long()}), 422, "values must be float32"),
        (file_of({"values": torch.tensor([0.0, torch.nan, 0.0])}), 422, "values must be finite at trainable tokens, got nan at token 1"),
        (file_of({"rewards": torch.tensor([0.0, torch.inf, 0.0])}), 422, "rewards must be finite at trainable tokens, got inf at token 1"),
        (file_of({"cu_seqlens": torch.tensor([0, 5, 3])}), 422, "cu_seqlens must not decrease"),
        (file_of({"cu_seqlens": torch.tensor([0.0, 3.0])}), 422, "cu_seqlens must be an integer tensor"),
        (file_of({"bootstrap": torch.tensor([torch.nan])}), 422, "bootstrap must be finite"),
    ],
)
def test_wrong_requests_in_safetensors(url: str, content: bytes, status: int, words: str) -> None:
    check(url, httpx.post(f"{url}/v1/gae", content=content, headers=SAFETENSORS), status, words)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "words"),
    [
        ("POST", "/v1/gea", JSON, 404, f"op must be one of {sorted(entry.name for entry in operations())}, got 'gea'"),
        ("POST", "/v1/linear_scan", JSON, 404, "got 'linear_scan'"),
        ("POST", "/v1/", JSON, 404, "op must be one of"),
        ("POST", "/v1/gae/", JSON, 404, "op must be one of"),
        ("GET", "/nothing", {}, 404, "/openapi.json"),
        ("GET", "/v1/gae", {}, 405, "POST"),
        ("DELETE", "/healthz", {}, 405, "GET"),
        ("POST", "/v1/gae", {}, 415, "gae: Content-Type must be"),
        ("POST", "/v1/gae", {"Content-Type": "text/plain"}, 415, "'text/plain'"),
        ("POST", "/v1/gae", {"Content-Type": "application/octet-stream"}, 415, "application/x-safetensors"),
        ("POST", "/v1/gae", {**JSON, "Content-Encoding": "gzip"}, 415, "gae: Content-Encoding must be identity"),
        ("POST", "/v1/gae", {**JSON, "Accept": "text/html"}, 406, "gae: Accept must allow"),
        ("POST", "/v1/gae", {**JSON, "Accept": "application/json;q=0"}, 406, "Accept must allow"),
        ("POST", "/v1/gae?gamma=0.5", JSON, 422, "query string must be empty"),
    ],
)
def test_wrong_paths_and_headers(url: str, method: str, path: str, headers: dict[str, str], status: int, words: str) -> None:
    response = httpx.request(method, f"{url}{path}", headers=headers, content=json.dumps(GOOD) if method == "POST" else None)
    check(url, response, status, words)


def test_a_body_over_the_limit(url: str) -> None:
    check(url, httpx.post(f"{url}/v1/gae", content=bytes(LIMIT + 1), headers=SAFETENSORS), 413, f"at most {LIMIT} bytes, got {LIMIT + 1}")
    check(url, httpx.post(f"{url}/v1/gae", content=bytes(JSON_LIMIT + 1), headers=JSON), 413, f"at most {JSON_LIMIT} bytes")


@pytest.mark.parametrize(
    ("headers", "json_limit", "words"),
    [
        (
            SAFETENSORS,
            10,
            "gae: the body must have at most 99 bytes, got 100 bytes; split the batch, or raise the service's --max-body-bytes",
        ),
        (
            JSON,
            10,
            "at most 10 bytes, got 100 bytes; split the batch, or send safetensors, which is smaller than JSON, or raise the "
            "service's --max-json-bytes",
        ),
        (
            JSON,
            200,
            "at most 99 bytes, got 100 bytes; split the batch, or send safetensors, which is smaller than JSON, or raise the "
            "service's --max-body-bytes",
        ),
    ],
)
def test_the_limit_that_holds_is_named(headers: dict[str, str], json_limit: int, words: str) -> None:
    with running(Settings(backend="reference", max_body_bytes=99, max_json_bytes=json_limit)) as address:
        assert words in httpx.post(f"{address}/v1/gae", content=bytes(100), headers=headers).json()["detail"]


def test_a_chunked_body_over_the_limit(url: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield bytes(LIMIT // 8)

    check(url, httpx.post(f"{url}/v1/gae", content=chunks(), headers=SAFETENSORS), 413, f"at most {LIMIT} bytes")


def test_a_body_that_does_not_come(url: str) -> None:
    def chunks() -> Iterator[bytes]:
        yield FILE[:10]
        time.sleep(1.0)
        yield FILE[10:]

    check(url, httpx.post(f"{url}/v1/gae", content=chunks(), headers=SAFETENSORS), 408, "gae: the body must arrive within 0.5 seconds")


def test_a_client_that_goes_away(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for sent in (
        b"POST /v1/gae HTTP/1.1\r\n",
        b"POST /v1/gae HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    assert httpx.post(f"{url}/v1/gae", json=GOOD).status_code == 200


def test_a_result_that_json_cannot_hold(url: str) -> None:
    huge = body({"rewards": [3e38, 3e38, 3e38]})
    response = httpx.post(f"{url}/v1/gae", json=huge)
    check(url, response, 422, "advantages must be finite to be JSON, but overflows float32")
    assert httpx.post(f"{url}/v1/gae", json=huge, headers={"Accept": SAFETENSORS["Content-Type"]}).status_code == 200
    wide = {**huge, "params": {"dtype": "float64"}}
    assert max(httpx.post(f"{url}/v1/gae", json=wide).json()["tensors"]["advantages"]) > 3.5e38


def test_a_long_name_is_quoted_in_part(url: str) -> None:
    check(url, httpx.post(f"{url}/v1/gae", json=body({"x" * 10000: [1]})), 422, "xxxx")
