"""PufferLib 3.0's advantage kernel, compiled from its sources.

It is V-trace-like: with importance 1 and both clips 1 it is GAE. Its rewards and done flags lie one slot later than the values that they follow
(`rewards[t + 1]` belongs to `values[t]`), and it writes nothing at the last step, so that one is not compared; the step before it terminates in
these works, so that what stands in the last does not enter. It makes advantages alone.
"""

from __future__ import annotations

import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..works import Work
from . import Prepared, Provider, register
from .peers import WITH_RETURNS, folder, needs_cuda, reason, with_returns

SOURCES = ("pufferlib.cpp", "pufferlib.cu")


def build() -> None:
    """Compile it, unless that was done before."""
    if not _missing():
        _library()


def _library() -> Path:
    from torch.utils import cpp_extension

    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    made_before = Path(cpp_extension.get_default_build_root()) / "pufferlib-3.0.0"
    library = made_before / f"torch-{torch.__version__}-cuda-{torch.version.cuda}-{capability}.so"
    if library.is_file():
        return library
    made_before.mkdir(parents=True, exist_ok=True)
    # Elsewhere first, so that nobody loads half a library or waits for a process that was killed.
    with tempfile.TemporaryDirectory(dir=made_before) as made:
        os.environ["TORCH_CUDA_ARCH_LIST"] = capability
        cpp_extension.load("_C", [str(file) for file in _files()], ["-O3"], ["-O3"], build_directory=made, is_python_module=False)
        os.replace(Path(made) / "_C.so", library)
    return library


@lru_cache(maxsize=1)
def absent() -> str | None:
    """Why it is not there or does not compile, if so."""
    missing = _missing()
    if missing:
        return f"{missing[0]} is not there; run scripts/fetch_peers.py"
    try:
        library = _library()
        if not hasattr(torch.ops.pufferlib, "compute_puff_advantage"):  # compiling it here has loaded it
            torch.ops.load_library(str(library))
    except Exception as error:  # no compiler, another CUDA: whatever it is, it is absent
        return f"it does not compile ({reason(error)})"
    return None


def _files() -> list[Path]:
    return [folder() / "PufferLib" / name for name in SOURCES]


def _missing() -> list[Path]:
    return [file for file in _files() if not file.is_file()]


def prepare(batch: Batch) -> Prepared:
    """The kernel, with its buffers laid out as its own trainer keeps them."""
    batch = batch.rows()
    values = batch.tensors["values"]
    rewards, dones = (torch.nn.functional.pad(tensor[:, :-1], (1, 0)) for tensor in (batch.tensors["rewards"], batch.flag("terminated")))
    importance, advantages = torch.ones_like(values), torch.full_like(values, torch.nan)
    gamma, lam = (batch.rates[name] for name in ("gamma", "lam"))

    def run() -> Tensor:
        torch.ops.pufferlib.compute_puff_advantage(values, rewards, dones, importance, advantages, gamma, lam, 1.0, 1.0)
        return advantages

    return Prepared(run, lambda found: {"advantages": found}, _without_the_last_step)


def _without_the_last_step(name: str, output: Any) -> Any:
    return output[:, :-1]


def refuses(work: Work) -> str | None:
    """Float32 rows with done flags."""
    if work.dtype != torch.float32 or work.packed or work.flags != "terminated":
        return "it takes float32 rows with done flags"
    return None


for name, prepared, about in (
    ("PufferLib", prepare, "3.0.0; it makes the advantages alone"),
    ("PufferLib + returns", with_returns(prepare), WITH_RETURNS),
):
    register(Provider(name, prepared, needs_cuda(absent), frozenset({"gae"}), refuses, queued=True, build=build, about=about))
