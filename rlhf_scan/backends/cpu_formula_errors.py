"""Which formula numba cannot compile, and why: said of the formula alone, not of the loop around it."""

# mypy: disallow-untyped-calls=false

from __future__ import annotations

import re
from typing import Any

from numba import typeof, types

from ..errors import FormulaError
from ..estimators import Estimator

_REMEDY = 'mend it as docs/estimators.md says under "A new one", or choose backend="reference"'


def formula_error(entry: Estimator, coefficients: Any, results: Any, rates: int, number: type) -> FormulaError | None:
    """What is wrong with the compiled builder or epilogue of `entry`, whose channels take so many `rates`; None: neither is to blame."""
    if not hasattr(coefficients, "py_func"):  # NUMBA_DISABLE_JIT: nothing is compiled
        return None

    def numbers(count: int) -> Any:
        return typeof((number(0),) * count)

    step = numbers(len(entry.inputs)), numbers(len(entry.following) + (entry.continuation is not None))
    return _mistake(entry.name, "coefficients", coefficients, (*step, numbers(rates)), 2, "a and b") or _mistake(
        entry.name, "results", results, (*step, numbers(2), numbers(2), numbers(rates)), len(entry.outputs), ", ".join(entry.outputs)
    )


def _mistake(name: str, which: str, formula: Any, arguments: tuple[Any, ...], count: int, meaning: str) -> FormulaError | None:
    function = f"{formula.py_func.__module__}.{formula.py_func.__qualname__}"
    try:
        formula.compile(arguments)
        returned = formula.overloads[arguments].signature.return_type
    except Exception as error:  # numba's are of many kinds
        return FormulaError(f"{name}: {which} must compile on the cpu backend, got {function}: {_reason(error)}; {_REMEDY}")
    # More results than outputs do no harm.
    fits = isinstance(returned, types.BaseTuple) and (len(returned) == count or (which == "results" and len(returned) > count))
    if fits and all(isinstance(kind, types.Number | types.Boolean) for kind in returned):
        return None
    return FormulaError(
        f"{name}: {which} must return a tuple of {count} numbers ({meaning}), got {returned} from {function} on the cpu backend; {_REMEDY}"
    )


def _reason(error: Exception) -> str:
    """The first line of numba's message that is no wrapping, and where it is."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Failed in nopython mode")]
    place = re.search(r'File "([^"]+)", line (\d+)', text)
    where = "" if place is None else f" ({place[1]}, line {place[2]})"
    return (lines[0].rstrip(".") if lines else type(error).__name__) + where
