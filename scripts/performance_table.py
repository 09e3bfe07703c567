"""Writes README's table of speeds from the committed results: ``python -m scripts.performance_table``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import report, targets

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "README.md"
RESULTS, UPDATE = (ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("h200", "end_to_end"))
START, STOP = "<!-- performance -->\n", "<!-- /performance -->\n"
# (group, how a work's name begins, what README calls it); a work that the results do not hold has no row
ROWS = (
    ("packed", "gae, packed, 1024 x 16384, gamma 1", "GAE, a pack of 1024 x 16384 tokens"),
    ("packed", "gae, packed, 128 x 131072, gamma 1, lam 1", "GAE, 128 x 131072, lambda 1"),
    ("mixed", "gae, packed", "GAE, 16M tokens in segments of 16 to 131072, mask and flags"),
    ("frameworks", "gae, rows, 1024 x 8192", "GAE, 1024 x 8192"),
    ("ppo", "ppo_advantages, packed, 1024 x 16384", "KL penalty, score, GAE and whitening, a pack of 1024 x 16384"),
    ("ppo", "ppo_advantages, rows, 1024 x 8192, preset trl", "The same as TRL does it, 1024 x 8192, padded"),
)


def table(results: dict[str, Any]) -> str:
    """The table, from results; README says where all of them are."""
    environment = results["environment"]
    head = f"on one {environment['device']}, of copy bandwidth, [others](benchmarks/results/{RESULTS.stem}.md)".split(", ")
    lines = [_line(["speed", *head]), _line(["---"] * 4)]
    for group, name, words in ROWS:
        work = next((work for work in results["works"] if work["group"] == group and work["name"].startswith(name)), None)
        if work is None:
            continue
        (ours,) = (row for row in work["rows"] if row["provider"] == "ours")
        timed = [row for row in work["rows"] if "time" in row and not row["provider"].startswith("ours")]
        others = sorted((targets.times_as_long(row, ours), row["provider"]) for row in timed)
        faster = ", ".join(f"{other} {report.ratio(times)}" for times, other in others)
        lines.append(_line([words, f"{report.number(ours['time'])} us", f"{ours['share']:.0%}", faster]))
    return "".join(lines)


def update(results: dict[str, Any]) -> str:
    """The table's last row: a whole PPO update at the longest responses that were measured."""
    row = max(results["rows"], key=lambda row: row["length"])
    millions = round(results["parameters"] / 1e6)
    words = f"A PPO update, generation left out, of {millions}M-parameter models, {row['responses']} responses of {row['length']} tokens"
    return _line([words, f"{row['ours']['step']:.3g} s", "", f"TRL's block [{row['gain']:.3g} x](benchmarks/results/{UPDATE.stem}.md)"])


def page(text: str) -> str:
    """`text` with the table of the committed results between its marks."""
    before, rest = text.split(START)
    _, after = rest.split(STOP)
    return f"{before}{START}{table(report.read(RESULTS))}{update(report.read(UPDATE))}{STOP}{after}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
