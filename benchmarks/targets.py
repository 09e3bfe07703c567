"""What was to be reached, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .works import LONG, PACKED

WorkResult = dict[str, Any]
Works = Sequence[WorkResult]


@dataclass(frozen=True)
class Measured:
    """A number to compare, and the words that show it."""

    value: float
    text: str


Metric = Callable[[Works], Measured | None]


@dataclass(frozen=True)
class Goal:
    """A bound on a metric: a floor, or a ceiling where `most`."""

    metric: Metric
    bound: float
    text: str
    most: bool = False

    def met(self, measured: Measured) -> bool:
        """Whether it was reached."""
        return measured.value <= self.bound if self.most else measured.value >= self.bound


@dataclass(frozen=True)
class Target:
    """One row: works of a group, what they must reach at least, and what was aimed at."""

    name: str
    group: str
    at_least: Goal
    aim: Goal | None
    shape: str | None = None

    def works(self, results: dict[str, Any]) -> list[WorkResult]:
        """Those that it speaks of."""
        return [work for work in results["works"] if work["group"] == self.group and self.shape in (None, work["shape"])]


def table(results: dict[str, Any]) -> str:
    """The rows whose works were measured."""
    lines = ["| work | at least | aim | got | met |\n", "| --- | --- | --- | --- | --- |\n"]
    lines += (f"| {' | '.join(cells)} |\n" for cells in _rows(results))
    return "".join(lines)


def _rows(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for target in TARGETS:
        works = target.works(results)
        if not works:
            continue
        least = target.at_least.metric(works)
        aimed = None if target.aim is None else target.aim.metric(works)
        texts = list(dict.fromkeys(found.text for found in (least, aimed) if found is not None))
        if least is None:
            verdict = "not measured"
        elif not target.at_least.met(least):
            verdict = "no"
        else:
            verdict = "aim" if target.aim is not None and aimed is not None and target.aim.met(aimed) else "at least"
        yield target.name, target.at_least.text, "" if target.aim is None else target.aim.text, ", ".join(texts) or "-", verdict


def times_as_long(other: dict[str, Any], ours: dict[str, Any]) -> float:
    """How many times as long as ours: where it was timed by the clock on the wall, which counts the host, as our full calls."""
    return float(other["time"] / (ours["full"] if other["how"] == "wall" and "full" in ours else ours["time"]))


def row_of(work: WorkResult, provider: str) -> dict[str, Any] | None:
    """A provider's row, if it was timed."""
    return next((row for row in work["rows"] if row["provider"] == provider and "time" in row), None)


def _share(works: Works, chosen: Callable[[WorkResult], bool] = lambda work: True) -> Measured | None:
    """The smallest share of the copy bandwidth; the one with the map kept in brackets."""
    rows = [row_of(work, "ours") for work in works if chosen(work)]
    if not rows or None in rows:
        return None
    least = min(row["share"] for row in rows if row)
    kept = [row["share"] for work in works if chosen(work) and (row := row_of(work, "ours (map kept)"))]
    return Measured(least, f"{least:.0%}" + (f" (map kept: {min(kept):.0%})" if kept else ""))


def _ratio(to: Sequence[str], works: Works, chosen: Callable[[WorkResult], bool] = lambda work: True) -> Measured | None:
    """The smallest ratio of the fastest of `to` and ours."""
    ratios = [_ratio_of(work, to) for work in works if chosen(work)]
    if not ratios or any(ratio is None for ratio in ratios):
        return None
    least = min(ratio for ratio in ratios if ratio is not None)
    return Measured(least, f"{least:,.0f} x" if least >= 100 else f"{least:.3g} x")


def _ratio_of(work: WorkResult, to: Sequence[str]) -> float | None:
    """How many times as long the fastest of these takes; None where ours or one of them was not timed."""
    ours, others = row_of(work, "ours"), [row_of(work, name) for name in to]
    if ours is None or None in others:
        return None
    return min(times_as_long(row, ours) for row in others if row)


def _ahead(to: Sequence[str], times: float, works: Works) -> Measured | None:
    """In how many works ours is so many times as fast as the fastest of `to`."""
    ratios = [_ratio_of(work, to) for work in works]
    if any(ratio is None for ratio in ratios):
        return None
    count = sum(ratio > times for ratio in ratios if ratio is not None)
    return Measured(count / len(works), f"{count} of {len(works)}" + (f" by {times:g} x" if times > 1 else ""))


def _time(field: str, works: Works, chosen: Callable[[WorkResult], bool] = lambda work: True) -> Measured | None:
    """The longest, in microseconds."""
    rows = [row_of(work, "ours") for work in works if chosen(work)]
    if not rows or any(row is None or field not in row for row in rows):
        return None
    longest = max(row[field] for row in rows if row)
    return Measured(longest, f"{longest:.1f} us")


def _growth(works: Works) -> Measured | None:
    """How much more a token takes in one work than in another."""
    rows = [(row_of(work, "ours"), work["tokens"]) for work in works]
    if len(rows) < 2 or any(row is None for row, _ in rows):
        return None
    times = [row["time"] / tokens for row, tokens in rows if row]
    return Measured(
        max(times) / min(times) - 1, f"{max(times) / min(times) - 1:.0%} more for {'few' if times[0] == max(times) else 'many'} tokens"
    )


def _decaying(work: WorkResult) -> bool:
    return bool(work["rates"]["lam"] < 1)


def _lasting(work: WorkResult) -> bool:
    return not _decaying(work)


def _rows_of_tokens(work: WorkResult) -> bool:
    return not work["packed"]


def _without_mask(work: WorkResult) -> bool:
    return not work["mask"]


def _of_bandwidth(name: str, group: str, at_least: float, aim: float, shape: str | None = None) -> Target:
    return Target(name, group, Goal(_share, at_least, f"{at_least:.0%}"), Goal(_share, aim, f"{aim:.0%}"), shape)


def _targets() -> Iterator[Target]:
    shapes = [f"{segments} x {length}" for segments, length in PACKED]
    for shape, at_least in zip(shapes, (0.80, 0.75, 0.70), strict=True):
        yield _of_bandwidth(f"GAE, packed float32, lam 0.95 and 1, {shape}", "packed", at_least, 0.92, shape)
    share = partial(_share, chosen=_without_mask)
    yield Target(
        "`ppo_advantages` with whitening, 16M tokens, rows and packed, without a mask",
        "ppo",
        Goal(share, 0.55, "55%"),
        None,
        "1024 x 16384",
    )
    steps = partial(_ratio, ("TRL",))
    yield Target(
        "`ppo_advantages`, 1024 x 8192, full calls, against TRL's own steps 4 to 6",
        "ppo",
        Goal(steps, 2000, "2,000 x"),
        None,
        "1024 x 8192",
    )
    for shape in shapes:
        yield _of_bandwidth(f"GAE, packed bfloat16, lam 0.95 and 1, {shape}", "bf16", 0.60, 0.85, shape)
    yield _of_bandwidth("GAE, mixed pack with mask and flags, 16M tokens", "mixed", 0.55, 0.80)
    yield _of_bandwidth("GAE, 8192 x 4096 with done flags", "rows", 0.80, 0.90)
    for (segments, length), times, aim in zip(LONG, (45, 70), (14, 10), strict=True):
        for lam, chosen in (("0.95", _decaying), ("1", _lasting)):
            least = Goal(partial(_ratio, ("rl-triton",), chosen=chosen), times, f"{times} x rl-triton")
            aimed = Goal(partial(_time, "time", chosen=chosen), aim, f"{aim} us", most=True)
            yield Target(f"GAE, few long, lam {lam}: {segments} x {length}", "long", least, aimed, f"{segments} x {length}")
    for shape in shapes:
        yield _of_bandwidth(f"Discounted returns, gamma 0.99 and 1, {shape}", "returns", 0.70, 0.90, shape)
    for suffix, what in ((" + returns", "with returns"), ("", "that make advantages alone")):
        both = f"rl-triton{suffix}", f"PufferLib{suffix}"
        yield Target(f"GAE, the 40 shapes, against the better of rl-triton and PufferLib {what}", "grid",
                     Goal(partial(_ahead, both, 1.0), 1.0, "ahead in all"), Goal(partial(_ahead, both, 2.0), 1.0, "2 x in all"))  # fmt: skip
    peer = ("rl-triton",)
    yield Target("Seven estimators, 4096 x 128 and 512 x 4096, against rl-triton", "seven",
                 Goal(partial(_ahead, peer, 1.0), 1.0, "ahead in all"), Goal(partial(_ratio, peer), 1.5, "1.5 x"))  # fmt: skip
    compiled = partial(_ratio, ("torch.compile",))
    yield Target("Retrace, T = 4096 and 8192, against torch.compile", "retrace", Goal(compiled, 1.0, "ahead"), Goal(compiled, 3.0, "3 x"))
    host = partial(_time, "host", chosen=_rows_of_tokens)
    yield Target("Host time of a `gae` call, 64 x 512", "host", Goal(host, 20, "20 us", most=True), Goal(host, 12, "12 us", most=True))
    yield Target("The time of a token in 1M, 4M, 16M and 64M", "growth", Goal(_growth, 0.15, "within 15%", most=True), None)
    for name in ("TRL", "verl"):
        against = partial(_ratio, (name,))
        least, aimed = Goal(against, 3000, "3,000 x"), Goal(against, 10000, "10,000 x")
        yield Target(f"GAE, 1024 x 8192, full calls, against {name}'s own block", "frameworks", least, aimed, "1024 x 8192")
    trl = partial(_ratio, ("TRL",), chosen=lambda work: work["estimator"] == "gae" and not work["packed"])
    yield Target("CPU: GAE, 256 x 4096, against TRL's block on the same cores", "cpu", Goal(trl, 50, "50 x"), Goal(trl, 150, "150 x"))


TARGETS = tuple(_targets())
