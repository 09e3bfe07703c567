"""docs/estimators.md speaks of every estimator, and of it as it is."""

from __future__ import annotations

from pathlib import Path

from script_modules import script

from rlhf_scan.estimators import served

ROOT = Path(__file__).parents[1]


def test_the_table_is_that_of_the_registry() -> None:
    table = script("estimator_table")
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == table.page(text), "run python -m scripts.estimator_table"


def test_every_estimator_has_its_coefficients_in_the_docs() -> None:
    text = (ROOT / "docs" / "estimators.md").read_text(encoding="utf-8")
    rows = [line for line in text[text.index("## Side by side") : text.index("## Boundaries")].splitlines() if line.startswith("| `")]
    for entry in served():
        (row,) = [row for row in rows if f"`{entry.name}`" in row.split("|")[1]]
        assert all(name in row for name in entry.outputs), entry.name
        assert ("(forward)" in row) == (not entry.reverse)
