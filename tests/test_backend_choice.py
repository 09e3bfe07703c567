"""A backend that was named runs, or says why it cannot: it never falls back on another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CUDA
from wrong_calls import error_of, inputs_of, public

import rlhf_scan
from rlhf_scan import BackendError
from rlhf_scan.backend_choice import backend_module
from rlhf_scan.backends import triton_launch
from rlhf_scan.estimators import served

ROWS = torch.zeros(2, 3)
META = torch.device("meta")
TAKES_CPU = "backend 'cpu' takes CPU tensors, got meta; call .cpu() on them or choose backend=\"triton\""


@pytest.mark.parametrize("name", ["cpu", "auto"])
@pytest.mark.parametrize("op", [*(entry.name for entry in served()), "linear_scan"])
def test_cpu_takes_cpu_tensors(op: str, name: str) -> None:
    inputs = {key: tensor.to(META) for key, tensor in inputs_of(op, (2, 3)).items()}
    assert error_of(lambda: public(op)(**inputs, backend=name), BackendError) == f"{op}: {TAKES_CPU}"


def test_interpreted_triton_takes_cpu_tensors() -> None:
    rewards = ROWS.to(META)
    message = error_of(lambda: rlhf_scan.gae(rewards, rewards, backend="triton"), BackendError)
    assert message.startswith("gae: backend 'triton' ")
    assert "got meta; " in message


@pytest.mark.gpu
def test_cpu_takes_no_gpu_tensors() -> None:
    rewards = ROWS.cuda()
    assert "takes CPU tensors, got cuda:0; " in error_of(lambda: rlhf_scan.gae(rewards, rewards, backend="cpu"), BackendError)


def without_interpreter(code: str) -> str:
    """What `code` prints in a Python of its own, where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_compiled_triton_takes_cuda_tensors() -> None:
    found = without_interpreter(
        "import torch, rlhf_scan\n"
        "x = torch.zeros(2, 3)\n"
        "for call in (lambda: rlhf_scan.gae(x, x, backend='triton'), lambda: rlhf_scan.linear_scan(x, x, backend='triton')):\n"
        "    try:\n"
        "        print(call())\n"
        "    except rlhf_scan.BackendError as error:\n"
        "        print(error)\n"
    )
    assert found.splitlines() == [
        f"{op}: backend 'triton' takes CUDA tensors, got cpu; move them to a GPU, choose backend=\"cpu\", or set TRITON_INTERPRET=1 before "
        "the first import"
        for op in ("gae", "linear_scan")
    ]


@pytest.mark.parametrize(("module", "name"), [("numba", "cpu"), ("triton", "triton")])
def test_a_backend_whose_library_is_missing(module: str, name: str) -> None:
    found = without_interpreter(
        f"import sys; sys.modules[{module!r}] = None\n"
        "import torch, rlhf_scan\n"
        "x = torch.zeros(2, 3)\n"
        "print(rlhf_scan.gae(x, x, backend='reference').returns.sum().item())\n"
        "try:\n"
        f"    print(rlhf_scan.gae(x, x, backend={name!r}))\n"
        "except rlhf_scan.BackendError as error:\n"
        "    print(error)\n"
    )
    assert found.splitlines() == [
        "0.0",
        f"gae: backend {name!r} needs {module}, which is not installed; install it or choose another backend",
    ]


@pytest.mark.parametrize(
    ("version", "remedy"), [("3.5.1", "install triton>=3.6, "), ("3.6.0", "move them to a GPU, "), ("4.0.0+git12", "move them to")]
)
def test_a_triton_that_is_too_old_says_so(version: str, remedy: str) -> None:
    """To a call, and to the doctor, in the same words."""
    found = without_interpreter(
        f"import triton; triton.__version__ = {version!r}\n"
        "import torch, rlhf_scan\n"
        "from rlhf_scan.doctor import _examine_backend\n"
        "try:\n"
        "    rlhf_scan.gae(torch.zeros(2, 3), torch.zeros(2, 3), backend='triton')\n"
        "except rlhf_scan.BackendError as error:\n"
        "    print(error)\n"
        "torch.cuda.is_available = lambda: False\n"
        "print(_examine_backend('triton')['why_not'])\n"
    )
    called, message = found.splitlines()
    assert called == f"gae: {message}"
    assert remedy in message
    assert message.startswith("backend 'triton' needs Triton 3.6 or newer, got 3.5.1; ") == (version == "3.5.1")


def test_the_oldest_triton_is_the_one_that_is_asked_for() -> None:
    extra = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'triton = ["triton>={".".join(map(str, triton_launch._OLDEST))}"]' in extra


@pytest.mark.skipif(CUDA, reason="triton is not interpreted where there is a CUDA device")
def test_a_named_backend_is_the_one_that_runs(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not even hear of the call."""
    ran: list[str] = []
    for name in ("reference", "cpu", "triton"):
        module = backend_module(name)

        def prepare(call: Any, name: str = name, original: Any = module.prepare) -> Any:
            ran.append(name)
            return original(call)

        monkeypatch.setattr(module, "prepare", prepare)
    rlhf_scan.gae(ROWS, ROWS, backend=backend)
    rlhf_scan.linear_scan(ROWS, ROWS, backend=backend)
    assert ran == [backend] * 2
