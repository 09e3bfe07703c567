"""What decides the machine code that numba makes of a function, as a digest."""

# mypy: disallow-untyped-calls=false

from __future__ import annotations

import builtins
import hashlib
import math
import sys
import sysconfig
from types import BuiltinFunctionType, CodeType
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numba
import numpy as np
from numba.core import config
from numba.core.registry import CPUDispatcher, cpu_target

_VERSIONS = sys.version, sysconfig.get_config_var("SOABI"), numba.__version__, llvmlite.__version__, np.__version__
_TEXT_TELLS_ALL = (type(None), type(...), bool, int, float, complex, str, bytes)
# Of a code object. Where it was written, file and line, is not among them.
_OF_CODE = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
    *("co_flags", "co_exceptiontable"),  # the table is there from Python 3.11 on
)


class Unknown(Exception):
    """A function uses something of which it cannot be told what numba makes of it."""


def fingerprint(dispatcher: Any) -> str:
    """The same only where numba makes the same of `dispatcher`: of its function, of all that this refers to, with these settings and versions.

    Raises:
        Unknown: where that cannot be told.
    """
    cpu_target.typing_context.refresh()
    settings = sorted((name, repr(value)) for name, value in vars(config).items() if name.isupper() and "THREADS" not in name)
    return hashlib.sha256(repr((_VERSIONS, settings, _parts(dispatcher, []))).encode()).hexdigest()


def _parts(value: Any, within: list[Any]) -> Any:
    """`value` as nested tuples of text. `within` are the dispatchers on the way to it: a function may call itself."""
    kind = type(value).__name__
    if type(value) in _TEXT_TELLS_ALL:
        return kind, repr(value)
    if isinstance(value, np.generic):
        return kind, value.tobytes()
    if type(value) is tuple:
        return kind, *(_parts(item, within) for item in value)
    if type(value) in (set, frozenset):
        return kind, *sorted(repr(_parts(item, within)) for item in value)
    if type(value) is dict:
        return kind, *((name, _parts(value[name], within)) for name in sorted(value, key=repr))  # keys of any types
    if type(value) is CodeType:
        return kind, *(getattr(value, name, None) for name in _OF_CODE), _parts(value.co_consts, within)
    if type(value) is CPUDispatcher:
        if any(value is outer for outer in within):
            return kind, [value is outer for outer in within]
        # A numba function of the user's own may have been compiled before what its names stand for was changed; ours have this option.
        if "no_cfunc_wrapper" in value.targetoptions:
            return kind, _parts(value.targetoptions, within), _of_function(value.py_func, [*within, value])
    if _is_numbas(value):
        return kind, value.__module__, value.__name__
    raise Unknown(f"{kind} {value!r}")


def _is_numbas(value: Any) -> bool:
    """Whether it is a function or type of Python or NumPy of which numba alone tells what becomes of it: others can (`numba.extending.overload`)."""
    if getattr(value, "__module__", None) not in ("builtins", "math", "numpy"):
        return False
    if not isinstance(value, type | BuiltinFunctionType) and vars(np).get(getattr(value, "__name__", "")) is not value:
        return False
    templates = getattr(cpu_target.typing_context._lookup_global(value), "templates", ())
    modules = [getattr(each, "_overload_func", each).__module__ for each in templates]
    return all(module is None or module.startswith("numba.") for module in modules)  # None: text that numba itself executed


def _of_function(function: Any, within: list[Any]) -> Any:
    """Its code, its defaults, and what the names in it stand for."""
    closed_over = tuple(cell.cell_contents for cell in function.__closure__ or ())
    names = _names(function.__code__)
    named = {name: value for name, value in (vars(builtins) | function.__globals__).items() if name in names}
    for module in (math, np):
        for name in [name for name, value in named.items() if value is module]:
            named[name] = {each: value for each, value in vars(module).items() if each in names}
    return function.__module__, _parts((function.__code__, function.__defaults__, function.__kwdefaults__, closed_over, named), within)


def _names(code: CodeType) -> set[str]:
    """Of globals, and of attributes, which are taken for globals where there are such."""
    return {*code.co_names}.union(*(_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)))
