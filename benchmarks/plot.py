"""The plot: share of the copy bandwidth of ours, and how many times as long the others take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BAR = 0.2  # inches a line


def write(results: dict[str, Any], path: Path) -> str | None:
    """Draw into `path`; where matplotlib is not installed, a sentence that says so."""
    try:
        import matplotlib
    except ImportError:
        return f"{path.name} is not drawn: matplotlib is not installed; install rlhf-scan[bench], then render the JSON with --render"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    works = [work for work in results["works"] if any(row["provider"] == "ours" and "time" in row for row in work["rows"])]
    if not works:
        return f"{path.name} is not drawn: nothing was measured"
    figure, (left, right) = pyplot.subplots(1, 2, sharey=True, figsize=(14, 2 + BAR * len(works)), layout="constrained")
    _shares(left, works)
    _ratios(right, works)
    left.set_yticks(range(len(works)), [f"{work['name']}{' (again)' if work['seed'] else ''}" for work in works], fontsize=7)
    left.invert_yaxis()
    environment = results["environment"]
    figure.suptitle(f"{environment['device']}, commit {environment['commit']}, {environment['date']}", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return None


def _shares(axes: Any, works: list[dict[str, Any]]) -> None:
    shares = [next(row["share"] for row in work["rows"] if row["provider"] == "ours") for work in works]
    axes.barh(range(len(works)), [100 * share for share in shares], color="tab:blue")
    axes.axvline(100, color="grey", linewidth=0.8)
    axes.set_xlabel("ours, % of the copy bandwidth")
    axes.set_ylim(-0.8, len(works) - 0.2)


def _ratios(axes: Any, works: list[dict[str, Any]]) -> None:
    by_provider: dict[str, list[tuple[float, int]]] = {}
    for place, work in enumerate(works):
        times = {row["provider"]: row["time"] for row in work["rows"] if "time" in row}
        for name, time in times.items():
            if not name.startswith("ours"):
                by_provider.setdefault(name, []).append((time / times["ours"], place))
    for name, points in by_provider.items():
        axes.scatter(*zip(*points, strict=True), label=name, s=18)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("time of others / time of ours")
    if by_provider:
        axes.legend(fontsize=8)
    axes.grid(axis="x", which="both", alpha=0.2)
