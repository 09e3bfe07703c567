from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from service import SAFETENSORS

from rlhf_scan import CreditRequest, LocalEngine, __version__, cli
from rlhf_scan.estimators import estimator, register, unregister
from rlhf_scan.operations import of_estimator
from rlhf_scan.rollout import read_result, result_from_bytes, write_request
from rlhf_scan.server import HttpEngine, Settings

Run = Callable[..., tuple[int, str, str]]
REWARDS = torch.tensor([0.0, 0.0, 1.0, 0.5])
REQUEST = CreditRequest("gae", {"rewards": REWARDS, "values": REWARDS.flip(0), "lengths": torch.tensor([3, 0, 1])}, {"gamma": 0.9})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `rlhf-scan` in this process: (exit code, stdout, stderr)."""

    def run_it(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlhf-scan", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        code = caught.value.code
        return code if isinstance(code, int) else 0, *capsys.readouterr()

    return run_it


@pytest.fixture
def rollout_file(tmp_path: Path) -> Path:
    path = tmp_path / "rollout.safetensors"
    write_request(REQUEST, path)
    return path


def test_compute_writes_the_result_and_sums_it_up(run: Run, rollout_file: Path, tmp_path: Path) -> None:
    code, printed, _ = run("compute", rollout_file, "-o", tmp_path / "out", "--backend", "reference")
    assert code == 0
    want = LocalEngine("reference").run(REQUEST).tensors
    got = read_result(tmp_path / "out")
    assert all(torch.equal(got.tensors[name], want[name]) for name in want)
    assert got.report["backend"] == "reference"
    for word in ("gae: 3 segments, 4 tokens", "advantages: float32 [4], mean", "returns: float32 [4], mean", str(tmp_path / "out")):
        assert word in printed


def test_compute_takes_op_and_params_from_the_command_line(run: Run, tmp_path: Path) -> None:
    save_file({"rewards": REWARDS}, tmp_path / "in", metadata={"gamma": "0.9"})
    code, _, _ = run(
        "compute", tmp_path / "in", "-o", tmp_path / "out", "--op", "discounted_returns", "--param", "gamma=0.5", "--param", "dtype=float64"
    )
    assert code == 0
    returns = load_file(tmp_path / "out")["returns"]
    assert returns.tolist() == [0.3125, 0.625, 1.25, 0.5]
    assert returns.dtype == torch.float64


def test_compute_sums_up_an_empty_rollout(run: Run, tmp_path: Path) -> None:
    write_request(CreditRequest("discounted_returns", {"rewards": torch.empty(0)}), tmp_path / "in")
    code, printed, _ = run("compute", tmp_path / "in", "-o", tmp_path / "out")
    assert code == 0
    assert "returns: float32 [0]" in printed


def test_compute_overwrites_only_by_force_and_never_its_input(run: Run, rollout_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    code, _, error = run("compute", rollout_file, "-o", out)
    assert (code, out.read_text()) == (2, "precious")
    assert "--force" in error
    assert run("compute", rollout_file, "-o", out, "--force", "--backend", "reference")[0] == 0
    assert set(load_file(out)) == {"advantages", "returns"}
    before = rollout_file.read_bytes()
    code, _, error = run("compute", rollout_file, "-o", rollout_file, "--force")
    assert (code, rollout_file.read_bytes()) == (2, before)
    assert error == f"rlhf-scan: compute: OUT must not be IN, got {rollout_file} as both; name another file\n"


def test_compute_leaves_out_what_another_op_does_not_take_and_says_so(
    run: Run, rollout_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command = ("compute", rollout_file, "-o", tmp_path / "out", "--op", "discounted_returns", "--backend", "reference")
    assert run(*command)[0] == 0
    assert caplog.messages == ["rollout: discounted_returns takes no values, which the file holds for gae: left out"]
    rewards, lengths = (REQUEST.tensors[name] for name in ("rewards", "lengths"))
    want = LocalEngine("reference").run(CreditRequest("discounted_returns", {"rewards": rewards, "lengths": lengths}, {"gamma": 0.9}))
    assert torch.equal(load_file(tmp_path / "out")["returns"], want.tensors["returns"])
    code, _, error = run(*command, "--force", "--param", "lam=0.9")  # what is asked for here is never left out
    assert (code, "parameter names must be among" in error) == (2, True)


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (None, [], "must be a readable file"),
        (b"", [], "no bytes"),
        (pickle.dumps({"rewards": [1.0]}), [], "nothing is unpickled"),
        (b"torn" * 10, [], "torn"),
        ({"rewards": REWARDS}, [], 'must hold "op"'),
        ({"rewards": REWARDS}, ["--op", "gea"], "op must be one of"),
        ({"rewards": REWARDS}, ["--op", "gae"], "got no values"),
        (None, ["--force"], "must be a readable file"),
        ({"rewards": REWARDS, "values": REWARDS[:3].clone()}, ["--op", "gae"], "values must have shape [4]"),
        ({"rewards": REWARDS, "values": REWARDS * torch.nan}, ["--op", "gae"], "values must be finite"),
        ({"rewards": REWARDS}, ["--op", "discounted_returns", "--param", "gama=1"], "'gama'"),
        ({"rewards": REWARDS}, ["--op", "discounted_returns", "--param", "gamma"], "--param must be NAME=VALUE"),
        ({"rewards": REWARDS}, ["--op", "discounted_returns", "--param", "gamma=much"], "gamma must be a number, got 'much'"),
        ({"rewards": REWARDS}, ["--op", "discounted_returns", "--backend", "gpu"], "backend must be one of"),
    ],
)
def test_compute_says_in_one_line_what_is_wrong(run: Run, tmp_path: Path, content: Any, more: list[str], words: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / "in").write_bytes(content)
    elif content is not None:
        save_file(content, tmp_path / "in")
    code, printed, error = run("compute", tmp_path / "in", "-o", tmp_path / "out", *more)
    assert (code, printed) == (2, "")
    assert error.startswith("rlhf-scan: ")
    assert error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "out").exists()


OWN_MODULE = """
from dataclasses import replace
from rlhf_scan.estimators import estimator, register
register(replace(estimator("discounted_returns"), name="own_returns"))
"""
OWN_REQUEST = CreditRequest("own_returns", {"rewards": REWARDS}, {"gamma": 0.5})


@pytest.fixture
def own_module(tmp_path: Path) -> Path:
    """A folder in which a user's module registers "own_returns", and a request for it lies."""
    (tmp_path / "own_estimators.py").write_text(OWN_MODULE)
    register(replace(estimator("discounted_returns"), name="own_returns"))
    try:
        write_request(OWN_REQUEST, tmp_path / "in")
    finally:
        unregister("own_returns")
    return tmp_path


def test_compute_imports_a_module_of_the_current_directory(own_module: Path) -> None:
    command = [str(Path(sys.executable).with_name("rlhf-scan")), "compute", "in", "-o", "out", "--backend", "reference"]
    without = subprocess.run(command, cwd=own_module, capture_output=True, text=True, check=False)
    assert without.returncode == 2
    assert "op must be one of" in without.stderr
    done = subprocess.run([*command, "--import", "json", "--import", "own_estimators"], cwd=own_module, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "own_returns: 1 segments, 4 tokens" in done.stdout
    assert load_file(own_module / "out")["returns"].tolist() == [0.3125, 0.625, 1.25, 0.5]


def test_serve_imports_a_module_of_the_current_directory(own_module: Path) -> None:
    arguments = "--backend", "reference", "--warm", "own_returns", "--import", "own_estimators"
    with serving(*arguments, folder=own_module) as (_, url):
        answer = httpx.post(f"{url}/v1/own_returns", json={"tensors": {"rewards": REWARDS.tolist()}, "params": {"gamma": 0.5}}, timeout=60)
        assert answer.json()["tensors"] == {"returns": [0.3125, 0.625, 1.25, 0.5]}


def test_doctor_tests_an_imported_estimator(run: Run, own_module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("rlhf_scan.doctor.BACKENDS", ("reference",))
    try:
        assert "own_returns agrees with the reference" in run("doctor", "--import", "own_estimators")[1]
    finally:
        unregister("own_returns")
        sys.modules.pop("own_estimators", None)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("not_there", "ModuleNotFoundError: No module named 'not_there'; name it as in an import statement, and run where it lies"),
        ("plain_module.py", "'plain_module' is not a package; name it as in an import statement"),
        ("broken", "got 'broken': ZeroDivisionError: division by zero; mend it"),
        ("wanting", "got 'wanting': ModuleNotFoundError: No module named 'not_there'; mend it"),
        ("nonsense", "got 'nonsense': InputError: own: end must be one of"),
        ("", "got '': ValueError: Empty module name"),
    ],
)
@pytest.mark.parametrize("command", ["compute", "serve", "doctor"])
def test_a_module_that_cannot_be_imported(
    run: Run, monkeypatch: pytest.MonkeyPatch, rollout_file: Path, command: str, module: str, words: str
) -> None:
    folder = rollout_file.parent
    (folder / "plain_module.py").write_text("")
    (folder / "broken.py").write_text("1 / 0")
    (folder / "wanting.py").write_text("import not_there")
    (folder / "nonsense.py").write_text(OWN_MODULE.replace('name="own_returns"', 'name="own", end="bootstrap"'))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments: list[str | Path] = [rollout_file, "-o", folder / "out"] if command == "compute" else []
    code, printed, error = run(command, *arguments, "--import", module)
    assert (code, printed) == (2, "")
    assert error.startswith(f"rlhf-scan: {command}: --import must name a module that can be imported, got '{module}': ")
    assert words in error
    assert error.count("\n") == 1


def test_version_and_help(run: Run) -> None:
    assert run("--version")[1] == f"rlhf-scan {__version__}\n"
    printed = run("--help")[1]
    assert all(command in printed for command in ("compute", "serve", "doctor", "demo"))
    assert run("unheard-of")[0] == 2


def test_doctor_reports_versions_backends_and_self_tests(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_scan.doctor.BACKENDS", ("auto", "reference"))
    code, printed, _ = run("doctor", "--json")
    report = json.loads(printed)
    assert (code, report["ok"]) == (0, True)
    assert report["versions"]["torch"] == torch.__version__ or report["versions"]["torch"] in torch.__version__
    assert {test["op"] for test in report["backends"]["reference"]["self_tests"]} >= {"gae", "discounted_returns"}
    code, printed, _ = run("doctor")
    assert code == 0
    assert "backend reference: usable" in printed
    assert "gae agrees with the reference" in printed


def test_doctor_exits_with_1_where_a_self_test_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_scan.doctor.BACKENDS", ("cpu",))
    monkeypatch.setattr("rlhf_scan.doctor.operations", lambda: [of_estimator(estimator("wrong"))])
    # Its formula adds what its definition subtracts.
    register(
        replace(
            estimator("discounted_returns"), name="wrong", naive=lambda steps, rewards, **_: ({s.token: -rewards[s.token] for s in steps},)
        )
    )
    try:
        code, printed, _ = run("doctor")
    finally:
        unregister("wrong")
    assert code == 1
    assert "wrong FAILED: differs from the reference" in printed


def test_doctor_says_why_a_backend_cannot_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_scan.doctor.BACKENDS", ("cpu",))
    monkeypatch.setattr("rlhf_scan.backends.cpu_backend.why_not", lambda device: "has a cold; keep it warm")
    code, printed, _ = run("doctor")
    assert code == 0
    assert "backend cpu: backend 'cpu' has a cold; keep it warm" in printed


@pytest.mark.parametrize(("command", "blocked"), [("serve", "fastapi"), ("serve", "uvicorn"), ("demo", "httpx")])
def test_a_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, command: str, blocked: str) -> None:
    for name in [name for name in sys.modules if name.startswith(("rlhf_scan.server.", "rlhf_scan.demo"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, blocked, None)
    code, _, error = run(command)
    assert code == 2
    assert error == f"rlhf-scan: this command needs {blocked}, which is not installed; run pip install 'rlhf-scan[server]'\n"


@contextmanager
def serving(*arguments: str, folder: Path | None = None, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`rlhf-scan serve` as a process in `folder` on a free port, and its address."""
    command = [str(Path(sys.executable).with_name("rlhf-scan")), "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()


def test_serve_computes_as_compute_does_and_finishes_what_is_in_flight(rollout_file: Path) -> None:
    with serving("--backend", "reference", RLHF_SCAN_MAX_BODY_BYTES="2000000") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        answer = httpx.post(f"{url}/v1/gae", content=rollout_file.read_bytes(), headers=SAFETENSORS)
        assert torch.equal(result_from_bytes(answer.content).tensors["returns"], LocalEngine("reference").run(REQUEST).tensors["returns"])
        assert httpx.post(f"{url}/v1/gae", content=bytes(2_000_001), headers=SAFETENSORS).status_code == 413
        with HttpEngine(url) as engine:
            stop = threading.Timer(0.2, process.send_signal, [signal.SIGTERM])
            stop.start()
            slow = CreditRequest("discounted_returns", {"rewards": torch.ones(400_000)})  # a second or so in the reference
            assert engine.run(slow).tensors["returns"][0] == 400_000
            assert stop.finished.is_set(), "was to be stopped meanwhile"
        assert process.wait(20) == -signal.SIGTERM


def test_serve_has_an_option_for_every_setting(run: Run) -> None:
    """Named in its help with its variable, and it reaches the setting, whose error it gets here."""
    options = {option.name: option for option in typer.main.get_command(cli.app).commands["serve"].params}  # type: ignore[attr-defined]
    assert options.pop("imports").opts == ["--import"]  # done before there are settings
    assert set(options) == {field.name for field in fields(Settings)}
    for name, option in options.items():
        assert f"[RLHF_SCAN_{name.upper()}; " in option.help
    for given in (("--max-json-bytes", "0"), ("--body-seconds", "-1"), ("--warm", "gae,gea"), ("--port", "70000"), ("--backend", "gpu")):
        assert f"settings: {given[0][2:].replace('-', '_')} must " in run("serve", *given)[2]


def test_serve_says_that_its_port_is_taken(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code, _, error = run("serve", "--port", str(listener.getsockname()[1]), "--backend", "reference")
    assert code == 2
    assert "choose another host or port" in error
    assert error.count("\n") == 1


def test_serve_refuses_settings_that_cannot_be_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "threads must be > 0" in run("serve", "--threads", "0")[2]
    monkeypatch.setenv("RLHF_SCAN_QUEUE", "many")
    assert "RLHF_SCAN_QUEUE must be of type int, got 'many'" in run("serve")[2]
