"""The registry: what an estimator is, and the ones that there are. Everything else (backends, requests, HTTP, Ray, CLI) reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import coefficients, naive
from .errors import InputError


@dataclass(frozen=True, eq=False)
class Estimator:
    """One credit-assignment estimator: a coefficient builder, a naive loop, and the names of what goes in and out.

    Attributes:
        name: the public name, as in ``rlhf_scan.<name>``, ``POST /v1/<name>`` and ``CreditRequest(op=<name>)``.
        summary: its recurrence in one line.
        inputs: token-level tensors, in the order in which builder and naive loop take them.
        outputs: names of the results, in order.
        rates: gamma-like parameters and their defaults, each a number in [0, 1], a tensor per segment or one per token; None is "not given".
        channels: for each scan that shares the inputs, the rates its builder takes. A channel with a rate that is None is not run; its
            results are then the first channel's.
        coefficients: the builder, see `rlhf_scan.coefficients`.
        results: turns the solved channels into the outputs.
        naive: the definition, a plain loop over the steps of one segment, see `rlhf_scan.naive`.
        following: the inputs whose value at the next step the builder reads; `bootstrap` stands in where the segment ends.
        end: what follows the last step. "value": `bootstrap` stands in for the inputs in `following`. "carry": it is the x that follows.
            "initial": likewise, but only per segment, where the scan starts. "none": no bootstrap is taken.
        reverse: backward in time.
        served: whether requests (CLI, HTTP, Ray) may name it.
    """

    name: str
    summary: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    channels: tuple[tuple[str, ...], ...]
    coefficients: Callable[..., Any]
    results: Callable[..., Any]
    naive: Callable[..., Any]
    rates: Mapping[str, float | None] = field(default_factory=dict)
    following: tuple[str, ...] = ()
    end: str = "value"
    reverse: bool = True
    served: bool = True


_REGISTRY: dict[str, Estimator] = {}


def register(estimator: Estimator) -> Estimator:
    """Make `estimator` known to every backend, engine and door."""
    if estimator.name in _REGISTRY:
        raise InputError(f"register: an estimator named {estimator.name!r} exists; choose another name or unregister it first")
    _REGISTRY[estimator.name] = estimator
    return estimator


def unregister(name: str) -> None:
    """Forget an estimator (for tests of new ones)."""
    _REGISTRY.pop(name, None)


def estimator(name: str) -> Estimator:
    """The estimator of that name; InputError lists the known ones."""
    found = _REGISTRY.get(name)
    if found is None:
        raise InputError(f"op must be one of {sorted(e.name for e in served())}, got {name!r}; choose one of these")
    return found


def served() -> Iterator[Estimator]:
    """The estimators that requests may name."""
    return (entry for entry in _REGISTRY.values() if entry.served)


register(
    Estimator(
        name="gae",
        summary="A_t = delta_t + gamma * lam * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t; returns = A_t + V_t",
        inputs=("rewards", "values"),
        outputs=("advantages", "returns"),
        rates={"gamma": 1.0, "lam": 0.95, "lam_value": None},
        channels=(("gamma", "lam"), ("gamma", "lam_value")),
        coefficients=coefficients.gae_coefficients,
        results=coefficients.gae_results,
        naive=naive.gae,
        following=("values",),
    )
)
register(
    Estimator(
        name="discounted_returns",
        summary="G_t = r_t + gamma * G_{t+1}",
        inputs=("rewards",),
        outputs=("returns",),
        rates={"gamma": 1.0},
        channels=(("gamma",),),
        coefficients=coefficients.discounted_returns_coefficients,
        results=coefficients.scanned_results,
        naive=naive.discounted_returns,
        end="carry",
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
            reverse=_reverse,
            served=False,
        )
    )
