"""`ppo_advantages(preset=...)` against the trainers' loops, which tests/test_peer_blocks.py holds against the trainers' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import CUDA, device_of
from peer_blocks import BLOCKS, Block, Floats, Rollout
from peer_options import cases, ours
from peer_rollouts import rollout
from script_modules import script
from torch import Tensor

import rlhf_scan
from rlhf_scan import Segments
from rlhf_scan.ppo_options import PRESETS

presets = pytest.mark.parametrize("name", list(BLOCKS))
not_interpreted = pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=pytest.mark.gpu)])
POISON = float("nan")


def batch_for(name: str, seed: int, **kinds: Any) -> Rollout:
    """Rows that the trainer can meet: TRL knows no tools."""
    return rollout(seed, tools=name != "trl", **kinds)


def found(name: str, batch: Rollout, backend: str, dtype: torch.dtype, *, packed: bool = False, **options: Any) -> Any:
    """What the preset makes of a rollout. Only AReaL goes on with the value after a row that was cut."""
    device = device_of(backend)
    kept = steps_of(name, batch) | response_of(batch)

    def per_token(array: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(array[kept] if packed else array, dtype=dtype, device=device)

    result = rlhf_scan.ppo_advantages(
        *(per_token(getattr(batch, argument), dtype) for argument in ("logprobs", "ref_logprobs", "values")),
        torch.tensor(batch.scores, dtype=dtype, device=device),
        preset=name,
        segments=Segments.from_lengths(kept.sum(1).tolist()) if packed else None,
        mask=per_token(batch.mask),
        attention_mask=per_token(response_of(batch)),
        stop_reasons=["stop" if ended else "length" for ended in batch.has_eos],
        bootstrap=torch.tensor(batch.bootstrap, dtype=dtype, device=device) if name == "areal" else None,
        backend=backend,
        **options,
    )
    if not packed:
        return result
    rows = [torch.zeros(kept.shape, dtype=dtype) for _ in result[:4]]
    for row, output in zip(rows, result[:4], strict=True):
        row[torch.tensor(kept)] = output.cpu()
    return result._replace(**dict(zip(result._fields, rows, strict=False)))


def response_of(batch: Rollout) -> Any:
    """Where there is no padding."""
    return np.arange(batch.mask.shape[1]) < batch.lengths[:, None]


def steps_of(name: str, batch: Rollout) -> Any:
    """Where the recursion takes a step that is read: trainable tokens, and for TRL the slot after the last one."""
    return np.arange(batch.mask.shape[1]) <= batch.lengths[:, None] if name == "trl" else batch.mask


def poisoned(name: str, batch: Rollout) -> Rollout:
    """NaN wherever a number does not count: in padding, and at tool tokens but for slime, which counts them."""
    counts = response_of(batch) if name == "slime" else batch.mask

    def poison(array: Floats, places: Any) -> Floats:
        return np.where(places, array, POISON)

    return Rollout(
        poison(batch.logprobs, counts),
        poison(batch.ref_logprobs, counts),
        poison(batch.values, counts | steps_of(name, batch)),
        batch.scores,
        batch.mask,
        batch.lengths,
        batch.has_eos,
        np.where(batch.has_eos, POISON, batch.bootstrap),
    )


def check(name: str, result: Any, expected: Block, batch: Rollout, *, of_each: float, of_largest: float) -> None:
    """Equal where it counts, 0 elsewhere; errors may be so large a part of the number itself, and of the largest (or of 1)."""
    steps = steps_of(name, batch)
    places = {"advantages": batch.mask, "returns": steps, "rewards": steps, "kl": batch.mask}
    for output, where in places.items():
        mine, theirs = getattr(result, output).double().cpu().numpy(), getattr(expected, output)
        allowed = of_largest * (1.0 + np.abs(theirs[where]).max())
        np.testing.assert_allclose(mine[where], theirs[where], rtol=of_each, atol=allowed, err_msg=output)
    for output in ("advantages", "returns", "kl"):
        cleared = ~places[output]
        assert not getattr(result, output).double().cpu().numpy()[cleared].any(), f"{output} outside"


def scored(batch: Rollout, options: dict[str, Any]) -> Rollout:
    """AReaL's mask_no_eos_with_zero, which a caller does to the scores."""
    if not options.get("zero_without_eos"):
        return batch
    return Rollout(**(vars(batch) | {"scores": np.where(batch.has_eos, batch.scores, 0.0)}))


@not_interpreted
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "options"), cases())
def test_preset_is_the_loop(name: str, options: dict[str, Any], seed: int, backend: str) -> None:
    batch = batch_for(name, seed)
    result = found(name, scored(batch, options), backend, torch.float64, **ours(name, options))
    check(name, result, BLOCKS[name](batch, **options), batch, of_each=0, of_largest=1e-11)


@not_interpreted
@pytest.mark.parametrize(("spread", "size"), [(12.0, 10.0), (1e-4, 5e-5)])
@pytest.mark.parametrize(("name", "options"), cases())
def test_preset_is_the_loop_at_clamps_and_at_small_variance(
    name: str, options: dict[str, Any], spread: float, size: float, backend: str
) -> None:
    batch = batch_for(name, 7, spread=spread, size=size)
    result = found(name, scored(batch, options), backend, torch.float64, **ours(name, options))
    check(name, result, BLOCKS[name](batch, **options), batch, of_each=0, of_largest=1e-11)


@presets
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-8)])
def test_low_precision_inputs(name: str, dtype: torch.dtype, rounding: float, backend: str) -> None:
    if backend == "triton" and not CUDA:
        rounding *= 2  # the interpreter truncates
    batch = batch_for(name, 3)
    rounded = {
        part: torch.tensor(getattr(batch, part)).to(dtype).double().numpy()
        for part in ("logprobs", "ref_logprobs", "values", "scores", "bootstrap")
    }
    batch = Rollout(**(vars(batch) | rounded))
    result = found(name, batch, backend, dtype, kl_coef=0.1)
    assert result.advantages.dtype == dtype
    check(name, result, BLOCKS[name](batch, kl_coef=0.1), batch, of_each=rounding, of_largest=2e-6)


@not_interpreted
@presets
def test_packed_rows_are_rows(name: str, backend: str) -> None:
    batch = batch_for(name, 5)
    rows, pack = (found(name, batch, backend, torch.float64, packed=packed, kl_coef=0.1) for packed in (False, True))
    for output in ("advantages", "returns", "rewards", "kl"):
        torch.testing.assert_close(getattr(pack, output), getattr(rows, output).cpu(), rtol=1e-12, atol=1e-12, msg=output)


@presets
def test_what_stands_outside_does_not_count(name: str, backend: str) -> None:
    batch = batch_for(name, 4)
    clean, poison = (found(name, rows, backend, torch.float64, kl_coef=0.1) for rows in (batch, poisoned(name, batch)))
    for output in ("advantages", "returns", "rewards", "kl"):
        assert torch.equal(getattr(clean, output), getattr(poison, output)), output


def test_every_preset_has_a_loop() -> None:
    assert sorted(PRESETS) == sorted(BLOCKS)


def test_the_tables_in_the_docs_are_those_of_now() -> None:
    table = script("preset_table")
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == table.page(text), "run python -m scripts.preset_table"


@presets
@pytest.mark.parametrize("same", [True, False])
def test_the_numbers_in_the_docs_are_the_loops(name: str, same: bool) -> None:
    table = script("preset_table")
    rows = table.rows_for(name)
    kinds = np.array([list(row) for row in table.ROWS.values()])[rows]
    log_ratios, values, scores, bootstrap = (
        np.array(numbers)[rows] for numbers in (table.LOG_RATIOS, table.VALUES, table.SCORES, table.BOOTSTRAP)
    )
    ended = np.array([table.STOP_REASONS[row] == "stop" for row in rows])
    batch = Rollout(log_ratios, np.zeros(kinds.shape), values, scores, kinds == "x", (kinds != ".").sum(1), ended, bootstrap)
    options: dict[str, Any] = {"kl_estimator": "k1", "kl_coef": 0.1, "gamma": 1.0, "lam": 0.95, "whiten": False} if same else {}
    shown = table.example(name, **(table.SAME if same else {})).numpy()
    np.testing.assert_allclose(shown[batch.mask], BLOCKS[name](batch, **options).advantages[batch.mask], rtol=1e-9, atol=1e-9)
