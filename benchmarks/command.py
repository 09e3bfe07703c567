"""The command: measure, or render what was measured."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from . import compilation, environment, measure, providers, report, timing
from .providers import all_providers, peers
from .works import GROUPS, Work, works


def main(arguments: Sequence[str] | None = None, program: str = "python -m benchmarks") -> None:
    """Run the command line."""
    options = _parser(program).parse_args(arguments)
    if options.render:
        results = report.merged([report.read(path) for path in options.render])
        report.write(results, options.out)
    else:
        planned = plan(options.only or _all_groups(), options.providers)
        results = run(planned, options.out, quick=options.quick, seconds=options.seconds, jobs=options.jobs)
    print(report.markdown(results))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description="Time every provider on every work, each checked first against float64 loops."
    )
    add = parser.add_argument
    groups = ", ".join(GROUPS)
    add("--only", type=group_names, metavar="GROUP,...", help=f"among {groups}; without it, all that this machine can run")
    add(
        "--out",
        type=Path,
        default=Path("benchmark"),
        metavar="PREFIX",
        help="writes PREFIX.json, .md and .png, after every work [benchmark]",
    )
    add(
        "--providers",
        type=_names,
        default=(),
        metavar="NAME,...",
        help=f"among {', '.join(p.name for p in all_providers())}; without it, all",
    )
    add("--quick", action="store_true", help="a few samples of each")
    add("--seconds", type=float, default=0.0, help="start no work later than this; 0: no limit")
    add(
        "--jobs",
        type=int,
        default=compilation.jobs(),
        help="processes that compile kernels before the first measurement; 0: none [%(default)s]",
    )
    add("--render", type=Path, nargs="+", metavar="JSON", help="measure nothing: merge these results and write PREFIX.*")
    return parser


def plan(groups: Sequence[str], only: Sequence[str] = ()) -> list[Work]:
    """The works of these groups that this machine can run, with all their providers or `only` these; those that wait for a build come last."""
    found = [work for work in works(groups) if work.device == "cpu" or torch.cuda.is_available()]
    if only:
        found = [replace(work, providers=tuple(name for name in work.providers if name in only)) for work in found]
    found = [work for work in found if any(providers.provider(name).computes(work.estimator) for name in work.providers)]
    return sorted(found, key=compilation.is_built)


def run(planned: Sequence[Work], out: Path, *, quick: bool, seconds: float, jobs: int) -> dict[str, Any]:
    """Measure these works, and write after each, so that a run that is cut short leaves what it has."""
    started = time.perf_counter()
    results: dict[str, Any] = {
        "environment": environment.environment(peers.folder()),
        "quick": quick,
        "copy_bandwidth": {},
        "providers": {provider.name: provider.about for provider in all_providers()},
        "not_run": [],
        "works": [],
    }
    builds = compilation.Builds(planned, seconds / 2 or compilation.BUILD_SECONDS)
    compiled = compilation.compile_kernels(planned, jobs, seconds / 3 or compilation.SECONDS)
    _log(f"{time.perf_counter() - started:.0f} s  {compiled}")
    bandwidths = {device: timing.copy_bandwidth(device) for device in sorted({work.device for work in planned})}
    results["copy_bandwidth"] = {device: round(bandwidth * 1e6) for device, bandwidth in bandwidths.items()}
    for work in planned:
        if seconds and time.perf_counter() - started > seconds:
            results["not_run"].append(work.name)
            continue
        builds.wait(work)
        _log(f"{time.perf_counter() - started:.0f} s  {work.group}: {work.name}")
        try:
            results["works"].append(measure.measure(work, bandwidths[work.device], quick, _log))
        except Exception as error:  # the other works are still worth having
            _log(f"  the work failed: {type(error).__name__}: {error}")
            results["not_run"].append(f"{work.name} ({type(error).__name__}: {error})")
        report.write(results, out, plot=False)
    builds.stop()
    report.write(results, out)
    return results


def _all_groups() -> tuple[str, ...]:
    return tuple(GROUPS) if torch.cuda.is_available() else ("cpu",)


def _names(text: str) -> tuple[str, ...]:
    return _among([provider.name for provider in all_providers()], text)


def group_names(text: str) -> tuple[str, ...]:
    """Those in `text`, by commas; each must be one of a group of works."""
    return _among(list(GROUPS), text)


def _among(known: Sequence[str], text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"must be names among {', '.join(known)}, by commas, got {name!r}")
    return names


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
