"""Functions that no graph of torch.compile can hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# What torch.compiler.disable made of each. It imports torch._dynamo, which takes as long as torch: only where something compiles.
_DISABLED: dict[str, Callable[..., Any]] = {}


def outside_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, before which a graph of torch.compile ends and after which another begins."""
    name = f"{function.__module__}.{function.__qualname__}"

    def prepare() -> None:
        if name not in _DISABLED:  # another one would be another function to graphs that know this one
            _DISABLED[name] = torch.compiler.disable(function)

    prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a tracer runs it, and knows that nothing comes of it

    @wraps(function)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            prepare()
            found: Result = _DISABLED[name](*arguments, **options)
            return found
        return function(*arguments, **options)

    return call
