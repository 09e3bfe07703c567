"""Writes the tables of the presets into docs/presets.md: ``python -m scripts.preset_table``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_scan import ppo_advantages
from rlhf_scan.ppo_options import PRESETS, PPOOptions, resolve_options

PAGE = Path(__file__).parents[1] / "docs" / "presets.md"

# One input for all: a row of each kind that the projects treat differently. "x" is a token of the policy, "t" one of a tool, "." padding.
ROWS = {"short": "xx....", "tool": "xxttx.", "ends in tool": "xxxtt.", "cut": "xxxxxx"}
STOP_REASONS = ["stop", "stop", "stop", "length"]
LOG_RATIOS = [
    [0.5, -0.25, 0.0, 0.0, 0.0, 0.0],
    [0.25, 0.5, 1.0, -0.5, 0.25, 0.0],
    [0.5, 0.5, -0.5, 1.0, 0.5, 0.0],
    [0.25, -0.5, 0.5, 0.25, 0.5, -0.25],
]
VALUES = [
    [0.25, 0.5, 0.75, 0.0, 0.0, 0.0],
    [0.5, 0.25, 1.0, -0.5, 0.5, 0.25],
    [0.25, 0.5, 0.75, -1.0, 0.5, 0.25],
    [0.5, 0.5, 0.25, 0.75, 0.5, 0.25],
]
SCORES = [1.0, 2.0, -1.0, 12.0]
BOOTSTRAP = [0.0, 0.0, 0.0, 0.75]
SAME = {"kl": "k1", "kl_coef": 0.1, "gamma": 1.0, "lam": 0.95, "whiten_advantages": "off"}
KNOWS_NO_TOOLS = "trl"


def rows_for(preset: str) -> list[int]:
    """The rows above that the project can have."""
    return [row for row, kinds in enumerate(ROWS.values()) if preset != KNOWS_NO_TOOLS or "t" not in kinds]


def example(preset: str, **options: Any) -> Tensor:
    """The advantages of these rows, [.., 6]."""
    rows = rows_for(preset)
    kinds = [list(ROWS.values())[row] for row in rows]
    log_ratios, values, scores, bootstrap = (
        torch.tensor(numbers, dtype=torch.float64)[rows] for numbers in (LOG_RATIOS, VALUES, SCORES, BOOTSTRAP)
    )
    return ppo_advantages(
        log_ratios,
        torch.zeros_like(log_ratios),
        values,
        scores,
        preset=preset,
        mask=torch.tensor([[kind == "x" for kind in row] for row in kinds]),
        attention_mask=torch.tensor([[kind != "." for kind in row] for row in kinds]),
        stop_reasons=[STOP_REASONS[row] for row in rows],
        bootstrap=bootstrap if preset == "areal" else None,
        backend="reference",
        **options,
    ).advantages


def examples(**options: Any) -> str:
    """A table of the example's advantages."""
    lines = [["preset", *(f"{name}<br>`{kinds}`" for name, kinds in ROWS.items())]]
    for preset in PRESETS:
        cells = dict.fromkeys(ROWS, "-")
        for row, numbers in zip(rows_for(preset), example(preset, **options).tolist(), strict=True):
            name, kinds = list(ROWS.items())[row]
            cells[name] = " ".join(
                f"{number:.3f}" if kind == "x" else "·" for kind, number in zip(kinds, numbers, strict=True) if kind != "."
            )
        lines.append([f"`{preset}`", *cells.values()])
    return _table(lines)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return "none" if math.isinf(value) else f"{value:g}"
    return "none" if value is None else f"`{value}`"


def _limits(which: int) -> Callable[[PPOOptions], str]:
    def cell(options: PPOOptions) -> str:
        k3, others = (_number(replace(options, kl=kl).limits[which]) for kl in ("k3", "k1"))
        return k3 if k3 == others else f"{k3} for k3"

    return cell


def _meant(name: str) -> Callable[[str | None, PPOOptions], str]:
    def cell(preset: str | None, options: PPOOptions) -> str:
        on = getattr(resolve_options("presets", preset, {name: True}), name)
        chosen = getattr(options, name)
        return f"`{chosen}`" if chosen == on else f"`{chosen}` (True: `{on}`)"

    return cell


def choices() -> str:
    """A table of every option: a line for each on which two of them differ, and the others in one line."""
    columns: dict[str | None, PPOOptions] = {**PRESETS, None: PPOOptions()}
    computed: dict[str, Callable[[str | None, PPOOptions], str]] = {
        "log_ratio_limit": lambda preset, options: _limits(0)(options),
        "kl_limit": lambda preset, options: _limits(1)(options),
        "whiten_rewards": _meant("whiten_rewards"),
        "whiten_advantages": _meant("whiten_advantages"),
    }
    lines = [["option", *(f"`{preset}`" if preset else "no preset" for preset in columns)]]
    same = []
    for field in fields(PPOOptions):
        if field.name == "kl_clamp":
            continue  # shown as the limits that come of it
        shown = computed.get(field.name, lambda preset, options, name=field.name: _number(getattr(options, name)))
        cells = [shown(preset, options) for preset, options in columns.items()]
        if len(set(cells)) == 1:
            same.append(f"`{field.name}` {cells[0]}")
        else:
            lines.append([f"`{field.name}`", *cells])
    return _table(lines) + f"\nThe same in all: {', '.join(same)}.\n"


def _table(lines: list[list[str]]) -> str:
    head, *rows = (f"| {' | '.join(cells)} |\n" for cells in lines)
    return head + "|" + " --- |" * len(lines[0]) + "\n" + "".join(rows)


def page(text: str) -> str:
    """`text` with the tables of now between their marks."""
    for mark, table in (("options", choices()), ("same options", examples(**SAME)), ("own options", examples())):
        before, rest = text.split(f"<!-- {mark} -->\n")
        _, after = rest.split(f"<!-- /{mark} -->\n")
        text = f"{before}<!-- {mark} -->\n{table}<!-- /{mark} -->\n{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
