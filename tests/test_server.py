from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch
from service import JSON, SAFETENSORS, running, wait_until

from rlhf_scan import CreditRequest, EngineError, LocalEngine
from rlhf_scan.estimators import estimator, register, served, unregister
from rlhf_scan.operations import operations
from rlhf_scan.rollout import request_to_bytes, result_from_bytes
from rlhf_scan.server import HttpEngine, Settings

OPS = [entry.name for entry in served()]
FORMATS = ("application/x-safetensors", "application/json")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(Settings()) as address:
        wait_until(f"{address}/readyz", 200)
        yield address


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Serves an estimator "held" on the reference backend, whose loop waits until the event is set."""
    go = threading.Event()

    def naive(steps: Any, rewards: Any, **rates: Any) -> Any:
        assert go.wait(20)
        return estimator("discounted_returns").naive(steps, rewards, **rates)

    register(replace(estimator("discounted_returns"), name="held", naive=naive))
    yield go
    go.set()
    unregister("held")


def request_for(op: str, tokens: int = 50, seed: int = 0) -> CreditRequest:
    """A pack for any estimator, by the registry."""
    generator = torch.Generator().manual_seed(seed)
    actions = estimator(op).expectation or ()
    tensors = {name: torch.randn((tokens, 3) if name in actions else (tokens,), generator=generator) for name in estimator(op).arguments}
    tensors |= {name: torch.rand(tokens, generator=generator) < 0.8 for name in estimator(op).takes if name == "mask"}
    tensors["cu_seqlens"] = torch.tensor([0, tokens // 3, tokens // 3, tokens])
    if (end := estimator(op).end_name) is not None:
        tensors[end] = torch.randn(3, generator=generator)
    return CreditRequest(op, tensors, dict.fromkeys(estimator(op).rates, 0.97))


def as_json(request: CreditRequest) -> dict[str, Any]:
    return {"tensors": {name: tensor.tolist() for name, tensor in request.tensors.items()}, "params": dict(request.params)}


@pytest.mark.parametrize("op", OPS)
def test_both_formats_give_the_bits_of_the_local_engine(url: str, op: str) -> None:
    request = request_for(op)
    want = LocalEngine().run(request).tensors
    file = httpx.post(f"{url}/v1/{op}", content=request_to_bytes(request), headers=SAFETENSORS)
    text = httpx.post(f"{url}/v1/{op}", json=as_json(request))
    assert (file.headers["content-type"], text.headers["content-type"]) == FORMATS
    from_file, from_text = result_from_bytes(file.content), text.json()
    assert set(from_file.tensors) == set(from_text["tensors"]) == set(want)
    for name, tensor in want.items():
        assert torch.equal(from_file.tensors[name], tensor)
        assert torch.equal(torch.tensor(from_text["tensors"][name]), tensor)
    for report in (from_file.report, from_text["report"]):
        assert {"backend", "device", "milliseconds", "segments", "tokens", "version"} <= set(report)
        assert (report["segments"], report["tokens"]) == (3, 50)


def test_rows_in_json(url: str) -> None:
    rewards = [[0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]
    sent = {"tensors": {"rewards": rewards, "mask": [[1, 1, 1], [True, False, 1.0]], "gamma": [0.5, 1.0]}}
    assert httpx.post(f"{url}/v1/discounted_returns", json=sent).json()["tensors"] == {"returns": [[0.25, 0.5, 1.0], [2.0, 0.0, 1.0]]}


def test_rows_with_actions_in_json(url: str) -> None:
    sent = {name: [[0.0, 0.0], [0.0, 1.0]] for name in ("rewards", "q_values", "behavior_logprobs", "target_logprobs")}
    sent |= {"next_q": [[[1, 2, 3], [1, 1, 1]]] * 2, "target_probs": [[[0.5, 0.5, 0], [1, 0, 0]]] * 2}
    answer = httpx.post(f"{url}/v1/retrace_from_policy", json={"tensors": sent, "params": {"gamma": 0.5, "lam": 0.0}})
    assert answer.json()["tensors"]["targets"] == [[0.75, 0.5], [0.75, 1.5]]


def test_no_proxy_between_a_client_and_a_service_on_the_same_machine(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    request = request_for("gae")
    with HttpEngine(url, retries=0) as near, HttpEngine("http://service.invalid", retries=0) as far:
        assert near.run(request).report["tokens"] == 50
        # The proxy is asked: the name itself could not be resolved.
        with pytest.raises(EngineError, match="refused"):
            far.run(request)


@pytest.mark.parametrize("op", ["grpo", "rloo", "reinforce_plus_plus"])
def test_booleans_stay_booleans(url: str, op: str) -> None:
    request = CreditRequest(op, {"scores": torch.tensor([1.0, 2.0, 3.0]), "groups": torch.tensor([0, 0, 1])})
    want = LocalEngine().run(request).tensors
    assert want["degenerate"].dtype == torch.bool
    text = httpx.post(f"{url}/v1/{op}", json=as_json(request)).json()["tensors"]
    assert text["degenerate"] == want["degenerate"].tolist()
    assert all(type(entry) is bool for entry in text["degenerate"])
    assert all(type(entry) is float for entry in text["advantages"])
    file = result_from_bytes(httpx.post(f"{url}/v1/{op}", content=request_to_bytes(request), headers=SAFETENSORS).content).tensors
    assert all(file[name].dtype == want[name].dtype and torch.equal(file[name], want[name]) for name in want)
    schema = httpx.get(f"{url}/openapi.json").json()["paths"][f"/v1/{op}"]["post"]["responses"]["200"]["content"]["application/json"][
        "schema"
    ]
    kinds = {name: array["anyOf"][0]["items"]["type"] for name, array in schema["properties"]["tensors"]["properties"].items()}
    assert kinds == {"advantages": "number", "degenerate": "boolean"}


@pytest.mark.parametrize("empty", [[], [[]], [[], []]])
def test_no_tokens(url: str, empty: list[Any]) -> None:
    response = httpx.post(f"{url}/v1/gae", json={"tensors": {"rewards": empty, "values": empty}})
    assert response.json()["tensors"] == {"advantages": empty, "returns": empty}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(url: str, dtype: torch.dtype) -> None:
    request = request_for("gae")
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in request.tensors.items()}
    request = replace(request, tensors=tensors)
    want = LocalEngine().run(request).tensors["advantages"]
    response = httpx.post(f"{url}/v1/gae", content=request_to_bytes(request), headers=SAFETENSORS)
    assert want.dtype == dtype
    assert torch.equal(result_from_bytes(response.content).tensors["advantages"], want)
    text = httpx.post(f"{url}/v1/gae", content=request_to_bytes(request), headers={**SAFETENSORS, "Accept": "application/json"})
    assert torch.equal(torch.tensor(text.json()["tensors"]["advantages"], dtype=dtype), want)


@pytest.mark.parametrize(
    ("accept", "sent", "wanted"),
    [
        ("*/*", "application/x-safetensors", "application/x-safetensors"),
        ("application/*", "application/json", "application/json"),
        ("application/json", "application/x-safetensors", "application/json"),
        ("application/x-safetensors", "application/json", "application/x-safetensors"),
        ("application/json;q=0.1, */*;q=0.5", "application/json", "application/x-safetensors"),
        ("text/html, Application/JSON ; q=0.9", "application/x-safetensors", "application/json"),
        ("application/json;q=0, */*", "application/json", "application/x-safetensors"),
    ],
)
def test_accept_chooses_the_format(url: str, accept: str, sent: str, wanted: str) -> None:
    request = request_for("gae")
    body = {"content": request_to_bytes(request)} if sent in SAFETENSORS.values() else {"json": as_json(request)}
    response = httpx.post(f"{url}/v1/gae", headers={"Accept": accept, "Content-Type": sent}, **body)  # type: ignore[arg-type]
    assert (response.status_code, response.headers["content-type"]) == (200, wanted)


def test_many_at_once_each_get_their_own(url: str) -> None:
    requests = [request_for("gae" if seed % 3 else "discounted_returns", tokens=20 + seed, seed=seed) for seed in range(60)]
    bad = replace(request_for("gae"), params={"gamma": 2.0})

    def ask(client: httpx.Client, request: CreditRequest) -> httpx.Response:
        return client.post(f"{url}/v1/{request.op}", content=request_to_bytes(request), headers=SAFETENSORS)

    with httpx.Client() as client, ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda index: ask(client, bad if index % 5 == 0 else requests[index]), range(60)))
    for index, answer in enumerate(answers):
        if index % 5 == 0:
            assert (answer.status_code, answer.json()["detail"][:29]) == (422, "gae: gamma must lie in [0, 1]")
            continue
        got, want = result_from_bytes(answer.content).tensors, LocalEngine().run(requests[index]).tensors
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("bad", [None, 7])
def test_what_waits_together_shares_a_launch_and_a_bad_one_fails_alone(held: threading.Event, bad: float | None) -> None:
    gammas = [0.5, 0.5, 0.25, 0.5] if bad is None else [0.5, bad, 0.25, 0.5]
    with running(Settings(backend="reference", threads=1)) as url, ThreadPoolExecutor(5) as threads:
        busy = threads.submit(lambda: httpx.post(f"{url}/v1/held", json={"tensors": {"rewards": [1.0]}}, timeout=30))
        wait_for_requests(url, 1)
        waited = [threads.submit(httpx.post, f"{url}/v1/gae", json=replaced(gamma), timeout=30) for gamma in gammas]
        wait_for_requests(url, 5)
        held.set()
        assert busy.result().status_code == 200
        answers = [future.result() for future in waited]
    for gamma, answer in zip(gammas, answers, strict=True):
        if gamma == bad:
            assert (answer.status_code, answer.json()["detail"][:35]) == (422, "gae: gamma must lie in [0, 1], got ")
        else:
            assert answer.json()["tensors"]["advantages"] == pytest.approx([1 + 0.95 * gamma, 1.0])
    shared = [answer.json()["report"]["shared_with"] for answer in answers if answer.status_code == 200]
    assert shared == ([2, 2, 0, 2] if bad is None else [0, 0, 0])


def replaced(gamma: float) -> dict[str, Any]:
    return {"tensors": {"rewards": [1, 1], "values": [0, 0]}, "params": {"gamma": gamma}}


def test_a_full_queue_answers_503_and_health_goes_on(held: threading.Event) -> None:
    with running(Settings(backend="reference", threads=1, queue=2, warm="held")) as url, ThreadPoolExecutor(2) as threads:
        body = {"tensors": {"rewards": [1.0, 2.0]}, "params": {"gamma": 0.5}}
        busy = [threads.submit(lambda: httpx.post(f"{url}/v1/held", json=body, timeout=30)) for _ in range(2)]
        wait_for_requests(url, 2)
        full = httpx.post(f"{url}/v1/discounted_returns", json=body)
        assert full.status_code == 503
        assert full.headers["retry-after"] == "1"
        assert full.headers["content-type"] == "application/problem+json"
        assert "discounted_returns: the service holds 2 requests, its limit" in full.json()["detail"]
        assert httpx.get(f"{url}/healthz", timeout=1).status_code == 200
        assert wait_until(f"{url}/readyz", 503).headers["content-type"] == "application/problem+json"
        held.set()
        assert [future.result().json()["tensors"]["returns"] for future in busy] == [[2.0, 2.0]] * 2
        assert httpx.post(f"{url}/v1/discounted_returns", json=body).status_code == 200
        wait_until(f"{url}/readyz", 200)


def wait_for_requests(url: str, count: int) -> None:
    """Until so many are in progress and their small bodies have arrived."""
    until(lambda: httpx.get(f"{url}/metrics"), lambda answer: f"rlhf_scan_requests_in_progress {count}.0" in answer.text)
    time.sleep(0.2)


def until(act: Callable[[], httpx.Response], good: Callable[[httpx.Response], bool]) -> httpx.Response:
    for _ in range(200):
        answer = act()
        if good(answer):
            return answer
        time.sleep(0.02)
    raise AssertionError(answer.text)


def test_stopping_finishes_what_is_in_flight(held: threading.Event) -> None:
    with ThreadPoolExecutor(1) as threads:
        with running(Settings(backend="reference")) as url:
            slow = threads.submit(lambda: httpx.post(f"{url}/v1/held", json={"tensors": {"rewards": [1.0]}}, timeout=30))
            wait_for_requests(url, 1)
            threading.Timer(0.5, held.set).start()  # after `running` has asked the server to stop
        assert slow.result().json()["tensors"]["returns"] == [1.0]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz")


def test_health_while_a_large_request_runs(url: str) -> None:
    tokens = 1_000_000
    text = b'{"tensors": {"rewards": [' + b"0.125," * (tokens - 1) + b'1], "values": [' + b"0.5," * (tokens - 1) + b"1]}}"
    slowest = 0.0
    with ThreadPoolExecutor(1) as threads:
        large = threads.submit(lambda: httpx.post(f"{url}/v1/gae", content=text, headers=JSON, timeout=60).json())
        while not large.done():
            asked = time.perf_counter()
            assert httpx.get(f"{url}/healthz", timeout=10).json()["status"] == "ok"
            slowest = max(slowest, time.perf_counter() - asked)
    assert len(large.result()["tensors"]["advantages"]) == tokens
    assert slowest < 2.0


def test_a_backend_that_fails_its_self_test_is_never_ready() -> None:
    def naive(*arguments: Any, **rates: Any) -> Any:
        raise ArithmeticError("broken on purpose")

    register(replace(estimator("discounted_returns"), name="broken", naive=naive))
    try:
        with running(Settings(backend="reference", warm="gae, broken")) as url:
            answer = until(lambda: httpx.get(f"{url}/readyz"), lambda answer: "broken on purpose" in answer.text)
            assert answer.status_code == 503
            assert httpx.get(f"{url}/healthz").status_code == 200
            failed = httpx.post(f"{url}/v1/broken", json={"tensors": {"rewards": [1.0]}})
            assert (failed.status_code, failed.headers["content-type"]) == (500, "application/problem+json")
            assert "ArithmeticError" in failed.json()["detail"]
            assert httpx.post(f"{url}/v1/gae", json=replaced(0.5)).status_code == 200
    finally:
        unregister("broken")


def test_an_estimator_of_the_registry_is_served_and_described(held: threading.Event) -> None:
    held.set()
    with running(Settings(backend="reference")) as url:
        answer = httpx.post(f"{url}/v1/held", json={"tensors": {"rewards": [1.0, 2.0]}, "params": {"gamma": 0.5}})
        assert answer.json()["tensors"] == {"returns": [2.0, 2.0]}
        paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert {f"/v1/{known.name}" for known in operations()} | {"/healthz", "/readyz", "/metrics"} == set(paths)
    assert {*OPS, "held"} < {path.removeprefix("/v1/") for path in paths}
    operation = paths["/v1/gae"]["post"]
    assert tuple(operation["requestBody"]["content"]) == tuple(operation["responses"]["200"]["content"]) == FORMATS
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["tensors"]["required"] == ["rewards", "values"]
    assert {"mask", "terminated", "bootstrap", "cu_seqlens", "lam"} <= set(body["properties"]["tensors"]["properties"])
    assert body["properties"]["params"]["properties"]["lam"]["default"] == 0.95
    assert body["properties"]["params"]["properties"]["masked"]["enum"] == ["skip", "zero", "keep"]
    assert "application/problem+json" in operation["responses"]["422"]["content"]


def test_metrics_count_requests_tokens_and_time() -> None:
    with running(Settings(backend="reference")) as url:
        for gamma in (0.5, 0.5, 2.0):
            httpx.post(f"{url}/v1/gae", json=replaced(gamma))
        httpx.post(f"{url}/v1/other-{time.time()}", json={})
        lines = httpx.get(f"{url}/metrics").text.splitlines()
    assert 'rlhf_scan_requests_total{op="gae",status="200"} 2.0' in lines
    assert 'rlhf_scan_requests_total{op="gae",status="422"} 1.0' in lines
    assert 'rlhf_scan_requests_total{op="unknown",status="404"} 1.0' in lines
    assert 'rlhf_scan_tokens_total{op="gae"} 4.0' in lines
    assert 'rlhf_scan_request_seconds_count{op="gae"} 3.0' in lines
