"""Group baselines against their textbook definition, and against the trainers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from group_textbook import FUNCTIONS, TEXTBOOK, Function, textbook_grpo, textbook_reinforce_plus_plus
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_scan import expand_to_tokens, grpo, reinforce_plus_plus, rloo

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


@pytest.mark.parametrize("function", FUNCTIONS)
def test_singletons_and_equal_scores_are_exactly_0(function: Function) -> None:
    scores = torch.tensor([0.1, 5.0, 0.1, 1.0, 0.1, 3.0, 2.0])
    groups = ["equal", "alone", "equal", "pair", "equal", "pair", "one left"]
    found = function(scores, [*groups[:6], "one left"], keep=torch.ones(7))
    assert found.degenerate.tolist() == [True, True, True, False, True, False, True]
    assert found.advantages[found.degenerate].tolist() == [0.0] * 5
    assert bool((found.advantages[[3, 5]] != 0).all())


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


def test_the_textbook_knows_its_own() -> None:
    """Two pairs by hand."""
    scores: Tensor = torch.tensor([1.0, 3.0, 5.0, 5.0])
    assert grpo(scores, [0, 0, 1, 1], scale=False).advantages.tolist() == [-1, 1, 0, 0]
    assert rloo(scores, [0, 0, 1, 1]).advantages.tolist() == [-2, 2, 0, 0]
    torch.testing.assert_close(grpo(scores, [0, 0, 1, 1], eps=0.0).advantages, torch.tensor([-(0.5**0.5), 0.5**0.5, 0, 0]))
