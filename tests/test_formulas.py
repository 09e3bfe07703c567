"""What a formula of one's own may be written like, and what is said of one that no backend could compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import device_of

from rlhf_scan import BackendError, CreditRequest, LocalEngine, coefficients
from rlhf_scan.coefficients import minimum as smaller
from rlhf_scan.coefficients import scanned_results
from rlhf_scan.errors import FormulaError
from rlhf_scan.estimators import Estimator, Rate, estimator, register, unregister
from rlhf_scan.naive import Numbers, Step, Tokens

pytestmark = pytest.mark.usefixtures("nan_filled")
TABLE = [1.0, 2.0]
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


def undefined(here: Any, following: Any, rates: Any) -> Any:
    return beyond(here[0]), rates[0]


def beyond(x: Any) -> Any:
    return x * not_there  # type: ignore[name-defined]  # noqa: F821


def calls_itself(here: Any, following: Any, rates: Any) -> Any:
    return calls_itself(here, following, rates)


def three_inputs(here: Any, following: Any, rates: Any) -> Any:
    rewards, _, _ = here
    return rewards, rates[0]


def a_alone(here: Any, following: Any, rates: Any) -> Any:
    return here[0]


def returns_nothing(here: Any, following: Any, rates: Any) -> Any:
    pass


def list_constant(here: Any, following: Any, rates: Any) -> Any:
    return here[0] * TABLE[0], rates[0]


def function_of_a_module(here: Any, following: Any, rates: Any) -> Any:
    return coefficients.exp(here[0]), rates[0]  # type: ignore[no-untyped-call]


def two_arguments(here: Any, rates: Any) -> Any:
    return here[0], rates[0]


def imports(here: Any, following: Any, rates: Any) -> Any:
    import math

    return math.exp(here[0]), rates[0]


def generator(here: Any, following: Any, rates: Any) -> Any:
    yield here[0]


def x_alone(here: Any, following: Any, x: Any, next_x: Any, rates: Any) -> Any:
    return x[0]


def closing_over(number: float) -> Callable[..., Any]:
    def closure(here: Any, following: Any, rates: Any) -> Any:
        return here[0] * number, rates[0]

    return closure


def outputs(
    backend: str, formula: Any, step_reward: Callable[[float], float], results: Any = scanned_results
) -> tuple[list[float], list[float]]:
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
            results=results,
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
        (undefined, "names of its module, got not_there in beyond; define or import it there"),
        (calls_itself, "not call itself, got calls_itself"),
    ],
    ids=["lambda", "partial", "closure", "built-in", "undefined", "recursion"],
)
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_what_it_may_not_be(formula: Any, words: str, backend: str) -> None:
    with pytest.raises(TypeError, match=r"^of_a_test: a formula must") as caught:
        outputs(backend, formula, abs)
    assert words in str(caught.value)
    assert isinstance(caught.value, BackendError)


@pytest.mark.parametrize(
    ("formula", "words"),
    [
        (three_inputs, "compile on the cpu backend, got test_formulas.three_inputs: .*expected 3, got 1.*test_formulas.py, line "),
        (a_alone, r"return a tuple of 2 numbers \(a and b\), got float32 from test_formulas.a_alone on the cpu backend"),
        (returns_nothing, r"return a tuple of 2 numbers \(a and b\), got none from"),
        (list_constant, "compile on the cpu backend, got test_formulas.list_constant: .*'TABLE' in globals, is not supported"),
        (
            function_of_a_module,
            "compile on the cpu backend, got test_formulas.function_of_a_module: Unknown attribute 'exp' of type Module.*, line ",
        ),
        (
            two_arguments,
            "compile on the cpu backend, got test_formulas.two_arguments: Signature mismatch: 3 argument types given, but function takes 2",
        ),
        (imports, "compile on the cpu backend, got test_formulas.imports: .*unsupported opcode"),
        (generator, r"return a tuple of 2 numbers \(a and b\), got float32 generator"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_numba_cannot_compile(formula: Any, words: str) -> None:
    with pytest.raises(FormulaError, match=f"(?s)^of_a_test: coefficients must {words}.*docs/estimators.md") as caught:
        outputs("cpu", formula, abs)
    assert "\n" not in str(caught.value)
    assert "nopython" not in str(caught.value)


def test_results_that_numba_cannot_compile() -> None:
    with pytest.raises(FormulaError, match=r"^of_a_test: results must return a tuple of 1 numbers \(returns\), got float32 from .*x_alone"):
        outputs("cpu", helper_with_a_default, abs, x_alone)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "got NoneType"),
        ({0: 1.0}, "got dict"),
        (([1.0, 2.0],), r"got \['list'\]"),
        (({0: 1.0, 1: 1.0}, {}), "got 2"),
        (({1: 1.0},), "got returns without token 0"),
    ],
)
def test_a_naive_loop_that_does_not_return_its_outputs(found: Any, words: str) -> None:
    register(replace(estimator("discounted_returns"), name="of_a_test", naive=lambda steps, rewards, gamma: found))
    try:
        with pytest.raises(FormulaError, match=rf"^of_a_test: naive must return a tuple of 1 {{token: number}} \(returns\), {words}"):
            LocalEngine("reference").run(CreditRequest("of_a_test", {"rewards": torch.zeros(2)}))
    finally:
        unregister("of_a_test")
