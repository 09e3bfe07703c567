"""The advantage blocks of TRL and verl, as they are installed or in `peers/`. Both are loops over tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..works import Work
from . import Prepared, Provider, register
from .peers import importable, imported

VERL = "verl.trainer.ppo.core_algos"
GAE = frozenset({"gae"})


def trl(batch: Batch) -> Prepared:
    """The statements of `PPOTrainer.train` that our callback replaces; the whitening after them stays TRL's and is not timed."""
    from rlhf_scan.integrations import trl_block

    recursion, _ = trl_block.recursion()
    batch = batch.rows()
    args = SimpleNamespace(**{"gamma": 1.0, "lam": 0.95, **batch.rates})
    rewards, values = batch.tensors["rewards"], batch.tensors["values"]
    return Prepared(lambda: recursion(rewards, values, args), lambda found: {"advantages": found[0], "returns": found[1]})


def verl(batch: Batch) -> Prepared:
    """`compute_gae_advantage_return`. It whitens the advantages too (below 1 % of its time), so the returns are what is compared."""
    block = imported(VERL).compute_gae_advantage_return
    batch = batch.rows()
    rewards, values = batch.tensors["rewards"], batch.tensors["values"]
    mask = torch.ones_like(rewards)
    rates = {"gamma": 1.0, "lam": 0.95, **batch.rates}

    def run() -> tuple[Tensor, Tensor]:
        found: Any = block(rewards, values, mask, **rates)
        return found  # type: ignore[no-any-return]

    return Prepared(run, lambda found: {"returns": found[1]})


def refuses(work: Work) -> str | None:
    """They take rows of responses, without flags."""
    if work.mask or work.flags or not work.length:
        return "it takes equal rows without flags"
    return None


register(
    Provider(
        "TRL",
        trl,
        lambda device: None,
        GAE,
        refuses,
        loop=True,
        about="the recursion of `PPOTrainer`'s advantage block",
    )
)
register(
    Provider(
        "verl",
        verl,
        lambda device: importable(VERL),
        GAE,
        refuses,
        loop=True,
        about="`core_algos.compute_gae_advantage_return`, with its whitening",
    )
)
