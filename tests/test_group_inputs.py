"""Group baselines: ids of any kind, scores that are not finite, wrong arguments; and what gives tokens their response's advantage."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of
from group_textbook import FUNCTIONS, TEXTBOOK, Function

from rlhf_scan import InputError, Segments, expand_to_tokens, grpo, reinforce_plus_plus, rloo

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
    "list of a tensor's entries": lambda ids: list(torch.tensor(ids)),
    "list of tuples of entries": lambda ids: list(zip(torch.tensor(ids), torch.zeros(len(ids)), strict=True)),
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


@pytest.mark.parametrize(
    "ids", [torch.tensor([math.nan, math.nan, 1.0, 1.0]), [math.nan, math.nan, 1, 1], [(0, math.nan), (0, math.nan), 1, 1]]
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_nan_is_no_id_of_a_group(function: Function, ids: Any) -> None:
    assert function(torch.tensor([1.0, 2.0, 3.0, 4.0]), ids).degenerate.tolist() == [True, True, False, False]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bool_ids(function: Function) -> None:
    scores = torch.randn(9)
    ids = torch.arange(9) % 2 == 0
    assert torch.equal(function(scores, ids).advantages, function(scores, ids.long()).advantages)


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
        (
            lambda: rloo(torch.ones(2), [torch.ones(2), torch.ones(2)]),
            r"rloo: groups must hold one id per row, got a tensor of shape \[2\]",
        ),
        (lambda: rloo(torch.ones(2), torch.ones(2).to(torch.float8_e5m2)), r"rloo: groups must be numbers .* got torch.float8_e5m2"),
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
