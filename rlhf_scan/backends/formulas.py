"""How a backend compiles the formulas of `rlhf_scan.coefficients`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def compiled_formula(
    formula: Callable[..., Any],
    own: Mapping[str, Any],
    compile: Callable[[Callable[..., Any]], Any],
    constant: Callable[[float], Any] = float,
) -> Any:
    """`formula` as `compile` makes it.

    The backend's `own` functions stand in place of those names; what else it calls is compiled too, and module constants become what
    `constant` makes of them.
    """
    if not isinstance(formula, FunctionType):
        raise TypeError(f"a formula must be a plain Python function, got {formula!r}")
    scope = {**formula.__globals__, **own}
    for name in set(formula.__code__.co_names) - set(own):
        named = scope.get(name)
        if isinstance(named, FunctionType):
            scope[name] = compiled_formula(named, own, compile, constant)
        elif isinstance(named, int | float):
            scope[name] = constant(named)
    copy = FunctionType(formula.__code__, scope, formula.__name__)
    copy.__module__, copy.__qualname__, copy.__doc__ = formula.__module__, formula.__qualname__, formula.__doc__
    return compile(copy)
