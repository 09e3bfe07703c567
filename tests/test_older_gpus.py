"""Kernels use what Hopper brought only on a GPU that has it; no GPU is needed to compile them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAM = """
import json, sys
import torch
from triton.compiler import CompiledKernel
from scripts import no_gpu
no_gpu.stand_in(int(sys.argv[1]))
from rlhf_scan import Segments, gae
from rlhf_scan.backends.triton_launch import Launcher

found = {}
def noted(kernel, _run=CompiledKernel.run.fget):
    found[kernel.metadata.name] = [kernel.metadata.launch_pdl, *(word in kernel.asm["ptx"] for word in ("griddepcontrol", "cp.async.bulk"))]
    return _run(kernel)
CompiledKernel.run = property(noted)
tokens = torch.zeros(2, 5000)
gae(tokens, tokens, backend="triton")
gae(tokens.flatten(), tokens.flatten(), segments=Segments.from_lengths([9000, 1000]), backend="triton")
print(json.dumps(found))
"""


@pytest.mark.parametrize(("capability", "hopper"), [(80, False), (90, True)])
def test_a_kernel_compiles_for(capability: int, hopper: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, root = [sys.executable, "-c", PROGRAM, str(capability)], Path(__file__).parent.parent
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=root)
    assert finished.returncode == 0, finished.stderr[-4000:]
    kernels = json.loads(finished.stdout)
    scans = {"scan_rows": [hopper] * 3, "scan_pack": [hopper] * 3}
    assert kernels == scans | {name: [hopper, hopper, False] for name in ("_clear", "_fill_slots")}
