"""How the CPU backend shares work out among its threads."""

from __future__ import annotations

import threading
from time import sleep

import pytest

pytest.importorskip("numba")
from rlhf_scan.backends.cpu_threads import spread, thread_pool


def test_each_share_is_done_once_and_by_several_threads() -> None:
    done, together = list[tuple[int, int]](), threading.Barrier(3)

    def work(share: int) -> None:
        if share < 3:
            together.wait(timeout=60)
        done.append((share, threading.get_ident()))

    spread(work, range(50), 3)
    assert sorted(share for share, _ in done) == list(range(50))
    assert len({thread for share, thread in done if share < 3}) == 3


def test_a_call_does_not_wait_for_threads_that_others_keep_busy() -> None:
    release, done = threading.Event(), list[int]()
    kept = [thread_pool(2).submit(release.wait, 60) for _ in range(2)]
    try:
        spread(done.append, range(8), 2)
    finally:
        release.set()
    assert done == list(range(8))
    assert all(each.result() for each in kept)


@pytest.mark.parametrize("here", [True, False])
def test_an_error_reaches_the_caller(here: bool) -> None:
    caller, met = threading.get_ident(), threading.Barrier(2)

    def work(share: int) -> None:
        met.wait(timeout=60)
        if (threading.get_ident() == caller) == here:
            raise ValueError(f"share {share}")

    with pytest.raises(ValueError, match="share"):
        spread(work, range(2), 2)


def test_where_the_caller_is_stopped_the_others_stop() -> None:
    caller, met, done = threading.get_ident(), threading.Barrier(2), list[int]()

    def work(share: int) -> None:
        if share < 2:
            met.wait(timeout=60)
        if threading.get_ident() == caller:
            raise KeyboardInterrupt
        done.append(share)
        sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        spread(work, range(5000), 2)
    assert len(done) < 2500
