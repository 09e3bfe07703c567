"""`ppo_advantages` over the ranks of a process group: real processes, one of them without tokens."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, distributed

from rlhf_scan import InputError, ppo_advantages

pytestmark = pytest.mark.slow

OPTIONS: dict[str, dict[str, Any]] = {
    "recommended": {},
    "trl": {"preset": "trl", "whiten_rewards": True},
    "drop": {"nonfinite": "drop", "whiten_rewards": "shift"},
}
# Rows of each rank; a rank may have none.
SHARDS = ([5, 3], [0, 8], [8, 0])
SPOILT = 2  # a row


def batch() -> dict[str, Tensor]:
    """The rows of all ranks together."""
    generator = torch.Generator().manual_seed(3)
    rows: dict[str, Tensor] = {name: torch.randn(8, 6, generator=generator) for name in ("logprobs", "ref_logprobs", "values")}
    rows["scores"] = torch.randn(8, generator=generator)
    rows["mask"] = torch.arange(6) < torch.randint(1, 7, (8, 1), generator=generator)
    rows["values"][SPOILT, 0] = float("nan")
    return rows


def rank_main(rank: int, folder: str) -> None:
    """This rank's share in every way, and what came out."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    world = distributed.group.WORLD
    results: dict[str, Any] = {}
    for number, lengths in enumerate(SHARDS):
        mine = {name: rows.split(lengths)[rank] for name, rows in batch().items()}
        for name, options in OPTIONS.items():
            found = ppo_advantages(**mine, process_group=world, **options)
            results[f"{name} {number}"] = [*found[:4]], dict(found.report)
        for forbidden in ({"nonfinite": "raise"}, {"validate": "full"}):
            try:
                ppo_advantages(**mine, process_group=world, **forbidden)  # type: ignore[arg-type]
            except InputError as error:
                results[f"{next(iter(forbidden))} {number}"] = str(error)
    # A tool's answer ends a sequence of one rank.
    call: dict[str, Any] = {name: torch.zeros(1, 3) for name in ("logprobs", "ref_logprobs", "values")}
    call |= {"scores": torch.zeros(1), "mask": torch.tensor([[1, 1, rank]]), "attention_mask": torch.ones(1, 3)}
    try:
        ppo_advantages(**call, trailing="error", process_group=world)
    except InputError as error:
        results["trailing"] = str(error)
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank got."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(rank_main, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("shard", range(len(SHARDS)))
@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_sharding_changes_nothing(outcome: list[dict[str, Any]], name: str, shard: int) -> None:
    want = ppo_advantages(**batch(), **OPTIONS[name])  # type: ignore[arg-type]
    (first, report), (second, other) = (result[f"{name} {shard}"] for result in outcome)
    for mine, theirs, whole in zip(first, second, want[:4], strict=True):
        torch.testing.assert_close(torch.cat([mine, theirs]), whole, rtol=1e-5, atol=1e-6, equal_nan=True)
    # Statistics are of all ranks, counts of each.
    statistics = [key for key in report if key.startswith(("advantages_", "rewards_"))]
    assert statistics
    assert {key: report[key] for key in statistics} == {key: other[key] for key in statistics}
    assert report["advantages_count"] == want.report["advantages_count"]
    assert report["sequences"] + other["sequences"] == 8
    assert report["nonfinite_sequences"] + other["nonfinite_sequences"] == 1


@pytest.mark.parametrize("shard", range(len(SHARDS)))
@pytest.mark.parametrize("kind", ["nonfinite", "validate"])
def test_all_ranks_raise_together(outcome: list[dict[str, Any]], kind: str, shard: int) -> None:
    holder = int(SHARDS[shard][0] <= SPOILT)
    messages = [result[f"{kind} {shard}"] for result in outcome]
    assert "values must be finite where it counts, got a number that is not at token 0 of sequence 2" in messages[holder]
    assert f"trouble on rank {holder} of the process group" in messages[1 - holder]


def test_a_trailing_token_of_one_rank_is_told_to_all(outcome: list[dict[str, Any]]) -> None:
    assert 'scores must end on trainable tokens with trailing="error", got 1 sequences' in outcome[0]["trailing"]
    assert "trouble on rank 0 of the process group" in outcome[1]["trailing"]
