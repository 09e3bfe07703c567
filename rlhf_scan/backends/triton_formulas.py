"""The formulas of `rlhf_scan.coefficients` and their kin as Triton functions."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from .formulas import compiled_formula


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


# The interpreter looks for the language among what a function sees, under whatever name.
_OWN = {"exp": _exp, "minimum": _minimum, "maximum": _maximum, "_triton_language": tl}


def jit_formula(formula: Callable[..., Any], own: Mapping[str, Any] | None = None) -> Any:
    """`formula` as a Triton function, a new one on each call; `own` stands in place of what it names."""
    return compiled_formula(formula, {**_OWN, **(own or {})}, _jit, tl.constexpr)


class _Plain(ast.NodeTransformer):
    """Takes annotations off."""

    found = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """That of what it returns, and what its own parts have."""
        self.found |= node.returns is not None
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """That of a parameter."""
        self.found |= node.annotation is not None
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """That of a variable."""
        self.found = True
        return ast.Pass() if node.value is None else ast.Assign([node.target], node.value)


def _jit(formula: FunctionType) -> Any:
    """Triton evaluates annotations as if they were statements of the kernel, so it gets a formula without them."""
    try:
        source = inspect.getsource(formula)
    except OSError as error:
        raise TypeError(
            f"a formula must lie in a file, from which Triton compiles it, got {formula.__qualname__} without source"
        ) from error
    plain = _Plain()
    tree = plain.visit(ast.parse(textwrap.dedent(source)))
    if not plain.found:
        return triton.jit(formula)
    function = tree.body[0]
    function.decorator_list = []  # they made `formula`, whose code it is
    source = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    name = f"<{formula.__module__}.{formula.__qualname__}, {hash(source):x}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # where Triton looks for it
    made: dict[str, Any] = {}
    exec(compile(source, name, "exec"), formula.__globals__, made)
    made[function.name].__module__ = formula.__module__
    return triton.jit(made[function.name])
