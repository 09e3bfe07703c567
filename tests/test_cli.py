"""The command line: the installed `rlhf-scan` as a process where that matters, else `main()` in this one."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from service import wait_until

from rlhf_scan import CreditRequest, LocalEngine, __version__, cli
from rlhf_scan.estimators import estimator, register, served, unregister
from rlhf_scan.rollout import read_result, write_request

COMMAND = str(Path(sys.executable).with_name("rlhf-scan"))
REQUEST = CreditRequest(
    "gae",
    {"rewards": torch.tensor([0.0, 1.0, 2.0]), "values": torch.tensor([0.5, 0.25, 1.0]), "cu_seqlens": torch.tensor([0, 2, 3])},
    {"gamma": 0.5, "lam": 0.5},
)
REFERENCE = ("--backend", "reference")


@pytest.fixture
def rollout(tmp_path: Path) -> Path:
    path = tmp_path / "rollout.safetensors"
    write_request(REQUEST, path)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "credit.safetensors"


class CommandLine:
    """`main()` with what it printed and its exit code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["rlhf-scan", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        said = self._capsys.readouterr()
        return int(exit.value.code or 0), said.out, said.err

    def refuses(self, *arguments: str | Path, words: str) -> None:
        """Exit code 2 and one line on stderr that holds `words`."""
        code, out, err = self(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("rlhf-scan: ")
        assert words in err
        assert err.count("\n") == 1


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_version() -> None:
    done = process("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"rlhf-scan {__version__}\n", "")


def test_a_file_in_and_a_file_out(rollout: Path, out: Path) -> None:
    before = rollout.read_bytes()
    done = process("compute", rollout, "-o", out)
    assert (done.returncode, done.stderr) == (0, "")
    summary, *outputs, wrote = done.stdout.splitlines()
    assert re.fullmatch(r"gae: 2 segments, 3 tokens, backend cpu, [\d.]+ ms", summary)
    assert outputs == [
        "  advantages: float32 [3], mean 0.520833, min -0.1875, max 1",
        "  returns: float32 [3], mean 1.10417, min 0.3125, max 2",
    ]
    assert wrote == f"wrote {out}"
    got, want = read_result(out), LocalEngine().run(REQUEST)
    assert got.report["backend"] == "cpu"
    assert all(torch.equal(got.tensors[name], tensor) for name, tensor in want.tensors.items())
    assert rollout.read_bytes() == before
    assert sorted(path.name for path in out.parent.iterdir()) == sorted([rollout.name, out.name])


def test_a_bad_file_as_a_process(tmp_path: Path, out: Path) -> None:
    bad = tmp_path / "rollout.pkl"
    bad.write_bytes(pickle.dumps({"rewards": [1.0]}))
    done = process("compute", bad, "-o", out)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rlhf-scan: rollout: the bytes must be a safetensors file, got a pickle")
    assert done.stderr.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("op", [entry.name for entry in served()])
def test_every_estimator(command_line: CommandLine, tmp_path: Path, out: Path, op: str) -> None:
    entry = estimator(op)
    tensors = {name: torch.rand((2, 5, 3) if name in (entry.expectation or ()) else (2, 5)) for name in entry.arguments}
    request = CreditRequest(op, tensors, dict.fromkeys(entry.rates, 0.5))
    write_request(request, tmp_path / "in")
    code, said, err = command_line("compute", tmp_path / "in", "-o", out, *REFERENCE)
    assert (code, err) == (0, "")
    assert said.startswith(f"{op}: 2 segments, 10 tokens, backend reference, ")
    got, want = read_result(out).tensors, LocalEngine("reference").run(request).tensors
    assert set(got) == set(entry.outputs)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_op_and_parameters_of_the_command_line_win(command_line: CommandLine, tmp_path: Path, out: Path) -> None:
    write_request(CreditRequest("gae", {"rewards": torch.ones(3)}, {"gamma": 0.9}), tmp_path / "in")
    code, *_ = command_line(
        "compute", tmp_path / "in", "-o", out, "--op", "discounted_returns", "--param", "gamma=0.5", "--param", "dtype=float64", *REFERENCE
    )
    assert code == 0
    assert torch.equal(read_result(out).tensors["returns"], torch.tensor([1.75, 1.5, 1.0], dtype=torch.float64))


def test_a_rollout_without_tokens(command_line: CommandLine, tmp_path: Path, out: Path) -> None:
    write_request(CreditRequest("gae", {"rewards": torch.ones(0), "values": torch.ones(0)}), tmp_path / "in")
    code, said, _ = command_line("compute", tmp_path / "in", "-o", out, *REFERENCE)
    assert code == 0
    assert "  advantages: float32 [0]\n" in said


def test_an_existing_file_is_overwritten_by_force_alone(command_line: CommandLine, rollout: Path, out: Path) -> None:
    out.write_bytes(b"dear")
    command_line.refuses("compute", rollout, "-o", out, *REFERENCE, words="pass --force")
    assert out.read_bytes() == b"dear"
    assert command_line("compute", rollout, "-o", out, "--force", *REFERENCE)[0] == 0
    assert read_result(out).report["tokens"] == 3


def test_the_rollout_itself_is_never_overwritten(command_line: CommandLine, rollout: Path) -> None:
    before = rollout.read_bytes()
    command_line.refuses("compute", rollout, "-o", rollout, "--force", *REFERENCE, words="name another file")
    assert rollout.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--param", "gamma"], "--param must be NAME=VALUE, got 'gamma'"),
        (["--param", "gamma=high"], "gae: gamma must be a number, got 'high'"),
        (["--param", "gamma=1.5"], "gae: gamma must lie in [0, 1], got 1.5"),
        (["--param", "gama=0.5"], "'gama'"),
        (["--op", "gea"], "op must be one of"),
        (["--op", "linear_scan"], "op must be one of"),
        (["--op", "vtrace"], "behavior_logprobs"),
        (["--backend", "gpu"], "backend must be one of"),
    ],
)
def test_wrong_arguments(command_line: CommandLine, rollout: Path, out: Path, arguments: list[str], words: str) -> None:
    command_line.refuses("compute", rollout, "-o", out, *arguments, words=words)
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "must be a readable file, got No such file"),
        (b"", "no bytes at all"),
        (b"\xff" * 100, "torn"),
        (b'{"rewards": [1]}', "got JSON"),
    ],
)
def test_a_file_that_cannot_be_read(command_line: CommandLine, tmp_path: Path, out: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "in").write_bytes(content)
    command_line.refuses("compute", tmp_path / "in", "-o", out, words=words)
    assert not out.exists()


def test_contents_are_checked(command_line: CommandLine, tmp_path: Path, out: Path) -> None:
    write_request(replace(REQUEST, tensors={**REQUEST.tensors, "values": torch.tensor([0.0, torch.nan, 0.0])}), tmp_path / "in")
    command_line.refuses("compute", tmp_path / "in", "-o", out, *REFERENCE, words="values must be finite at trainable tokens, got nan")


def test_an_output_that_cannot_be_written(command_line: CommandLine, rollout: Path, tmp_path: Path) -> None:
    command_line.refuses("compute", rollout, "-o", tmp_path / "none" / "out", *REFERENCE, words="must be writable, got No such file")
    command_line.refuses("compute", rollout, "-o", tmp_path, "--force", *REFERENCE, words="must be a file, got a directory")


@pytest.fixture
def one_estimator() -> Any:
    """The registry with GAE alone, so that not every estimator is compiled."""
    others = [entry for entry in served() if entry.name != "gae"]
    for entry in others:
        unregister(entry.name)
    yield
    for entry in others:
        register(entry)


@pytest.mark.usefixtures("one_estimator")
def test_doctor(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, said, _ = command_line("doctor", "--json")
    report = json.loads(said)
    assert (code, report["ok"]) == (0, True)
    assert report["versions"]["rlhf-scan"] == __version__
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["backends"]) == {"reference", "cpu", "triton"}
    assert len(report["gpus"]) == torch.cuda.device_count()
    for name in ("reference", "cpu"):
        assert report["backends"][name]["why_not"] is None
        assert [(test["op"], test["ok"]) for test in report["backends"][name]["self_tests"]] == [("gae", True)]
    code, said, _ = command_line("doctor")
    assert code == 0
    assert "backend cpu: usable\n  gae agrees with the reference\n" in said
    assert torch.__version__ in said


@pytest.mark.usefixtures("one_estimator")
def test_doctor_finds_a_backend_that_is_wrong(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_scan.backends import cpu_backend

    run = cpu_backend.run
    monkeypatch.setattr(cpu_backend, "run", lambda call: [output + 0.01 for output in run(call)])
    code, said, _ = command_line("doctor")
    assert code == 1
    assert "  gae FAILED: differs from the reference by" in said


def test_serve_answers_and_stops_on_sigterm() -> None:
    command = [COMMAND, "serve", "--port", "0", *REFERENCE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "RLHF_SCAN_QUEUE": "3"}
    ) as served:
        try:
            assert served.stdout is not None
            found = re.fullmatch(r"rlhf-scan listens on (http://127\.0\.0\.1:\d+)\n", served.stdout.readline())
            assert found is not None
            url = found[1]
            assert wait_until(f"{url}/readyz", 200).json() == {"status": "ready", "backend": "reference"}
            answer = httpx.post(f"{url}/v1/discounted_returns", json={"tensors": {"rewards": [1, 1]}, "params": {"gamma": 0.5}})
            assert answer.json()["tensors"] == {"returns": [1.5, 1.0]}
            served.send_signal(signal.SIGTERM)
            _, log = served.communicate(timeout=20)
        finally:
            served.kill()
    assert served.returncode in (0, -signal.SIGTERM)
    assert "Traceback" not in log
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/healthz")


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--port", "70000"], {}, "port must lie in [0, 65535], got 70000"),
        (["--threads", "0"], {}, "threads must be > 0, got 0"),
        (["--backend", "gpu"], {}, "backend must be one of"),
        (["--host", "no.such.host.invalid"], {}, "host and port must be free to listen on"),
        ([], {"RLHF_SCAN_PORT": "http"}, "RLHF_SCAN_PORT must be of type int, got 'http'"),
        ([], {"RLHF_SCAN_WARM": "gea"}, "warm must be one of"),
    ],
)
def test_serve_with_wrong_settings(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str], words: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command_line.refuses("serve", *arguments, words=words)


def test_a_missing_extra_is_named(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rlhf_scan.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    command_line.refuses("serve", words="this command needs uvicorn, which is not installed; run pip install 'rlhf-scan[server]'")
