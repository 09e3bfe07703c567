"""What the Triton kernels do at the tile sizes that a GPU gets: in the interpreter tiles are small otherwise, so that short inputs have many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).parent
PROGRAM = """
import sys
import pytest
from rlhf_scan.backends import tiles
tiles.WIDTH, tiles.MEDIUM, tiles.SHORT, tiles.GROUP, tiles.PROGRAM = 2048, 512, 128, 32, 256
from rlhf_scan.backends import triton_map
assert triton_map.WIDTH == tiles.WIDTH
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("file", "which"),
    [("test_cases.py", "triton"), ("test_ppo_faults.py", "triton and advantages"), ("test_zero_decay.py", "triton and bad_number")],
)
def test_others_pass_with_them(file: str, which: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS / file), "-k", which],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
        cwd=TESTS.parent,
    )
    assert finished.returncode == 0, finished.stdout[-4000:]
    assert " passed" in finished.stdout
