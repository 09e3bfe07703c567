"""One work: every provider checked, then timed in turn."""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import check, providers, timing
from .batches import Batch, batches
from .providers import Provider
from .providers.peers import reason
from .works import Work

ROUNDS, QUICK_ROUNDS = 20, 5
FEWEST_ROUNDS = 2  # of a loop over tokens, which takes seconds and hardly varies
SECONDS, QUICK_SECONDS = 1.0, 0.4  # more rounds than those take no longer
HOST_ROUNDS = 7
HOST_CALLS = 50
HOST_MICROSECONDS = 2000.0  # a call of the device that takes longer says nothing of the host

Log = Callable[[str], None]


@dataclass
class Contender:
    """A provider that computed the right thing, ready to be timed."""

    provider: Provider
    row: dict[str, Any]
    runs: list[timing.Run]
    sampler: timing.Sampler
    rounds: int


def measure(work: Work, bandwidth: float, quick: bool, log: Log) -> dict[str, Any]:
    """What the results hold of a work; a provider that fails is a row that says how."""
    try:
        return _measure(work, bandwidth, quick, log)
    finally:
        free()


def _measure(work: Work, bandwidth: float, quick: bool, log: Log) -> dict[str, Any]:
    clock = [time.perf_counter()]
    inputs = batches(work)
    wanted = check.Expected(inputs[0])
    clock.append(time.perf_counter())
    floor = inputs[0].bytes / bandwidth
    result = describe(inputs[0], floor)
    contenders = []
    for provider in map(providers.provider, work.providers):
        if not provider.computes(work.estimator):
            continue
        row: dict[str, Any] = {"provider": provider.name}
        result["rows"].append(row)
        found = _prepare(provider, row, inputs, wanted, floor, quick)
        if found is not None:
            contenders.append(found)
    clock.append(time.perf_counter())
    _time(contenders, work)
    clock.append(time.perf_counter())
    for contender in contenders:
        if "failed" not in contender.row:
            _conclude(contender.row, floor)
    for row in result["rows"]:
        log(f"  {row['provider']}: {say(row)}")
    parts = zip(("reference", "checks", "times"), clock, clock[1:], strict=False)
    log(f"  {clock[-1] - clock[0]:.1f} s: {', '.join(f'{part} {stop - start:.1f}' for part, start, stop in parts)}")
    return result


def describe(batch: Batch, floor: float) -> dict[str, Any]:
    """What the work is, as plain data."""
    work = batch.work
    return {
        "group": work.group,
        "name": work.name,
        "estimator": work.estimator,
        "shape": work.shape,
        "segments": work.segments if batch.segments is None else batch.segments.count,
        "length": work.length,
        "packed": work.packed,
        "rates": dict(work.rates),
        "dtype": str(work.dtype).removeprefix("torch."),
        "flags": work.flags,
        "mask": work.mask or work.padded,
        "device": work.device,
        "seed": work.seed,
        "tokens": batch.tokens,
        "bytes": batch.bytes,
        "floor": floor,
        "rows": [],
    }


def free() -> None:
    """Give back the memory of the last work."""
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(row: Mapping[str, Any]) -> str:
    """A row in a few words."""
    for kind in ("skipped", "failed", "wrong"):
        if kind in row:
            return f"{kind}: {row[kind]}"
    return f"{row['time']:.2f} us ({row['how']}), {row['share']:.0%} of copy bandwidth"


def _prepare(
    provider: Provider, row: dict[str, Any], inputs: Sequence[Batch], wanted: check.Expected, floor: float, quick: bool
) -> Contender | None:
    """Check the provider on the first of the inputs; None, and the reason in `row`, unless it is right."""
    missing = provider.why_not(inputs[0].work)
    if missing is not None:
        row["skipped"] = missing
        return None
    try:
        return _check(provider, row, inputs, wanted, floor, quick)
    except Exception as error:  # whatever a peer raises, the others are still measured
        row["failed"] = reason(error)
        return None


def _check(
    provider: Provider, row: dict[str, Any], inputs: Sequence[Batch], wanted: check.Expected, floor: float, quick: bool
) -> Contender | None:
    work = inputs[0].work
    first = provider.prepare(inputs[0])
    check.poison(inputs[0])
    row["wrong"] = check.difference(first.outputs(first.run()), wanted, first.comparable)
    if row["wrong"] is not None:
        return None
    # Loops over tokens take no longer where their inputs come from memory.
    runs = [first.run, *(provider.prepare(other).run for other in inputs[1:])] if not provider.loop else [first.run]
    for run in runs[1:]:
        run()
    sampler = _sampler(provider, row, runs, floor, work)
    if isinstance(sampler, timing.GraphSampler):
        for output in first.outputs(sampler.kept[0]).values():
            output.fill_(math.nan)
        sampler.replay()
        row["wrong"] = check.difference(first.outputs(sampler.kept[0]), wanted, first.comparable)
        if row["wrong"] is not None:
            row["wrong"] += " (in a CUDA graph)"
            return None
    del row["wrong"]
    return Contender(provider, row, runs, sampler, _rounds(sampler, quick))


def _rounds(sampler: timing.Sampler, quick: bool) -> int:
    """How many samples there is time for."""
    started = time.perf_counter()
    sampler.sample()
    affordable = int((QUICK_SECONDS if quick else SECONDS) / (time.perf_counter() - started))
    return max(FEWEST_ROUNDS, min(QUICK_ROUNDS if quick else ROUNDS, affordable))


def _sampler(provider: Provider, row: dict[str, Any], runs: list[timing.Run], floor: float, work: Work) -> timing.Sampler:
    """How this provider is timed on this work; in `row`, why not in a graph where that was tried."""
    if work.device == "cpu":
        return timing.WallSampler(runs, timing.calls_per_sample(timing.seconds_of(runs[0], "cpu") * 1e6, len(runs), "cpu"), timing.nothing)
    if provider.loop:
        return timing.WallSampler(runs, 1, torch.cuda.synchronize)
    try:
        time_of_one = timing.QueuedSampler(runs, len(runs)).sample()
    except RuntimeError:
        torch.cuda.synchronize()
        return timing.WallSampler(runs, len(runs), torch.cuda.synchronize)  # it waits for the device itself
    calls = timing.calls_per_sample(max(floor, time_of_one), len(runs), "cuda")
    if not work.queued and not provider.queued:
        try:
            return timing.GraphSampler(runs, calls)
        except RuntimeError as error:
            torch.cuda.synchronize()
            row["no_graph"] = str(error).strip().splitlines()[0][:200]
    return timing.QueuedSampler(runs, calls)


def _time(contenders: Sequence[Contender], work: Work) -> None:
    """Those that take microseconds in turn, round after round; then the loops, between which the clocks would sink."""
    for loops in (False, True):
        group = [contender for contender in contenders if contender.provider.loop == loops]
        if work.device == "cuda" and group:
            timing.warm_up(group[0].runs[0])
        samples: dict[str, list[float]] = {contender.provider.name: [] for contender in group}
        for number in range(max((contender.rounds for contender in group), default=0)):
            for contender in [contender for contender in group if number < contender.rounds]:
                try:
                    samples[contender.provider.name].append(contender.sampler.sample())
                except Exception as error:  # whatever a peer raises, the others are still measured
                    contender.row["failed"] = reason(error)
                    group.remove(contender)
        for contender in group:
            figure = timing.Figure.of(samples[contender.provider.name])
            contender.row.update(time=figure.median, spread=figure.spread, how=contender.sampler.how)
        if work.device == "cuda":
            _time_host(group)


def _time_host(group: Sequence[Contender]) -> None:
    """Full calls without a graph, in turn, where the device's part is short enough for the host's to show."""
    samplers = [
        (contender, timing.HostSampler(contender.runs[0], min(HOST_CALLS, math.ceil(10_000 / contender.row["time"]))))
        for contender in group
        if not contender.provider.loop and contender.row["time"] < HOST_MICROSECONDS
    ]
    samples: dict[str, list[tuple[float, float]]] = {contender.provider.name: [] for contender, _ in samplers}
    for _ in range(HOST_ROUNDS):
        for contender, sampler in samplers:
            samples[contender.provider.name].append(sampler.sample())
    for contender, _ in samplers:
        full, host = zip(*samples[contender.provider.name], strict=True)
        contender.row.update(full=statistics.median(full), host=statistics.median(host))


def _conclude(row: dict[str, Any], floor: float) -> None:
    """Round, and add the share of the copy bandwidth."""
    row["share"] = floor / row["time"]
    for name, digits in (("time", 3), ("spread", 3), ("full", 2), ("host", 2), ("share", 4)):
        if name in row:
            row[name] = round(row[name], digits)
