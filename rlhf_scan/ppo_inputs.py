"""The tensors of a `ppo_advantages` call, checked and in their normal form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import checks
from .backend_choice import choose_backend
from .call import BACKENDS, is_per_segment
from .checks import Layout
from .contents import check_boundaries
from .errors import InputError
from .estimators import estimator
from .ppo_options import PPOOptions
from .segments import Segments
from .shaping import ScoreCall, ShapingCall

OP = "ppo_advantages"
# Why a sequence ended, as inference engines name it -> whether the episode ends there; else it was cut.
STOP_REASONS = {"stop": True, "tool_calls": True, "length": False, "abort": False}
_DIVIDERS = ("terminated", "truncated")


@dataclass(frozen=True)
class StepRewards:
    """Rewards at chosen tokens: int64 [K] sequences, int64 [K] tokens counted from the sequence's first, [K] rewards."""

    sequences: Tensor
    tokens: Tensor
    rewards: Tensor


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
    stop_reasons: Sequence[str] | None,
    dtype: torch.dtype | None,
    backend: str,
    validate: str,
) -> PPOInputs:
    """Check all of them; InputError names the wrong one."""
    checks.check_option(OP, "backend", backend, BACKENDS)
    checks.check_option(OP, "validate", validate, ("shapes", "full"))
    checks.check_dtype(OP, dtype)
    like = replace(estimator("gae"), inputs=("logprobs", "values"))
    layout = checks.resolve_layout(OP, like, tensors["logprobs"], segments)
    if validate == "full":
        check_boundaries(layout)
    chosen = choose_backend(backend, layout.device)
    tensors = {**tensors, **_by_stop_reason(layout, tensors, stop_reasons)}
    floats = {name: checks.per_token(layout, name, tensors[name]) for name in ("logprobs", "values")}
    floats |= {name: checks.per_token(layout, name, tensors[name]) for name in ("ref_logprobs", "rewards") if tensors[name] is not None}
    flags = {name: checks.resolve_flag(layout, name, tensors[name], segment_form=False) for name in ("mask", "attention_mask")}
    has_eos, terminated, truncated = (
        checks.resolve_flag(layout, name, tensors[name], segment_form=True) for name in ("has_eos", *_DIVIDERS)
    )
    if options.missing_eos_penalty and has_eos is None:
        raise InputError(f"{OP}: has_eos must be given for missing_eos_penalty, got None; pass one flag per sequence or per token")
    if options.score_at == "post_eos":
        _refuse_per_token(terminated, truncated)
    number = torch.float64 if chosen == "reference" or torch.float64 in {tensor.dtype for tensor in floats.values()} else torch.float32
    (log_ratio_limit, kl_limit), (low, high) = options.limits, options.score_range
    bootstrap = None if tensors["bootstrap"] is None else checks.check_floats(OP, "bootstrap", tensors["bootstrap"])
    bootstrap = None if bootstrap is None else checks.per_token_or_segment(layout, "bootstrap", bootstrap)
    call = ShapingCall(
        values=floats["values"],
        logprobs=floats["logprobs"] if "ref_logprobs" in floats else None,
        ref_logprobs=floats.get("ref_logprobs"),
        rewards=floats.get("rewards"),
        mask=flags["mask"],
        attention=flags["attention_mask"],
        has_eos=None if has_eos is None or is_per_segment(has_eos) else has_eos,
        kl=options.kl,
        log_ratio_limit=log_ratio_limit,
        kl_limit=kl_limit,
        ignores_mask=options.masked == "keep",
        kl_everywhere=options.kl_at == "all",
        padded=flags["mask"] is not None and (segments is None or options.score_at == "post_eos"),
        zero_faults=options.nonfinite == "zero",
        segments=layout.segments,
        length=layout.length,
        cu_seqlens=None if layout.boundaries is None else layout.boundaries.on(layout.device),
        dtype=number,
    )
    return PPOInputs(
        layout=layout,
        backend=chosen,
        call=call,
        scores=ScoreCall(
            scores=_per_sequence(layout, "scores", tensors["scores"]),
            kl_coef=_kl_coef(layout, options, "ref_logprobs" in floats),
            has_eos=has_eos.flatten() if has_eos is not None and is_per_segment(has_eos) else None,
            terminated=terminated,
            truncated=truncated,
            bootstrap=bootstrap,
            bias=options.score_bias,
            scale=options.score_scale,
            low=low,
            high=high,
            missing_eos_penalty=options.missing_eos_penalty,
            post_eos=options.score_at == "post_eos",
            trailing=options.trailing,
        ),
        step_rewards=_step_rewards(layout, step_rewards, number),
        terminated=terminated,
        truncated=truncated,
        bootstrap=bootstrap,
        dtype=dtype or _promoted([tensors[name] for name in floats]),
    )


def _promoted(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _by_stop_reason(layout: Layout, tensors: Mapping[str, Any], reasons: Sequence[str] | None) -> dict[str, Tensor]:
    """The flags that stop reasons stand for."""
    if reasons is None:
        return {}
    twice = [name for name in _DIVIDERS if tensors[name] is not None]
    if twice:
        raise InputError(f"{OP}: stop_reasons must not be given with {twice[0]}, got both; drop one of them")
    as_list = getattr(reasons, "tolist", None)  # NumPy's
    words = reasons if as_list is None else as_list()
    # No set, which has no order, and nothing that reading uses up.
    if isinstance(words, str) or not isinstance(words, Sequence) or len(words) != layout.segments:
        got = f"{len(words)}" if isinstance(words, list | tuple) else f"{words!r:.80}"
        raise InputError(f"{OP}: stop_reasons must have {layout.segments} entries, one per sequence, got {got}; pass a list of words")
    for reason in words:
        checks.check_option(OP, "stop_reasons", reason, tuple(STOP_REASONS))
    stopped = torch.tensor([STOP_REASONS[reason] for reason in words], dtype=torch.bool).to(layout.device, non_blocking=True)
    flags = {"terminated": stopped, "truncated": ~stopped}
    return flags if tensors["has_eos"] is not None else {**flags, "has_eos": stopped}


def _refuse_per_token(*flags: Tensor | None) -> None:
    """A cut between a sequence and the step after it would lose the score there."""
    for name, flag in zip(_DIVIDERS, flags, strict=True):
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
    if not isinstance(tensor, Tensor):
        raise InputError(f"{OP}: {name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with torch.as_tensor")
    if tensor.dtype.is_complex:
        raise InputError(f"{OP}: {name} must be real numbers, got {tensor.dtype}; convert it with .float()")
    if tensor.shape != (layout.segments,):
        raise InputError(
            f"{OP}: {name} must have shape [{layout.segments}], one entry per sequence, got {list(tensor.shape)}; "
            + ("squeeze it" if tensor.numel() == layout.segments else "pass rewards per token as rewards=, or one number per sequence")
        )
    if tensor.device != layout.device:
        raise InputError(
            f"{OP}: {name} must be on {layout.device} like logprobs, got {tensor.device}; move it with .to({str(layout.device)!r})"
        )
    return tensor.detach().contiguous()


def _step_rewards(layout: Layout, given: Any, number: torch.dtype) -> StepRewards | None:
    """From three tensors, a [K, 3] tensor or a list of triples."""
    if given is None:
        return None
    try:
        if isinstance(given, Tensor) or not (len(given) == 3 and all(isinstance(part, Tensor) for part in given)):
            table = (
                given if isinstance(given, Tensor) else torch.tensor([tuple(map(float, triple)) for triple in given], dtype=torch.float64)
            )
            given = table.reshape(-1, 3).unbind(1)
        sequences, tokens = (_whole(part.detach()) for part in given[:2])
        rewards = given[2].detach().to(number)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(
            f"{OP}: step_rewards must be (sequence, end token, reward) triples, got {type(given).__name__}; pass a list of triples, a [K, 3] "
            "tensor, or three tensors [K], with sequences and tokens as integers, float32 or float64"
        ) from error
    if not (sequences.shape == tokens.shape == rewards.shape and sequences.dim() == 1):
        shapes = [list(part.shape) for part in (sequences, tokens, rewards)]
        raise InputError(
            f"{OP}: step_rewards must be three tensors [K] of one length, got shapes {shapes}; pass one entry of each per step"
        )
    if sequences.device.type == "cpu" and tokens.device.type == "cpu":
        _check_places(layout, sequences, tokens)
    return StepRewards(*(part.to(layout.device, non_blocking=True) for part in (sequences, tokens, rewards)))


def _whole(numbers: Tensor) -> Tensor:
    """Sequences or tokens as int64; -1, which no batch has, for what is no whole number."""
    if numbers.dtype in (torch.bfloat16, torch.float16) or numbers.dtype.is_complex:
        raise TypeError(f"{numbers.dtype} does not hold every place")
    whole = numbers.to(torch.int64)
    return torch.where(numbers == whole, whole, -1)


def _check_places(layout: Layout, sequences: Tensor, tokens: Tensor) -> None:
    """Raise for a step outside its sequence. What lies on a GPU is not read: such a step is left out, and the report counts it."""
    known = layout.boundaries is None or layout.boundaries.cu_seqlens.device.type == "cpu"
    if layout.boundaries is None:
        lengths = torch.full((layout.segments,), layout.length or 0)
    else:
        lengths = layout.boundaries.lengths() if known else torch.full((layout.segments,), layout.shape.numel())
    inside = (sequences >= 0) & (sequences < layout.segments)
    if layout.segments:
        inside &= (tokens >= 0) & (tokens < lengths[sequences.clamp(0, layout.segments - 1)])
    outside = (~inside).nonzero()
    if outside.numel():
        at = int(outside[0])
        raise InputError(
            f"{OP}: step_rewards must name tokens of the batch, got token {int(tokens[at])} of sequence {int(sequences[at])} at entry {at}; "
            "count sequences from 0, and tokens from the first of their sequence, in whole numbers"
        )
