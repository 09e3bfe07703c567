"""What each definition of whitening means, and which project whitens by which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor
from whitening_textbook import case, textbook

from rlhf_scan import whiten

DEFINITIONS: list[dict[str, Any]] = [
    {},
    {"shift_mean": False},
    {"scale": False},
    {"unbiased": False},
    {"eps_at": "outside", "eps": 1e-1},
    {"eps_at": "floor", "eps": 1e-1},
    {"eps_at": "floor", "eps": 10.0, "unbiased": False},
    {"eps": 0.5, "shift_mean": False, "unbiased": False},
]


@pytest.mark.parametrize("definition", DEFINITIONS, ids=str)
@pytest.mark.usefixtures("nan_filled")
def test_each_definition(backend: str, definition: dict[str, Any]) -> None:
    x, mask = case(backend)
    before = x.clone()
    y = whiten(x, mask, backend=backend, **definition)
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask]))
    torch.testing.assert_close(y[mask].double(), textbook(x[mask].double(), **definition), rtol=1e-6, atol=1e-6)
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    assert y.dtype == x.dtype


def trl_whiten(values: Tensor, mask: Tensor, shift_mean: bool) -> Tensor:
    ppo = pytest.importorskip("trl.experimental.ppo.ppo_trainer")
    result: Tensor = ppo.masked_whiten(values, mask, shift_mean)
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shift_mean", [True, False])
def test_as_trl_whitens(shift_mean: bool) -> None:
    x = torch.randn(6, 9) * 3 + 1
    mask = torch.rand(6, 9) < 0.7
    want = torch.where(mask, trl_whiten(x, mask, shift_mean), 0.0)
    torch.testing.assert_close(whiten(x, mask, shift_mean=shift_mean), want, rtol=1e-5, atol=1e-5)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def by_rsqrt(x: Tensor, mask: Tensor, unbiased: bool, floor: bool) -> Tensor:
    """TRL's, verl's, slime's and NeMo-RL's GAE's (variance + eps); OpenRLHF's and NeMo-RL's REINFORCE++'s (population, at least eps)."""
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    if unbiased:
        variance = variance * mask.sum() / (mask.sum() - 1)
    return (x - mean) * (variance.clamp(min=1e-8) if floor else variance + 1e-8).rsqrt()


def by_std(x: Tensor, mask: Tensor, eps: float) -> Tensor:
    """AReaL's Normalization of a batch, in float64."""
    count = mask.sum()
    mean = (x * mask).sum() / count
    std = (((x * mask - mean * mask) ** 2).sum() / (count - 1)).sqrt()
    return ((x - mean) * mask) / (std + eps)


PROJECTS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "trl, verl, slime, nemo-rl": ({}, lambda x, mask: by_rsqrt(x, mask, True, False)),
    "openrlhf, nemo-rl reinforce++": ({"unbiased": False, "eps_at": "floor"}, lambda x, mask: by_rsqrt(x, mask, False, True)),
    "openrlhf no_std_norm": ({"scale": False}, lambda x, mask: x - masked_mean(x, mask)),
    "areal": ({"eps_at": "outside", "eps": 1e-5}, lambda x, mask: by_std(x, mask, 1e-5)),
}


@pytest.mark.parametrize("spread", [2.0, 1e-4])
@pytest.mark.parametrize("project", PROJECTS)
def test_as_each_project_whitens(backend: str, project: str, spread: float) -> None:
    """With a spread at which it shows where eps enters."""
    definition, behaviour = PROJECTS[project]
    seed = torch.Generator().manual_seed(0)  # at some spreads two definitions agree
    x = (torch.randn(6, 9, dtype=torch.float64, generator=seed) * spread + 1).to(device_of(backend))
    mask = (torch.rand(6, 9, generator=seed) < 0.7).double().to(x.device)
    found = whiten(x, mask, backend=backend, **definition)
    torch.testing.assert_close(found, behaviour(x, mask) * mask, rtol=1e-10, atol=1e-10)
    others = [whiten(x, mask, backend=backend, **other) for other, _ in PROJECTS.values() if other != definition]
    if spread < 1e-3:
        assert all(float((found - other).abs().max()) > 1e-3 for other in others)
