"""The threads of the CPU backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from time import perf_counter, sleep
from typing import TypeVar

Share = TypeVar("Share")

# Fewer tokens than this are not worth waking a thread for.
TOKENS_PER_THREAD = 1 << 15
_AWAKE_SECONDS = 2e-4


def thread_pool(threads: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked child, which inherits none, makes its own."""
    return _pool(threads, os.getpid())


def spread(work: Callable[[Share], None], shares: Iterable[Share], threads: int) -> None:
    """`work` on each share, on so many threads. This one begins at once; others take what is left when they have woken."""
    left = iter(shares)

    def take() -> None:
        for share in left:
            work(share)

    others = [thread_pool(threads).submit(take) for _ in range(threads - 1)]
    try:
        take()
    finally:
        for _ in left:  # where this thread was stopped, the others stop, too
            pass
        for other in others:
            other.cancel()
    # The last shares end at about the same time: to sleep and be woken takes longer than most of them.
    until = perf_counter() + _AWAKE_SECONDS
    while not all(other.done() for other in others) and perf_counter() < until:
        sleep(0)
    for other in others:
        if not other.cancelled():
            other.result()


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rlhf-scan")
