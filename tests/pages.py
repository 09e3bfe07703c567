"""Pages of the documentation whose examples are run as they stand, against a real server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BIN = Path(sys.executable).parent
SERVE, ADDRESS = "rlhf-scan serve --port 8000", "http://127.0.0.1:8000"  # as the pages have them


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


@contextmanager
def serving() -> Iterator[str]:
    """The pages' server, on a free port, and where it listens."""
    command = [BIN / "rlhf-scan", *SERVE.replace("8000", "0").split()[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1]
        finally:
            server.terminate()


def run_python(page: str, name: str, address: str, folder: Path, names: dict[str, Any]) -> None:
    """Run the Python blocks in order, in `folder` and in one namespace, `names`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for number, block in enumerate(blocks(page, "python")):
            exec(compile(block.replace(ADDRESS, address), f"{name}, Python block {number + 1}", "exec"), names)
