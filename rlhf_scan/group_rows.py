"""What the group baselines share: which rows count, and how far each score is from its group's mean."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from .checks import FLOATS, check_dense, check_floats, check_mask, check_option
from .errors import InputError

NONFINITE = ("propagate", "raise", "zero", "drop")


@dataclass(frozen=True)
class Rows:
    """Responses.

    Attributes:
        op: whom messages speak for.
        scores: float64 [S], NaN where one that counts is not finite, 0 at rejected rows.
        kept: bool [S], the rows that count.
        weights: float64 [S], how much each weighs in statistics of the batch.
        dtype: the scores' own.
    """

    op: str
    scores: Tensor
    kept: Tensor
    weights: Tensor
    dtype: torch.dtype

    def parts(self, numbers: Tensor) -> Tensor:
        """Each row's (count, mean, M2), for `rlhf_scan.whitening.merge`: as many equal `numbers` as it weighs; none where not finite."""
        used = self.kept & numbers.isfinite()
        zeros = torch.zeros_like(numbers)
        return torch.stack([torch.where(used, self.weights, zeros), torch.where(used, numbers, zeros), zeros], dim=1)


@dataclass(frozen=True)
class Centred:
    """Per row, its group's statistics.

    Attributes:
        deviations: float64 [S], score minus the mean of the group's scores that are kept; exactly 0 where these are equal, and if rejected.
        counts: float64 [S], kept rows of the group.
        squares: float64 [S], sum of the group's squared deviations.
        degenerate: bool [S], kept rows whose group has one kept row, or equal scores.
    """

    deviations: Tensor
    counts: Tensor
    squares: Tensor
    degenerate: Tensor


def resolve_rows(op: str, scores: object, keep: Tensor | None, nonfinite: str, tokens: Tensor | None = None) -> Rows:
    """The caller's rows, checked, with `nonfinite` applied."""
    check_option(op, "nonfinite", nonfinite, NONFINITE)
    given = check_floats(op, "scores", scores)
    if given.dim() != 1:
        raise InputError(f"{op}: scores must be [S], got shape {list(given.shape)}; pass one score per response")
    kept = torch.ones_like(given, dtype=torch.bool) if keep is None else check_mask(op, "keep", keep, "scores", given).detach() != 0
    numbers = given.detach().double()
    bad = kept & ~numbers.isfinite()
    if nonfinite == "raise" and bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise InputError(
            f"{op}: scores must be finite where kept, got {float(numbers[row])} at row {row} ({int(bad.sum())} in all); "
            'reject that row with keep=, or pass nonfinite="drop"'
        )
    if nonfinite == "drop":
        kept = kept & ~bad
    numbers = torch.where(kept, numbers, 0.0)
    return Rows(
        op, torch.where(bad & kept, 0.0 if nonfinite == "zero" else math.nan, numbers), kept, _weights(op, tokens, given), given.dtype
    )


def ids_of(op: str, groups: object, scores: Tensor) -> Tensor:
    """The group ids as a tensor [S]: as given, or numbered in the order in which they first appear."""
    if not isinstance(groups, Tensor):
        return torch.tensor(_numbered(op, groups, len(scores)), dtype=torch.int64).to(scores.device, non_blocking=True)
    check_dense(op, "groups", groups)
    if groups.shape != scores.shape:
        raise InputError(
            f"{op}: groups must have shape {list(scores.shape)} to match scores, got {list(groups.shape)}; pass one id per row"
        )
    if groups.device != scores.device:
        raise InputError(
            f"{op}: groups must be on {scores.device} like scores, got {groups.device}; move them with .to({str(scores.device)!r})"
        )
    if groups.dtype.is_complex or (groups.dtype.is_floating_point and groups.dtype not in FLOATS):
        raise InputError(f"{op}: groups must be numbers that can be told apart by size, got {groups.dtype}; pass integers")
    return groups.detach() if groups.dtype.is_floating_point else groups.detach().long()


def centred(rows: Rows, ids: Tensor) -> Centred:
    """Deviations from the group means: rows are sorted by id, each group reduced in the order of its rows, without waiting for a GPU.

    Scores are first taken relative to their group's largest, so that equal ones deviate by exactly 0.
    """
    if not len(ids):
        return Centred(rows.scores, rows.scores, rows.scores, rows.kept)
    sorted_ids, order = ids.sort(stable=True)
    group = torch.nn.functional.pad((sorted_ids[1:] != sorted_ids[:-1]).cumsum(0), (1, 0))
    # There are at most as many groups as rows; the groups beyond the last one are empty.
    offsets = torch.searchsorted(group, torch.arange(len(ids) + 1, device=ids.device))

    def reduced(numbers: Tensor, how: str) -> Tensor:
        """Over each row's group."""
        return torch.segment_reduce(numbers, how, offsets=offsets, unsafe=True)[group]

    kept = rows.kept[order]
    scores = torch.where(kept, rows.scores[order], -math.inf)
    below = torch.where(kept, scores - reduced(scores, "max"), 0.0)
    counts, total = reduced(kept.double(), "sum"), reduced(below, "sum")
    deviations = torch.where(kept, below - total / counts.clamp(min=1), 0.0)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return Centred(deviations[back], counts[back], reduced(deviations * deviations, "sum")[back], (kept & (total == 0))[back])


def _numbered(op: str, groups: object, count: int) -> list[int]:
    """Ids of any hashable kind as small integers."""
    as_list = getattr(groups, "tolist", None)  # NumPy's
    ids = as_list() if as_list is not None else groups
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise InputError(
            f"{op}: groups must be a tensor, list, tuple or NumPy array of ids, got {type(groups).__name__}; pass one id per row"
        )
    if len(ids) != count:
        raise InputError(f"{op}: groups must have {count} ids to match scores, got {len(ids)}; pass one id per row")
    numbers: dict[Hashable, int] = {}
    try:
        return [numbers.setdefault(_plain(op, one), len(numbers)) for one in ids]
    except TypeError as error:
        raise InputError(f"{op}: groups must hold hashable ids, got {error}; pass strings or integers") from error


def _plain(op: str, one: object) -> Hashable:
    """An id that is found again by what it is: tensors hash by which object they are, and NaN equals nothing."""
    if isinstance(one, Tensor):
        if one.numel() != 1:
            raise InputError(
                f"{op}: groups must hold one id per row, got a tensor of shape {list(one.shape)} as an id; pass a tuple of numbers"
            )
        one = one.item()
    if isinstance(one, tuple):
        return tuple(_plain(op, part) for part in one)
    return object() if isinstance(one, Real) and one != one else one


def _weights(op: str, tokens: Tensor | None, scores: Tensor) -> Tensor:
    if tokens is None:
        return torch.ones_like(scores, dtype=torch.float64)
    checked = check_mask(op, "tokens", tokens, "scores", scores)
    if checked.dtype.is_floating_point or checked.dtype == torch.bool:
        raise InputError(
            f"{op}: tokens must be integers, got {checked.dtype}; pass how many trainable tokens each response has, such as mask.sum(1)"
        )
    return checked.detach().clamp(min=0).double()
