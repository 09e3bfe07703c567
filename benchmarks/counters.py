"""What the GPU's counters say of our kernels: `python -m benchmarks.counters`, which runs itself under Nsight Compute.

Each work is called once with boundaries new to the call. Kernels run one at a time, from cold caches: they take a little longer than in
the benchmark, which lets them overlap.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import measure, providers
from .batches import batches
from .command import plan
from .environment import environment
from .providers import peers
from .works import Work

GROUPS = ("packed", "bf16", "returns", "mixed")
SECTIONS = (
    "SpeedOfLight",
    "SchedulerStats",
    "WarpStateStats",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "InstructionStats",
    "Occupancy",
)
BETWEEN = "spin_kernel"  # of torch.cuda._sleep: separates works
RUN = 8  # tokens of a thread
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
COLUMNS = {
    "time": "gpu__time_duration.sum",
    "bytes_per_second": "dram__bytes.sum.per_second",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "instructions": "smsp__inst_executed.sum",
    "issuing": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write PREFIX.json and PREFIX.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=__doc__)
    parser.add_argument("--only", default=",".join(GROUPS), metavar="GROUP,...", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("counters"), metavar="PREFIX", help="default: %(default)s")
    parser.add_argument("--called", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.called:
        options.called.write_text(json.dumps(call(plan(options.only.split(",")))))
        return
    with tempfile.TemporaryDirectory() as folder:
        log, called = Path(folder, "log"), Path(folder, "called.json")
        command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
        command += [word for section in SECTIONS for word in ("--section", section)]
        command += ["--log-file", str(log), sys.executable, "-m", "benchmarks.counters", "--only", options.only, "--called", str(called)]
        subprocess.run(command, check=True)
        text = log.read_text()
        options.out.with_suffix(".csv").write_text(text)
        works = read(json.loads(called.read_text()), text.splitlines())
    results = {"environment": environment(peers.folder()), "works": works}
    options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(results))


def call(works: Sequence[Work]) -> list[dict[str, Any]]:
    """What is profiled: one call of each work, compiled before. Returns what the works are."""
    ours = providers.provider("ours")
    called = []
    for work in works:
        batch = batches(work)[0]
        run = ours.prepare(batch).run
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        measure.free()
        called.append({"group": work.group, "name": work.name, "tokens": batch.tokens, "bytes": batch.bytes})
    return called


def read(works: Iterable[dict[str, Any]], lines: Iterable[str]) -> list[dict[str, Any]]:
    """Each work with the kernels of its call, from what Nsight Compute printed."""
    waiting = iter(works)
    found: list[dict[str, Any]] = []
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    for row in rows:
        if not row["ID"]:  # the units
            continue
        if BETWEEN in row["Kernel Name"]:
            found.append({**next(waiting), "kernels": []})
        else:
            found[-1]["kernels"].append(_kernel(row))
    return found


def _kernel(row: dict[str, str]) -> dict[str, Any]:
    kernel: dict[str, Any] = {"name": row["Kernel Name"].split("(")[0]}
    kernel |= {name: float(row[column].replace(",", "")) for name, column in COLUMNS.items() if row.get(column)}
    stalls = {match[1]: float(row[column]) for column in row if column and (match := STALL.fullmatch(column)) and row[column]}
    return kernel | {"stalls": dict(sorted(stalls.items(), key=lambda item: -item[1])[:4])}


def markdown(results: dict[str, Any]) -> str:
    """A table of the works."""
    lines = ["| work | kernel | us | DRAM | traffic | instructions | issue slots | ALU | warps | stalls |\n", "| --- " * 10 + "|\n"]
    for work in results["works"]:
        lines += (f"| {' | '.join(_cells(work, kernel))} |\n" for kernel in work["kernels"])
    return "".join(lines)


def _cells(work: dict[str, Any], kernel: dict[str, Any]) -> Iterator[str]:
    def share(name: str) -> str:
        return f"{kernel[name]:.0f}%" if name in kernel else ""

    yield from (work["name"], kernel["name"], f"{kernel['time'] / 1000:.1f}", share("memory"))
    yield f"{kernel['bytes_per_second'] * kernel['time'] * 1e-9 / work['bytes']:.2f}"
    yield f"{kernel['instructions'] * 32 * RUN / work['tokens']:.0f}"
    yield from (share("issuing"), share("alu"), share("warps"))
    yield ", ".join(f"{name} {value:.1f}" for name, value in kernel["stalls"].items())


if __name__ == "__main__":
    main()
