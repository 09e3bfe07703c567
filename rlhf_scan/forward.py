"""The public estimators that run forward in time."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import estimate
from .segments import Segments


def eligibility_traces(
    inputs: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    initial: Tensor | None = None,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    masked: str = "skip",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> Tensor:
    """Accumulating eligibility traces.

        e_t = x_t + gamma * lam * e_{t-1}

    Boundaries: before a segment's first token e is `initial` (0 if None); after a terminated or truncated token it is 0. gamma and lam per
    token are read at t. A masked token's output is 0 and, by `masked`, it is passed over ("skip"), a step with x = 0 ("zero") or a step like
    any other ("keep").

    Args:
        inputs: x_t, [B, T] (each row a segment), or packed [N] with `segments` (without: one segment).
        initial: the trace before each segment's first token, [S] ([B] for rows).
        gamma, lam, segments, mask, masked, terminated, truncated, dtype, backend, validate: as in `gae`.

    Returns:
        The traces, in the shape of `inputs`, detached from autograd.

    Raises:
        InputError, BackendError: as in `gae`.

    Sutton & Barto 2018, Reinforcement Learning, section 12.2.
    """
    (traces,) = estimate(
        "eligibility_traces",
        {"inputs": inputs},
        {"gamma": gamma, "lam": lam},
        segments=segments,
        mask=mask,
        masked=masked,
        terminated=terminated,
        truncated=truncated,
        bootstrap=initial,
        dtype=dtype,
        backend=backend,
        validate=validate,
    )
    return traces


def episodic_cumsum(
    inputs: Tensor,
    *,
    initial: Tensor | None = None,
    boundary: str = "ends_at",
    segments: Segments | None = None,
    terminated: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> Tensor:
    """Running sum within each episode.

        s_t = x_t + s_{t-1}

    Boundaries: before a segment's first token s is `initial` (0 if None). `terminated` marks where episodes end ("ends_at": its token is
    the last of an episode) or start ("starts_at": its token is the first of one); the sum starts at 0 after an end, or at a start.

    Args:
        inputs: x_t, [B, T] (each row a segment), or packed [N] with `segments` (without: one segment).
        initial: the sum before each segment's first token, [S] ([B] for rows).
        boundary: what `terminated` marks.
        segments, terminated, dtype, backend, validate: as in `gae`.

    Returns:
        The sums, in the shape of `inputs`, detached from autograd.

    Raises:
        InputError, BackendError: as in `gae`.
    """
    (sums,) = estimate(
        "episodic_cumsum",
        {"inputs": inputs},
        {},
        segments=segments,
        terminated=terminated,
        bootstrap=initial,
        boundary=boundary,
        dtype=dtype,
        backend=backend,
        validate=validate,
    )
    return sums
