"""torchrl's vectorized functions. It keeps time in the last but one dimension, and takes V(s_{t+1}) of every step beside V(s_t)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..works import Work
from . import Prepared, Provider, register
from .peers import importable, imported
from .torch_scans import rates_of, rows

MODULE = "torchrl.objectives.value.functional"
VECTORIZED = frozenset({"gae", "discounted_returns", "lambda_returns"})


def prepare(batch: Batch) -> Prepared:
    """A call with everything that it takes laid out before."""
    functional = imported(MODULE)
    torch.backends.cudnn.allow_tf32 = False  # torch's default gives its results errors of 0.004 to 0.01
    batch, entry = batch.rows(), batch.estimator
    tensors = batch.tensors
    found = rows(entry, dict(tensors), dict(batch.ends))
    # Both stand beside every step; returns alone have no values, and only the bootstrap at an end is read.
    following = found.following[0] if found.following else found.carries
    terminated = batch.flag("terminated") != 0
    common: dict[str, Any] = {
        "next_state_value": following,
        "reward": tensors["rewards"],
        "done": terminated | (batch.flag("truncated") != 0),
        "terminated": terminated,
    }
    if "values" in tensors and entry.name != "lambda_returns":
        common["state_value"] = tensors["values"]
    common = {name: tensor[..., None] for name, tensor in common.items()}
    function, leading = _function(functional, batch)

    def run() -> Any:
        return function(*leading, **common)

    return Prepared(run, lambda outputs: _named(entry.name, outputs))


def _function(functional: Any, batch: Batch) -> tuple[Any, list[Any]]:
    """The function, and its arguments before the common ones."""
    gamma, *rest = rates_of(batch)
    if batch.estimator.name == "vtrace":
        logprobs = (batch.tensors[name][..., None] for name in ("target_logprobs", "behavior_logprobs"))
        return functional.vtrace_advantage_estimate, [gamma, *logprobs]
    names = {
        "gae": "vec_generalized_advantage_estimate",
        "lambda_returns": "vec_td_lambda_return_estimate",
        "discounted_returns": "vec_td1_return_estimate",
    }
    return getattr(functional, names[batch.estimator.name]), [gamma, *rest]


def _named(estimator: str, outputs: Any) -> dict[str, Tensor]:
    if isinstance(outputs, torch.Tensor):
        return {"returns": outputs.squeeze(-1)}
    advantages, others = outputs
    return {"advantages": advantages.squeeze(-1), "targets" if estimator == "vtrace" else "returns": others.squeeze(-1)}


def refuses(work: Work) -> str | None:
    """Rows in one precision, and V-trace without lambda."""
    if work.mask or not work.length:
        return "it knows neither masks nor packs of different lengths"
    if work.estimator == "vtrace" and work.rates.get("lam", 1.0) != 1.0:
        return "its V-trace has no lambda"
    return None


def absent(device: str) -> str | None:
    """It runs on both devices."""
    return importable(MODULE)


register(Provider("torchrl", prepare, absent, VECTORIZED, refuses, about="its vectorized functions, with convolutions in float32"))
register(Provider("torchrl loop", prepare, absent, frozenset({"vtrace"}), refuses, loop=True, about="its V-trace, a loop over time steps"))
