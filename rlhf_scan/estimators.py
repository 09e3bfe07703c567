"""The registry: the estimators that there are. Everything else (backends, requests, HTTP, Ray, CLI) reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import coefficients, naive
from .errors import InputError
from .estimator_checks import check_estimator
from .estimator_class import Estimator as Estimator
from .estimator_class import Rate as Rate

_REGISTRY: dict[str, Estimator] = {}


def register(estimator: Estimator) -> Estimator:
    """Make `estimator` known to every backend, engine and door.

    Raises:
        InputError: its name is taken, or what describes it makes no sense; the message names what.
    """
    if not isinstance(estimator, Estimator):
        raise InputError(f"register: estimator must be an Estimator, got {type(estimator).__name__}; make one")
    check_estimator(estimator)
    if estimator.name in _REGISTRY:
        raise InputError(f"register: an estimator named {estimator.name!r} exists; choose another name or unregister it first")
    _REGISTRY[estimator.name] = estimator
    return estimator


def unregister(name: str) -> None:
    """Forget an estimator, so that another may have its name (in a notebook, in tests); an unknown name is no error."""
    _REGISTRY.pop(name, None)


def estimator(name: str) -> Estimator:
    """The estimator of that name; InputError lists the known ones."""
    found = _REGISTRY.get(name) if isinstance(name, str) else None
    if found is None:
        raise _unknown(name)
    return found


def served_estimator(name: str) -> Estimator:
    """The estimator of that name, if requests may name it."""
    found = estimator(name)
    if not found.served:
        raise _unknown(name)
    return found


def _unknown(name: object) -> InputError:
    return InputError(f"op must be one of {sorted(entry.name for entry in served())}, got {name!r}; choose one of these")


def served() -> Iterator[Estimator]:
    """The estimators that requests may name."""
    return (entry for entry in _REGISTRY.values() if entry.served)


def written_with(formula: Callable[..., Any]) -> list[str]:
    """The names of the estimators that have `formula` as builder or epilogue."""
    return [entry.name for entry in _REGISTRY.values() if formula in (entry.coefficients, entry.results)]


_GAMMA = Rate(1.0, meaning="discount per step")
_LAM = Rate(0.95, meaning="trace parameter per step")
_LOGPROBS = ("behavior_logprobs", "target_logprobs")


def _is_cut(tensors: Mapping[str, Tensor]) -> Tensor:
    """Where the log-ratio, in the precision in which it is formed, is cut."""
    behavior, target = (tensors[name].to(torch.promote_types(tensors[name].dtype, torch.float32)) for name in _LOGPROBS)
    return target - behavior > coefficients.LARGEST_LOG_RATIO


_CUT = {"log_ratios_cut": _is_cut}

register(
    Estimator(
        name="gae",
        summary="A_t = delta_t + gamma * lam * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t; returns = A_t + V_t",
        inputs=("rewards", "values"),
        outputs=("advantages", "returns"),
        rates={"gamma": _GAMMA, "lam": _LAM, "lam_value": Rate(None, meaning="trace parameter of the returns alone")},
        channels=(("gamma", "lam"), ("gamma", "lam_value")),
        coefficients=coefficients.gae_coefficients,
        results=coefficients.gae_results,
        naive=naive.gae,
        following=("values",),
        fades_by_rates=True,
    )
)
register(
    Estimator(
        name="discounted_returns",
        summary="G_t = r_t + gamma * G_{t+1}",
        inputs=("rewards",),
        outputs=("returns",),
        rates={"gamma": _GAMMA},
        channels=(("gamma",),),
        coefficients=coefficients.discounted_returns_coefficients,
        results=coefficients.scanned_results,
        naive=naive.discounted_returns,
        end="carry",
        fades_by_rates=True,
    )
)
register(
    Estimator(
        name="lambda_returns",
        summary="G_t = r_t + gamma * ((1 - lam) * V_{t+1} + lam * G_{t+1})",
        inputs=("rewards", "values"),
        outputs=("returns",),
        rates={"gamma": _GAMMA, "lam": _LAM},
        channels=(("gamma", "lam"),),
        coefficients=coefficients.lambda_returns_coefficients,
        results=coefficients.scanned_results,
        naive=naive.lambda_returns,
        following=("values",),
        end="carry",
        fades_by_rates=True,
    )
)
register(
    Estimator(
        name="vtrace",
        summary="target_t = V_t + rho_t * delta_t + gamma * lam * c_t * (target_{t+1} - V_{t+1}), rho = min(rho_bar, ratio), c = min(c_bar, ratio)",
        inputs=("rewards", "values", *_LOGPROBS),
        outputs=("targets", "advantages"),
        rates={
            "gamma": _GAMMA,
            "lam": Rate(1.0, meaning="trace parameter per step"),
            "rho_bar": Rate(1.0, math.inf, "largest importance ratio in delta and advantage"),
            "c_bar": Rate(1.0, math.inf, "largest importance ratio in the trace"),
        },
        channels=(("gamma", "lam", "rho_bar", "c_bar"),),
        coefficients=coefficients.vtrace_coefficients,
        results=coefficients.vtrace_results,
        naive=naive.vtrace,
        minus_infinity=("target_logprobs",),
        counts=_CUT,
        following=("values",),
    )
)
_RETRACE = Estimator(
    name="retrace",
    summary="target_t = r_t + gamma * E[Q(s_{t+1}, .)] + gamma * lam * c_{t+1} * (target_{t+1} - Q_{t+1}), c = min(c_bar, ratio)",
    inputs=("rewards", "q_values", "expected_next_q", *_LOGPROBS),
    outputs=("targets", "advantages"),
    rates={
        "gamma": _GAMMA,
        "lam": Rate(1.0, meaning="trace parameter per step"),
        "c_bar": Rate(1.0, math.inf, "largest importance ratio in the trace"),
        "rho_bar": Rate(1.0, math.inf, "largest importance ratio in the advantage"),
    },
    channels=(("gamma", "lam", "c_bar", "rho_bar"),),
    coefficients=coefficients.retrace_coefficients,
    results=coefficients.retrace_results,
    naive=naive.retrace,
    following=("q_values", *_LOGPROBS),
    rates_following=("c_bar",),
    continuation="expected_next_q",
    minus_infinity=("target_logprobs",),
    counts=_CUT,
    end="none",
)
register(_RETRACE)
register(
    replace(
        _RETRACE,
        name="retrace_from_policy",
        summary="Retrace(lambda) with E[Q(s_{t+1}, .)] = sum over actions of target_probs * next_q",
        expectation=("next_q", "target_probs"),
        choices={"target_logprobs": ("policy_probs", "actions")},
    )
)
register(
    Estimator(
        name="eligibility_traces",
        summary="e_t = x_t + gamma * lam * e_{t-1}",
        inputs=("inputs",),
        outputs=("traces",),
        rates={"gamma": _GAMMA, "lam": _LAM},
        channels=(("gamma", "lam"),),
        coefficients=coefficients.eligibility_traces_coefficients,
        results=coefficients.scanned_results,
        naive=naive.eligibility_traces,
        end="initial",
        reverse=False,
        fades_by_rates=True,
    )
)
register(
    Estimator(
        name="episodic_cumsum",
        summary="s_t = x_t + s_{t-1}, from 0 in each episode",
        inputs=("inputs",),
        outputs=("sums",),
        channels=((),),
        coefficients=coefficients.episodic_cumsum_coefficients,
        results=coefficients.scanned_results,
        naive=naive.episodic_cumsum,
        end="initial",
        takes=("terminated",),
        starts=True,
        reverse=False,
        fades_by_rates=True,
    )
)
for _name, _reverse in (("linear_scan", False), ("linear_scan_reverse", True)):
    register(
        Estimator(
            name=_name,
            summary="x_t = a_t + b_t * x_next",
            inputs=("a", "b"),
            outputs=("x",),
            channels=((),),
            coefficients=coefficients.linear_scan_coefficients,
            results=coefficients.scanned_results,
            naive=naive.linear_scan,
            end="initial",
            takes=(),
            reverse=_reverse,
            served=False,
        )
    )
