"""The tensors of a `ppo_advantages` call, checked and in their normal form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from . import checks
from .backend_choice import choose_backend
from .call import BACKENDS, is_per_segment
from .checks import Layout
from .contents import check_boundaries, check_padding
from .errors import InputError
from .estimators import Estimator, estimator
from .ppo_options import PPOOptions
from .ppo_step_rewards import StepRewards, resolve_step_rewards
from .segments import Segments
from .shaping import ScoreCall, ShapingCall

OP = "ppo_advantages"
# Why a sequence ended, as inference engines name it -> whether the episode ends there; else it was cut.
STOP_REASONS = {"stop": True, "tool_calls": True, "length": False, "abort": False}
_DIVIDERS = ("terminated", "truncated")
# What is per token, and whether it must be given.
_FLOATS = {"logprobs": True, "values": True, "ref_logprobs": False, "rewards": False}
# And whether it may be once per sequence.
_FLAGS = {"mask": False, "attention_mask": False, "has_eos": True, "terminated": True, "truncated": True}


@dataclass(frozen=True)
class PPOInputs:
    """What a caller gave, resolved.

    Attributes:
        layout: of the tokens.
        backend: that runs.
        call: what shaping needs.
        scores: and what else is given once per sequence.
        step_rewards: None without.
        terminated, truncated, bootstrap: [S, 1], [N] or None, as in `rlhf_scan.call.Call`.
        dtype: of the outputs.
    """

    layout: Layout
    backend: str
    call: ShapingCall
    scores: ScoreCall
    step_rewards: StepRewards | None
    terminated: Tensor | None
    truncated: Tensor | None
    bootstrap: Tensor | None
    dtype: torch.dtype


def resolve_inputs(
    tensors: Mapping[str, Any],
    options: PPOOptions,
    *,
    segments: Segments | None,
    step_rewards: Any,
    dtype: torch.dtype | None,
    backend: str,
    validate: str,
) -> PPOInputs:
    """Check all of them; InputError names the wrong one."""
    checks.check_option(OP, "backend", backend, BACKENDS)
    checks.check_option(OP, "validate", validate, ("shapes", "full"))
    checks.check_dtype(OP, dtype)
    if any(isinstance(given, Tensor) and given.is_neg() for given in tensors.values()):  # kernels read what memory holds
        tensors = {name: given.resolve_neg() if isinstance(given, Tensor) else given for name, given in tensors.items()}
    layout = checks.resolve_layout(OP, _like(), tensors["logprobs"], segments)
    if validate == "full":
        check_boundaries(layout)
    chosen = choose_backend(backend, layout.device, OP)
    floats = {
        name: checks.per_token(layout, name, tensors[name]) for name, needed in _FLOATS.items() if needed or tensors[name] is not None
    }
    flags = {
        name: None if tensors[name] is None else checks.resolve_flag(layout, name, tensors[name], segment_form=segment_form)
        for name, segment_form in _FLAGS.items()
    }
    if validate == "full":
        check_padding(layout, flags["mask"], flags["attention_mask"])
    if options.missing_eos_penalty and flags["has_eos"] is None:
        raise InputError(f"{OP}: has_eos must be given for missing_eos_penalty, got None; pass one flag per sequence or per token")
    if options.score_at == "post_eos":
        _refuse_per_token(flags)
    dtypes = [tensors[name].dtype for name in floats]
    number = torch.float64 if chosen == "reference" or torch.float64 in dtypes else torch.float32
    bootstrap = None if tensors["bootstrap"] is None else checks.check_floats(OP, "bootstrap", tensors["bootstrap"])
    bootstrap = None if bootstrap is None else checks.per_token_or_segment(layout, "bootstrap", bootstrap)
    return PPOInputs(
        layout=layout,
        backend=chosen,
        call=_shaping_call(layout, options, floats, flags, number),
        scores=_score_call(layout, options, tensors, flags, bootstrap),
        step_rewards=resolve_step_rewards(layout, step_rewards, number),
        terminated=flags["terminated"],
        truncated=flags["truncated"],
        bootstrap=bootstrap,
        dtype=dtype or reduce(torch.promote_types, dtypes),
    )


@cache
def _like() -> Estimator:
    """What layout and messages take a call for."""
    return replace(estimator("gae"), inputs=("logprobs", "values"))


def _shaping_call(
    layout: Layout, options: PPOOptions, floats: Mapping[str, Tensor], flags: Mapping[str, Tensor | None], number: torch.dtype
) -> ShapingCall:
    """What there is per token."""
    log_ratio_limit, kl_limit = options.limits
    mask, has_eos, ref_logprobs = flags["mask"], flags["has_eos"], floats.get("ref_logprobs")
    return ShapingCall(
        values=floats["values"],
        logprobs=None if ref_logprobs is None else floats["logprobs"],
        ref_logprobs=ref_logprobs,
        rewards=floats.get("rewards"),
        mask=mask,
        attention=flags["attention_mask"],
        has_eos=None if has_eos is None or is_per_segment(has_eos) else has_eos,
        kl=options.kl,
        log_ratio_limit=log_ratio_limit,
        kl_limit=kl_limit,
        ignores_mask=options.masked == "keep",
        kl_everywhere=options.kl_at == "all",
        padded=mask is not None and (layout.boundaries is None or options.score_at == "post_eos"),
        zero_faults=options.nonfinite == "zero",
        segments=layout.segments,
        length=layout.length,
        cu_seqlens=None if layout.boundaries is None else layout.boundaries.on(layout.device),
        dtype=number,
    )


def _score_call(
    layout: Layout, options: PPOOptions, tensors: Mapping[str, Any], flags: Mapping[str, Tensor | None], bootstrap: Tensor | None
) -> ScoreCall:
    """What there is per sequence."""
    has_eos, (low, high) = flags["has_eos"], options.score_range
    divided = any(end is not None and not is_per_segment(end) for end in (flags["terminated"], flags["truncated"], bootstrap))
    return ScoreCall(
        scores=_per_sequence(layout, "scores", tensors["scores"]),
        kl_coef=_kl_coef(layout, options, tensors["ref_logprobs"] is not None),
        has_eos=has_eos.flatten() if has_eos is not None and is_per_segment(has_eos) else None,
        terminated=flags["terminated"],
        truncated=flags["truncated"],
        bootstrap=bootstrap,
        bias=options.score_bias,
        scale=options.score_scale,
        low=low,
        high=high,
        looks_for_eos=has_eos is not None,
        missing_eos_penalty=options.missing_eos_penalty,
        post_eos=options.score_at == "post_eos",
        trailing=options.trailing,
        trims=flags["mask"] is not None and (options.masked != "skip" or (bootstrap is not None and divided)),
    )


def with_stop_reasons(tensors: Mapping[str, Any], segments: Segments | None, reasons: Sequence[str]) -> dict[str, Any]:
    """`tensors` with the flags that stop reasons stand for."""
    layout = checks.resolve_layout(OP, _like(), tensors["logprobs"], segments)
    twice = [name for name in _DIVIDERS if tensors[name] is not None]
    if twice:
        raise InputError(f"{OP}: stop_reasons must not be given with {twice[0]}, got both; drop one of them")
    as_list = getattr(reasons, "tolist", None)  # NumPy's
    words = reasons if as_list is None else as_list()
    # No set, which has no order, and nothing that reading uses up.
    if isinstance(words, str) or not isinstance(words, Sequence) or len(words) != layout.segments:
        got = f"{len(words)}" if isinstance(words, list | tuple) else f"{words!r:.80}"
        remedy = checks.UNSPLIT if layout.unsplit else "pass a list of words"
        raise InputError(f"{OP}: stop_reasons must have {layout.segments} entries, one per sequence, got {got}; {remedy}")
    for reason in words:
        checks.check_option(OP, "stop_reasons", reason, tuple(STOP_REASONS))
    ends = [STOP_REASONS[reason] for reason in words]
    unused = [False] * (-len(ends) % 16)  # so that the second row begins at a multiple of 16 bytes
    both = torch.tensor([ends + unused, [not end for end in ends] + unused], dtype=torch.bool)
    both = both.to(layout.device, non_blocking=True)  # one copy
    stopped, cut = both[:, : len(ends)].unbind(0)
    return {**tensors, "terminated": stopped, "truncated": cut, "has_eos": stopped if tensors["has_eos"] is None else tensors["has_eos"]}


def _refuse_per_token(flags: Mapping[str, Tensor | None]) -> None:
    """A cut between a sequence and the step after it would lose the score there."""
    for name in _DIVIDERS:
        flag = flags[name]
        if flag is not None and not is_per_segment(flag):
            raise InputError(
                f'{OP}: {name} must have one entry per sequence with score_at="post_eos", got one per token; '
                'reduce it with .any(1), or choose score_at="last"'
            )


def _kl_coef(layout: Layout, options: PPOOptions, has_reference: bool) -> float | Tensor:
    if not isinstance(options.kl_coef, Tensor):
        return float(options.kl_coef) if has_reference else 0.0
    given = options.kl_coef
    checked = _per_sequence(layout, "kl_coef", given.expand(layout.segments) if given.dim() == 0 else given)
    return 0.0 if checked is None else checked


def _per_sequence(layout: Layout, name: str, tensor: object) -> Tensor | None:
    """[S], of any real dtype."""
    if tensor is None:
        return None
    given = checks.check_dense(OP, name, tensor)
    if given.dtype.is_complex:
        raise InputError(f"{OP}: {name} must be real numbers, got {given.dtype}; convert it with .float()")
    if given.shape != (layout.segments,):
        remedy = "pass rewards per token as rewards=, or one number per sequence"
        if given.numel() == layout.segments:
            remedy = "squeeze it"
        elif layout.unsplit:
            remedy = checks.UNSPLIT
        raise InputError(f"{OP}: {name} must have shape [{layout.segments}], one entry per sequence, got {list(given.shape)}; {remedy}")
    if given.device != layout.device:
        raise InputError(
            f"{OP}: {name} must be on {layout.device} like logprobs, got {given.device}; move it with .to({str(layout.device)!r})"
        )
    return given.detach().resolve_neg().contiguous()
