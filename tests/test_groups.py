"""Group baselines against their textbook definition, written as loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_scan import GroupAdvantages, InputError, Segments, expand_to_tokens, grpo, reinforce_plus_plus, rloo

Function = Callable[..., GroupAdvantages]
FUNCTIONS: list[Function] = [grpo, rloo, reinforce_plus_plus]
Numbers = list[float]


def members(groups: Sequence[object], keep: Sequence[bool]) -> list[list[int]]:
    """The kept rows of each group."""
    found: dict[object, list[int]] = {}
    for row, group in enumerate(groups):
        if keep[row]:
            found.setdefault(group, []).append(row)
    return list(found.values())


def spread(numbers: Numbers, mean: float, unbiased: bool, weights: Numbers | None = None) -> float:
    """Standard deviation; 0 for a single number."""
    weights = weights or [1.0] * len(numbers)
    degrees = sum(weights) - (1 if unbiased else 0)
    return math.sqrt(sum(w * (x - mean) ** 2 for x, w in zip(numbers, weights, strict=True)) / degrees) if degrees > 0 else 0.0


def textbook_grpo(
    scores: Numbers,
    groups: Sequence[object],
    keep: Sequence[bool],
    *,
    scale: bool = True,
    std_over: str = "group",
    unbiased: bool = True,
    eps: float = 1e-6,
) -> Numbers:
    advantages = [0.0] * len(scores)
    kept = [score for score, used in zip(scores, keep, strict=True) if used]
    for rows in members(groups, keep):
        mean = sum(scores[row] for row in rows) / len(rows)
        over = [scores[row] for row in rows] if std_over == "group" else kept
        std = spread(over, sum(over) / len(over), unbiased)
        for row in rows:
            advantages[row] = (scores[row] - mean) / (std + eps if scale else 1.0)
    return advantages


def textbook_rloo(scores: Numbers, groups: Sequence[object], keep: Sequence[bool]) -> Numbers:
    advantages = [0.0] * len(scores)
    for rows in members(groups, keep):
        for row in rows:
            others = [scores[other] for other in rows if other != row]
            advantages[row] = scores[row] - sum(others) / len(others) if others else 0.0
    return advantages


def textbook_reinforce_plus_plus(
    scores: Numbers, groups: Sequence[object] | None, keep: Sequence[bool], *, tokens: Sequence[int] | None = None, eps: float = 1e-8
) -> Numbers:
    deviations = list(scores)
    alone: set[int] = set()
    for rows in members(groups, keep) if groups is not None else []:
        mean = sum(scores[row] for row in rows) / len(rows)
        for row in rows:
            deviations[row] = scores[row] - mean
        if len({scores[row] for row in rows}) == 1:
            alone |= set(rows)
            deviations = [0.0 if row in alone else deviation for row, deviation in enumerate(deviations)]
    used = [row for row in range(len(scores)) if keep[row]]
    if not used:
        return [0.0] * len(scores)
    weights = [float(tokens[row]) if tokens is not None else 1.0 for row in used]
    mean = sum(w * deviations[row] for row, w in zip(used, weights, strict=True)) / max(sum(weights), 1.0)
    std = spread([deviations[row] for row in used], mean, True, weights)
    return [(deviations[row] - mean) / math.sqrt(std**2 + eps) if keep[row] and row not in alone else 0.0 for row in range(len(scores))]


TEXTBOOK: dict[Function, Callable[..., Numbers]] = {
    grpo: textbook_grpo,
    rloo: textbook_rloo,
    reinforce_plus_plus: textbook_reinforce_plus_plus,
}

ROWS = st.lists(
    st.tuples(st.integers(-3, 3), st.sampled_from([0.0, 1.0, 0.1, -2.5, 1e4, 0.3]) | st.floats(-10, 10, width=16), st.booleans()),
    max_size=24,
)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_as_the_textbook(function: Function, rows: list[tuple[int, float, bool]], dtype: torch.dtype) -> None:
    """Any sizes, interleaved, some rejected; equal to 1e-6 of the largest where the output is as wide."""
    scores = torch.tensor([score for _, score, _ in rows], dtype=torch.float64).to(dtype)
    groups = [group for group, _, _ in rows]
    keep = [used for _, _, used in rows]
    ids = torch.tensor(groups, dtype=torch.int64)
    found = function(scores, ids, keep=torch.tensor(keep, dtype=torch.bool), dtype=torch.float64)
    want = torch.tensor(TEXTBOOK[function](scores.double().tolist(), groups, keep), dtype=torch.float64)
    torch.testing.assert_close(found.advantages, want, rtol=1e-6, atol=1e-6)
    narrow = function(scores, ids, keep=torch.tensor(keep, dtype=torch.bool))
    assert narrow.advantages.dtype == dtype
    assert torch.equal(narrow.advantages, found.advantages.to(dtype))
    for number, (row_group, _, used) in enumerate(rows):
        mates = {float(scores[i]) for i, (other, _, kept) in enumerate(rows) if kept and other == row_group}
        assert bool(found.degenerate[number]) == (used and len(mates) == 1)
        if found.degenerate[number] or not used:
            assert found.advantages[number] == 0.0


@pytest.mark.parametrize(
    "options",
    [
        {"scale": False},
        {"std_over": "batch"},
        {"unbiased": False},
        {"eps": 0.0},
        {"eps": 1e-4, "std_over": "batch", "unbiased": False},
    ],
    ids=str,
)
def test_grpo_options(options: dict[str, Any]) -> None:
    scores = torch.randn(30, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(30) * 7 % 5
    keep = torch.arange(30) % 4 != 0
    want = torch.tensor(textbook_grpo(scores.double().tolist(), groups.tolist(), keep.tolist(), **options))
    torch.testing.assert_close(grpo(scores, groups, keep=keep, **options).advantages, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("with_groups", [True, False])
@pytest.mark.parametrize("with_tokens", [True, False])
def test_reinforce_plus_plus_is_whitening_of_the_tokens(with_groups: bool, with_tokens: bool) -> None:
    scores = torch.randn(12, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(12) % 3
    tokens = torch.arange(12) % 5 + 1
    keep = torch.arange(12) != 4
    found = reinforce_plus_plus(scores, groups if with_groups else None, keep=keep, tokens=tokens if with_tokens else None)
    want = textbook_reinforce_plus_plus(
        scores.double().tolist(), groups.tolist() if with_groups else None, keep.tolist(), tokens=tokens.tolist() if with_tokens else None
    )
    torch.testing.assert_close(found.advantages, torch.tensor(want), rtol=1e-6, atol=1e-6)
    assert not found.degenerate.any()


def test_reinforce_plus_plus_without_groups_whose_scores_are_equal() -> None:
    found = reinforce_plus_plus(torch.full((5,), 0.1), keep=torch.tensor([1, 1, 1, 0, 1]))
    assert not found.advantages.any()
    assert found.degenerate.tolist() == [True, True, True, False, True]


IDS: dict[str, Callable[[list[int]], Any]] = {
    "int64": lambda ids: torch.tensor(ids),
    "sparse and negative": lambda ids: torch.tensor(ids) * 10**15 - 7,
    "int8": lambda ids: torch.tensor(ids, dtype=torch.int8),
    "uint8": lambda ids: torch.tensor(ids, dtype=torch.uint8),
    "uint16": lambda ids: torch.tensor(ids, dtype=torch.uint16),
    "float32": lambda ids: torch.tensor(ids, dtype=torch.float32),
    "every other": lambda ids: torch.tensor(ids).repeat_interleave(2)[::2],
    "list": lambda ids: ids,
    "tuple of strings": lambda ids: tuple(f"prompt {one}" for one in ids),
    "list of tuples": lambda ids: [(one, "turn") for one in ids],
    "array of integers": lambda ids: np.array(ids),
    "array of objects": lambda ids: np.array([f"uid-{one}" for one in ids], dtype=object),
}


@pytest.mark.parametrize("kind", IDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_ids_of_any_kind(function: Function, kind: str) -> None:
    scores = torch.randn(20, generator=torch.Generator().manual_seed(0))
    ids = [row * 7 % 6 for row in range(20)]
    want = torch.tensor(TEXTBOOK[function](scores.double().tolist(), ids, [True] * 20))
    torch.testing.assert_close(function(scores, IDS[kind](ids)).advantages, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bool_ids(function: Function) -> None:
    scores = torch.randn(9)
    ids = torch.arange(9) % 2 == 0
    assert torch.equal(function(scores, ids).advantages, function(scores, ids.long()).advantages)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_singletons_and_equal_scores_are_exactly_0(function: Function) -> None:
    scores = torch.tensor([0.1, 5.0, 0.1, 1.0, 0.1, 3.0, 2.0])
    groups = ["equal", "alone", "equal", "pair", "equal", "pair", "one left"]
    found = function(scores, [*groups[:6], "one left"], keep=torch.ones(7))
    assert found.degenerate.tolist() == [True, True, True, False, True, False, True]
    assert found.advantages[found.degenerate].tolist() == [0.0] * 5
    assert bool((found.advantages[[3, 5]] != 0).all())


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite(function: Function, bad: float) -> None:
    scores = torch.tensor([1.0, bad, 2.0, 4.0, 8.0, 7.0])
    groups = torch.tensor([1, 1, 2, 2, 1, 2])
    others = groups == 2
    alone = torch.tensor([True, False, True, True, True, True])
    without = function(scores.where(alone, 0), groups, keep=alone)
    kept = function(scores, groups)
    assert bool(kept.advantages[~others].isnan().all())
    assert bool(kept.advantages[others].isfinite().all())
    if function is not reinforce_plus_plus:
        assert torch.equal(kept.advantages[others], without.advantages[others])
    assert torch.equal(function(scores, groups, nonfinite="drop").advantages, without.advantages)
    assert torch.equal(function(scores, groups, keep=alone).advantages, without.advantages)
    assert torch.equal(function(scores, groups, nonfinite="zero").advantages, function(scores.where(alone, 0), groups).advantages)
    with pytest.raises(InputError, match=rf"{function.__name__}: scores must be finite where kept, got .* at row 1 \(1 in all\); reject"):
        function(scores, groups, nonfinite="raise")
    assert torch.equal(function(scores, groups, keep=alone, nonfinite="raise").advantages, without.advantages)


def test_without_groups_a_score_that_is_not_finite_spoils_itself_alone() -> None:
    scores = torch.tensor([1.0, math.nan, 2.0, 4.0])
    found = reinforce_plus_plus(scores).advantages
    assert bool(found[1].isnan())
    assert torch.equal(found[[0, 2, 3]], reinforce_plus_plus(scores[[0, 2, 3]]).advantages)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_order_of_rows_does_not_matter(function: Function, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(40, generator=generator)
    groups = torch.randint(0, 9, (40,), generator=generator)
    order = torch.randperm(40, generator=generator)
    found, shuffled = function(scores, groups), function(scores[order], groups[order])
    torch.testing.assert_close(shuffled.advantages, found.advantages[order], rtol=1e-6, atol=1e-6)
    assert torch.equal(shuffled.degenerate, found.degenerate[order])


@pytest.mark.parametrize("function", [grpo, rloo])
def test_groups_do_not_see_each_other(function: Function) -> None:
    scores = torch.randn(20, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(20) * 3 % 4
    found = function(scores, groups).advantages
    for one in range(4):
        mine = groups == one
        assert torch.equal(function(scores[mine], groups[mine]).advantages, found[mine])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_scores_keep_their_differences(function: Function) -> None:
    scores = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 0.1 + 1e4
    groups = (torch.arange(64) % 8).tolist()
    want = torch.tensor(TEXTBOOK[function](scores.double().tolist(), groups, [True] * 64))
    torch.testing.assert_close(function(scores, groups).advantages, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_inputs_stay_as_they_are(function: Function) -> None:
    scores, groups, keep = torch.randn(6).requires_grad_(), torch.arange(6) % 2, torch.ones(6)
    before = [tensor.detach().clone() for tensor in (scores, groups, keep)]
    found = function(scores, groups, keep=keep)
    assert all(torch.equal(now, then) for now, then in zip((scores, groups, keep), before, strict=True))
    assert not found.advantages.requires_grad


@pytest.mark.parametrize("function", FUNCTIONS)
def test_no_rows_and_no_kept_rows(function: Function) -> None:
    empty = function(torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert (empty.advantages.shape, empty.degenerate.shape) == ((0,), (0,))
    assert len(function(torch.empty(0), []).advantages) == 0
    nothing = function(torch.full((4,), math.nan), [1, 1, 2, 2], keep=torch.zeros(4))
    assert not nothing.advantages.any()
    assert not nothing.degenerate.any()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_without_a_break(function: Function) -> None:
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    scores, groups = torch.randn(30), torch.arange(30) % 7
    assert torch.equal(compiled(scores, groups).advantages, function(scores, groups).advantages)


def test_as_trl_computes_grpo_and_rloo() -> None:
    """Statements of its trainers, run with its own functions; the groups lie in order there."""
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    scores = torch.randn(24, generator=torch.Generator().manual_seed(0))
    scores[5] = math.nan  # a row that no reward function scored
    rows = scores.view(-1, 4)
    mean = rows.nanmean(dim=1).repeat_interleave(4)
    groups = torch.arange(24) // 4
    for std_over, std in (("group", nanstd(rows, dim=1).repeat_interleave(4)), ("batch", nanstd(scores).expand_as(scores))):
        want = ((scores - mean) / (std + 1e-4)).nan_to_num(0)
        found = grpo(scores, groups, eps=1e-4, std_over=std_over, nonfinite="drop")
        torch.testing.assert_close(found.advantages, want, rtol=1e-5, atol=1e-5)
    counts = rows.isfinite().sum(1, keepdim=True)
    want = (rows - (rows.nansum(1, keepdim=True) - rows) / (counts - 1)).flatten().nan_to_num(0)
    torch.testing.assert_close(rloo(scores, groups, nonfinite="drop").advantages, want, rtol=1e-5, atol=1e-5)


def test_as_verl_computes_them() -> None:
    verl = pytest.importorskip("verl.trainer.ppo.core_algos")
    scores = torch.randn(24, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) < torch.arange(24)[:, None] % 8 + 1).float()
    uids = np.array([f"uid-{row % 5}" for row in range(24)], dtype=object)
    rewards = torch.zeros(24, 8)
    rewards[torch.arange(24), mask.sum(1).long() - 1] = scores
    of_verl = [
        (grpo(scores, uids), verl.compute_grpo_outcome_advantage(rewards.clone(), mask, uids)),
        (
            grpo(scores, uids, scale=False),
            verl.compute_grpo_outcome_advantage(rewards.clone(), mask, uids, norm_adv_by_std_in_grpo=False),
        ),
        (rloo(scores, uids), verl.compute_rloo_outcome_advantage(rewards.clone(), mask, uids)),
        (
            reinforce_plus_plus(scores, uids, tokens=mask.sum(1).long()),
            verl.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards.clone(), mask, uids),
        ),
    ]
    for found, (want, _) in of_verl:
        torch.testing.assert_close(expand_to_tokens(found.advantages, mask), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_expand_to_tokens(backend: str, mask_dtype: torch.dtype) -> None:
    device = device_of(backend)
    advantages = torch.tensor([1.0, -2.0, 3.0], device=device)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [0, 1, 1]], device=device).to(mask_dtype)
    assert expand_to_tokens(advantages, mask).tolist() == [[1, 1, 0], [0, 0, 0], [0, 3, 3]]
    pack = Segments.from_lengths([2, 0, 3])
    assert expand_to_tokens(advantages, segments=pack).tolist() == [1, 1, 3, 3, 3]
    live = torch.tensor([1, 0, 0, 1, 1], device=device).to(mask_dtype)
    assert expand_to_tokens(advantages, live, segments=pack).tolist() == [1, 0, 0, 3, 3]
    assert expand_to_tokens(torch.empty(0), torch.empty(0, 7)).shape == (0, 7)
    assert expand_to_tokens(torch.empty(0), segments=Segments.from_lengths([])).shape == (0,)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grpo([1.0], [1]), r"grpo: scores must be a torch.Tensor, got list"),
        (lambda: grpo(torch.ones(2, 2), [1, 1]), r"grpo: scores must be \[S\], got shape \[2, 2\]; pass one score per response"),
        (lambda: grpo(torch.ones(2, dtype=torch.int64), [1, 1]), r"grpo: scores must be float32.*convert it with .float"),
        (lambda: grpo(torch.ones(2), [1]), r"grpo: groups must have 2 ids to match scores, got 1; pass one id per row"),
        (lambda: rloo(torch.ones(2), torch.ones(3)), r"rloo: groups must have shape \[2\] to match scores, got \[3\]"),
        (lambda: rloo(torch.ones(2), [[1], [2]]), r"rloo: groups must hold hashable ids, got unhashable type"),
        (lambda: rloo(torch.ones(2), "ab"), r"rloo: groups must be a tensor, list, tuple or NumPy array of ids, got str"),
        (lambda: rloo(torch.ones(2), 3), r"rloo: groups must be a tensor, list, tuple or NumPy array of ids, got int"),
        (lambda: rloo(torch.ones(2), torch.ones(2, dtype=torch.complex64)), r"rloo: groups must be numbers .* got torch.complex64"),
        (lambda: grpo(torch.ones(2), [1, 1], keep=torch.ones(3)), r"grpo: keep must have shape \[2\] to match scores, got \[3\]"),
        (lambda: grpo(torch.ones(2), [1, 1], eps=-1.0), r"grpo: eps must be a number from 0 on, got -1.0"),
        (lambda: grpo(torch.ones(2), [1, 1], std_over="all"), r"grpo: std_over must be one of"),
        (lambda: grpo(torch.ones(2), [1, 1], nonfinite="skip"), r"grpo: nonfinite must be one of"),
        (lambda: grpo(torch.ones(2), [1, 1], dtype=torch.int32), r"grpo: dtype must be one of"),
        (
            lambda: reinforce_plus_plus(torch.ones(2), tokens=torch.ones(2)),
            r"reinforce_plus_plus: tokens must be integers, got torch.float32",
        ),
        (lambda: reinforce_plus_plus(torch.ones(2), tokens=torch.ones(3).long()), r"reinforce_plus_plus: tokens must have shape \[2\]"),
        (lambda: reinforce_plus_plus(torch.ones(2), eps_at="x"), r"reinforce_plus_plus: eps_at must be one of"),
        (lambda: expand_to_tokens(torch.ones(2, 2), torch.ones(2, 2)), r"expand_to_tokens: advantages must be \[S\], got shape \[2, 2\]"),
        (lambda: expand_to_tokens(torch.ones(2)), r"expand_to_tokens: mask must be given"),
        (lambda: expand_to_tokens(torch.ones(2), torch.ones(3, 4)), r"expand_to_tokens: advantages must have shape \[3\], .* got \[2\]"),
        (lambda: expand_to_tokens(torch.ones(2), torch.ones(3)), r"expand_to_tokens: tokens must be \[B, T\] without segments"),
        (
            lambda: expand_to_tokens(torch.ones(2), torch.ones(4), segments=Segments.from_lengths([1, 2])),
            r"expand_to_tokens: segments must cover the 4 tokens, got 3",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_on_the_gpu_nothing_waits_and_bits_do_not_change(function: Function) -> None:
    scores = torch.randn(20_000, device="cuda")
    groups = torch.randint(-1000, 1000, (20_000,), device="cuda") * 1_000_003
    keep = torch.rand(20_000, device="cuda") < 0.9
    first = function(scores, groups, keep=keep)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = function(scores, groups, keep=keep)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again.advantages, first.advantages)
    there = function(scores.cpu(), groups.cpu(), keep=keep.cpu())
    torch.testing.assert_close(first.advantages.cpu(), there.advantages, rtol=1e-6, atol=1e-6)
    assert torch.equal(first.degenerate.cpu(), there.degenerate)


@pytest.mark.gpu
def test_expand_to_tokens_on_the_gpu_waits_for_nothing() -> None:
    advantages, mask = torch.randn(8, device="cuda"), torch.ones(8, 100, device="cuda")
    pack = Segments.from_lengths(torch.full((8,), 100, device="cuda"))
    expand_to_tokens(advantages, mask)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows, packed = expand_to_tokens(advantages, mask), expand_to_tokens(advantages, mask.flatten(), segments=pack)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(rows.flatten(), packed)


def test_the_textbook_knows_its_own() -> None:
    """Two pairs by hand."""
    scores: Tensor = torch.tensor([1.0, 3.0, 5.0, 5.0])
    assert grpo(scores, [0, 0, 1, 1], scale=False).advantages.tolist() == [-1, 1, 0, 0]
    assert rloo(scores, [0, 0, 1, 1]).advantages.tolist() == [-2, 2, 0, 0]
    torch.testing.assert_close(grpo(scores, [0, 0, 1, 1], eps=0.0).advantages, torch.tensor([-(0.5**0.5), 0.5**0.5, 0, 0]))
