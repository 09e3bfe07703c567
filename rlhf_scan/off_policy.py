"""The public off-policy estimators: targets from rollouts that another policy made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import replays
from .dispatch import estimate
from .segments import Segments


class VTrace(NamedTuple):
    """What `vtrace` returns."""

    targets: Tensor
    advantages: Tensor


class Retrace(NamedTuple):
    """What `retrace` returns."""

    targets: Tensor
    advantages: Tensor


def vtrace(
    rewards: Tensor,
    values: Tensor,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 1.0,
    rho_bar: float | Tensor = 1.0,
    c_bar: float | Tensor = 1.0,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    masked: str = "skip",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    bootstrap: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> VTrace:
    """V-trace targets and policy-gradient advantages.

        v_t = V_t + rho_t * delta_t + gamma * lam * c_t * (v_{t+1} - V_{t+1}),   delta_t = r_t + gamma * V_{t+1} - V_t
        advantages_t = rho_t * (r_t + gamma * v_{t+1} - V_t)
        rho_t = min(rho_bar, ratio_t),   c_t = min(c_bar, ratio_t),   ratio_t = exp(target_logprobs_t - behavior_logprobs_t)

    Boundaries: after a terminated token V_{t+1} = v_{t+1} = 0; after a truncated one, or the last of a segment, both are bootstrap (0 if
    None). The log-ratio is cut at 20 before exp, so that a ratio is never infinite.

    Args:
        rewards, values, gamma, lam: as in `gae`.
        behavior_logprobs: log mu(a_t | s_t) of the policy that made the rollout, the shape of `rewards`; nats.
        target_logprobs: log pi(a_t | s_t) of the policy that is learnt, likewise.
        rho_bar: largest ratio in delta and advantage, >= 0 (inf: none): a number, [S] or per token.
        c_bar: largest ratio in the trace, likewise.
        segments, mask, masked, terminated, truncated, bootstrap, dtype, backend, validate: as in `gae`.

    Returns:
        VTrace(targets, advantages), in the shape of `rewards`, detached from autograd.

    Raises:
        InputError, BackendError: as in `gae`.

    Espeholt et al. 2018, IMPALA; lam as in its remark 2.
    """
    return VTrace(
        *estimate(
            "vtrace",
            {"rewards": rewards, "values": values, "behavior_logprobs": behavior_logprobs, "target_logprobs": target_logprobs},
            {"gamma": gamma, "lam": lam, "rho_bar": rho_bar, "c_bar": c_bar},
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


def retrace(
    rewards: Tensor,
    q_values: Tensor,
    expected_next_q: Tensor,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 1.0,
    c_bar: float | Tensor = 1.0,
    rho_bar: float | Tensor = 1.0,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    masked: str = "skip",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> Retrace:
    """Retrace(lambda) targets for action values, and advantages.

        target_t = r_t + gamma * E_t + gamma * lam * c_{t+1} * (target_{t+1} - Q_{t+1}),   E_t = E_pi[Q(s_{t+1}, .)]
        advantages_t = rho_t * (r_t + gamma * target_{t+1} - Q_t)
        c_t = min(c_bar, ratio_t),   rho_t = min(rho_bar, ratio_t),   ratio_t = exp(target_logprobs_t - behavior_logprobs_t)

    Boundaries: there is no bootstrap. At a truncated token, or the last of a segment, E_t is the value and the target that follow; at a
    terminated one both are 0. The log-ratio is cut at 20 before exp, so that a ratio is never infinite.

    Args:
        rewards, gamma, lam: as in `gae`.
        q_values: Q(s_t, a_t), the shape of `rewards`.
        expected_next_q: E_t, likewise.
        behavior_logprobs, target_logprobs: as in `vtrace`.
        c_bar: largest ratio in the trace, >= 0 (inf: none): a number, [S] or per token. c_bar[t] bounds the ratio at t, so it acts on the
            target of the step before.
        rho_bar: largest ratio in the advantage, likewise.
        segments, mask, masked, terminated, truncated, dtype, backend, validate: as in `gae`.

    Returns:
        Retrace(targets, advantages), in the shape of `rewards`, detached from autograd.

    Raises:
        InputError, BackendError: as in `gae`.

    Munos et al. 2016, Safe and Efficient Off-Policy Reinforcement Learning.
    """
    return Retrace(
        *estimate(
            "retrace",
            {
                "rewards": rewards,
                "q_values": q_values,
                "expected_next_q": expected_next_q,
                "behavior_logprobs": behavior_logprobs,
                "target_logprobs": target_logprobs,
            },
            {"gamma": gamma, "lam": lam, "c_bar": c_bar, "rho_bar": rho_bar},
            segments=segments,
            mask=mask,
            masked=masked,
            terminated=terminated,
            truncated=truncated,
            dtype=dtype,
            backend=backend,
            validate=validate,
        )
    )


def retrace_from_policy(
    rewards: Tensor,
    q_values: Tensor,
    next_q: Tensor,
    target_probs: Tensor,
    behavior_logprobs: Tensor,
    target_logprobs: Tensor | None = None,
    *,
    policy_probs: Tensor | None = None,
    actions: Tensor | None = None,
    gamma: float | Tensor = 1.0,
    lam: float | Tensor = 1.0,
    c_bar: float | Tensor = 1.0,
    rho_bar: float | Tensor = 1.0,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    masked: str = "skip",
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> Retrace:
    """`retrace` from the policy's probabilities of all actions: it takes the expectation, and the ratio of the action taken, itself.

        E_t = sum over actions of target_probs[t, a] * next_q[t, a]
        ratio_t = policy_probs[t, actions_t] / mu(a_t | s_t), with policy_probs;   all else as in `retrace`

    `target_probs` stand at the state that follows, `policy_probs` at t's own. Of probabilities `probs` at all T + 1 states of a rollout:
    ``target_probs=probs[1:], policy_probs=probs[:-1]``; such views, also of [B, T + 1, A], are read in place by the Triton backend.
    An action of probability 0 adds 0 to E_t, whatever its value, and has the ratio 0.

    Args:
        next_q: Q(s_{t+1}, .), the shape of `rewards` and one more dimension, of actions.
        target_probs: pi(. | s_{t+1}), likewise: the policy at the state that follows, as `next_q` is; not at s_t.
        rewards, q_values, behavior_logprobs, gamma, lam, c_bar, rho_bar: as in `retrace`.
        target_logprobs: as in `retrace`; or, in place of it, `policy_probs` and `actions`.
        policy_probs: pi(. | s_t), in the shape of `next_q`.
        actions: a_t, from 0 to A - 1, the shape of `rewards`; any integer dtype. Where a step is taken, another number makes the ratio
            NaN (`validate="full"` refuses it); at a masked token it may be anything.
        segments, mask, masked, terminated, truncated, dtype, backend, validate: as in `gae`.

    Returns:
        Retrace(targets, advantages), in the shape of `rewards`, detached from autograd.

    Raises:
        InputError, BackendError: as in `gae`.

    Munos et al. 2016, Safe and Efficient Off-Policy Reinforcement Learning.
    """
    tensors = {
        "rewards": rewards,
        "q_values": q_values,
        "next_q": next_q,
        "target_probs": target_probs,
        "behavior_logprobs": behavior_logprobs,
        "target_logprobs": target_logprobs,
        "policy_probs": policy_probs,
        "actions": actions,
    }
    rates = {"gamma": gamma, "lam": lam, "c_bar": c_bar, "rho_bar": rho_bar}

    def run() -> tuple[tuple[Tensor, ...], Callable[[], None]]:
        targets_and_advantages = estimate(
            "retrace_from_policy",
            tensors,
            rates,
            segments=segments,
            mask=mask,
            masked=masked,
            terminated=terminated,
            truncated=truncated,
            dtype=dtype,
            backend=backend,
            validate=validate,
        )
        return targets_and_advantages, lambda: None

    given = {**tensors, **rates, "mask": mask, "terminated": terminated, "truncated": truncated}
    options = "retrace_from_policy", masked, dtype, backend
    key, read = replays.likeness(options, given, segments) if validate == "shapes" else (None, [])
    return Retrace(*replays.repeated(key, read, run)[0])
