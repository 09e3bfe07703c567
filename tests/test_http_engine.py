from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
import torch
from service import running

from rlhf_scan import CreditRequest, Engine, EngineError, InputError, LocalEngine
from rlhf_scan.rollout import result_to_bytes
from rlhf_scan.server import HttpEngine, Settings

REWARDS = torch.tensor([[0.0, 0.0, 1.0], [0.5, -0.5, 0.25]])
REQUEST = CreditRequest(
    "gae", {"rewards": REWARDS, "values": REWARDS.t().contiguous().t()}, {"gamma": 0.9, "lam": 0.1 + 0.2, "masked": "zero"}
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(Settings(backend="reference")) as address:
        yield address


@pytest.fixture(scope="module")
def engine(url: str) -> Iterator[HttpEngine]:
    with HttpEngine(url + "/") as made:
        yield made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_of_the_local_engine(engine: Engine, dtype: torch.dtype) -> None:
    request = replace(REQUEST, tensors={name: tensor.to(dtype) for name, tensor in REQUEST.tensors.items()})
    here, there = LocalEngine("reference").run(request), engine.run(request)
    assert set(there.tensors) == {"advantages", "returns"}
    for name, tensor in here.tensors.items():
        assert there.tensors[name].dtype == dtype
        assert torch.equal(there.tensors[name], tensor)
    assert there.report["tokens"] == 6


def test_inputs_are_not_written_to(engine: Engine) -> None:
    tensors = {name: tensor.clone() for name, tensor in REQUEST.tensors.items()}
    engine.run(REQUEST)
    assert all(torch.equal(tensors[name], REQUEST.tensors[name]) for name in tensors)


@pytest.mark.gpu
def test_outputs_come_back_to_the_gpu(engine: Engine) -> None:
    request = replace(REQUEST, tensors={name: tensor.cuda() for name, tensor in REQUEST.tensors.items()})
    assert engine.run(request).tensors["advantages"].device == request.tensors["rewards"].device


def test_threads_share_an_engine(engine: Engine) -> None:
    def run(gamma: float) -> None:
        request = replace(REQUEST, params={"gamma": gamma})
        got[gamma] = engine.run(request).tensors["advantages"], LocalEngine("reference").run(request).tensors["advantages"]

    got: dict[float, Any] = {}
    threads = [threading.Thread(target=run, args=(step / 20,)) for step in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 20
    assert all(torch.equal(*pair) for pair in got.values())


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (replace(REQUEST, params={"gamma": 1.5}), "gae: gamma must lie in [0, 1], got 1.5"),
        (replace(REQUEST, params={"gama": 1}), "'gama'"),
        (replace(REQUEST, op="gea"), "op must be one of"),
        (replace(REQUEST, op="../healthz"), "op must be one of"),
        (replace(REQUEST, tensors={"rewards": REWARDS}), "got no values"),
        (replace(REQUEST, tensors={"rewards": [1.0]}), "rewards must be a torch.Tensor"),  # type: ignore[dict-item]
    ],
)
def test_a_wrong_request_is_an_input_error(engine: Engine, request_: CreditRequest, words: str) -> None:
    with pytest.raises(InputError) as caught:
        engine.run(request_)
    assert words in str(caught.value)


@pytest.mark.parametrize("bad", ["127.0.0.1:8000", "ftp://127.0.0.1", "", "http://[::1"])
def test_a_url_that_is_none(bad: str) -> None:
    with pytest.raises(InputError, match="HttpEngine: url must"):
        HttpEngine(bad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "HttpEngine: timeout must be > 0 seconds and finite, got 0; leave it out for 60"),
        ({"timeout": float("nan")}, "HttpEngine: timeout must be > 0 seconds and finite, got nan; leave it out for 60"),
        ({"timeout": "60"}, "HttpEngine: timeout must be a number of seconds, got str; pass a float such as 60.0"),
        ({"retries": -1}, "HttpEngine: retries must be >= 0 and finite, got -1; leave it out for 4"),
        ({"backoff": float("inf")}, "HttpEngine: backoff must be >= 0 and finite, got inf; leave it out for 0.25"),
    ],
)
def test_numbers_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        HttpEngine("http://127.0.0.1:8000", **options)
    assert str(caught.value) == message


def test_https_to_a_service_that_speaks_http_says_so_at_once(url: str) -> None:
    began = time.monotonic()
    with HttpEngine(url.replace("http:", "https:"), backoff=5) as engine, pytest.raises(EngineError) as caught:
        engine.run(REQUEST)
    assert "`rlhf-scan serve` speaks no TLS: pass url='http://..'" in str(caught.value)
    assert time.monotonic() - began < 4


def test_a_closed_engine_says_so(url: str) -> None:
    engine = HttpEngine(url)
    engine.close()
    with pytest.raises(EngineError, match=rf"^HttpEngine: the engine for {url} was closed; create a new one"):
        engine.run(REQUEST)


def test_a_body_over_the_limit_names_op_and_setting() -> None:
    with (
        running(Settings(backend="reference", max_body_bytes=99)) as address,
        HttpEngine(address) as engine,
        pytest.raises(InputError, match=r"^gae: the body must have at most 99 bytes, got .*raise the service's --max-body-bytes$"),
    ):
        engine.run(REQUEST)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_nobody_listens() -> None:
    with (
        HttpEngine(f"http://127.0.0.1:{free_port()}", retries=1, backoff=0.01) as engine,
        pytest.raises(EngineError, match="rlhf-scan serve"),
    ):
        engine.run(REQUEST)


def test_a_service_that_starts_late_is_awaited() -> None:
    port = free_port()
    with HttpEngine(f"http://127.0.0.1:{port}", retries=4, backoff=0.05) as engine:
        late = threading.Timer(0.1, lambda: started.append(serve_once(port, [(503, "text/plain", b"later")])))
        started: list[HTTPServer] = []
        late.start()
        with pytest.raises(EngineError, match="503"):
            engine.run(REQUEST)
        late.join()
        started[0].shutdown()


def test_a_service_that_hangs_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began = time.monotonic()
        with (
            HttpEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.3) as engine,
            pytest.raises(EngineError, match="did not answer in time"),
        ):
            engine.run(REQUEST)
    assert time.monotonic() - began < 5


def serve_once(port: int, answers: list[tuple[int, str, bytes]]) -> HTTPServer:
    """A foreign server that gives these answers, the last for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, media_type, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


PROBLEM = "application/problem+json"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([(200, "text/html", b"<html>")], "something else than a result"),
        ([(404, "text/html", b"<html>")], "is this the address of an rlhf-scan service"),
        ([(500, PROBLEM, b'{"detail": "it broke; read its log"}')], "answered 500: it broke; read its log"),
        ([(503, PROBLEM, b'{"detail": "full; come back"}')], "answered 503: full; come back"),
        ([(400, PROBLEM, b"not JSON")], "not JSON"),
        ([(400, PROBLEM, b'"no object"')], "no object"),
    ],
)
def test_foreign_and_failing_services(answers: list[tuple[int, str, bytes]], words: str) -> None:
    server = serve_once(0, answers)
    with HttpEngine(f"http://127.0.0.1:{server.server_port}", retries=2, backoff=0.01) as engine, pytest.raises(EngineError) as caught:
        engine.run(REQUEST)
    server.shutdown()
    assert words in str(caught.value)


def test_a_full_service_is_asked_again() -> None:
    result = result_to_bytes(LocalEngine("reference").run(REQUEST))
    server = serve_once(0, [(503, "text/plain", b"full"), (503, "text/plain", b"full"), (200, "application/x-safetensors", result)])
    with HttpEngine(f"http://127.0.0.1:{server.server_port}", backoff=0.01) as engine:
        assert engine.run(REQUEST).report["tokens"] == 6
    server.shutdown()


def test_the_client_needs_no_fastapi() -> None:
    code = (
        "import sys\n"
        "for name in ('fastapi', 'uvicorn', 'starlette', 'orjson', 'prometheus_client'): sys.modules[name] = None\n"
        "from rlhf_scan.server import HttpEngine, Settings\n"
        "HttpEngine('http://127.0.0.1:1').close()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
