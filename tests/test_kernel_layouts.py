"""The Triton kernels compile for a GPU, and each scan gives a thread one element along the scanned dimension.

That fixes the order of the sums, and on it rests the promise that a segment has the same bits wherever it lies. What the compiler chose can be
read on a machine without a GPU.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPILER = [sys.executable, "-m", "tests.offline_compiler"]
ROOT = Path(__file__).parent.parent
WITHOUT_SCANS = {"rows of 8"}  # a run of tokens is composed within a thread


@pytest.fixture(scope="module")
def launches() -> list[dict[str, Any]]:
    """Every launch of every variant, compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(COMPILER, env=environment, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_every_kind_of_launch_was_compiled(launches: list[dict[str, Any]]) -> None:
    assert len({launch["variant"] for launch in launches}) == len(launches) == 23
    assert {launch["variant"] for launch in launches if not launch["scans"]} == WITHOUT_SCANS
    found = {launch["variant"]: len(launch["scans"]) for launch in launches}
    # Of tiles within their segment, of other tiles, of medium and of short segments: the estimator's scan; and for tiles those of the tiles and
    # the groups before them.
    assert found["pack"] == 3 + 3 + 1 + 1
    # With flags all tiles are alike; a scan of the masked tokens, and all but that for each lambda.
    assert found["pack, mask and flag"] == (1 + 3) + (1 + 1) + (1 + 1)
    assert found["pack, everything"] == (1 + 2 * 3) + (1 + 2) + (1 + 2)


def test_a_thread_holds_one_element_of_a_scan(launches: list[dict[str, Any]]) -> None:
    for launch in launches:
        for scan in launch["scans"]:
            sizes = re.search(r"sizePerThread = \[([\d, ]+)\]", scan["layout"])
            assert sizes, f"{launch['variant']}: the scan's layout is not a blocked one: {scan['layout']}"
            per_thread = [int(size) for size in sizes[1].split(",")]
            assert per_thread[scan["axis"]] == 1, f"{launch['variant']}: {scan['layout']}"


def test_the_interpreter_is_refused() -> None:
    finished = subprocess.run(COMPILER, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert finished.returncode == 1
    assert "unset TRITON_INTERPRET" in finished.stderr
