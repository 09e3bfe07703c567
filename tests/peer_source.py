"""Runs functions of other projects taken out of their source files, so that nothing else of those projects has to be there.

A project is looked for as a checkout peers/<name>, as a package in peers/site (`pip install --no-deps --target peers/site verl==0.9.1`), then among
the installed packages. RLHF_SCAN_PEERS names another folder than peers/ at the root, which git ignores.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(os.environ.get("RLHF_SCAN_PEERS", Path(__file__).parents[1] / "peers"))


def root(project: str, package: str) -> Path:
    """The folder that holds the project's package; skips the test where there is none."""
    for folder in (PEERS / project, PEERS / "site"):
        if (folder / package).is_dir():
            return folder
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{project} is neither in {PEERS.name}/{project} or {PEERS.name}/site nor installed")
    return Path(next(iter(spec.submodule_search_locations))).parent


def load(folder: Path, places: dict[str, Iterable[str]], given: dict[str, Any]) -> dict[str, Any]:
    """The namespace of the named functions, classes and methods ("Class.method") of each file, which see one another and `given`.

    Decorators of what is named are left out: they compile or register.
    """
    names = dict(given)
    for file, wanted in places.items():
        text = (folder / file).read_text(encoding="utf-8")
        tree = ast.parse(text)
        for name in wanted:
            definition = _find(tree, name.split("."))
            definition.decorator_list = []
            execute([definition], names, f"{folder / file}")
    return names


def execute(body: list[ast.stmt], names: dict[str, Any], file: str) -> None:
    """Run statements in `names`, with annotations left unread."""
    exec(compile(ast.Module(body, []), file, "exec", flags=annotations.compiler_flag), names)


def statements(file: Path, first: str, last: str) -> list[ast.stmt]:
    """The run of statements of one block, anywhere in `file`, from the first assignment to the variable `first` to the next whose text starts
    with `last`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and all(isinstance(part, ast.stmt) for part in body):
                texts = [ast.unparse(part) for part in body]
                starts = [i for i, text in enumerate(texts) if text.startswith(f"{first} = ")]
                if starts:
                    stop = next(i for i in range(starts[0], len(texts)) if texts[i].startswith(last))
                    return body[starts[0] : stop + 1]
    raise LookupError(f"{file} assigns no {first}")


def _find(tree: ast.AST, path: list[str]) -> ast.FunctionDef | ast.ClassDef:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == path[0]:
            return node if len(path) == 1 else _find(node, path[1:])
    raise LookupError(f"no {path[0]}")
