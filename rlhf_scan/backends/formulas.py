"""How a backend compiles the formulas of `rlhf_scan.coefficients`."""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from ..errors import FormulaError
from ..estimators import written_with


def compiled_formula(
    formula: Callable[..., Any],
    own: Mapping[str, Any],
    compile: Callable[[Callable[..., Any]], Any],
    constant: Callable[[float], Any] = float,
) -> Any:
    """`formula` as `compile` makes it.

    The backend's `own` functions stand in place of rlhf_scan's of those names, however the formula's module calls these, and of names that are
    no function of its module; what else it calls is compiled too, and module constants become what `constant` makes of them.

    Raises:
        FormulaError: no backend could compile it; the message names the estimator whose it is.
    """
    try:
        return _compiled(formula, own, compile, constant)
    except (TypeError, RecursionError) as error:
        names = ", ".join(written_with(formula))
        reason = error if isinstance(error, TypeError) else f"a formula must not call itself, got {formula.__qualname__}; write it without"
        raise FormulaError(f"{names}: {reason}" if names else str(reason)) from error


def _compiled(
    formula: Callable[..., Any], own: Mapping[str, Any], compile: Callable[[Callable[..., Any]], Any], constant: Callable[[float], Any]
) -> Any:
    formula = _plain(formula)
    scope = {**formula.__globals__, **{name: it for name, it in own.items() if not isinstance(formula.__globals__.get(name), FunctionType)}}
    for name in {step.argval for step in dis.get_instructions(formula) if step.opname == "LOAD_GLOBAL"}:
        named = scope.get(name)
        if isinstance(named, FunctionType):
            ours = named.__module__.startswith("rlhf_scan.") and named.__name__ in own
            scope[name] = own[named.__name__] if ours else _compiled(named, own, compile, constant)
        elif name not in own and isinstance(named, int | float):
            scope[name] = constant(named)
        elif name not in scope and not hasattr(builtins, name):
            raise TypeError(f"a formula must use names of its module, got {name} in {formula.__qualname__}; define or import it there")
        elif name not in scope and name != "float" and callable(getattr(builtins, name)):
            raise TypeError(
                f"a formula must call exp, minimum and functions of its module, got {name} in {formula.__qualname__}; use these"
            )
    copy = FunctionType(formula.__code__, scope, formula.__name__, formula.__defaults__)
    copy.__kwdefaults__ = formula.__kwdefaults__
    copy.__module__, copy.__qualname__, copy.__doc__ = formula.__module__, formula.__qualname__, formula.__doc__
    return compile(copy)


def _plain(formula: Callable[..., Any]) -> FunctionType:
    """`formula`, if it is what every backend can compile."""
    if not isinstance(formula, FunctionType) or formula.__name__ == "<lambda>":
        raise TypeError(f"a formula must be a plain Python function, made by def, got {formula!r}")
    if formula.__closure__ is not None:
        names = ", ".join(formula.__code__.co_freevars)
        raise TypeError(
            f"a formula must use its arguments and its module alone, got {formula.__qualname__}, which uses {names} of a function"
        )
    return formula
