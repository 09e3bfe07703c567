"""README's snippets, run as they stand, in order and in one namespace, with a real server, a real Ray and a real PPOTrainer."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ADDRESS, BIN, SERVE, blocks, run_python, serving
from tiny_ppo import tiny_trainer

from rlhf_scan import gae
from rlhf_scan.rollout import read_result

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def shell_block(containing: str) -> str:
    (block,) = [block for block in blocks(README, "sh") if containing in block]
    return block


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where README's server listens: its own command, on a free port."""
    assert f"`{SERVE}`" in README
    with serving() as address:
        yield address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


@pytest.fixture(scope="module")
def namespace(address: str, folder: Path) -> Iterator[dict[str, Any]]:
    """What the Python blocks leave behind, after all have run."""
    import ray

    torch.manual_seed(0)
    names: dict[str, Any] = {"trainer": tiny_trainer(folder / "trainer", updates=1)}
    run_python(README, "README.md", address, folder, names)
    yield names
    ray.shutdown()


def test_python_blocks(namespace: dict[str, Any]) -> None:
    """Each ran, and through each door the example's numbers came out."""
    assert "".join(blocks(README, "python")).count("engine.run(request)") == 2
    advantages, returns = gae(namespace["rewards"], namespace["values"], segments=namespace["segments"], lam=0.95, backend="reference")
    torch.testing.assert_close(namespace["advantages"], advantages)
    torch.testing.assert_close(namespace["result"].tensors["returns"], returns)
    assert namespace["trainer"].state.global_step == 1


def test_curl(address: str) -> None:
    block = shell_block("curl").replace(ADDRESS, address)
    answer = json.loads(subprocess.run(["bash", "-c", block], capture_output=True, check=True, timeout=60).stdout)
    sent = json.loads(re.search(r"-d '(.*)'", block, flags=re.DOTALL)[1])
    rewards, values = (torch.tensor(sent["tensors"][name]) for name in ("rewards", "values"))
    first = gae(rewards[:3].float(), values[:3], lam=0.95, backend="reference").advantages
    torch.testing.assert_close(torch.tensor(answer["tensors"]["advantages"][:3]), first)


def test_rollout_file(namespace: dict[str, Any], folder: Path) -> None:
    command = shell_block("rlhf-scan compute").split()
    subprocess.run([BIN / command[0], *command[1:]], cwd=folder, check=True, timeout=120)
    found = read_result(folder / "credit.safetensors").tensors["advantages"]
    assert torch.equal(found, namespace["advantages"])


def test_make_targets() -> None:
    targets = set(re.findall(r"\bmake (\w+)", "".join(blocks(README, "sh"))))
    assert targets == {"demo", "test", "setup"}
    subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_length() -> None:
    assert len(README.splitlines()) < 120
