"""Whitening over the ranks of a process group: real processes, one of them without tokens."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, distributed

from rlhf_scan import InputError, reinforce_plus_plus, whiten
from rlhf_scan.whitening import statistics

DEFINITIONS: list[dict[str, Any]] = [{}, {"shift_mean": False}, {"unbiased": False, "eps_at": "floor"}, {"scale": False}]
pytestmark = pytest.mark.slow

BACKENDS = ("cpu", "reference")
# Tokens of each rank; none may be anywhere, and then all of a rank may be masked.
SHARDS = {2: ([70, 30], [0, 100], [100, 0]), 3: ([50, 0, 50], [1, 98, 1], [0, 0, 100])}


def batch() -> tuple[Tensor, Tensor]:
    """The numbers of all ranks together."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(100, generator=generator) * 0.1 + 1e4
    return x, torch.rand(100, generator=generator) < 0.8


def rank_main(rank: int, ranks: int, folder: str) -> None:
    """Whiten this rank's share in every way, and keep what came out."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    world = distributed.group.WORLD
    results: dict[str, Any] = {}
    x, mask = batch()
    for number, lengths in enumerate(SHARDS[ranks]):
        mine, trainable = x.split(lengths)[rank], mask.split(lengths)[rank]
        results[f"statistics {number}"] = statistics(mine, trainable, process_group=world)
        for backend in BACKENDS:
            for kind, definition in enumerate(DEFINITIONS):
                results[f"{number} {backend} {kind}"] = whiten(mine, trainable, process_group=world, backend=backend, **definition)
    # Tokens, but none of them trainable, on the last rank alone; then on all.
    last = rank == ranks - 1
    results["masked"] = whiten(x, torch.full_like(x, 0.0 if last else 1.0), process_group=world)
    results["all masked"] = whiten(x, torch.zeros_like(x), process_group=world)
    # A number that is not finite is on the last rank; all must hear of it.
    spoilt = x.clone()
    spoilt[7] = float("nan") if last else 1.0
    results["nan"] = whiten(spoilt, process_group=world)
    try:
        whiten(spoilt, process_group=world, validate="full")
    except InputError as error:
        results["error"] = str(error)
    # Groups lie whole on a rank.
    mine = torch.arange(100) // 10 % ranks == rank
    results["reinforce_plus_plus"] = reinforce_plus_plus(x[mine], torch.arange(100)[mine] // 5, process_group=world).advantages
    # A group that this rank may not be in.
    pair = distributed.new_group([0, 1])
    results["pair"] = whiten(x[rank::ranks], process_group=pair) if rank < 2 else None
    try:
        whiten(x, process_group=pair)
    except InputError as error:
        results["outside"] = str(error)
    try:
        whiten(x, process_group="world")  # type: ignore[arg-type]
    except InputError as error:
        results["no group"] = str(error)
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank got."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(rank_main, args=(request.param, str(folder)), nprocs=request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", range(len(DEFINITIONS)))
def test_the_sharding_changes_nothing(outcome: list[dict[str, Any]], kind: int, backend: str) -> None:
    x, mask = batch()
    want = whiten(x, mask, backend="reference", **DEFINITIONS[kind])
    for number, lengths in enumerate(SHARDS[len(outcome)]):
        parts = [result[f"{number} {backend} {kind}"] for result in outcome]
        assert [len(part) for part in parts] == lengths
        torch.testing.assert_close(torch.cat(parts), want, rtol=1e-6, atol=1e-6)


def test_every_rank_has_the_same_statistics_bit_for_bit(outcome: list[dict[str, Any]]) -> None:
    x, mask = batch()
    want = statistics(x, mask, backend="reference")
    for number in range(len(SHARDS[len(outcome)])):
        found = [result[f"statistics {number}"] for result in outcome]
        assert all(torch.equal(other, found[0]) for other in found)
        torch.testing.assert_close(found[0], want, rtol=1e-9, atol=0)


def test_a_rank_without_trainable_tokens(outcome: list[dict[str, Any]]) -> None:
    x, _ = batch()
    for result in outcome[:-1]:
        torch.testing.assert_close(result["masked"].double().mean(), torch.tensor(0.0).double(), atol=1e-6, rtol=0)
        # Every rank but one holds the same numbers, so the population is the same, and the correction for it differs.
        count = len(x) * (len(outcome) - 1)
        shrunk = ((len(x) - 1) / len(x) * count / (count - 1)) ** 0.5
        torch.testing.assert_close(result["masked"] * shrunk, whiten(x), rtol=1e-5, atol=1e-5)
    assert not outcome[-1]["masked"].any()
    assert not any(result["all masked"].any() for result in outcome)


def test_a_number_that_is_not_finite_reaches_all_and_all_raise(outcome: list[dict[str, Any]]) -> None:
    for result in outcome:
        assert bool(result["nan"].isnan().all())
    assert all("on another rank" in result["error"] for result in outcome[:-1])
    assert "got nan at [7]" in outcome[-1]["error"]


def test_reinforce_plus_plus_over_the_ranks(outcome: list[dict[str, Any]]) -> None:
    x, _ = batch()
    want = reinforce_plus_plus(x, torch.arange(100) // 5).advantages
    for rank, result in enumerate(outcome):
        torch.testing.assert_close(
            result["reinforce_plus_plus"], want[torch.arange(100) // 10 % len(outcome) == rank], rtol=1e-6, atol=1e-6
        )


def test_a_group_of_some_ranks(outcome: list[dict[str, Any]]) -> None:
    x, _ = batch()
    ranks = len(outcome)
    want = whiten(torch.cat([x[0::ranks], x[1::ranks]]))
    torch.testing.assert_close(torch.cat([outcome[0]["pair"], outcome[1]["pair"]]), want, rtol=1e-6, atol=1e-6)
    for result in outcome[2:]:
        assert "this process is not in it" in result["outside"]
    assert all("process_group must be a torch.distributed.ProcessGroup, got str" in result["no group"] for result in outcome)


def nccl_main(rank: int, ranks: int, folder: str) -> None:
    """Numbers on the GPU, on the CPU, and no numbers."""
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    world = distributed.group.WORLD
    x, mask = batch()
    lengths = SHARDS[ranks][0] if ranks in SHARDS else [100]
    mine, trainable = x.split(lengths)[rank], mask.split(lengths)[rank]
    on_gpu = whiten(mine.cuda(), trainable.cuda(), process_group=world)
    torch.save([on_gpu.cpu(), whiten(mine, trainable, process_group=world)], f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.gpu
def test_over_nccl(tmp_path: Path) -> None:
    ranks = min(torch.cuda.device_count(), 3)
    mp.spawn(nccl_main, args=(ranks, str(tmp_path)), nprocs=ranks)
    x, mask = batch()
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for place in range(2):
        torch.testing.assert_close(torch.cat([result[place] for result in results]), whiten(x, mask), rtol=1e-6, atol=1e-6)
