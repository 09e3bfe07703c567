"""What compilers make before the first measurement, by several processes at once: they fill the caches on disk that the measuring one reads.

Kernels of a GPU take seconds each, and there are a hundred; what CUDA sources are built from takes minutes, and goes on while the rest is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from . import check, providers
from .batches import batches
from .providers.peers import reason
from .works import Work

FEWEST_TASKS = 6  # fewer are compiled where they are needed: a process takes seconds to start
SECONDS, BUILD_SECONDS = 180.0, 300.0
_SPAWN = multiprocessing.get_context("spawn")


def jobs() -> int:
    """How many processes this machine has cores for."""
    return min(8, len(os.sched_getaffinity(0)) // 2)


class Builds:
    """The builds of these works' providers, each in a process of its own, that may take so many seconds."""

    def __init__(self, works: Sequence[Work], seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._running = {name: _Build(name) for name in sorted(_built(works))}

    def wait(self, work: Work) -> None:
        """Until those of the work are done; a provider that could not be built in time is left out."""
        for name in _built([work]) & self._running.keys():
            trouble = self._running.pop(name).outcome(self._end)
            if trouble is not None:
                providers.leave_out(name, trouble)

    def stop(self) -> None:
        """End those that nobody waited for."""
        for build in self._running.values():
            build.stop()


class _Build:
    """One of them."""

    def __init__(self, name: str) -> None:
        self._trouble, send = _SPAWN.Pipe(duplex=False)
        self._process = _SPAWN.Process(target=_build, args=(name, send), daemon=True)
        self._process.start()

    def outcome(self, end: float) -> str | None:
        """What went wrong, known at that time at the latest."""
        self._process.join(max(0.0, end - time.monotonic()))
        if self._process.exitcode is None:
            self.stop()
            return "it was not built in time"
        try:
            trouble = self._trouble.recv()
        except EOFError:
            return f"its build ended with exit code {self._process.exitcode}"
        return None if trouble is None else f"it does not build ({trouble})"

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.join()


def _build(name: str, trouble: Connection) -> None:
    build = providers.provider(name).build
    try:
        if build is not None:
            build()
        trouble.send(None)
    except Exception as error:  # no compiler, another CUDA
        trouble.send(reason(error))


def is_built(work: Work) -> bool:
    """Whether a provider of this work has to be built."""
    return bool(_built([work]))


def _built(works: Sequence[Work]) -> set[str]:
    found = (providers.provider(name) for work in filter(_on_gpu, works) for name in work.providers if _takes(name, work))
    return {provider.name for provider in found if provider.build is not None}


def _takes(name: str, work: Work) -> bool:
    provider = providers.provider(name)
    return provider.computes(work.estimator) and provider.refuses(work) is None


def compile_kernels(works: Sequence[Work], processes: int, seconds: float) -> str:
    """Let so many processes call every provider once on each of these works, and compile the loops that they are checked against meanwhile.

    It ends after so many seconds at the latest; what is then missing is compiled where it is needed. Returns what it did in words.
    """
    end = time.monotonic() + seconds
    tasks = list(_tasks(works))
    if processes < 2 or len(tasks) < FEWEST_TASKS:
        return "nothing compiled ahead"
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(processes, len(tasks)), _SPAWN, _prepare_process)
    futures = [pool.submit(_compile, name, of_it) for name, of_it in tasks]
    for small in _small(works):
        with suppress(Exception):  # the measurement will tell
            check.Expected(batches(small)[0])
        if time.monotonic() > end:
            break
    done, late = wait(futures, max(0.0, end - time.monotonic()))
    pool.shutdown(wait=not late, cancel_futures=True)
    for process in set(multiprocessing.active_children()) - others:
        process.kill()
        process.join()
    # The pool's own thread waits for them as well: until it has noted that they ended, they count as running.
    while set(multiprocessing.active_children()) - others and time.monotonic() < end + SECONDS:
        time.sleep(0.01)
    sound = sum(future.exception() is None for future in done)
    return f"{sound} of {len(tasks)} kinds of calls compiled ahead, {len(late)} not in time"


def _tasks(works: Sequence[Work]) -> Iterator[tuple[str, list[Work]]]:
    """A provider and works whose kernels are likely to be the same."""
    tasks: dict[tuple[object, ...], list[Work]] = {}
    for work in filter(_on_gpu, works):
        for name in work.providers:
            provider = providers.provider(name)
            if _takes(name, work) and not provider.loop and provider.build is None:
                tasks.setdefault((name, *_kind(work), work.dtype), []).append(work)
    yield from ((str(key[0]), of_it) for key, of_it in tasks.items())


def _on_gpu(work: Work) -> bool:
    return work.device == "cuda"


def _kind(work: Work) -> tuple[object, ...]:
    return work.estimator, work.preset, work.packed, work.length, work.flags, work.mask, work.padded


def _small(works: Sequence[Work]) -> list[Work]:
    """A work on the CPU for each kind of loop that the providers of these works are checked against."""
    kinds = {_kind(work): work for work in filter(_on_gpu, works)}
    return [replace(work, device="cpu", segments=min(1, work.segments), tokens=min(work.tokens, 2**18)) for work in kinds.values()]


def _prepare_process() -> None:
    """One of many: no threads of its own."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)


def _compile(name: str, works: Sequence[Work]) -> None:
    """Call the provider once on each. What it raises is told when it is measured."""
    provider = providers.provider(name)
    for work in works:
        if provider.why_not(work) is None:
            provider.prepare(batches(work, most=1)[0]).run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
