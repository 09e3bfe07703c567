"""The Triton backend: what it can run, and what it offers."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call, Tensors
from . import tiles, triton_expectation
from .triton_launch import Launcher, on_device_of, too_old, why_not_direct
from .triton_solver import Scan


def why_not(device: torch.device) -> str | None:
    """It takes CUDA tensors, or CPU tensors in Triton's interpreter; an old Triton does not compile the kernels."""
    reason = too_old()
    if reason is not None:
        return reason
    if device.type == "cuda" and not tiles.INTERPRETED:
        return None
    if device.type == "cpu" and tiles.INTERPRETED:
        return None
    if tiles.INTERPRETED:
        return f"runs in Triton's interpreter here and takes CPU tensors, got {device}; unset TRITON_INTERPRET for CUDA tensors"
    return f'takes CUDA tensors, got {device}; move them to a GPU, choose backend="cpu", or set TRITON_INTERPRET=1 before the first import'


def note() -> str:
    """How it launches."""
    reason = why_not_direct()
    return "repeated launches are direct" if reason is None else f"every launch is Triton's own: {reason}"


def run(call: Call) -> list[Tensor]:
    """Launch the kernel over rows or over a pack."""
    return prepare(call)(call.tensors)


def prepare(call: Call) -> Callable[[Tensors], list[Tensor]]:
    """What runs any call with the shapes, dtypes and options of `call`; it keeps no tensor of it."""
    return Scan(call)


def expectation(values: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the actions of values * probabilities."""
    *shape, actions = values.shape
    tokens = math.prod(shape)
    expected = torch.empty(tokens, dtype=dtype, device=values.device)
    width = min(triton.next_power_of_2(actions), 128)
    rows = max(1, triton_expectation.PRODUCTS // width)
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    launcher = Launcher(
        triton_expectation.sum_of_products, {"ROWS": rows, "WIDTH": width, "DTYPE": accumulate}, num_warps=4, enable_fp_fusion=True
    )
    places = _strides(values) + _strides(probabilities)
    with on_device_of(values):
        launcher(triton.cdiv(tokens, rows), values, probabilities, expected, tokens, actions, shape[-1], *places)
    return expected


def chosen_logprobs(probabilities: Tensor, actions: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of the probability of each token's action."""
    *shape, count = probabilities.shape
    tokens, block = actions.numel(), 256
    logprobs = torch.empty(tokens, dtype=dtype, device=actions.device)
    accumulate = tl.float64 if dtype == torch.float64 else tl.float32
    launcher = Launcher(triton_expectation.logarithm_of_chosen, {"BLOCK": block, "DTYPE": accumulate}, num_warps=4)
    with on_device_of(actions):
        launcher(triton.cdiv(tokens, block), probabilities, actions, logprobs, tokens, count, shape[-1], *_strides(probabilities))
    return logprobs


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Of [.., A]: from row to row, which a pack has none of, from token to token, from action to action."""
    return (0, *tensor.stride())[-3:]
