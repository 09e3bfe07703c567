"""Writes the table of every served estimator's arguments into docs/estimators.md: ``python -m scripts.estimator_table``."""

from __future__ import annotations

import math
from pathlib import Path

from rlhf_scan.estimators import Estimator, Rate, served
from rlhf_scan.requests import options

PAGE = Path(__file__).parents[1] / "docs" / "estimators.md"
START, STOP = "<!-- arguments -->\n", "<!-- /arguments -->\n"


def table() -> str:
    """The table, from the registry."""
    head = "| estimator | inputs | parameters | flags | end | outputs |\n| --- | --- | --- | --- | --- | --- |\n"
    return head + "".join(map(_row, served()))


def page(text: str) -> str:
    """`text` with the table of now between its marks."""
    before, rest = text.split(START)
    _, after = rest.split(STOP)
    return f"{before}{START}{table()}{STOP}{after}"


def _row(entry: Estimator) -> str:
    words = [f"`{name}` {' or '.join(choices)}" for name, choices in options(entry).items()]
    columns = (
        f"`{entry.name}`",
        ", ".join(_argument(entry, name) for name in entry.arguments),
        ", ".join([_rate(name, rate) for name, rate in entry.rates.items()] + words) or "-",
        ", ".join(f"`{name}`" for name in entry.takes),
        "-" if entry.end_name is None else f"`{entry.end_name}`",
        ", ".join(f"`{name}`" for name in entry.outputs),
    )
    return f"| {' | '.join(columns)} |\n"


def _argument(entry: Estimator, name: str) -> str:
    names = [name] if name not in entry.choices else [name, *entry.choices[name]]
    shown = [f"`{part}`" + (" [.., A]" if part in entry.per_action else "") for part in names]
    return shown[0] if len(shown) == 1 else f"{shown[0]} (or {' and '.join(shown[1:])})"


def _rate(name: str, rate: Rate) -> str:
    default = "none" if rate.default is None else f"{rate.default:g}"
    return f"`{name}` {default} ({rate.meaning}, {'any' if math.isinf(rate.largest) else f'at most {rate.largest:g}'})"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
