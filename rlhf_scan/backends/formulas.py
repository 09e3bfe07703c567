"""How a backend compiles the formulas of `rlhf_scan.coefficients`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def compiled_formula(formula: Callable[..., Any], own: Mapping[str, Any], compile: Callable[[Callable[..., Any]], Any]) -> Any:
    """`formula` as `compile` makes it, with the backend's `own` functions in place of those names, and what else it calls compiled too."""
    if not isinstance(formula, FunctionType):
        raise TypeError(f"a formula must be a plain Python function, got {formula!r}")
    scope = dict(formula.__globals__)
    scope.update(own)
    for name in formula.__code__.co_names:
        called = scope.get(name)
        if name not in own and isinstance(called, FunctionType):
            scope[name] = compiled_formula(called, own, compile)
    copy = FunctionType(formula.__code__, scope, formula.__name__)
    copy.__module__, copy.__qualname__, copy.__doc__ = formula.__module__, formula.__qualname__, formula.__doc__
    return compile(copy)
