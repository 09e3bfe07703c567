"""The advantage blocks of TRL and verl, as they are installed or in `peers/`: their own code, taken out of its source. Both are loops over tokens."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from functools import lru_cache
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from ..batches import Batch
from ..works import Work
from . import Prepared, Provider, register
from .peers import on_path

RATES = {"gamma": 1.0, "lam": 0.95}
TRL_DEFAULTS = {**RATES, "kl_estimator": "k1", "kl_coef": 0.05, "whiten_rewards": False}
TRL_FILES = ("experimental/ppo/ppo_trainer.py", "trainer/ppo_trainer.py")
TRL_INPUTS = ("responses", "logprobs", "ref_logprobs", "values", "scores", "sequence_lengths", "args")
TRL_MASKS = ("sequence_lengths_p1", "padding_mask", "padding_mask_p1")
TRL_OUTPUTS = ("advantages", "returns", "rewards", "kl")


def trl_recursion(batch: Batch) -> Prepared:
    """The statements of `PPOTrainer.train` that our callback replaces; the whitening after them stays TRL's and is not timed."""
    from rlhf_scan.integrations import trl_block

    recursion, _ = trl_block.recursion()
    batch = batch.rows()
    args = SimpleNamespace(**{**RATES, **batch.rates})
    rewards, values = batch.tensors["rewards"], batch.tensors["values"]
    return Prepared(lambda: recursion(rewards, values, args), lambda found: {"advantages": found[0], "returns": found[1]})


def trl_steps(batch: Batch) -> Prepared:
    """Steps 4 to 6 of `PPOTrainer.train`: rewards, their whitening, advantages and returns. What it masks before them is not timed."""
    prepare, run = _trl_functions()
    mask = batch.ends["mask"]
    args = SimpleNamespace(**{**TRL_DEFAULTS, **batch.rates})
    arguments: dict[str, Any] = {**batch.tensors, "responses": mask.long(), "sequence_lengths": mask.sum(1) - 1, "args": args}
    masked = prepare(**arguments)
    arguments = {name: masked[name] for name in (*TRL_INPUTS, *TRL_MASKS)}
    return Prepared(lambda: run(**arguments), lambda found: {name: found[name] for name in TRL_OUTPUTS})


TRL: dict[str, Callable[[Batch], Prepared]] = {"gae": trl_recursion, "ppo_advantages": trl_steps}


@lru_cache(maxsize=1)
def _trl_functions() -> tuple[Callable[..., dict[str, Any]], Callable[..., dict[str, Any]]]:
    """What TRL masks before its step 4, and its steps 4 to 6, each as a function of local variables to all that it sets."""
    file = _trl_source()
    if file is None:
        raise ModuleNotFoundError("trl is not installed")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    invalid = _statements(tree, "INVALID_LOGPROB = ", "INVALID_LOGPROB = ")
    known = _functions(file, ("masked_mean", "masked_var", "masked_whiten"), {})
    masking = _statements(tree, "response_idxs = ", "values = torch.masked_fill(")
    steps = _statements(tree, "logr = ", "advantages = torch.masked_fill(")
    return _function(invalid + masking, TRL_INPUTS, known), _function(steps, (*TRL_INPUTS, *TRL_MASKS), known)


def _statements(tree: ast.Module, first: str, last: str) -> list[ast.stmt]:
    """Those of one block, wherever it is, from the first that starts like `first` to the next that starts like `last`."""
    for node in ast.walk(tree):
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and all(isinstance(part, ast.stmt) for part in body):
                texts = [ast.unparse(part) for part in body]
                start = next((i for i, text in enumerate(texts) if text.startswith(first)), None)
                if start is not None:
                    stop = next(i for i in range(start, len(texts)) if texts[i].startswith(last))
                    return cast(list[ast.stmt], body[start : stop + 1])
    raise LookupError(f"{first!r} stands nowhere in the source")


def _function(body: list[ast.stmt], arguments: Collection[str], known: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """These statements as a function that returns its local variables."""
    tree = ast.parse(f"def run({', '.join(arguments)}):\n    return locals()")
    cast(ast.FunctionDef, tree.body[0]).body[:0] = body
    scope = {"torch": torch, **known}
    exec(compile(tree, "<the advantage block of TRL>", "exec"), scope)
    return cast(Callable[..., dict[str, Any]], scope["run"])


def verl(batch: Batch) -> Prepared:
    """`compute_gae_advantage_return`. It whitens the advantages too (below 1 % of its time), so the returns are what is compared."""
    block = _verl_block()
    batch = batch.rows()
    rewards, values = batch.tensors["rewards"], batch.tensors["values"]
    mask = torch.ones_like(rewards)
    rates = {**RATES, **batch.rates}

    def run() -> tuple[Tensor, Tensor]:
        found: Any = block(rewards, values, mask, **rates)
        return found  # type: ignore[no-any-return]

    return Prepared(run, lambda found: {"returns": found[1]})


@lru_cache(maxsize=1)
def _verl_block() -> Any:
    """From the source of verl, which imports Ray and more as a whole."""
    root = _root("verl")
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


def _root(package: str) -> Path | None:
    """Where the package lies; None where it is not."""
    on_path()
    found = util.find_spec(package)
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def _trl_source() -> Path | None:
    root = _root("trl")
    return None if root is None else next((root / name for name in TRL_FILES if (root / name).is_file()), None)


def verl_is_absent(device: str) -> str | None:
    """Its source is enough."""
    return "verl is not installed; run scripts/fetch_peers.py" if _root("verl") is None else None


def refuses(work: Work) -> str | None:
    """They take rows of responses, without flags."""
    if work.mask or work.flags or not work.length:
        return "it takes equal rows without flags"
    return None


def trl_refuses(work: Work) -> str | None:
    """Of its recursion there is a copy; its steps are taken from where it is installed."""
    if work.estimator == "ppo_advantages":
        return "trl is not installed" if _trl_source() is None else None
    return refuses(work)


register(
    Provider(
        "TRL",
        lambda batch: TRL[batch.work.estimator](batch),
        lambda device: None,
        frozenset(TRL),
        trl_refuses,
        loop=True,
        about="the recursion of `PPOTrainer`'s advantage block; beside `ppo_advantages` its steps 4 to 6, whole",
    )
)
register(
    Provider(
        "verl",
        verl,
        verl_is_absent,
        frozenset({"gae"}),
        refuses,
        loop=True,
        about="`core_algos.compute_gae_advantage_return`, with its whitening",
    )
)
