"""What Nsight Compute printed, as results."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_scan.benchmarks import counters

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "counters"
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
WORKS = [{"group": "packed", "name": name, "tokens": 2048, "bytes": 32768} for name in ("first", "second")]


def printed(*kernels: tuple[str, float]) -> list[str]:
    """A log with a kernel of each name and time in it."""
    columns = ["ID", "Kernel Name", *counters.COLUMNS.values(), STALLED.format("barrier"), STALLED.format("wait")]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(columns)
    writer.writerow(["", "", *["unit"] * (len(columns) - 2)])
    for number, (name, time) in enumerate(kernels):
        numbers = {"time": f"{time:,.0f}", "bytes_per_second": "4,096,000,000", "instructions": "3,200"}
        writer.writerow([number, name, *(numbers.get(column, "41.3") for column in counters.COLUMNS), "0.5", "1,002.5"])
    return ["==PROF== Connected", *text.getvalue().splitlines(), "==PROF== Disconnected"]


def test_kernels_belong_to_the_work_that_was_called() -> None:
    log = printed(("spin_kernel(long)", 9), ("_fill_slots", 4000), ("scan_pack", 8000), ("spin_kernel(long)", 9), ("scan_rows", 16000))
    first, second = counters.read(WORKS, log)
    assert [kernel["name"] for kernel in first["kernels"]] == ["_fill_slots", "scan_pack"]
    assert [kernel["time"] for kernel in second["kernels"]] == [16000]
    assert list(second["kernels"][0]["stalls"].items()) == [("wait", 1002.5), ("barrier", 0.5)]
    assert second["tokens"] == 2048


def test_a_later_result_counts() -> None:
    def part(commit: str, works: list[dict[str, Any]]) -> dict[str, Any]:
        found = [{**work, "kernels": counters.read([work], printed(("spin_kernel", 9), ("scan", 8000)))[0]["kernels"]} for work in works]
        return {"environment": {"commit": commit, "device": "a GPU", "versions": {"torch": "2", "triton": "3"}}, "works": found}

    both = counters.merged([part("old", WORKS), part("new", WORKS[1:])])
    assert [(work["name"], work["commit"]) for work in both["works"]] == [("first", "old"), ("second", "new")]
    text = counters.markdown(both)
    assert "commit old, new" in text
    # 8 us at 4.096 GB/s, of the 32,768 bytes that must be moved; 32 threads of 3,200 warps' instructions over 256 threads' tokens.
    assert "| second | scan | 8.0 | 41% | 1.00 | 400 | 41% | 41% | 41% | wait 1002.5, barrier 0.5 |" in text


def test_the_committed_table_is_that_of_the_committed_results(tmp_path: Path) -> None:
    counters.main(["--render", str(RESULTS.with_suffix(".json")), "--out", str(tmp_path / "again")])
    for kind in (".md", ".json"):
        assert (tmp_path / "again").with_suffix(kind).read_text() == RESULTS.with_suffix(kind).read_text()
    assert json.loads(RESULTS.with_suffix(".json").read_text())["works"]


def test_without_nsight_compute_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="needs Nsight Compute"):
        counters.main([])
