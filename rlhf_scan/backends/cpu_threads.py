"""The threads of the CPU backend."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

# Fewer tokens than this are not worth waking a thread for.
TOKENS_PER_THREAD = 1 << 15


def thread_pool(threads: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked child, which inherits none, makes its own."""
    return _pool(threads, os.getpid())


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rlhf-scan")
