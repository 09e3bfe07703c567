"""All kernels of `ppo_advantages` compile for a GPU, and repeated calls launch what was compiled directly; no GPU is needed for either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json
import torch
from scripts import no_gpu
gpu = no_gpu.stand_in()
from rlhf_scan import Segments, ppo_advantages
from rlhf_scan.backends.triton_launch import Launcher

own = []
def by_triton(launcher, *given, _launch=Launcher._compile_and_launch):
    own.append(launcher)
    return _launch(launcher, *given)
Launcher._compile_and_launch = by_triton

flag, scores = torch.ones(3, 40, dtype=torch.bool), torch.zeros(3)
ends = {"stop_reasons": ["stop", "length", "stop"], "bootstrap": scores, "has_eos": flag, "missing_eos_penalty": 1.0}
per_token = {"terminated": flag, "truncated": flag, "bootstrap": torch.zeros(3, 40), "kl_coef": scores, "rewards": torch.zeros(3, 40)}
calls = {
    "the default": {},
    "trl": {"mask": flag, "preset": "trl", "whiten_rewards": True, "kl": "k3"},
    "openrlhf": {"mask": flag, "attention_mask": flag, "preset": "openrlhf", **ends},
    "slime": {"mask": flag, "preset": "slime", "nonfinite": "drop", **per_token},
    "in float64": {"dtype": torch.float64, "nonfinite": "zero", "score_clip": 3.0},
}
for name, options in calls.items():
    number = options.get("dtype", torch.float32)
    tensors = [torch.zeros(3, 40, dtype=number) for _ in range(3)]
    for time in range(3):
        gpu.launched.clear()
        own.clear()
        ppo_advantages(*tensors, scores, backend="triton", **options)
    print(json.dumps([name, gpu.launched, len(own)]))
"""


@pytest.fixture(scope="module")
def launches() -> dict[str, tuple[list[str], int]]:
    """By call: the kernels that it launched the third time, and how many of these Triton launched."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parent.parent
    finished = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=280, cwd=root)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return {name: (kernels, own) for name, kernels, own in map(json.loads, finished.stdout.splitlines())}


def test_every_kernel_compiles(launches: dict[str, tuple[list[str], int]]) -> None:
    ours = {"_locate", "_place", "_shape", "_kept", "_tile_statistics", "_sound_statistics", "_merge", "_whiten", "_fill_slots"}
    assert {kernel for kernels, _ in launches.values() for kernel in kernels} == {"scan_rows", "scan_pack", *ours}


def test_repeated_launches_are_direct(launches: dict[str, tuple[list[str], int]]) -> None:
    assert {name: own for name, (_, own) in launches.items()} == dict.fromkeys(launches, 0)


def test_the_kernels_of_the_default(launches: dict[str, tuple[list[str], int]]) -> None:
    assert launches["the default"][0] == ["_place", "scan_rows", "_sound_statistics", "_merge", "_whiten"]


DIFFERENT = """
import math
from triton.compiler import ASTSource
from rlhf_scan.backends import triton_core, triton_ppo, triton_scan

def found_again_as(kl, post_eos):
    stage = triton_ppo._shaping(kl, (math.inf, math.inf), False, False, False, False, post_eos)
    how = triton_core.How(*[None] * len(triton_core.How._fields))._replace(BEFORE=stage)
    return ASTSource(fn=triton_scan.scan_rows, signature={}, constexprs={("HOW",): how}).hash()

cases = [(kl, post_eos) for kl in ("k1", "k3") for post_eos in (False, True)]
assert len({found_again_as(*case) for case in cases}) == len(cases)
assert found_again_as("k1", True) == found_again_as("k1", True)
"""


def test_stages_of_one_name_are_not_taken_for_each_other() -> None:
    """What Triton keeps on disk it finds by a hash, which must tell apart functions that differ in their constants alone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run([sys.executable, "-c", DIFFERENT], env=environment, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr[-4000:]
