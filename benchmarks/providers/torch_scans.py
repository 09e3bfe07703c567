"""Plain torch over rows: a loop over time steps as CleanRL and TRL write it, and a scan in log2(T) steps through torch.compile.

Both take the formulas of the registry, over tensors, so that they do for every estimator what a user would write by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from rlhf_scan.backends.formulas import compiled_formula
from rlhf_scan.estimators import Estimator, estimator

from ..batches import Batch
from ..works import Work
from . import Prepared, Provider, register

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Rows:
    """What the formulas read, [B, T] each, in the order in which the steps are taken.

    Attributes:
        here: the estimator's inputs.
        following: what it reads of the next step.
        ends: where nothing follows.
        carries: what is carried into such a step; None: 0.
    """

    here: Tensors
    following: Tensors
    ends: Tensor
    carries: Tensor | None


@dataclass(frozen=True)
class Formulas:
    """An estimator's formulas over tensors, with its rates."""

    entry: Estimator
    rates: tuple[float, ...]
    coefficients: Callable[..., Any]
    results: Callable[..., Any]


def formulas(entry: Estimator, rates: tuple[float, ...]) -> Formulas:
    """Those of the registry, in torch."""
    own = {"minimum": lambda x, y: x.clamp(max=y), "exp": torch.exp}
    build, finish = (compiled_formula(formula, own, lambda plain: plain) for formula in (entry.coefficients, entry.results))
    return Formulas(entry, rates, build, finish)


def rates_of(batch: Batch) -> tuple[float, ...]:
    """Those of the first channel, with the registry's defaults."""
    rates = batch.estimator.rates
    return tuple(float(batch.rates.get(name, rates[name].default)) for name in batch.estimator.channels[0])  # type: ignore[arg-type]


def rows(entry: Estimator, tensors: dict[str, Tensor], ends: dict[str, Tensor]) -> Rows:
    """Shift, and put at every end what stands in there."""
    if entry.expectation is not None and entry.continuation is not None:
        values, probabilities = entry.expectation
        tensors = {**tensors, entry.continuation: (tensors[values] * tensors[probabilities]).sum(-1)}
    here = tuple(tensors[name] for name in entry.inputs)
    terminated, truncated = (None if name not in ends else ends[name] != 0 for name in ("terminated", "truncated"))
    stop = _either(terminated, truncated)
    last = torch.zeros_like(here[0], dtype=torch.bool)
    last[:, -1 if entry.reverse else 0] = True
    if stop is not None:
        last = last | (stop if entry.reverse else torch.nn.functional.pad(stop[:, :-1], (1, 0)))
    after = ends.get("bootstrap", torch.zeros_like(here[0])) if entry.continuation is None else tensors[entry.continuation]
    if terminated is not None and entry.reverse:
        after = torch.where(terminated, 0, after)
    following = [torch.where(last, after, torch.nn.functional.pad(tensors[name][:, 1:], (0, 1))) for name in entry.following]
    if entry.continuation is not None:
        following.append(after)
    return Rows(here, tuple(following), last, after if entry.end == "carry" else None)


def _either(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left | right


def solve_in_log_steps(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    """x_t = a_t + b_t * x_next by doubling (Hillis and Steele 1986)."""
    step, steps = 1, a.shape[1]
    while step < steps:
        if reverse:
            near_a, near_b, far_a, far_b = a[:, :-step], b[:, :-step], a[:, step:], b[:, step:]
            a = torch.cat([near_a + near_b * far_a, a[:, -step:]], 1)
            b = torch.cat([near_b * far_b, b[:, -step:]], 1)
        else:
            near_a, near_b, far_a, far_b = a[:, step:], b[:, step:], a[:, :-step], b[:, :-step]
            a = torch.cat([a[:, :step], near_a + near_b * far_a], 1)
            b = torch.cat([b[:, :step], near_b * far_b], 1)
        step *= 2
    return a


def coefficients(formulas: Formulas, found: Rows) -> tuple[Tensor, Tensor]:
    """(a, b) with b = 0 where nothing follows."""
    a, b = formulas.coefficients(found.here, found.following, formulas.rates)
    b = torch.full_like(a, b) if isinstance(b, float) else b
    if found.carries is not None:
        a = torch.where(found.ends, a + b * found.carries, a)
    return a, torch.where(found.ends, 0, b)


def results(formulas: Formulas, found: Rows, x: Tensor) -> Tensors:
    """The solved x to the outputs."""
    following = torch.nn.functional.pad(x[:, 1:], (0, 1)) if formulas.entry.reverse else torch.nn.functional.pad(x[:, :-1], (1, 0))
    channels = len(formulas.entry.channels)
    next_x = (torch.where(found.ends, 0, following),) * channels
    outputs: Tensors = formulas.results(found.here, found.following, (x,) * channels, next_x, formulas.rates)
    return outputs


def log_steps(batch: Batch) -> Prepared:
    """All of it in one function, compiled once for all batches of a shape."""
    batch = batch.rows()
    compiled, tensors, ends = _compiled(batch.estimator.name, rates_of(batch)), dict(batch.tensors), dict(batch.ends)
    return Prepared(lambda: compiled(tensors, ends), partial(_named, batch.estimator))


@lru_cache(maxsize=64)
def _compiled(estimator_name: str, rates: tuple[float, ...]) -> Callable[[dict[str, Tensor], dict[str, Tensor]], Tensors]:
    solving = formulas(estimator(estimator_name), rates)

    def whole(tensors: dict[str, Tensor], ends: dict[str, Tensor]) -> Tensors:
        found = rows(solving.entry, tensors, ends)
        return results(solving, found, solve_in_log_steps(*coefficients(solving, found), solving.entry.reverse))

    return torch.compile(whole, dynamic=False, fullgraph=True)


def loop(batch: Batch) -> Prepared:
    """Time step after time step, the batch side by side; what needs no loop is done before it."""
    batch = batch.rows()
    solving, tensors, ends = formulas(batch.estimator, rates_of(batch)), dict(batch.tensors), dict(batch.ends)
    reverse = solving.entry.reverse

    def run() -> Tensors:
        found = rows(solving.entry, tensors, ends)
        steps = list(zip(*(part.unbind(1) for part in coefficients(solving, found)), strict=True))
        x, solved = torch.zeros_like(steps[0][0]), []
        for a, b in reversed(steps) if reverse else steps:
            x = a + b * x
            solved.append(x)
        return results(solving, found, torch.stack(solved[::-1] if reverse else solved, 1))

    return Prepared(run, partial(_named, batch.estimator))


def _named(entry: Estimator, outputs: Tensors) -> dict[str, Tensor]:
    return dict(zip(entry.outputs, outputs, strict=True))


def refuses(work: Work) -> str | None:
    """Rows without masks are what such code is written for."""
    if work.mask or not work.length:
        return "it knows neither masks nor packs of different lengths"
    return None


def absent(device: str) -> str | None:
    """Torch is always there."""
    return None


register(Provider("torch.compile", log_steps, absent, refuses=refuses, about="a scan in log2(T) doubling steps, compiled for each shape"))
register(
    Provider(
        "torch loop",
        loop,
        absent,
        refuses=refuses,
        loop=True,
        about="a loop over time steps, as CleanRL and TRL write it, with all that needs no loop before it",
    )
)
