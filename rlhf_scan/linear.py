"""The recurrence itself, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_switch
from .dispatch import estimate
from .segments import Segments


def linear_scan(
    a: Tensor,
    b: Tensor,
    *,
    reverse: bool = False,
    initial: Tensor | None = None,
    segments: Segments | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> Tensor:
    """The affine recurrence that every estimator is.

        x_t = a_t + b_t * x_{t-1},  or with ``reverse=True``  x_t = a_t + b_t * x_{t+1}

    Boundaries: before a segment's first token (after its last, in reverse) x is `initial`, or 0; b there multiplies nothing if that is 0.
    Where b_t is 0 nothing passes: x_t is a_t, whatever x_{t-1} is.

    Args:
        a: [B, T] (each row a segment), or packed [N] with `segments` (without: one segment).
        b: the shape of `a`.
        reverse: scan backward in time.
        initial: x before the scan's first step, [S] ([B] for rows).
        segments, dtype, backend, validate: as in `gae`.

    Returns:
        x, in the shape of `a`; differentiable any number of times in a, b and initial. The gradient is the same scan in the other direction;
        that of b_t is x_next times the one that arrives at t, also where b_t is 0, so it is not finite where x_next is not.

    Raises:
        InputError, BackendError: as in `gae`.
    """
    check_switch("linear_scan", "reverse", reverse)
    x: Tensor = _LinearScan.apply(  # type: ignore[no-untyped-call]
        a, b, initial, reverse, segments, dtype, backend, validate
    )
    return x


class _LinearScan(torch.autograd.Function):
    """g_t = grad_t + b_{t-1} g_{t-1} (for reverse), grad_a = g, grad_b = g * x_next, grad_initial = b * g where the scan starts."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, initial: Any, reverse: bool, segments: Any, dtype: Any, backend: str, validate: str) -> Tensor:
        (x,) = estimate(
            "linear_scan_reverse" if reverse else "linear_scan",
            {"a": a, "b": b},
            {},
            segments=segments,
            bootstrap=initial,
            dtype=dtype,
            backend=backend,
            validate=validate,
            op="linear_scan",
        )
        ctx.save_for_backward(b, initial, x)
        ctx.options = reverse, segments, backend
        ctx.a_dtype = a.dtype
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        b, initial, x = ctx.saved_tensors
        reverse, segments, backend = ctx.options
        step = 1 if reverse else -1
        # b of the token that reads x_t; what wraps around lands where a segment starts and multiplies nothing.
        reader_b = b.flatten().roll(step).reshape(b.shape)
        g = linear_scan(grad.to(x.dtype), reader_b, reverse=not reverse, segments=segments, backend=backend)
        owner, starts = _scan_starts(x, reverse, segments)
        x_next = x.flatten().roll(-step)
        first = torch.zeros_like(x_next) if initial is None else initial.to(x.dtype)[owner]
        x_next = torch.where(starts, first, x_next).reshape(x.shape)
        grad_initial = None
        if initial is not None:
            # Where b is 0 nothing passes back either. Not selecting on the product keeps the second derivative there.
            passing = torch.where((b == 0) & ~g.isfinite(), 0, g)
            at_starts = torch.where(starts, b.flatten() * passing.flatten(), 0).to(initial.dtype)
            grad_initial = torch.zeros_like(initial).index_add(0, owner, at_starts)
        return g.to(ctx.a_dtype), (g * x_next).to(b.dtype), grad_initial, None, None, None, None, None


def _scan_starts(x: Tensor, reverse: bool, segments: Segments | None) -> tuple[Tensor, Tensor]:
    """Each token's segment, and whether the segment's scan starts at it."""
    tokens = torch.arange(x.numel(), device=x.device)
    if segments is None:
        length = max(x.shape[-1], 1)
        owner, place = tokens // length, tokens % length
        return owner, place == (length - 1 if reverse else 0)
    bounds = segments.on(x.device)
    owner = torch.searchsorted(bounds[1:].contiguous(), tokens, right=True)
    return owner, tokens == (bounds[owner + 1] - 1 if reverse else bounds[owner])
