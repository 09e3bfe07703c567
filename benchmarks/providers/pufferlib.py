"""PufferLib 3.0's advantage kernel, compiled from its sources.

It is V-trace-like: with importance 1 and both clips 1 it is GAE. Its rewards and done flags lie one slot later than the values that they follow
(`rewards[t + 1]` belongs to `values[t]`), and it writes nothing at the last step, so that one is not compared; the step before it terminates in
these works, so that what stands in the last does not enter. It makes advantages alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..works import Work
from . import Prepared, Provider, register
from .peers import folder, needs_cuda

SOURCES = ("pufferlib.cpp", "pufferlib.cu")


@lru_cache(maxsize=1)
def absent() -> str | None:
    """Compile it; why that does not work, if it does not."""
    files = [folder() / "PufferLib" / name for name in SOURCES]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        return f"{missing[0]} is not there; run scripts/fetch_peers.py"
    from torch.utils import cpp_extension

    try:
        cpp_extension.load("_C", [str(file) for file in files], extra_cflags=["-O3"], extra_cuda_cflags=["-O3"])
    except Exception as error:  # no compiler, another CUDA: whatever it is, it is absent
        return f"it does not compile ({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'})"
    return None


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


register(
    Provider(
        "PufferLib", prepare, needs_cuda(absent), frozenset({"gae"}), refuses, queued=True, about="3.0.0; it makes the advantages alone"
    )
)
