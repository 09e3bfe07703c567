"""The environment that `make` sets up: which interpreter it takes, and how it stands on an existing torch that sees CUDA."""

import importlib.util
import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def setup(monkeypatch, tmp_path):
    """scripts/setup.py, working in an empty directory."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPTS / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build = tmp_path / "build"
    build.mkdir()
    environment = tmp_path / ".venv"
    paths = {"VENV": environment, "PYTHON": environment / "bin" / "python", "STAMP": environment / "stamp.json"}
    for name, value in {**paths, "BUILD": build, "LOG": build / "setup.log", "UNFINISHED": build / "unfinished"}.items():
        monkeypatch.setattr(module, name, value)
    return module


def interpreter_that_answers(path, **answer):
    """A program that says of itself what `answer` says, whatever is asked."""
    facts = {"path": str(path), "version": [3, 12, 1], "base": str(path), "nested": False, "packages": []}
    facts.update(venv=True, pip=True, cuda=None)
    path.write_text(f"#!/bin/sh\necho '{json.dumps({**facts, **answer})}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_running_interpreter_will_do(setup):
    assert setup.choose_interpreter(sys.executable)["version"] == list(sys.version_info[:3])


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"version": [3, 9, 2]}, "is 3.9.2"),
        ({"venv": False}, "is 3.12.1 and lacks venv"),
        ({"venv": False, "pip": False, "cuda": "2.11.0+cu130"}, "is 3.12.1 and lacks venv"),
    ],
)
def test_an_interpreter_that_will_not_do_is_named(setup, tmp_path, answer, complaint):
    asked = interpreter_that_answers(tmp_path / "python", **answer)
    with pytest.raises(setup.SetupError, match=rf"3\.11 or newer with venv is needed; {asked} {complaint}"):
        setup.choose_interpreter(asked)


def test_an_interpreter_that_does_not_run_is_named(setup, tmp_path):
    with pytest.raises(setup.SetupError, match="nothing-here did not run"):
        setup.choose_interpreter(str(tmp_path / "nothing-here"))


def test_the_first_interpreter_that_sees_cuda_is_preferred(setup, tmp_path, monkeypatch):
    plain = interpreter_that_answers(tmp_path / "plain")
    cuda = interpreter_that_answers(tmp_path / "cuda", cuda="2.11.0+cu130")
    monkeypatch.setattr(setup, "CANDIDATES", [plain, cuda])
    assert setup.choose_interpreter("")["path"] == cuda


SEES_CUDA = """
class cuda:
    is_available = staticmethod(lambda: True)
"""


@pytest.fixture
def existing(tmp_path):
    """The interpreter of a virtual environment whose torch says that it sees CUDA (this machine has none: torch is a stand-in)."""
    folder = tmp_path / "existing"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, version in {"torch": "9.9.0+cu130", "numpy": "9.8"}.items():
        (packages / name).mkdir()
        (packages / name / "__init__.py").write_text(
            f"__version__ = {version!r}\nclass cuda:\n    is_available = staticmethod(lambda: True)\n"
        )
        (packages / f"{name}-{version}.dist-info").mkdir()
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder / "bin" / "python")


def test_the_environment_stands_on_a_torch_that_sees_cuda(setup, existing):
    interpreter = setup.choose_interpreter(existing)
    assert interpreter["cuda"] == "9.9.0+cu130"
    assert not setup.is_built_on(interpreter)
    setup.make_environment(setup.Progress(setup.LOG), interpreter)
    assert setup.is_built_on(interpreter)
    seen = subprocess.run([setup.PYTHON, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "9.9.0+cu130"

    held = dict(line.split("==") for line in setup.pins_beside_existing_torch().read_text().split())
    assert held["torch"] == "9.9.0+cu130"
    assert "numpy" not in held
    assert "triton" in held


def test_an_unfinished_environment_is_built_anew(setup, existing):
    interpreter = setup.choose_interpreter(existing)
    setup.make_environment(setup.Progress(setup.LOG), interpreter)
    setup.UNFINISHED.touch()
    assert not setup.is_built_on(interpreter)


def test_a_failed_step_shows_the_end_of_its_output(setup, capsys):
    progress = setup.Progress(setup.LOG)
    with pytest.raises(setup.StepError, match="the reason"):
        progress.run("a step", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
    assert "a step: FAILED (exit status 3)" in capsys.readouterr().out
    assert "the reason" in setup.LOG.read_text()
