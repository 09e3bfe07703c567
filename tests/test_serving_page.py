"""docs/serving.md: its examples, run as they stand with a real server and a real Ray, and its tables held against the code."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pages import ADDRESS, BIN, blocks, run_python, serving

from rlhf_scan import LocalEngine
from rlhf_scan.estimators import served
from rlhf_scan.operations import operations
from rlhf_scan.ray_actors import CreditPool
from rlhf_scan.rollout import read_result
from rlhf_scan.server import HttpEngine, Settings
from rlhf_scan.server.schemas import _ERRORS

PAGE = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as address:
        yield address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def names(ray: Any, address: str, folder: Path) -> dict[str, Any]:
    """What the Python blocks leave behind."""
    names: dict[str, Any] = {}
    run_python(PAGE, "serving.md", address, folder, names)
    return names


def test_python_blocks(names: dict[str, Any]) -> None:
    want = LocalEngine().run(names["request"]).tensors["advantages"]
    assert len(names["results"]) == 8
    assert all(torch.equal(result.tensors["advantages"], want) for result in [names["result"], *names["results"]])


def test_curl(names: dict[str, Any], address: str, folder: Path) -> None:
    (block,) = [block for block in blocks(PAGE, "sh") if "curl" in block]
    answers = [
        json.loads(
            subprocess.run(["bash", "-c", line.replace(ADDRESS, address)], cwd=folder, capture_output=True, check=True, timeout=60).stdout
        )
        for line in block.splitlines()
    ]
    assert answers[0]["tensors"]["degenerate"] == [False, False, True]
    want = LocalEngine().run(names["request"]).tensors["advantages"]
    assert torch.equal(torch.tensor(answers[1]["tensors"]["advantages"]), want)


def test_compute(names: dict[str, Any], folder: Path) -> None:
    (block,) = [block for block in blocks(PAGE, "sh") if "compute" in block]
    for line in block.splitlines():
        command = line.split()
        said = subprocess.run([BIN / command[0], *command[1:]], cwd=folder, capture_output=True, check=True, timeout=120, text=True).stderr
    assert said == "rollout: discounted_returns takes no values, lam, which the file holds for gae: left out\n"
    assert read_result(folder / "returns.safetensors").tensors["returns"].tolist() == [1.0, 1.0, 1.0, -1.0, -1.0]
    assert set(read_result(folder / "credit.safetensors").tensors) == {"advantages", "returns"}


def test_every_operation_is_named() -> None:
    own = {entry.name for entry in served()} | {entry.name for entry in operations()}
    assert [name for name in own if f"`{name}`" not in PAGE] == []


def test_every_setting_and_its_default() -> None:
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \| (.*?) \|", PAGE, re.MULTILINE)
    table = {
        option: (variable, default)
        for options, variables, defaults in rows
        for option, variable, default in zip(options.split(", "), variables.split(", "), defaults.split(", "), strict=True)
    }
    wanted = {
        f"`--{field.name.replace('_', '-')}`": (f"`RLHF_SCAN_{field.name.upper()}`", str(field.default)) for field in fields(Settings)
    }
    assert table == wanted


def test_every_status() -> None:
    said = {int(status) for cell in re.findall(r"^\| (\d[\d, ]*) \|", PAGE, re.MULTILINE) for status in cell.split(", ")}
    assert said == {*_ERRORS, 404, 405, 500}


def test_every_metric_is_one(names: dict[str, Any], address: str) -> None:
    text = httpx.get(f"{address}/metrics").text
    metrics = re.findall(r"`(rlhf_scan_\w+)`", PAGE)
    assert len(metrics) == 4
    assert [metric for metric in metrics if metric not in text] == []


def test_defaults() -> None:
    client = {name: parameter.default for name, parameter in inspect.signature(HttpEngine).parameters.items()}
    assert "timeout={timeout}, retries={retries}, backoff={backoff})".format(**client) in PAGE
    pool = {name: parameter.default for name, parameter in inspect.signature(CreditPool).parameters.items()}
    assert pool["max_tokens_in_flight"] == 2**24
    for said in ("`retries` ({retries})", "**`timeout`** ({timeout:g} s)", "`start_timeout` ({start_timeout:g} s)"):
        assert said.format(**pool) in PAGE
