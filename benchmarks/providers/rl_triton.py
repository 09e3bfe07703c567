"""rl-triton 0.1.3. Float32 rows on a GPU; flags are float32 tensors that it always reads, zeros where there are none.

Conventions that differ, and how each is bridged: it takes V(s_{t+1}) for lambda-returns, one `done` flag for forward scans, and bootstraps that are 0
wherever they are not read. Its Retrace puts 0 after the last step and the next episode's target after a truncated one, where ours has the
expected Q: advantages are compared elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..batches import Batch
from ..works import Work
from . import Prepared, Provider, register, unchanged
from .peers import WITH_RETURNS, importable, imported, needs_cuda, with_returns

Arguments = tuple[str, dict[str, Any]]


def _gae(batch: Batch) -> Arguments:
    return "compute_gae", _ends(batch) | {"rewards": batch.tensors["rewards"], "values": batch.tensors["values"], **_rates(batch, "lam")}


def _discounted_returns(batch: Batch) -> Arguments:
    return "compute_discounted_returns", _ends(batch) | {"rewards": batch.tensors["rewards"], **_rates(batch)}


def _lambda_returns(batch: Batch) -> Arguments:
    following = torch.nn.functional.pad(batch.tensors["values"][:, 1:], (0, 1))
    if "bootstrap" in batch.ends:
        following[:, -1] = batch.ends["bootstrap"][:, -1]
        following = torch.where(batch.flag("truncated") != 0, 0, following)
    return "compute_lambda_returns", _ends(batch) | {"rewards": batch.tensors["rewards"], "next_values": following, **_rates(batch, "lam")}


def _vtrace(batch: Batch) -> Arguments:
    tensors = batch.tensors
    logprobs = {"log_pi_target": tensors["target_logprobs"], "log_pi_behavior": tensors["behavior_logprobs"]}
    return "compute_vtrace", _ends(batch) | logprobs | {"rewards": tensors["rewards"], "values": tensors["values"], **_rates(batch)}


def _retrace(batch: Batch) -> Arguments:
    tensors = batch.tensors
    return "compute_retrace", {
        "action_probs_target": tensors["target_probs"],
        "action_probs_behavior": tensors["behavior_logprobs"].exp(),
        "q_values": tensors["q_values"],
        "next_q_values_all": tensors["next_q"],
        "actions": batch.actions,
        "rewards": tensors["rewards"],
        "terminateds": batch.flag("terminated"),
        "truncateds": batch.flag("truncated"),
        **_rates(batch, "lam"),
    }


def _eligibility_traces(batch: Batch) -> Arguments:
    return "compute_eligibility_traces", {"gradients": batch.tensors["inputs"], "dones": _done(batch), **_rates(batch, "lam")}


def _episodic_cumsum(batch: Batch) -> Arguments:
    return "compute_episodic_prefix_sum", {"inputs": batch.tensors["inputs"], "dones": _done(batch)}


CALLS: dict[str, Callable[[Batch], Arguments]] = {
    "gae": _gae,
    "discounted_returns": _discounted_returns,
    "lambda_returns": _lambda_returns,
    "vtrace": _vtrace,
    "retrace_from_policy": _retrace,
    "eligibility_traces": _eligibility_traces,
    "episodic_cumsum": _episodic_cumsum,
}


def _done(batch: Batch) -> Tensor:
    return (batch.flag("terminated") + batch.flag("truncated")).clamp(max=1)


def _ends(batch: Batch) -> dict[str, Any]:
    ends: dict[str, Any] = {"terminateds": batch.flag("terminated")}
    if "truncated" in batch.ends:
        ends |= {"truncateds": batch.flag("truncated"), "bootstrap_values": batch.ends.get("bootstrap")}
    return ends


def _rates(batch: Batch, *names: str) -> dict[str, float]:
    """Its defaults are not ours: all are given."""
    theirs = {"gamma": "gamma", "lam": "lambda_"}
    return {theirs[name]: batch.rates.get(name, batch.estimator.rates[name].default or 0.0) for name in ("gamma", *names)}


def prepare(batch: Batch) -> Prepared:
    """A call with everything that it takes converted before."""
    batch = batch.rows()
    name, arguments = CALLS[batch.estimator.name](batch)
    function = getattr(imported("rl_triton"), name)
    names = batch.estimator.outputs

    def outputs(found: Any) -> dict[str, Tensor]:
        return dict(zip(names, (found,) if isinstance(found, Tensor) else found, strict=False))  # its GAE returns advantages alone

    return Prepared(lambda: function(**arguments), outputs, _comparable(batch))


def _comparable(batch: Batch) -> Callable[[str, Tensor], Tensor]:
    if batch.estimator.name != "retrace_from_policy":
        return unchanged
    followed = batch.flag("truncated") == 0
    followed[:, -1] = False

    def where_conventions_agree(name: str, output: Tensor) -> Tensor:
        return output[followed] if name == "advantages" else output

    return where_conventions_agree


def refuses(work: Work) -> str | None:
    """Float32 rows without masks."""
    if work.mask or not work.length:
        return "it knows neither masks nor packs of different lengths"
    if work.dtype != torch.float32:
        return "it takes float32 alone"
    return None


ABSENT = needs_cuda(lambda: importable("rl_triton"))
register(Provider("rl-triton", prepare, ABSENT, frozenset(CALLS), refuses, about="of GAE it makes the advantages alone"))
register(Provider("rl-triton + returns", with_returns(prepare), ABSENT, frozenset({"gae"}), refuses, about=WITH_RETURNS))
