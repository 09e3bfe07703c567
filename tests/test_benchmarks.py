"""The benchmark harness: what it refuses to time, what it writes, and that README's table is that of the committed results."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from script_modules import script
from torch import Tensor

from rlhf_scan.benchmarks import batches, check, command, end_to_end, measure, providers, report, targets, timing, works
from rlhf_scan.benchmarks.providers import Prepared, Provider, torch_scans
from rlhf_scan.benchmarks.works import ESTIMATORS, GROUPS, Work

ROOT = Path(__file__).parents[1]
TINY = Work("cpu", "gae", 3, 16, ("ours",), rates={"gamma": 0.99, "lam": 0.95}, device="cpu")


def ignore(line: str) -> None:
    pass


def measured(work: Work) -> dict[str, dict[str, Any]]:
    """The rows of a work by provider."""
    return {row["provider"]: row for row in measure.measure(work, 1000.0, True, ignore)["rows"]}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Provider]]:
    """The registry of providers, put back afterwards."""
    copy = dict(providers._REGISTRY)
    monkeypatch.setattr(providers, "_REGISTRY", copy)
    return copy


def spoiling(name: str, change: Any) -> Provider:
    """Ours, with its outputs changed before they are returned."""

    def prepare(batch: batches.Batch) -> Prepared:
        return Prepared(lambda: {key: change(output) for key, output in check.call_ours(batch).items()}, dict)

    return Provider(name, prepare, lambda device: None)


def raising(name: str) -> Provider:
    def run() -> Tensor:
        raise RuntimeError("out of luck\nand more")

    return Provider(name, lambda batch: Prepared(run, dict), lambda device: None)


def test_a_wrong_provider_is_not_timed(registry: dict[str, Provider]) -> None:
    added = [
        spoiling("off by little", lambda output: output * 1.001),
        spoiling("not written", torch.empty_like),
        spoiling("too short", lambda output: output[:, 1:]),
        raising("raises"),
        Provider("absent", lambda batch: Prepared(lambda: None, dict), lambda device: "it is not there"),
        Provider("other", lambda batch: Prepared(lambda: None, dict), lambda device: None, frozenset({"vtrace"})),
    ]
    for provider in added:
        providers.register(provider)
    rows = measured(replace(TINY, providers=("ours", *(provider.name for provider in added))))
    assert rows["ours"]["time"] > 0
    assert rows["off by little"]["wrong"].startswith("advantages is off by")
    assert "off by" in rows["not written"]["wrong"]
    assert rows["too short"]["wrong"] == "advantages has shape [3, 15], expected [3, 16]"
    assert rows["raises"]["failed"] == "RuntimeError: out of luck"
    assert rows["absent"]["skipped"] == "it is not there"
    assert "other" not in rows
    assert [name for name, row in rows.items() if "time" in row] == ["ours"]


def test_nan_anywhere_is_wrong() -> None:
    batch = batches.batches(TINY)[0]
    outputs = check.call_ours(batch)
    wanted = check.Expected(batch)
    assert check.difference(outputs, wanted, providers.unchanged) is None
    outputs["returns"][1, 3] = math.nan
    assert check.difference(outputs, wanted, providers.unchanged) is not None
    assert check.difference({}, wanted, providers.unchanged) == "it returned nothing"


@pytest.mark.parametrize(
    ("estimator", "flags"), [("linear_scan", ""), *((name, flags) for name in ESTIMATORS for flags in ("", "terminated", "truncated"))]
)
def test_what_torch_is_measured_with_is_right(estimator: str, flags: str) -> None:
    batch = batches.batches(replace(TINY, estimator=estimator, flags=flags, chance=0.2, length=37))[0]
    wanted = check.Expected(batch)
    loop = torch_scans.loop(batch)
    assert check.difference(loop.outputs(loop.run()), wanted, loop.comparable) is None
    solving = torch_scans.formulas(batch.estimator, torch_scans.rates_of(batch))
    rows = torch_scans.rows(batch.estimator, dict(batch.tensors), dict(batch.ends))
    solved = torch_scans.solve_in_log_steps(*torch_scans.coefficients(solving, rows), batch.estimator.reverse)
    outputs = dict(zip(batch.estimator.outputs, torch_scans.results(solving, rows, solved), strict=True))
    assert check.difference(outputs, wanted, providers.unchanged) is None


def test_trainers_blocks_are_right_where_they_are() -> None:
    rows = measured(replace(TINY, providers=("TRL", "verl", "torchrl", "rl-triton")))
    assert rows["TRL"]["time"] > 0
    for name in ("verl", "torchrl"):
        assert "time" in rows[name] or "skipped" in rows[name]
    assert rows["rl-triton"]["skipped"] == "it runs on a GPU alone"


def test_trls_own_steps_make_what_our_preset_makes() -> None:
    pytest.importorskip("trl")
    work = replace(list(GROUPS["ppo"]())[-1], device="cpu", segments=5, length=23)
    assert [row["time"] > 0 for row in measured(work).values()] == [True, True]
    assert "is off by" in measured(replace(work, preset=""))["TRL"]["wrong"]  # another place for the score


def test_the_block_counts_28_bytes_a_token() -> None:
    for work in list(GROUPS["ppo"]())[:2]:
        batch = batches.batches(replace(work, device="cpu", segments=3, length=16))[0]
        assert batch.bytes == 28 * batch.tokens + 4 * 3
        assert set(check.call_ours(batch)) == {"advantages", "returns", "rewards", "kl"}


@pytest.mark.parametrize("group", GROUPS)
def test_works_name_providers_and_estimators_that_exist(group: str) -> None:
    planned = list(works.works((group,)))
    assert len({(work.name, work.seed) for work in planned}) == len(planned)
    for work in planned:
        assert work.group == group
        assert any(providers.provider(name).computes(work.estimator) for name in work.providers)
    assert len(planned) == 40 or group != "grid"


def test_a_mixed_pack_has_what_its_work_says() -> None:
    batch = batches.batches(replace(next(GROUPS["mixed"]()), tokens=2**17, device="cpu"))[0]
    assert batch.segments is not None
    lengths = batch.segments.lengths()
    assert 2**16 < batch.tokens < 2**17
    assert (int(lengths.min()) >= 16, int(lengths.max()) <= 131072) == (True, True)
    assert {name: tensor.shape for name, tensor in batch.ends.items()} == dict.fromkeys(("mask", "terminated"), torch.Size([batch.tokens]))
    assert batch.bytes == batch.tokens * (4 * 4 + 2)


def results(*found: dict[str, Any]) -> dict[str, Any]:
    """Results as `command.run` makes them."""
    return {
        "environment": {
            "device": "NVIDIA H200",
            "processor": "a CPU",
            "threads": 2,
            "clocks": "unknown",
            "versions": {"torch": "2"},
            "commit": "abc",
            "date": "2026-11-30",
        },
        "quick": False,
        "copy_bandwidth": {"cuda": 4.25e12},
        "providers": {"ours": "", "rl-triton": "theirs"},
        "not_run": [],
        "works": list(found),
    }


def result(work: Work, **times: float) -> dict[str, Any]:
    """A work's entry where our copy bandwidth allows 50 us."""
    row = {"how": "graph", "spread": 0.5, "full": 30.0, "host": 11.0}
    rows = [{"provider": name.replace("_", "-"), "time": time, "share": 50 / time, **row} for name, time in times.items()]
    described = measure.describe(batches.batches(replace(work, device="cpu", segments=2, length=8))[0], 50.0)
    return {**described, "shape": work.shape, "name": work.name, "tokens": work.segments * work.length, "rows": rows}


def verdicts(*found: dict[str, Any]) -> dict[str, list[str]]:
    rows = [line.strip("| \n").split(" | ") for line in targets.table(results(*found)).splitlines()[2:]]
    return {cells[0]: cells[3:] for cells in rows}


def test_targets_are_what_was_measured() -> None:
    packed = list(GROUPS["packed"]())[:2]
    name = "GAE, packed float32, lam 0.95 and 1, 1024 x 16384"
    assert verdicts(*(result(work, ours=52.0) for work in packed)) == {name: ["96%", "aim"]}
    assert verdicts(result(packed[0], ours=52.0), result(packed[1], ours=60.0)) == {name: ["83%", "at least"]}
    assert verdicts(result(packed[0], ours=52.0), result(packed[1], ours=70.0)) == {name: ["71%", "no"]}
    assert verdicts({**result(packed[0]), "rows": [{"provider": "ours", "wrong": "it is"}]}) == {name: ["-", "not measured"]}
    long = [work for work in GROUPS["long"]() if work.segments == 1]
    found = [result(long[0], ours=10.0, rl_triton=1000.0), result(long[1], ours=40.0, rl_triton=1000.0)]
    few = "GAE, few long, lam {}: 1 x 1048576"
    assert verdicts(*found) == {few.format(0.95): ["100 x, 10.0 us", "aim"], few.format(1): ["25 x, 40.0 us", "no"]}
    with_returns = {"rl-triton + returns": 5.0, "PufferLib + returns": 4.1}
    grid = [result(work, ours=2.0, rl_triton=5.0, PufferLib=3.9, **with_returns) for work in GROUPS["grid"]()]
    ahead = ["40 of 40, 40 of 40 by 2 x", "aim"]
    assert list(verdicts(*grid).values()) == [ahead, ["40 of 40, 0 of 40 by 2 x", "at least"]]
    grid[7]["rows"][2]["time"] = 1.9
    assert list(verdicts(*grid).values()) == [ahead, ["39 of 40, 0 of 40 by 2 x", "no"]]
    del grid[7]["rows"][2]
    assert list(verdicts(*grid).values()) == [ahead, ["-", "not measured"]]
    growth = [result(work, ours=work.segments * (1.1 if work.segments == 128 else 1.0)) for work in GROUPS["growth"]()]
    assert list(verdicts(*growth).values()) == [["10% more for few tokens", "at least"]]
    block = [result(work, ours=80.0, TRL=160_100.0) for work in GROUPS["ppo"]()]
    assert [found[1:] for found in verdicts(*block).values()] == [["at least"], ["at least"]]
    trl = block[-1]["rows"]
    trl[1]["how"], trl[0]["full"] = "wall", 100.0  # where the host counts it counts on both sides
    assert [found[0] for found in verdicts(block[-1]).values()] == ["1,601 x"]
    assert report._ahead({row["provider"]: row for row in trl}) == "1,601 x"
    block[1] = result(list(GROUPS["ppo"]())[1], ours=92.0)
    assert [found[1:] for found in verdicts(*block[:3]).values()] == [["no"]]
    host = [result(work, ours=2.0) for work in GROUPS["host"]()]
    assert list(verdicts(*host).values()) == [["11.0 us", "aim"]]


def test_results_are_merged_and_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, bf16 = next(GROUPS["packed"]()), next(GROUPS["bf16"]())
    parts = [results(result(bf16, ours=30.0), result(packed, ours=99.0)), results(result(packed, ours=60.0, rl_triton=200.0))]
    parts[0]["works"][1]["rows"].append({"provider": "torch.compile", "skipped": "it is not there"})
    parts[0]["not_run"] = [packed.name, "never"]
    for number, part in enumerate(parts):
        (tmp_path / f"{number}.json").write_text(json.dumps(part))
    command.main(["--out", str(tmp_path / "all"), "--render", str(tmp_path / "0.json"), str(tmp_path / "1.json")])
    whole = report.read(tmp_path / "all.json")
    assert [(work["group"], work["rows"][0]["time"]) for work in whole["works"]] == [("packed", 60.0), ("bf16", 30.0)]
    assert [row["provider"] for row in whole["works"][0]["rows"]] == ["ours", "torch.compile", "rl-triton"]
    assert whole["not_run"] == ["never"]
    text = (tmp_path / "all.md").read_text()
    assert f"| {packed.name} | 50 | 60.0 ±0.5, 83% | 200 ±0.5, 25% | 3.33 x |" in text
    drawn = (tmp_path / "all.png").exists()
    assert drawn == (importlib.util.find_spec("matplotlib") is not None)
    assert drawn == ("![Times](all.png)" in text)
    assert drawn != ("matplotlib is not installed" in capsys.readouterr().out)


def test_a_run_writes_after_every_work_and_ends_with_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "copy_bandwidth", lambda device: 1e4)
    monkeypatch.setitem(GROUPS, "cpu", lambda: iter([TINY, replace(TINY, estimator="none")]))
    command.main(["--only", "cpu", "--quick", "--out", str(tmp_path / "run")])
    found = report.read(tmp_path / "run.json")
    assert [row["provider"] for row in found["works"][0]["rows"]] == ["ours"]
    assert len(found["not_run"]) == 1
    assert found["environment"]["versions"]["torch"] == torch.__version__
    command.main(["--only", "cpu", "--seconds", "1e-9", "--out", str(tmp_path / "run")])
    assert report.read(tmp_path / "run.json")["works"] == []
    assert TINY.name in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--only", "nothing"])
    assert "must be names among packed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "program", [["-m", "benchmarks"], ["-m", "benchmarks.end_to_end"], ["-c", "from rlhf_scan.cli import main; main()", "bench"]]
)
def test_commands_from_the_repository(program: list[str]) -> None:
    done = subprocess.run([sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--out PREFIX" in done.stdout


def test_end_to_end(tmp_path: Path) -> None:
    sizes = "--layers 1 --width 16 --heads 2 --vocabulary 50 --tokens 64 --tokens-at-once 32 --lengths 8,16 --updates 9 --seconds 0 --device cpu"
    end_to_end.main([*sizes.split(), "--out", str(tmp_path / "e2e")])
    rows = json.loads((tmp_path / "e2e.json").read_text())["rows"]
    assert [(row["responses"], row["length"]) for row in rows] == [(8, 8), (4, 16)]
    for row in rows:
        assert 0 < row["trl"]["share"] < 1
        assert len(row["trl"]["steps"]) == len(row["ours"]["steps"]) == 2  # no time for more
        assert row["gain"] == pytest.approx(row["trl"]["step"] / row["ours"]["step"])
    assert (tmp_path / "e2e.md").read_text().count(" x |") == 2


def test_readmes_table_is_that_of_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    table_script = script("performance_table")
    text = table_script.PAGE.read_text(encoding="utf-8")
    assert text == table_script.page(text), "run python -m scripts.performance_table"
    planned = [work for group in dict.fromkeys(group for group, _, _ in table_script.ROWS) for work in GROUPS[group]()]
    table = table_script.table(results(*(result(work, ours=60.0, rl_triton=120.0) for work in planned)))
    assert table.count("60.0 us | 83% | rl-triton 2 x |") == len(table_script.ROWS)
    rows = [{"length": length, "responses": 4, "ours": {"step": 0.5}, "gain": length / 100} for length in (200, 700, 300)]
    row = table_script.update({"rows": rows, "parameters": 109_600_000})
    assert row.startswith(
        "| A PPO update, generation left out, of 110M-parameter models, 4 responses of 700 tokens | 0.5 s |  | TRL's block [7 x]("
    )


@pytest.mark.gpu
@pytest.mark.parametrize("queued", [False, True])
def test_on_a_gpu(queued: bool) -> None:
    compared = ("ours", "ours (map kept)", "torch loop")
    rows = measured(replace(TINY, providers=compared, device="cuda", packed=True, segments=64, length=512, queued=queued))
    assert {name: row.get("how") for name, row in rows.items()} == {
        "ours": "queued" if queued else "graph",
        "ours (map kept)": "queued",
        "torch loop": "wall",
    }
    assert 0 < rows["ours"]["host"] <= rows["ours"]["full"]


@pytest.mark.gpu
def test_the_block_on_a_gpu() -> None:
    for work in GROUPS["ppo"]():
        rows = measured(replace(work, segments=64, length=512))
        assert 0 < rows["ours"]["host"] <= rows["ours"]["full"]
        assert "TRL" not in rows or "time" in rows["TRL"] or "skipped" in rows["TRL"]
