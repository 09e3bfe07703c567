"""What the GPU's counters say of our kernels: `python -m benchmarks.counters`, which runs itself under Nsight Compute.

Each work is called once with boundaries new to the call. Kernels run one at a time, from cold caches: they take a little longer than in
the benchmark, which lets them overlap.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import measure, providers
from .batches import batches
from .command import group_names, plan
from .environment import environment
from .providers import peers
from .works import GROUPS as ALL_GROUPS
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
HOW = (
    "One call with boundaries new to it, kernel by kernel from cold caches: `_fill_slots` makes the map of the pack's tiles, `scan_pack` does "
    "all else.\n\n"
    "- DRAM: its throughput, of the peak. Traffic: bytes that went to or from it, of those that a call must read and write.\n"
    "- Instructions: how many a thread executes for its 8 tokens.\n"
    "- Issue slots, ALU: how much of the time they are busy while a multiprocessor has work; the ALU does comparisons, selects and integers.\n"
    "- Warps: how many of the 64 that a multiprocessor could hold are there.\n"
    "- Stalls: what a warp waits for from one instruction to the next, and how many cycles: `long_scoreboard` memory, `short_scoreboard` "
    "shared memory or a shuffle, `barrier` the others of its program, `wait` the last instruction, `math_pipe_throttle` the ALU; "
    "`not_selected` waits for nothing but its turn.\n"
)
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
    """Measure, or merge what was measured, and write PREFIX.json and PREFIX.md."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", type=group_names, default=GROUPS, metavar="GROUP,...", help=f"default: {','.join(GROUPS)}")
    parser.add_argument("--out", type=Path, default=Path("counters"), metavar="PREFIX", help="default: %(default)s")
    parser.add_argument("--render", type=Path, nargs="+", metavar="JSON", help="measure nothing: merge these results, a later one counts")
    parser.add_argument("--called", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.called:
        options.called.write_text(json.dumps(call(plan(options.only))))
        return
    parts = [json.loads(path.read_text()) for path in options.render] if options.render else [measured(options.only)]
    results = merged(parts)
    options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(markdown(results))


def measured(groups: Sequence[str]) -> dict[str, Any]:
    """Run the works under Nsight Compute."""
    if shutil.which("ncu") is None:
        raise SystemExit("needs Nsight Compute: no `ncu` on the PATH; it comes with CUDA's toolkit")
    with tempfile.TemporaryDirectory() as folder:
        log, called = Path(folder, "log"), Path(folder, "called.json")
        command = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
        command += [word for section in SECTIONS for word in ("--section", section)]
        command += [
            "--log-file",
            str(log),
            sys.executable,
            "-m",
            f"{__package__}.counters",
            "--only",
            ",".join(groups),
            "--called",
            str(called),
        ]
        status = subprocess.run(command).returncode
        if status:
            raise SystemExit(f"Nsight Compute ended with {status}:\n" + log.read_text()[-4000:])
        works = read(json.loads(called.read_text()), log.read_text().splitlines())
    found = environment(peers.folder())
    return {"environment": found, "works": [{"commit": found["commit"], **work} for work in works]}


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As one; a work that was measured again counts as it was measured last."""
    works = {work["name"]: {"commit": part["environment"]["commit"], **work} for part in parts for work in part["works"]}
    found = sorted(works.values(), key=lambda work: list(ALL_GROUPS).index(work["group"]))
    return {"environment": parts[-1]["environment"], "works": found}


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


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _kernel(row: dict[str, str]) -> dict[str, Any]:
    kernel: dict[str, Any] = {"name": row["Kernel Name"].split("(")[0]}
    kernel |= {name: _number(row[column]) for name, column in COLUMNS.items() if row.get(column)}
    stalls = {match[1]: _number(row[column]) for column in row if column and (match := STALL.fullmatch(column)) and row[column]}
    return kernel | {"stalls": dict(sorted(stalls.items(), key=lambda item: -item[1])[:4])}


def markdown(results: dict[str, Any]) -> str:
    """What the columns are, and a row for each kernel of each work."""
    found = results["environment"]
    commits = ", ".join(dict.fromkeys(work["commit"] for work in results["works"]))
    lines = [
        "# Counters\n",
        f"{found['device']}, torch {found['versions']['torch']}, triton {found['versions']['triton']}, commit {commits}.\n",
        HOW,
    ]
    lines += ["| work | kernel | us | DRAM | traffic | instructions | issue slots | ALU | warps | stalls |\n" + "| --- " * 10 + "|"]
    lines += [f"| {' | '.join(_cells(work, kernel))} |" for work in results["works"] for kernel in work["kernels"]]
    return "\n".join(lines) + "\n"


def _cells(work: dict[str, Any], kernel: dict[str, Any]) -> Iterator[str]:
    traffic = kernel["bytes_per_second"] * kernel["time"] * 1e-9 / work["bytes"]
    yield from (work["name"], kernel["name"], f"{kernel['time'] / 1000:.1f}", f"{kernel['memory']:.0f}%", f"{traffic:.2f}")
    yield f"{kernel['instructions'] * 32 * RUN / work['tokens']:.0f}"
    yield from (f"{kernel[name]:.0f}%" for name in ("issuing", "alu", "warps"))
    yield ", ".join(f"{name} {value:.1f}" for name, value in kernel["stalls"].items())


if __name__ == "__main__":
    main()
