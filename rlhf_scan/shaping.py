"""Reward shaping, the first stage of `ppo_advantages`: from log-probabilities and scores to one reward a token.

Two passes over the tokens: `place` finds where each sequence ends, and with it where its score goes; `shape` makes rewards and KL. No pass waits
for the device.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol, cast

import torch
from torch import Tensor

from .call import Call

# What a token or sequence that is not finite is named after; `Shaped.fault` holds the position in this list.
FAULTS = ("logprobs", "ref_logprobs", "kl", "values", "rewards", "scores", "kl_coef", "bootstrap", "advantages")
NO_FAULT = torch.iinfo(torch.int64).max
# What is added to the position where advantages are not finite: it comes after any cause, and speaks where none is known, such as a rate, a
# bootstrap within a sequence, or a sum too large.
RESULT_FAULT = len(FAULTS) << 58


@dataclass(frozen=True)
class ShapingCall:
    """Tokens lie flat, sequence after sequence, as in `rlhf_scan.call.Call`.

    Attributes:
        values: [N].
        logprobs, ref_logprobs: [N], or both None: no KL.
        rewards: token rewards [N].
        mask: nonzero at trainable tokens [N].
        attention: nonzero at tokens that are no padding [N].
        has_eos: nonzero at end-of-sequence tokens [N].
        kl: the estimator's name.
        log_ratio_limit, kl_limit: how far log-ratio and KL may lie from 0; inf: any.
        ignores_mask: the recursion does (``masked="keep"``), so token rewards and values at masked tokens count.
        kl_everywhere: KL counts at masked tokens too.
        padded: where there is no `attention`: whether what follows the last trainable token is padding.
        zero_faults: a number that is not finite counts as 0.
        segments, length, cu_seqlens: as in `Call`.
        dtype: of the arithmetic, float32 or float64.
    """

    values: Tensor
    logprobs: Tensor | None
    ref_logprobs: Tensor | None
    rewards: Tensor | None
    mask: Tensor | None
    attention: Tensor | None
    has_eos: Tensor | None
    kl: str
    log_ratio_limit: float
    kl_limit: float
    ignores_mask: bool
    kl_everywhere: bool
    padded: bool
    zero_faults: bool
    segments: int
    length: int | None
    cu_seqlens: Tensor | None
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        """N."""
        return self.values.numel()

    @cached_property
    def boundaries(self) -> Tensor:
        """cu_seqlens [S + 1], for rows too."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        return torch.arange(self.segments + 1, device=self.values.device) * (self.length or 0)


@dataclass(frozen=True)
class ScoreCall:
    """What is given once per sequence, and what becomes of it.

    Attributes:
        scores: [S], any real dtype; None: 0.
        kl_coef: [S], likewise, or a number.
        has_eos: nonzero for sequences that have an end [S]; None: `ShapingCall.has_eos` says it.
        terminated, truncated, bootstrap: as in `Call`.
        bias, scale, low, high: score' = (score + bias) * scale, from `low` to `high`.
        looks_for_eos: whether it is known which sequences have an end.
        missing_eos_penalty: subtracted from score' where no trainable token ends the sequence.
        post_eos: the score belongs to the slot after the sequence's end, where there is room.
        trailing: what becomes of the score of a sequence that ends with no trainable token: "carry_back" or "error", "drop", "stay".
        trims: whether padding must be cut off a sequence, so that nothing is read there and what follows the end follows the last step.
    """

    scores: Tensor | None
    kl_coef: float | Tensor
    has_eos: Tensor | None
    terminated: Tensor | None
    truncated: Tensor | None
    bootstrap: Tensor | None
    bias: float
    scale: float
    low: float
    high: float
    looks_for_eos: bool
    missing_eos_penalty: float
    post_eos: bool
    trailing: str
    trims: bool


@dataclass(frozen=True)
class Located:
    """Where each sequence ends, int64 [S] each.

    Attributes:
        last: its last trainable token; -1 where it has none.
        end: its last token that is no padding, never before `last`; -1 where `last` is.
        trainable: how many trainable tokens it has.
        eos: how many of these are end-of-sequence tokens.
    """

    last: Tensor
    end: Tensor
    trainable: Tensor
    eos: Tensor


@dataclass(frozen=True)
class Placed:
    """What an entry per sequence says, [S] each.

    Attributes:
        score: to be added, in the call's dtype.
        place: the token that gets it, int64; -1: none does.
        slot: the token after the end that is one more step, int64; -1: there is none.
        end: `Located.end`.
    """

    score: Tensor
    place: Tensor
    slot: Tensor
    end: Tensor


@dataclass(frozen=True)
class Sequences:
    """All that there is once per sequence, [S] each. Nothing of it is the caller's.

    Attributes:
        start: its first token, int64.
        located, placed: see there.
        fault: as `Shaped.fault`, of the score, kl_coef, and the value that follows.
        kl_coef: in the call's dtype.
        missing_eos: bool, those without an end; None: it is not known.
        truncated: int64, how many of its tokens are and do not terminate; None: nobody said.
        trimmed: cu_seqlens int64 [2 S + 1] of each sequence up to its last step, and the padding after it; None: nobody asked.
    """

    start: Tensor
    located: Located
    placed: Placed
    fault: Tensor
    kl_coef: Tensor
    missing_eos: Tensor | None
    truncated: Tensor | None
    trimmed: Tensor | None


@dataclass(frozen=True)
class Shaped:
    """What shaping makes.

    Attributes:
        rewards: [N], in the call's dtype: 0 at tokens that take no step.
        kl: [N], likewise: 0 at masked tokens.
        fault: int64 [S], ``offset of the token * len(FAULTS) + which`` of the first number that is not finite, else NO_FAULT; those of
            `Sequences` among them.
        clamped: int64 [S], log-ratios or KLs that a limit cut.
        kl_sum: [S], of KL at trainable tokens.
    """

    rewards: Tensor
    kl: Tensor
    fault: Tensor
    clamped: Tensor
    kl_sum: Tensor


@dataclass(frozen=True)
class Kept:
    """Which tokens count, [N] each, nonzero where they do; None: all do.

    Attributes:
        trainable: those of the mask.
        steps: these and the step after the end, where there is one.
        counted: trainable tokens of sequences that statistics may hold.
        counted_steps: likewise of `steps`.
    """

    trainable: Tensor | None
    steps: Tensor | None
    counted: Tensor | None
    counted_steps: Tensor | None


@dataclass(frozen=True)
class Solved:
    """What shaping and recursion make in one pass.

    Attributes:
        advantages, returns: [N].
        shaped: rewards, KL, and what was found on the way; None where rewards were given.
        fault: as in `Shaped`, with those of the advantages.
        statistics: count, mean and M2, float64 [3], of the advantages of trainable tokens in sequences without a fault; None: not asked for.
    """

    advantages: Tensor
    returns: Tensor
    shaped: Shaped | None
    fault: Tensor
    statistics: Tensor | None


class ShapingBackend(Protocol):
    """A module ``rlhf_scan.backends.<name>_shaping``."""

    def place(self, call: ShapingCall, scores: ScoreCall) -> Sequences:
        """Where each sequence ends, and what there is once per sequence."""
        ...

    def shape(self, call: ShapingCall, sequences: Sequences) -> Shaped:
        """Rewards and KL of each token."""
        ...

    def kept(self, call: ShapingCall, placed: Placed, fault: Tensor, *, slots: bool, drops: bool) -> Kept:
        """Which tokens count. `slots`: the slot after the end is a step, which no mask holds; `drops`: no sequence with a fault is counted."""
        ...


Dtypes = tuple[torch.dtype, ...]


class OnePass(Protocol):
    """The recursion in one pass over the tokens; with shaping, where nothing divides them."""

    def __call__(
        self, call: Call, shaping: ShapingCall | None, sequences: Sequences, *, post_eos: bool, checked: bool, tallied: bool, dtypes: Dtypes
    ) -> Solved:
        """`call` is that of `gae`; with `shaping` what rewards are made of stands in place of them.

        `dtypes` are those of its outputs, then of rewards and KL.
        `post_eos`: a sequence may have a step after its end; `checked`: faults of the advantages are looked for; `tallied`: statistics are wanted.
        """
        ...


@cache
def one_pass(backend: str) -> OnePass | None:
    """Of the backend that has it."""
    return cast(OnePass, importlib.import_module(".backends.triton_ppo", __package__).solve) if backend == "triton" else None


@cache
def shaping_backend(name: str) -> ShapingBackend:
    """The module behind a backend's name, which `choose_backend` has found to run here."""
    return cast(ShapingBackend, importlib.import_module(f".backends.{name}_shaping", __package__))
