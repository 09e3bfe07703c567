"""How a call is timed: on the device, and with the host's part."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Run = Callable[[], Any]
# A sample lasts at least so long: or the start of a graph would count, or on a CPU the waking of a thread.
SAMPLE_MICROSECONDS = {"cuda": 1500.0, "cpu": 15000.0}
MOST_CALLS = 96
WARM_SECONDS = 0.1
SLEEP_CYCLES_PER_MICROSECOND = 2000.0  # no GPU's clock is faster: the delay is never shorter than meant


@dataclass(frozen=True)
class Figure:
    """Median of the samples and half the distance between quartiles, both in microseconds a call."""

    median: float
    spread: float

    @staticmethod
    def of(samples: Sequence[float]) -> Figure:
        """Needs at least one sample."""
        if len(samples) < 3:
            return Figure(statistics.median(samples), (max(samples) - min(samples)) / 2)
        lower, _, upper = statistics.quantiles(samples, n=4)
        return Figure(statistics.median(samples), (upper - lower) / 2)


class Sampler(Protocol):
    """Something that can be timed again and again."""

    how: str

    def sample(self) -> float:
        """Microseconds of one call."""
        ...


class GraphSampler:
    """Replays of a CUDA graph that holds many calls: the device's time with nothing of the host in it."""

    how = "graph"

    def __init__(self, runs: Sequence[Run], calls: int) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            runs[0]()
        torch.cuda.current_stream().wait_stream(side)
        self.calls = calls
        self.kept: list[Any] = [None] * len(runs)  # outputs rotate as the inputs do
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for i in range(calls):
                self.kept[i % len(runs)] = runs[i % len(runs)]()

    def replay(self) -> None:
        """Run all its calls once."""
        self._graph.replay()

    def sample(self) -> float:
        """Microseconds of one call."""
        return _between_events(self._graph.replay) / self.calls


class QueuedSampler:
    """Many calls, queued while the device is kept waiting: its time alone, unless the host is slower than the delay."""

    how = "queued"

    def __init__(self, runs: Sequence[Run], calls: int) -> None:
        self._runs, self.calls = runs, calls
        self._delay = 300.0

    def sample(self) -> float:
        """Microseconds of one call."""
        while True:
            torch.cuda.synchronize()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(int(self._delay * SLEEP_CYCLES_PER_MICROSECOND))
            start.record()
            for i in range(self.calls):
                self._runs[i % len(self._runs)]()
            stop.record()
            queued_in_time = not start.query()
            torch.cuda.synchronize()
            if queued_in_time:
                return float(start.elapsed_time(stop)) * 1e3 / self.calls
            if self._delay > 100_000:
                raise RuntimeError("the host does not queue these calls within 100 ms")
            self._delay *= 2


class WallSampler:
    """The clock on the wall, from before the first call until all are done: for the CPU, and for loops over tokens on the host."""

    how = "wall"

    def __init__(self, runs: Sequence[Run], calls: int, synchronize: Run) -> None:
        self._runs, self.calls, self._synchronize = runs, calls, synchronize

    def sample(self) -> float:
        """Microseconds of one call."""
        self._synchronize()
        start = time.perf_counter()
        for i in range(self.calls):
            self._runs[i % len(self._runs)]()
        self._synchronize()
        return (time.perf_counter() - start) * 1e6 / self.calls


class HostSampler:
    """Full calls, back to back: until all are done, and until the host has its last answer."""

    def __init__(self, run: Run, calls: int) -> None:
        self._run, self._calls = run, calls

    def sample(self) -> tuple[float, float]:
        """Microseconds of one call: (full, host)."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self._calls):
            self._run()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6 / self._calls, (returned - start) * 1e6 / self._calls


def nothing() -> None:
    """What there is to wait for on the CPU."""


def seconds_of(run: Run, device: str) -> float:
    """Of one call that has run before."""
    synchronize = torch.cuda.synchronize if device == "cuda" else nothing
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def calls_per_sample(microseconds: float, copies: int, device: str) -> int:
    """So many that a sample lasts, a multiple of `copies`."""
    wanted = min(MOST_CALLS, max(1, math.ceil(SAMPLE_MICROSECONDS[device] / max(microseconds, 0.1))))
    return copies * math.ceil(wanted / copies)


def warm_up(run: Run) -> None:
    """Work until the clocks are up: an idle GPU lowers them."""
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        run()
        torch.cuda.synchronize()


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per microsecond by a large elementwise copy; `Tensor.copy_` is slower on a GPU."""
    source = torch.ones(2**29 if device == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        torch.mul(source, 1.0, out=target)

    copy()
    sampler: Sampler = GraphSampler([copy], 1) if device == "cuda" else WallSampler([copy], 1, nothing)
    if device == "cuda":
        warm_up(sampler.sample)
    return 2 * source.numel() * 4 / statistics.median(sampler.sample() for _ in range(15))


def _between_events(run: Run) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) * 1e3
