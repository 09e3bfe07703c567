"""What a formula of one's own may be written like, and what is said of one that no backend could compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from conftest import device_of

from rlhf_scan import CreditRequest, LocalEngine
from rlhf_scan.coefficients import minimum as smaller
from rlhf_scan.coefficients import scanned_results
from rlhf_scan.estimators import Estimator, Rate, register, unregister
from rlhf_scan.naive import Numbers, Step, Tokens

pytestmark = pytest.mark.usefixtures("nan_filled")
tl = 0.25  # a name that Triton's users give its language


def scaled(x: Any, factor: Any = 2.0) -> Any:
    return x * factor


def maximum(x: Any, y: Any) -> Any:
    """Not what a backend has by that name."""
    return x + 2 * y


def kept(function: Any) -> Any:
    return function


def imported_by_another_name(here: Any, following: Any, rates: Any) -> Any:
    return smaller(here[0], 0.5), rates[0]


def helper_with_a_default(here: Any, following: Any, rates: Any) -> Any:
    return scaled(here[0]) + scaled(here[0], 0.5), rates[0]


def own_function_and_constant(here: Any, following: Any, rates: Any) -> Any:
    return maximum(here[0], tl), rates[0]


@kept
def annotated_within(here: Any, following: Any, rates: Any) -> Any:
    if tl > 0:
        bonus: float
    bonus: Any = here[0] * 3.0
    return bonus, rates[0]


def built_in(here: Any, following: Any, rates: Any) -> Any:
    return abs(here[0]), rates[0]


def closing_over(number: float) -> Callable[..., Any]:
    def closure(here: Any, following: Any, rates: Any) -> Any:
        return here[0] * number, rates[0]

    return closure


def outputs(backend: str, formula: Any, step_reward: Callable[[float], float]) -> tuple[list[float], list[float]]:
    """What the backend makes of it, and what a loop of the same does."""
    rewards = [1.0, -2.0, 0.25, 4.0]

    def naive(steps: Sequence[Step], rewards: Tokens, *, gamma: Tokens) -> tuple[Numbers]:
        returns: Numbers = {}
        for step in steps:
            t = step.token
            returns[t] = step_reward(rewards[t]) + gamma[t] * (step.end if step.next is None else returns[step.next])
        return (returns,)

    register(
        Estimator(
            name="of_a_test",
            summary="",
            inputs=("rewards",),
            outputs=("returns",),
            rates={"gamma": Rate(0.5)},
            channels=(("gamma",),),
            coefficients=formula,
            results=scanned_results,
            naive=naive,
            end="carry",
        )
    )
    try:
        found = [
            LocalEngine(name)
            .run(CreditRequest("of_a_test", {"rewards": torch.tensor(rewards, device=device_of(name))}))
            .tensors["returns"]
            .tolist()
            for name in (backend, "reference")
        ]
    finally:
        unregister("of_a_test")
    return found[0], found[1]


@pytest.mark.parametrize(
    ("formula", "step_reward"),
    [
        (imported_by_another_name, lambda reward: min(reward, 0.5)),
        (helper_with_a_default, lambda reward: reward * 2.5),
        (own_function_and_constant, lambda reward: reward + 0.5),
        (annotated_within, lambda reward: reward * 3.0),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_formula_may_be(formula: Any, step_reward: Callable[[float], float], backend: str) -> None:
    found, expected = outputs(backend, formula, step_reward)
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (lambda here, following, rates: (here[0], rates[0]), "a plain Python function, made by def, got <function <lambda>"),
        (partial(built_in, following=None), "a plain Python function, made by def, got functools.partial"),
        (closing_over(2.0), "its arguments and its module alone, got closing_over.<locals>.closure, which uses number of a function"),
        (built_in, "exp, minimum and functions of its module, got abs in built_in"),
    ],
    ids=["lambda", "partial", "closure", "built-in"],
)
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_what_it_may_not_be(formula: Any, words: str, backend: str) -> None:
    with pytest.raises(TypeError, match="a formula must") as caught:
        outputs(backend, formula, abs)
    assert words in str(caught.value)
