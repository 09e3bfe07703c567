"""`rlhf-scan demo`, for real: its server is a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from rlhf_scan import EngineError, cli, demo
from rlhf_scan.rollout import read_request

pytestmark = pytest.mark.slow
DEMO = [sys.executable, "-c", "from rlhf_scan.cli import main; main()", "demo"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes that the demo starts here; all of them have ended in the end."""
    processes: list[subprocess.Popen[str]] = []

    class Kept(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Kept)
    yield processes
    assert processes
    assert all(process.returncode is not None for process in processes)


def test_demo() -> None:
    finished = subprocess.run(DEMO, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    for shown in ("256 segments, 16,733 tokens", "agrees with the reference", "advantages", "returns", "there and back", "TRL's loop"):
        assert shown in finished.stdout


def test_recorded_rollout() -> None:
    """A pack of many responses of many lengths, with a KL reward on their tokens and a score on the last step, in a small file."""
    assert demo.ROLLOUT.stat().st_size < 300_000
    request = read_request(demo.ROLLOUT)
    assert (request.op, request.params) == ("gae", {"gamma": 1.0, "lam": 0.95})
    rewards, cu_seqlens = request.tensors["rewards"], request.tensors["cu_seqlens"]
    lengths = cu_seqlens.diff()
    assert lengths.numel() == 256
    assert lengths.unique().numel() > 50
    last = cu_seqlens[1:] - 1
    within = torch.ones_like(rewards, dtype=torch.bool).index_fill(0, last, False)
    assert (rewards[within] != 0).float().mean() > 0.9
    assert rewards[last].abs().mean() > 10 * rewards[within].abs().mean()
    assert request.tensors["values"].std() > 0.1


@pytest.mark.parametrize("wrong", [2.0, -2.0, float("nan")])
def test_a_wrong_answer_is_noticed(wrong: float) -> None:
    rollout = demo.with_reference(read_request(demo.ROLLOUT))
    assert 0 < rollout.tolerance < 1e-3
    assert demo.check(rollout, rollout.expected, "it") == 0
    advantages = rollout.expected["advantages"].clone()
    advantages[5000] += wrong * rollout.tolerance
    with pytest.raises(EngineError, match="it must agree with the reference within"):
        demo.check(rollout, {**rollout.expected, "advantages": advantages}, "it")


def test_a_wrong_answer_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], started: list[subprocess.Popen[str]]
) -> None:
    def shifted(rollout: demo.Rollout, *rest: Any) -> float:
        return check(demo.replace(rollout, expected={name: tensor + 1 for name, tensor in rollout.expected.items()}), *rest)

    check = demo.check
    monkeypatch.setattr(demo, "check", shifted)
    monkeypatch.setattr(demo, "wait_until_ready", lambda url: None)  # saves seconds
    monkeypatch.setattr(sys, "argv", ["rlhf-scan", "demo"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "rlhf-scan: demo: the service's answer must agree" in capsys.readouterr().err


def test_the_service_is_stopped(started: list[subprocess.Popen[str]]) -> None:
    handler = signal.getsignal(signal.SIGTERM)

    def use() -> None:
        with demo.service("cpu") as url:
            addresses.append(url)
            assert httpx.get(f"{url}/healthz").status_code == 200
            raise RuntimeError("on the way")

    addresses: list[str] = []
    with pytest.raises(RuntimeError, match="on the way"):
        use()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{addresses[0]}/healthz")
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_service_that_does_not_start(started: list[subprocess.Popen[str]]) -> None:
    with pytest.raises(EngineError, match=r"must start within 120 s, but said: .*backend must be one of"), demo.service("nonsense"):
        pass


def test_a_service_that_hangs(monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[str]]) -> None:
    monkeypatch.setattr(demo, "START_SECONDS", 0.1)
    with pytest.raises(EngineError, match="must start within 0 s, but said: nothing"), demo.service("cpu"):
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_demo_that_is_terminated_takes_its_service_along() -> None:
    process = subprocess.Popen(DEMO, stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until = time.monotonic() + 60
    while not children.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    (service,) = map(int, children.read_text().split())
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(service, 0)
