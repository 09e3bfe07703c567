"""The whole RLHF block: KL penalty, score, whitening and GAE in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import replays
from . import whitened as whitened_before
from .outside_graphs import outside_graphs
from .ppo_inputs import OP, PPOInputs, resolve_inputs, with_stop_reasons
from .ppo_options import NAMES, PPOOptions, resolve_options, whitenings
from .ppo_places import with_step_rewards
from .ppo_rates import wrong_rates
from .ppo_recursion import solved, solved_in_one_pass
from .ppo_report import Facts, PPOReport, raise_if_asked
from .ppo_stages import kept_tokens, statistics, whitened, without_what_does_not_count
from .ranks import check_process_group
from .segments import Segments
from .shaping import Sequences, Shaped, shaping_backend
from .whitening import Whitening

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PPOAdvantages(NamedTuple):
    """What `ppo_advantages` returns: four tensors in the shape of the log-probabilities, and a report that is read when it is looked at."""

    advantages: Tensor
    returns: Tensor
    rewards: Tensor
    kl: Tensor
    report: PPOReport


@outside_graphs
def ppo_advantages(
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    values: Tensor,
    scores: Tensor | None,
    *,
    preset: str | None = None,
    kl: str | None = None,
    kl_coef: float | Tensor | None = None,
    kl_at: str | None = None,
    kl_clamp: str | None = None,
    log_ratio_limit: float | None = None,
    kl_limit: float | None = None,
    rewards: Tensor | None = None,
    step_rewards: Any = None,
    score_at: str | None = None,
    trailing: str | None = None,
    score_bias: float | None = None,
    score_scale: float | None = None,
    score_clip: float | tuple[float, float] | None = None,
    missing_eos_penalty: float | None = None,
    has_eos: Tensor | None = None,
    whiten_rewards: str | bool | Whitening | None = None,
    whiten_advantages: str | bool | Whitening | None = None,
    gamma: float | Tensor | None = None,
    lam: float | Tensor | None = None,
    lam_value: float | Tensor | None = None,
    length_adaptive_alpha: float | None = None,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    masked: str | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    stop_reasons: Sequence[str] | None = None,
    bootstrap: Tensor | None = None,
    nonfinite: str | None = None,
    process_group: ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> PPOAdvantages:
    """PPO's advantages and returns from log-probabilities, values and scores.

        r_t = rewards_t + (score, at the one token that gets it) - kl_coef * KL_t,   KL_t an estimate from logprobs_t - ref_logprobs_t
        advantages, returns = GAE of r and values;   rewards before it and advantages after it whitened if wanted

    A sequence is a row, or a segment of a pack. Boundaries: after its last token the value is 0 if it terminated, and `bootstrap` (0 if None) if it
    was cut, however wide its row. It does not see its neighbours but through the statistics of whitening, and one with a number that is not
    finite is left out of these. Outputs are 0 at masked tokens, and what stands there changes nothing elsewhere, unless ``masked="keep"``. None
    as an option means the preset's choice, without a preset the recommended one; docs/ppo.md lists them.

    Args:
        logprobs: log pi(a_t | s_t) of the policy that sampled, [B, T] or packed [N]; nats. float32, float64, bfloat16 or float16.
        ref_logprobs: of the reference policy, likewise; None: no KL penalty.
        values: V(s_t), likewise.
        scores: of each sequence, [S] ([B] for rows), any dtype; None: 0.
        preset: "trl", "verl", "openrlhf", "nemo-rl", "slime", "areal": every option as that project has it. Other options given beside it win.
        kl: "k1" (log-ratio), "k2" (half its square), "k3" (exp(-x) - 1 + x), "abs".
        kl_coef: >= 0, a number or [S].
        kl_at: KL counts at "trainable" tokens, or with ``masked="keep"`` at "all".
        kl_clamp: which estimators the two limits hold for: "exp" (k3 alone, the one that can overflow), "all", "off".
        log_ratio_limit, kl_limit: largest size of the log-ratio before, and of the KL after, the estimator.
        rewards: token rewards, in the shape of `logprobs`; ignored at masked tokens, unless ``masked="keep"``.
        step_rewards: (sequence, end token, reward) triples: a list, [K, 3], or three tensors [K]. Tokens count from their sequence's first.
        score_at: "last", the last trainable token; or "post_eos" (TRL): the slot after the sequence's last token is one more step; its value is
            read, and its return written. A sequence without room for it has its score on the last token.
        trailing: for a score or step reward whose token is not trainable, as where a sequence ends with a tool's answer: "carry_back" to the
            trainable token before, "drop", "error" (reads the device), or with ``masked="keep"`` "stay".
        score_bias, score_scale, score_clip: score' = clip((score + bias) * scale), to [-clip, clip] or (lowest, highest).
        missing_eos_penalty: subtracted from score' where no trainable token is end-of-sequence; needs `has_eos` or `stop_reasons`.
        has_eos: nonzero for each sequence that has one, [S]; or at each token that is one, of which the trainable ones count.
        whiten_rewards, whiten_advantages: "off", "unbiased", "keep_mean", "shift", "population", "eps_outside", a `Whitening`, True or False.
        gamma, lam, lam_value: as in `gae`.
        length_adaptive_alpha: > 0: VAPO's lam = 1 - 1 / (alpha * trainable tokens), at least 0, for the advantages; the returns have `lam_value`, or
            without one `lam`.
        segments: where the sequences of a pack lie.
        mask: nonzero at trainable tokens, any dtype.
        attention_mask: nonzero at tokens that are no padding. Without it, what follows the last trainable token of a row is padding, and a pack
            has none (with ``score_at="post_eos"`` it has it there, too).
        masked: what a masked token that is no padding does to the recursion, as in `gae`. Padding takes no part.
        terminated, truncated, bootstrap: as in `gae`; a flag or value per sequence belongs to its last token, wherever the row ends.
        stop_reasons: one of "stop", "tool_calls" (terminated), "length", "abort" (truncated) per sequence, in place of these flags, and of
            `has_eos`.
        nonfinite: where a number that counts is not finite: "propagate" it within its sequence, "raise" (reads the device), take it for "zero", or
            "drop" the sequence: its outputs are 0. The report names sequence and token.
        process_group: whitening is over all its ranks, as in `whiten`.
        dtype: of the outputs; None: that of the tensors per token, promoted. Arithmetic is in float32 (float64 where one of these is).
        backend: as in `gae`.
        validate: "shapes", or "full" to check contents too (reads the device); numbers that are not finite then raise instead of propagating.

    Returns:
        PPOAdvantages(advantages, returns, rewards, kl, report): rewards are those that GAE got, 0 at tokens that the mask
            leaves out. Detached from autograd.

    Raises:
        InputError: an argument is wrong; the message says which, and what to do.
        BackendError: the backend cannot run here.

    Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage Estimation; Schulman et al. 2017, Proximal Policy
    Optimization Algorithms; Ouyang et al. 2022, InstructGPT; Yue et al. 2025, VAPO.
    """
    given = locals()
    options = resolve_options(OP, preset, {name: given[name] for name in NAMES})
    check_process_group(OP, process_group)
    tensors = {name: given[name] for name in _TENSORS}
    if rewards is not None and whitenings(OP, options)[0] is not None:
        whitened_before.refuse(OP, "rewards", rewards)
    if stop_reasons is not None:
        tensors = with_stop_reasons(tensors, segments, stop_reasons)
    full = validate == "full"

    def run() -> tuple[Sequence[Tensor], Callable[[], Facts]]:
        inputs = resolve_inputs(
            tensors,
            options,
            segments=segments,
            step_rewards=step_rewards,
            dtype=dtype,
            backend=backend,
            validate=validate,
        )
        chosen = replace(options, nonfinite="raise") if full and options.nonfinite == "propagate" else options
        return _run(inputs, chosen, process_group, full=full)

    others = process_group, step_rewards, *[value for value in vars(options).values() if isinstance(value, Tensor)]
    alone = not full and all(other is None for other in others)
    key, read = replays.likeness((OP, options, dtype, backend, validate), tensors, segments) if alone else (None, [])
    outputs, facts = replays.repeated(key, read, run)
    definition = whitenings(OP, options)[1]
    if definition is not None and definition.scale:
        whitened_before.remember(outputs[0])
    return PPOAdvantages(outputs[0], outputs[1], outputs[2], outputs[3], PPOReport(facts))


_TENSORS = (
    "logprobs",
    "ref_logprobs",
    "values",
    "scores",
    "rewards",
    "has_eos",
    "mask",
    "attention_mask",
    "terminated",
    "truncated",
    "bootstrap",
)


def _run(inputs: PPOInputs, options: PPOOptions, group: ProcessGroup | None, *, full: bool) -> tuple[Sequence[Tensor], Callable[[], Facts]]:
    """Shape, whiten, solve, whiten; what lies between two whitenings is one pass where the backend has it. The four outputs, and the facts."""
    whiten_rewards, whiten_advantages = whitenings(OP, options)
    module, call = shaping_backend(inputs.backend), inputs.call
    sequences = module.place(call, inputs.scores)
    step_rewards: dict[str, Tensor] = {}
    if inputs.step_rewards is not None and call.tokens:
        call, step_rewards = with_step_rewards(call, inputs.step_rewards, options, sequences.placed)
    tallied = whiten_advantages is not None
    found: dict[str, Tensor] = {}
    kept = kept_tokens(inputs, options, sequences, None)
    result = None if whiten_rewards is not None else solved_in_one_pass(inputs, options, call, sequences, kept.steps, tallied=tallied)
    shaped = module.shape(call, sequences) if result is None or result.shaped is None else result.shaped
    rewards = shaped.rewards
    if whiten_rewards is not None:
        counted = kept_tokens(inputs, options, sequences, shaped.fault).counted_steps
        found["rewards"] = statistics(inputs, rewards, counted, group)
        rewards = whitened(inputs, rewards, found["rewards"], None if options.masked == "keep" else kept.steps, whiten_rewards)
    if result is None:
        result = solved(inputs, options, sequences, rewards, shaped.fault, kept.steps, tallied=tallied)
    facts = _facts(inputs, options, sequences, replace(shaped, fault=result.fault), step_rewards)
    raise_if_asked(options, PPOReport(lambda: facts), group, full=full, rates=wrong_rates(inputs, options, sequences) if full else None)
    if options.nonfinite == "drop" or (tallied and result.statistics is None):
        kept = kept_tokens(inputs, options, sequences, result.fault)
    advantages = result.advantages
    if whiten_advantages is not None:
        found["advantages"] = statistics(inputs, advantages, kept.counted, group, result.statistics)
        advantages = whitened(inputs, advantages, found["advantages"], kept.trainable, whiten_advantages, inputs.dtype)
    outputs = advantages, result.returns, rewards, shaped.kl
    if result.shaped is None or options.nonfinite == "drop":
        outputs = without_what_does_not_count(options, kept, *outputs)
    given = [output.to(inputs.dtype).reshape(inputs.layout.shape) for output in outputs]
    return given, lambda: replace(facts, whitened=found)


def _facts(inputs: PPOInputs, options: PPOOptions, sequences: Sequences, shaped: Shaped, step_rewards: dict[str, Tensor]) -> Facts:
    """What is to be said of it."""
    return Facts(
        tokens=inputs.call.tokens,
        sequences=sequences,
        kl_sum=shaped.kl_sum,
        clamped=shaped.clamped,
        fault=shaped.fault,
        step_rewards=step_rewards,
        dropping=options.nonfinite == "drop",
        taking_for_zero=options.nonfinite == "zero",
        whitened={},
    )
