"""Results as files: JSON, the tables of it in Markdown, a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import plot as plots
from . import targets
from .works import GROUPS

Results = dict[str, Any]
WORKS = {
    "packed": "GAE over packs, float32",
    "ppo": "The whole RLHF block: KL penalty, score, GAE, advantage whitening",
    "bf16": "GAE over packs, bfloat16",
    "mixed": "GAE over a pack of log-normal lengths, with mask and done flags",
    "rows": "GAE over rows with done flags",
    "long": "GAE over few long segments",
    "returns": "Discounted returns over packs",
    "grid": "GAE over the 40 shapes of rl-triton's comparison with PufferLib",
    "seven": "Seven estimators",
    "retrace": "Retrace from the policy, 4 actions",
    "host": "Small shapes, where the host is what takes time",
    "growth": "From 1M to 64M tokens",
    "frameworks": "Against the trainers' own blocks",
    "linear": "The plain recurrence",
    "cpu": "On the CPU",
}
WITH_HOST = ("ppo", "grid", "seven", "host", "frameworks")


def read(path: Path) -> Results:
    """The results in a JSON file."""
    found: Results = json.loads(path.read_text(encoding="utf-8"))
    return found


def write(results: Results, prefix: Path, plot: bool = True) -> None:
    """PREFIX.json, PREFIX.md and, where matplotlib is, PREFIX.png."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    _beside(prefix, "json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    missing = plots.write(results, _beside(prefix, "png")) if plot else None
    image = f"![Times]({prefix.name}.png)\n\n" if plot and missing is None else ""
    _beside(prefix, "md").write_text(markdown(results, image), encoding="utf-8")
    if missing is not None:
        print(missing)


def merged(parts: Sequence[Results]) -> Results:
    """Runs on one machine as one; a provider that was measured again on a work counts as it was measured last."""
    whole = dict(parts[-1])
    by_key: dict[tuple[Any, ...], dict[str, Any]] = {}
    for commit, work in ((part["environment"]["commit"], work) for part in parts for work in part["works"]):
        key = work["group"], work["name"], work["seed"]
        measured = [{"commit": commit, **row} for row in work["rows"]]
        rows = {row["provider"]: row for row in (*by_key.get(key, {"rows": []})["rows"], *measured)}
        by_key[key] = {**work, "rows": list(rows.values())}
    whole["works"] = sorted(by_key.values(), key=lambda work: list(GROUPS).index(work["group"]))
    done = {work["name"] for work in whole["works"]}
    whole["not_run"] = [name for name in dict.fromkeys(name for part in parts for name in part["not_run"]) if name not in done]
    for field in ("copy_bandwidth", "providers"):
        whole[field] = {key: value for part in parts for key, value in part[field].items()}
    versions = {name: version for part in parts for name, version in part["environment"]["versions"].items()}
    counted = {row["commit"] for work in whole["works"] for row in work["rows"]}
    named = dict.fromkeys(commit for part in parts for commit in part["environment"]["commit"].split(", "))  # by results that were merged
    commits = [commit for commit in named if commit in counted]
    whole["environment"] = {**parts[-1]["environment"], "versions": versions, "commit": ", ".join(commits)}
    whole["quick"] = any(part["quick"] for part in parts)
    return whole


def markdown(results: Results, image: str = "") -> str:
    """All tables."""
    sections = [f"# Benchmarks\n\n{_where(results)}\n\n{_how()}\n\n{image}## Targets\n\n{targets.table(results)}"]
    for group in GROUPS:
        works = [work for work in results["works"] if work["group"] == group]
        if works:
            commits = dict.fromkeys(row["commit"] for work in works for row in work["rows"] if "commit" in row)
            at = f"Measured at commit {', '.join(commits)}.\n\n" if commits else ""
            sections.append(f"## {WORKS[group]}\n\n{at}{''.join(_tables(works, group in WITH_HOST))}")
    if results["not_run"]:
        sections.append("## Not run\n\n" + "".join(f"- {name}\n" for name in results["not_run"]))
    providers = {row["provider"] for work in results["works"] for row in work["rows"]}
    about = "".join(f"- {name}: {text}\n" for name, text in results["providers"].items() if name in providers and text)
    return "\n".join([*sections, f"## Providers\n\n{about}"])


def _beside(prefix: Path, kind: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{kind}")


def _where(results: Results) -> str:
    found = results["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    bandwidth = ", ".join(f"{device} {value / 1e12:.3g} TB/s" for device, value in results["copy_bandwidth"].items())
    quick = " A quick run: few samples." if results["quick"] else ""
    return (
        f"{found['device']}{_clocks(found['clocks'])}, {found['processor']}, {found['threads']} threads. "
        f"Copy bandwidth: {bandwidth}. {versions}. Commit {found['commit']}, {found['date']}.{quick}"
    )


def _clocks(text: str) -> str:
    """As nvidia-smi gives them: now and at most, of the multiprocessors and of the memory; then the driver."""
    parts = text.split(", ")
    if len(parts) != 5:
        return ""
    return f" (clock {parts[0]} before the run, {parts[1]} at most; memory {parts[2]}, {parts[3]} at most; driver {parts[4]})"


def _how() -> str:
    return (
        "Microseconds of one call, the median of samples that take turns among the providers, ± half the distance between quartiles. On a GPU: "
        "replays of a CUDA graph of many calls over inputs that rotate past the L2 cache (outputs are allocated inside it); q: calls queued behind "
        "a delay instead; w: the clock on the wall. %: the floor, every input read once and every output written once at the copy bandwidth "
        "measured in the same run, as a share of the time. A provider timed by the clock on the wall, which counts the host, is compared with our "
        "full calls. Every provider was first checked on these inputs against float64 loops; a wrong one "
        "is not timed."
    )


def _tables(works: Sequence[dict[str, Any]], with_host: bool) -> Iterator[str]:
    providers = list(dict.fromkeys(row["provider"] for work in works for row in work["rows"] if "skipped" not in row))
    yield _header(["work", "floor", *providers, "best other / ours"])
    for work in works:
        rows = {row["provider"]: row for row in work["rows"]}
        yield _line([_label(work), f"{work['floor']:.3g}", *(_cell(rows.get(name)) for name in providers), _ahead(rows)])
    yield "\n"
    if with_host and any("host" in row for work in works for row in work["rows"]):
        timed = [name for name in providers if any("host" in row for work in works for row in work["rows"] if row["provider"] == name)]
        yield "Full calls back to back without a graph: until the device is done (until the host has the last answer).\n\n"
        yield _header(["work", *timed])
        for work in works:
            rows = {row["provider"]: row for row in work["rows"]}
            yield _line([_label(work), *(_full(rows.get(name)) for name in timed)])
        yield "\n"
    notes = dict.fromkeys(note for work in works for row in work["rows"] if (note := _note(row, work)))
    yield "".join(f"- {note}\n" for note in notes)


def _label(work: dict[str, Any]) -> str:
    return f"{work['name']} (again)" if work["seed"] else str(work["name"])


def _header(cells: Sequence[str]) -> str:
    return _line(cells) + _line(["---"] * len(cells))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or "skipped" in row:
        return ""
    for kind in ("wrong", "failed"):
        if kind in row:
            return kind
    how = {"queued": " q", "wall": " w"}.get(row["how"], "")
    share = f"{row['share']:.0%}" if row["share"] >= 0.1 else f"{row['share']:.1%}"
    return f"{number(row['time'])} ±{row['spread']:.2g}{how}, {share}"


def _full(row: dict[str, Any] | None) -> str:
    return "" if row is None or "full" not in row else f"{number(row['full'])} ({number(row['host'])})"


def _ahead(rows: dict[str, dict[str, Any]]) -> str:
    ours = rows.get("ours", {})
    if "time" not in ours:
        return ""
    others = [targets.times_as_long(row, ours) for name, row in rows.items() if not name.startswith("ours") and "time" in row]
    return ratio(min(others)) if others else ""


def _note(row: dict[str, Any], work: dict[str, Any]) -> str | None:
    for kind in ("skipped", "wrong", "failed"):
        if kind in row:
            where = "" if kind == "skipped" else f", {work['name']}"
            return f"{row['provider']}{where}: {kind}: {row[kind]}"
    return f"{row['provider']}: no CUDA graph: {row['no_graph']}" if "no_graph" in row else None


def number(microseconds: float) -> str:
    """Three figures, no exponent."""
    if microseconds >= 100:
        return f"{microseconds:,.0f}"
    return f"{microseconds:.1f}" if microseconds >= 10 else f"{microseconds:.2f}"


def ratio(value: float) -> str:
    """How many times."""
    return f"{value:,.0f} x" if value >= 100 else f"{value:.3g} x"
