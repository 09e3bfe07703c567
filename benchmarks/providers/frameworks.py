"""The advantage blocks of TRL and verl, as they are installed or in `peers/`. Both are loops over tokens."""

from __future__ import annotations

import ast
from collections.abc import Collection
from functools import lru_cache
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..works import Work
from . import Prepared, Provider, register
from .peers import on_path

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
    block = _verl_block()
    batch = batch.rows()
    rewards, values = batch.tensors["rewards"], batch.tensors["values"]
    mask = torch.ones_like(rewards)
    rates = {"gamma": 1.0, "lam": 0.95, **batch.rates}

    def run() -> tuple[Tensor, Tensor]:
        found: Any = block(rewards, values, mask, **rates)
        return found  # type: ignore[no-any-return]

    return Prepared(run, lambda found: {"returns": found[1]})


@lru_cache(maxsize=1)
def _verl_block() -> Any:
    """From the source of verl, which imports Ray and more as a whole."""
    root = _verl_root()
    if root is None:
        raise ModuleNotFoundError("verl is not installed")
    whitening = ("masked_sum", "masked_mean", "masked_var", "masked_whiten")
    functional = SimpleNamespace(**_functions(root / "utils" / "torch_functional.py", whitening, {}))
    name = "compute_gae_advantage_return"
    return _functions(root / "trainer" / "ppo" / "core_algos.py", (name,), {"verl_F": functional})[name]


def _functions(file: Path, names: Collection[str], known: dict[str, Any]) -> dict[str, Any]:
    """Functions of a module by themselves, without their decorators."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in wanted:
        node.decorator_list = []
    scope = {"torch": torch, **known}
    exec(compile(ast.Module([*wanted], []), str(file), "exec"), scope)
    return {name: scope[name] for name in names}


def _verl_root() -> Path | None:
    on_path()
    found = util.find_spec("verl")
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def verl_is_absent(device: str) -> str | None:
    """Its source is enough."""
    return "verl is not installed; run scripts/fetch_peers.py" if _verl_root() is None else None


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
        verl_is_absent,
        GAE,
        refuses,
        loop=True,
        about="`core_algos.compute_gae_advantage_return`, with its whitening",
    )
)
