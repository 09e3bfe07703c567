"""Group baselines: one score per response becomes one advantage per response, against the other responses to the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .checks import check_dtype, check_eps, check_flag, check_floats, check_option, check_switch
from .errors import InputError
from .group_rows import Rows, centred, ids_of, resolve_rows
from .ranks import check_process_group, gathered
from .segments import Segments
from .turns import token_mask, token_owners
from .whitening import Whitening, apply, merge

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STD_OVER = ("group", "batch")
Ids = Tensor | Sequence[object]


class GroupAdvantages(NamedTuple):
    """What the group baselines return.

    Attributes:
        advantages: [S], one per response; 0 at rejected ones.
        degenerate: bool [S], True at responses that teach nothing, whose advantage is exactly 0: their group has one response that is kept,
            or equal scores.
    """

    advantages: Tensor
    degenerate: Tensor


def grpo(
    scores: Tensor,
    groups: Ids,
    *,
    keep: Tensor | None = None,
    scale: bool = True,
    std_over: str = "group",
    unbiased: bool = True,
    eps: float = 1e-6,
    nonfinite: str = "propagate",
    dtype: torch.dtype | None = None,
) -> GroupAdvantages:
    """Group-relative advantages.

        A_i = (r_i - mean of the group) / (std of the group + eps)

    Boundaries: no response of another group matters, unless ``std_over="batch"``. A group of one, or of equal scores, gets exactly 0 and is
    degenerate. Rows may lie in any order, groups have any size. Sums are in float64, in a fixed order. Nothing waits for a GPU, unless
    `groups` is no tensor or `nonfinite` is "raise".

    Args:
        scores: r_i, [S], one per response; float32, float64, bfloat16 or float16.
        groups: which prompt each answers, [S]: a tensor of any dtype (on the device of `scores`), or a list, tuple or NumPy array of
            numbers, strings or anything hashable. Equal ids are one group; ids need not be small, sorted or positive.
        keep: nonzero at responses that count, [S], any dtype; rejected ones are in no statistic and get 0. None: all count.
        scale: False does not divide by the std (Dr. GRPO).
        std_over: "group", or "batch": the std of all scores that are kept.
        unbiased: of the variance: divide by n - 1, not by n.
        eps: added to the std, >= 0.
        nonfinite: what a NaN or inf among the scores that are kept does. "propagate": its group becomes NaN, no other changes. "raise":
            InputError names the row. "drop": as if rejected. "zero": as if 0.
        dtype: of the advantages; None: that of `scores`. Half precisions are rounded once, from float64.

    Returns:
        GroupAdvantages(advantages, degenerate), both [S], detached from autograd.

    Raises:
        InputError: an argument is wrong; the message says which, and what to do.

    Shao et al. 2024, DeepSeekMath; Liu et al. 2025, Understanding R1-Zero-Like Training (without the std).
    """
    check_option("grpo", "std_over", std_over, STD_OVER)
    check_eps("grpo", eps)
    check_switch("grpo", "scale", scale)
    check_switch("grpo", "unbiased", unbiased)
    rows = resolve_rows("grpo", scores, keep, nonfinite)
    group = centred(rows, ids_of("grpo", groups, scores))
    advantages = group.deviations
    if scale:
        whole = merge(rows.parts(rows.scores)) if std_over == "batch" else None
        squares, count = (group.squares, group.counts) if whole is None else (whole[2], whole[0])
        std = (squares / (count - 1 if unbiased else count).clamp(min=1)).sqrt() + eps
        advantages = torch.where(std > 0, advantages / std, advantages)
    return _result(advantages, group.degenerate, rows, dtype)


def rloo(
    scores: Tensor, groups: Ids, *, keep: Tensor | None = None, nonfinite: str = "propagate", dtype: torch.dtype | None = None
) -> GroupAdvantages:
    """REINFORCE with the mean of the other responses of the group as the baseline.

        A_i = r_i - mean over j != i of r_j,   j in the group of i

    A group of one, or of equal scores, gets exactly 0 and is degenerate.

    Args:
        scores, groups, keep, nonfinite, dtype: as in `grpo`.

    Returns:
        GroupAdvantages(advantages, degenerate), both [S], detached from autograd.

    Raises:
        InputError: as in `grpo`.

    Ahmadian et al. 2024, Back to Basics.
    """
    rows = resolve_rows("rloo", scores, keep, nonfinite)
    group = centred(rows, ids_of("rloo", groups, scores))
    # r_i - (n * mean - r_i) / (n - 1)
    return _result(group.deviations * group.counts / (group.counts - 1).clamp(min=1), group.degenerate, rows, dtype)


def reinforce_plus_plus(
    scores: Tensor,
    groups: Ids | None = None,
    *,
    keep: Tensor | None = None,
    tokens: Tensor | None = None,
    unbiased: bool = True,
    eps: float = 1e-8,
    eps_at: str = "inside",
    process_group: ProcessGroup | None = None,
    nonfinite: str = "propagate",
    dtype: torch.dtype | None = None,
) -> GroupAdvantages:
    """Scores whitened over the whole batch; with `groups`, after their group's mean was taken off (REINFORCE++-baseline).

        A_i = (d_i - mean of d) / sqrt(variance of d + eps),   d_i = r_i, or r_i - mean of the group

    A response of a degenerate group has d_i = 0, which counts in the statistics, and advantage 0.

    Args:
        scores, keep, dtype: as in `grpo`.
        groups: as in `grpo`; None: no group's mean is taken off.
        tokens: how many trainable tokens each response has, an integer [S]: it then weighs so much in mean and variance, as when advantages
            are whitened per token. None: each response weighs 1.
        unbiased, eps, eps_at, process_group: as in `whiten`. A group must lie on one rank.
        nonfinite: as in `grpo`; "propagate" without groups: that row alone becomes NaN. Statistics are of the finite ones.

    Returns:
        GroupAdvantages(advantages, degenerate), both [S], detached from autograd.

    Raises:
        InputError: as in `grpo`.

    Hu et al. 2025, REINFORCE++.
    """
    op = "reinforce_plus_plus"
    whitening = Whitening(unbiased=unbiased, eps=eps, eps_at=eps_at)
    whitening.check(op)
    check_process_group(op, process_group)
    rows = resolve_rows(op, scores, keep, nonfinite, tokens)
    group = None if groups is None else centred(rows, ids_of(op, groups, scores))
    deviations = rows.scores if group is None else group.deviations
    statistics = merge(rows.parts(deviations))
    if process_group is not None:
        statistics = merge(gathered(statistics, process_group))
    degenerate = rows.kept & deviations.isfinite() & (statistics[2] == 0) if group is None else group.degenerate
    return _result(apply(deviations, rows.kept, statistics, whitening), degenerate, rows, dtype)


def expand_to_tokens(advantages: Tensor, mask: Tensor | None = None, *, segments: Segments | None = None) -> Tensor:
    """Give each trainable token of a response the response's advantage.

        output_t = A_i,   i the response that token t is of;   0 at masked tokens

    Args:
        advantages: A_i, [S], one per response; float32, float64, bfloat16 or float16, and so is the output.
        mask: nonzero at trainable tokens: [S, T], or with `segments` packed [N]. None: all tokens of the segments are trainable.
        segments: where each response lies in a pack. Boundaries on a GPU do not say how many tokens there are: pass a mask with them.

    Returns:
        The advantages per token, in the shape of `mask` ([N] without one), 0 at masked tokens, detached from autograd.

    Raises:
        InputError: an argument is wrong.
    """
    op = "expand_to_tokens"
    check_floats(op, "advantages", advantages)
    count = len(advantages) if advantages.dim() == 1 else -1
    if count < 0:
        raise InputError(f"{op}: advantages must be [S], got shape {list(advantages.shape)}; pass one per response")
    if mask is not None:
        mask = check_flag(op, "mask", mask)
    elif not isinstance(segments, Segments) or segments.total is None:
        raise InputError(f"{op}: mask must be given where segments do not say how many tokens there are, got None; pass the token mask")
    shape = torch.Size([segments.total or 0]) if mask is None and segments is not None else mask.shape  # type: ignore[union-attr]
    owners, responses = token_owners(op, shape, segments, advantages.device)
    if responses != count:
        raise InputError(
            f"{op}: advantages must have shape [{responses}], one per response, got [{count}]; pass one for each row or segment"
        )
    spread = advantages.detach()[owners] if count else advantages.new_zeros(shape)
    return spread if mask is None else torch.where(token_mask(op, mask, advantages.device), spread, 0)


def _result(advantages: Tensor, degenerate: Tensor, rows: Rows, dtype: torch.dtype | None) -> GroupAdvantages:
    check_dtype(rows.op, dtype)
    exact = torch.where(rows.kept & ~degenerate, advantages, 0)
    return GroupAdvantages(exact.to(dtype or rows.dtype), degenerate)
