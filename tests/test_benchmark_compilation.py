"""What the benchmark harness compiles ahead, in processes of its own, and what it does about builds that fail."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_scan.benchmarks import command, compilation, providers
from rlhf_scan.benchmarks.works import GROUPS, Work


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Works of the CPU are compiled ahead too, and what is left out is forgotten afterwards; no process outlives its test."""
    monkeypatch.setattr(compilation, "_on_gpu", lambda work: True)
    monkeypatch.setattr(providers, "_LEFT_OUT", {})
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


WORKS = [Work("cpu", "gae", 3, length, ("ours", "torch loop"), device="cpu") for length in range(8, 15)]


@pytest.mark.slow
def test_every_provider_is_called_once_in_other_processes() -> None:
    assert compilation.compile_kernels(WORKS, 2, 120.0) == "7 of 7 kinds of calls compiled ahead, 0 not in time"
    assert compilation.compile_kernels(WORKS, 1, 120.0) == "nothing compiled ahead"
    assert compilation.compile_kernels(WORKS[:3], 2, 120.0) == "nothing compiled ahead"


@pytest.mark.slow
def test_calls_that_fail_and_calls_that_are_late_stop_nothing() -> None:
    works = [replace(WORKS[0], estimator="none"), *WORKS]
    assert compilation.compile_kernels(works, 2, 120.0) == "7 of 8 kinds of calls compiled ahead, 0 not in time"
    assert compilation.compile_kernels(works, 2, 0.0).startswith("0 of 8 ")


@pytest.mark.parametrize(
    ("sources", "seconds", "reason"),
    [(True, 120.0, "it does not build ("), (True, 0.0, "it was not built in time"), (False, 120.0, "it runs on a GPU alone")],
)
def test_a_build_that_fails_is_why_a_provider_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: bool, seconds: float, reason: str
) -> None:
    (tmp_path / "PufferLib").mkdir()
    for name in ("pufferlib.cpp", "pufferlib.cu") if sources else ():
        (tmp_path / "PufferLib" / name).write_text("#error nothing compiles this\n")
    monkeypatch.setenv("RLHF_SCAN_PEERS", str(tmp_path))
    work = replace(next(GROUPS["grid"]()), device="cpu")
    builds = compilation.Builds([work], seconds)
    builds.wait(work)
    builds.stop()
    why = providers.provider("PufferLib").why_not(work)
    assert why is not None
    assert why.startswith(reason)
    assert providers.provider("ours").why_not(work) is None


def test_works_that_wait_for_a_build_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    planned = command.plan(("grid", "linear", "host"), ("ours", "rl-triton", "PufferLib"))
    assert [work.group for work in planned[:5]] == ["linear"] * 3 + ["host"] * 2
    assert [work.group for work in planned[5:]] == ["grid"] * 40
    assert [work.group for work in command.plan(("grid", "linear"), ("accelerated-scan",))] == ["linear"] * 3
