"""Device time of `gae` over the shapes that matter, beside the copy bandwidth of the same run.

    python -m benchmarks.device_times --out benchmarks/results/gae_device_times

writes OUT.json and OUT.md. Each wrong result is reported, not timed. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import rlhf_scan
from rlhf_scan import Segments

L2_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Work:
    """One row of the table: `segments` segments of `length` tokens, or of `lengths`."""

    name: str
    segments: int
    length: int
    packed: bool
    lam: float = 0.95
    dtype: torch.dtype = torch.float32
    flags: bool = False
    mixed: bool = False


def works() -> Iterator[Work]:
    """The shapes of the table."""
    for segments, length in ((1024, 16384), (256, 65536), (128, 131072), (16, 131072), (1, 1048576)):
        for lam in (0.95, 1.0):
            yield Work("GAE, packed", segments, length, True, lam)
    yield Work("GAE, packed, bf16", 1024, 16384, True, dtype=torch.bfloat16)
    yield Work("GAE, mixed pack, mask and flags", 0, 0, True, flags=True, mixed=True)
    for segments, length in ((1024, 16384), (128, 131072), (4096, 2048), (1024, 8192), (4096, 128), (32768, 128), (4096, 8), (32768, 8)):
        yield Work("GAE, rows", segments, length, False)
    yield Work("GAE, rows, done flags", 8192, 4096, False, flags=True)
    yield Work("GAE, packed", 32768, 8, True)
    yield Work("GAE, packed", 4096, 500, True)
    yield Work("GAE, packed", 64, 1048576, True, 1.0)


def arguments(work: Work) -> list[dict[str, Any]]:
    """Arguments of enough calls to run past L2, random each."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    lengths = torch.full((work.segments,), work.length)
    if work.mixed:
        spread = torch.exp(torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1.5 + math.log(1500)).long().clamp(16, 131072)
        lengths = spread[: int((spread.cumsum(0) < 16 * 2**20).sum())]
    tokens = int(lengths.sum())
    shape = (tokens,) if work.packed else (work.segments, work.length)
    calls = []
    for _ in range(max(1, min(8, 3 * L2_BYTES // (16 * tokens)))):
        call: dict[str, Any] = {
            "rewards": torch.randn(shape, device="cuda", generator=generator).to(work.dtype),
            "values": torch.randn(shape, device="cuda", generator=generator).to(work.dtype),
            "gamma": 1.0,
            "lam": work.lam,
        }
        if work.packed:
            call["segments"] = Segments.from_cu_seqlens(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cuda())
        if work.flags:
            call["terminated"] = torch.rand(shape, device="cuda", generator=generator) < 0.005
        if work.mixed:
            call["mask"] = torch.rand(shape, device="cuda", generator=generator) < 0.9
        calls.append(call)
    return calls


def bytes_of(call: dict[str, Any]) -> int:
    """Every token-level input read once, every output written once."""
    read = [value for value in call.values() if isinstance(value, Tensor)]
    return sum(t.numel() * t.element_size() for t in read) + 2 * call["rewards"].numel() * call["rewards"].element_size()


def wrong(call: dict[str, Any]) -> str | None:
    """How the result differs from the CPU backend's in float64, if it does."""
    host = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in call.items() if key != "segments"}
    segments = Segments.from_cu_seqlens(call["segments"].cu_seqlens.cpu()) if "segments" in call else None
    exact = rlhf_scan.gae(
        **{key: value.double() if key in ("rewards", "values") else value for key, value in host.items()}, segments=segments
    )
    # Rounding of a sum of n terms of size ~1 with decay: a few eps times sqrt(n), n at most a segment; plus one rounding of the output.
    length = int(segments.lengths().max()) if segments is not None else host["rewards"].shape[-1]
    eps = torch.finfo(torch.float32).eps
    for name, got, want in zip(("advantages", "returns"), rlhf_scan.gae(**call), exact, strict=True):
        scale = want.abs().max().clamp(min=1.0)
        bound = scale * (16 * eps * math.sqrt(length) + torch.finfo(got.dtype).eps)
        error = (got.cpu().double() - want).abs().max()
        if not error <= bound:
            return f"{name} off by {error:.3g}, bound {bound:.3g}"
    return None


def device_microseconds(run: Callable[[], object], repeat: int = 20) -> tuple[float, float]:
    """(median, spread) of one replay of a CUDA graph of `run`, with events."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    # An idle GPU lowers its clocks: work until they are up.
    warm = time.perf_counter() + 0.2
    while time.perf_counter() < warm:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    times.sort()
    return times[repeat // 2], times[3 * repeat // 4] - times[repeat // 4]


def copy_bandwidth() -> float:
    """Bytes read and written per microsecond by a large elementwise copy."""
    source = torch.empty(2**29, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    median, _ = device_microseconds(lambda: torch.mul(source, 1.0, out=target))
    return 2 * source.numel() * 4 / median


def measure(work: Work, bandwidth: float) -> dict[str, Any]:
    """One row: device time of a call and its share of the copy bandwidth."""
    calls = arguments(work)
    tokens = calls[0]["rewards"].numel()
    row = {"work": work.name, "shape": f"{calls[0]['segments'].count if work.mixed else work.segments} x {work.length or 'mixed'}"}
    row |= {"lam": work.lam, "dtype": str(work.dtype).removeprefix("torch."), "tokens": tokens}
    reason = wrong(calls[0])
    if reason is not None:
        return row | {"wrong": reason}

    def run() -> None:
        for call in calls:
            rlhf_scan.gae(**call)

    median, spread = device_microseconds(run)
    floor = bytes_of(calls[0]) / bandwidth
    return row | {
        "microseconds": round(median / len(calls), 2),
        "spread": round(spread / len(calls), 2),
        "floor": round(floor, 2),
        "share": round(floor * len(calls) / median, 3),
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a table."""
    lines = [
        f"`gae` on {report['device']}, copy bandwidth {report['copy_bandwidth_TB_s']} TB/s, torch {report['torch']}, triton {report['triton']}, "
        f"commit {report['commit']}. Device time of one call (graph replay, everything included), median; floor: every input read once and every "
        "output written once at copy bandwidth.",
        "",
        "| work | segments x length | lam | dtype | us | spread | floor us | share |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        cells = [row["work"], row["shape"], row["lam"], row["dtype"]]
        cells += [row["wrong"], "", "", ""] if "wrong" in row else [row["microseconds"], row["spread"], row["floor"], f"{row['share']:.0%}"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def commit() -> str:
    """The commit that is measured; RLHF_SCAN_COMMIT where the tree was copied without its history."""
    known = os.environ.get("RLHF_SCAN_COMMIT")
    return known or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    bandwidth = copy_bandwidth()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "copy_bandwidth_TB_s": round(bandwidth / 1e6, 3),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "rlhf_scan": rlhf_scan.__version__,
        "commit": commit(),
        "rows": [],
    }
    for work in works():
        report["rows"].append(measure(work, bandwidth))
        print(report["rows"][-1], flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(report))


if __name__ == "__main__":
    main()
