"""The public estimators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import estimate
from .segments import Segments


class GAE(NamedTuple):
    """What `gae` returns."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    lam_value: float | Tensor | None = None,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    masked: str = "skip",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> GAE:
    """Generalized advantage estimation.

        A_t = delta_t + gamma * lam * A_{t+1},   delta_t = r_t + gamma * V_{t+1} - V_t,   returns_t = A_t + V_t

    Boundaries: after a terminated token V_{t+1} = 0; after a truncated one, or the last of a segment, V_{t+1} = bootstrap (0 if None). Either
    way A_{t+1} = 0: the bootstrap enters once. Credit and values never cross a segment. At masked tokens outputs are 0, and what stands
    there changes no output elsewhere (unless ``masked="keep"`` asks for it).

    Args:
        rewards: r_t, [B, T] (each row a segment), or packed [N] with `segments` (without: one segment). With `segments`, [B, T] is read as
            a pack of B * T tokens.
        values: V(s_t), the shape of `rewards`; V(s_T) goes into `bootstrap`.
        gamma: discount in [0, 1]: a number, [S] per segment ([B] for rows), or one per token. Where a pack has as many segments as tokens, [N]
            is per segment; as a row, [1, N], tokens are told apart.
        lam: trace parameter in [0, 1], likewise.
        lam_value: a second lambda, for `returns` only (VAPO); computed in the same pass.
        segments: where the segments of a pack lie.
        mask: nonzero at trainable tokens; any dtype.
        masked: what a masked token does to the recursion. "skip": no step, credit and next value pass over it. "zero": a step with r = 0 and
            V = 0. "keep": the recursion ignores the mask.
        terminated: nonzero where the episode ends at t, per token, or [S] for each segment's last token. Wins over `truncated`.
        truncated: nonzero where it is cut at t, likewise. Both end a segment inside a row or pack, also at a masked token.
        bootstrap: the value that follows: [S], after each segment's last token; or one per token, read at truncated and last tokens only.
        dtype: of the outputs; None: that of the inputs. Sums are in float32 (float64 for float64 input).
        backend: "auto" (triton for CUDA tensors, else cpu), "triton", "cpu" or "reference"; a named one never falls back.
        validate: "shapes", or "full" to check contents too (reads the device).

    Returns:
        GAE(advantages, returns), in the shape of `rewards`, detached from autograd.

    Raises:
        InputError: an argument is wrong; the message says which, and what to do.
        BackendError: the backend cannot run here.

    Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation; Yue et al. 2025, VAPO
    (`lam_value`).
    """
    return GAE(
        *estimate(
            "gae",
            {"rewards": rewards, "values": values},
            {"gamma": gamma, "lam": lam, "lam_value": lam_value},
            segments=segments,
            mask=mask,
            masked=masked,
            terminated=terminated,
            truncated=truncated,
            bootstrap=bootstrap,
            dtype=dtype,
            backend=backend,
            validate=validate,
        )
    )


def discounted_returns(
    rewards: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    masked: str = "skip",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> Tensor:
    """Discounted sum of the rewards to come.

        G_t = r_t + gamma * G_{t+1}

    Boundaries: after a terminated token G_{t+1} = 0; after a truncated one, or the last of a segment, G_{t+1} = bootstrap (0 if None).
    Arguments, shapes, dtypes and errors as in `gae`.

    Returns:
        The returns, in the shape of `rewards`, detached from autograd.

    Sutton & Barto 2018, Reinforcement Learning, section 3.3.
    """
    (returns,) = estimate(
        "discounted_returns",
        {"rewards": rewards},
        {"gamma": gamma},
        segments=segments,
        mask=mask,
        masked=masked,
        terminated=terminated,
        truncated=truncated,
        bootstrap=bootstrap,
        dtype=dtype,
        backend=backend,
        validate=validate,
    )
    return returns


def lambda_returns(
    rewards: Tensor,
    values: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 0.95,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    masked: str = "skip",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> Tensor:
    """TD(lambda) targets.

        G_t = r_t + gamma * ((1 - lam) * V_{t+1} + lam * G_{t+1})

    Boundaries: after a terminated token V_{t+1} = G_{t+1} = 0; after a truncated one, or the last of a segment, both are bootstrap (0 if
    None). `values` are V(s_t), as in `gae`, not shifted. ``lam=0`` gives one-step targets, ``lam=1`` discounted returns.
    Arguments, shapes, dtypes and errors as in `gae`.

    Returns:
        The targets, in the shape of `rewards`, detached from autograd.

    Sutton & Barto 2018, Reinforcement Learning, section 12.1.
    """
    (returns,) = estimate(
        "lambda_returns",
        {"rewards": rewards, "values": values},
        {"gamma": gamma, "lam": lam},
        segments=segments,
        mask=mask,
        masked=masked,
        terminated=terminated,
        truncated=truncated,
        bootstrap=bootstrap,
        dtype=dtype,
        backend=backend,
        validate=validate,
    )
    return returns
