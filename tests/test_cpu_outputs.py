"""Large outputs of the CPU backend: memory is used again, and never while somebody can see it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("numba")
import rlhf_scan
from rlhf_scan.backends import cpu_outputs
from rlhf_scan.backends.cpu_outputs import KEPT_BYTES, SMALLEST_BYTES, empty_like

LIKE = torch.empty(2, SMALLEST_BYTES // 8)


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    cpu_outputs._kept.clear()
    yield
    cpu_outputs._kept.clear()


def test_memory_that_nobody_holds_is_used_again() -> None:
    first = empty_like(LIKE, torch.float32)
    address = first.data_ptr()
    assert (first.shape, first.dtype) == (LIKE.shape, torch.float32)
    del first
    again = empty_like(LIKE, torch.float32)
    assert again.data_ptr() == address
    assert empty_like(LIKE, torch.float32).data_ptr() != address


@pytest.mark.parametrize(
    "held", [lambda x: x[1:], lambda x: x.detach(), lambda x: x.numpy()[0], lambda x: x.untyped_storage(), torch.utils.dlpack.to_dlpack]
)
def test_memory_that_somebody_holds_is_not(held: object) -> None:
    first = empty_like(LIKE, torch.float32)
    address, kept = first.data_ptr(), held(first)  # type: ignore[operator]
    del first
    other = empty_like(LIKE, torch.float32)
    assert other.data_ptr() != address
    del kept
    assert empty_like(LIKE, torch.float64).data_ptr() != address, "another size"
    assert empty_like(LIKE, torch.float32).data_ptr() == address


def test_only_so_much_is_kept() -> None:
    held = [empty_like(LIKE, torch.float32) for _ in range(KEPT_BYTES // SMALLEST_BYTES + 5)]
    assert len(cpu_outputs._kept) == KEPT_BYTES // SMALLEST_BYTES
    assert len({tensor.data_ptr() for tensor in held}) == len(held)
    cpu_outputs._kept.clear()
    assert empty_like(LIKE[:, :-1], torch.float32).shape == (2, LIKE.shape[1] - 1)
    assert empty_like(torch.empty(KEPT_BYTES // 8 + 1), torch.float32).numel() == KEPT_BYTES // 8 + 1
    assert cpu_outputs._kept == []


def test_results_of_earlier_calls_stay() -> None:
    rewards = torch.randn(4, 1 << 17)
    first = rlhf_scan.discounted_returns(rewards, gamma=0.9, backend="cpu")
    kept = first.clone()
    for gamma in (0.1, 0.5):
        rlhf_scan.discounted_returns(rewards, gamma=gamma, backend="cpu")
    assert torch.equal(first, kept)


def test_threads_do_not_share_memory() -> None:
    met, found = threading.Barrier(4), list[torch.Tensor]()

    def take() -> None:
        met.wait(timeout=60)
        for _ in range(20):
            found.append(empty_like(LIKE, torch.float32))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tensor.data_ptr() for tensor in found}) == len(found) == 80
