"""The options of each trainer that the loops of tests/peer_blocks.py are tried with, and what `ppo_advantages` calls them."""

from __future__ import annotations

import math
from typing import Any

import pytest

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "trl": [
        {},
        {"kl_estimator": "k3", "kl_coef": 0.3, "gamma": 0.9, "lam": 0.8},
        {"whiten_rewards": True, "kl_coef": 0.2},
        {"missing_eos_penalty": 1.5},
    ],
    "verl": [
        {},
        {"kl_coef": 0.2, "gamma": 0.9, "lam": 0.8},
        {"kl_estimator": "k2", "kl_coef": 0.1, "lam": 0.95},
        {"kl_estimator": "abs", "kl_coef": 0.1},
        {"kl_estimator": "k3", "kl_coef": 0.1, "lam": 0.9},
    ],
    "openrlhf": [
        {},
        {"kl_coef": 0.2, "gamma": 0.9, "lam": 0.8, "score_clip": (-1.0, 0.5)},
        {"kl_estimator": "k2", "kl_coef": 0.1, "lam": 0.95},
        {"kl_estimator": "k3", "kl_coef": 0.1, "scale": False},
        {"kl_coef": -1.0},
    ],
    "nemo-rl": [
        {},
        {"kl_coef": 0.2, "gamma": 0.9, "lam": 0.8},
        {"kl_estimator": "k1", "kl_coef": 0.1},
        {"kl_estimator": "k2", "kl_coef": 0.1, "whiten": False},
        {"lam_policy": 0.9, "lam_value": 1.0},
        {"length_adaptive_alpha": 0.4, "lam_value": 1.0},
        {"length_adaptive_alpha": 0.05},
    ],
    "slime": [
        {},
        {"kl_coef": 0.2, "gamma": 0.9, "lam": 0.8, "whiten": True},
        {"kl_estimator": "k2", "kl_coef": 0.1, "whiten": True},
        {"kl_estimator": "k3", "kl_coef": 0.1},
        {"kl_estimator": "low_var_kl", "kl_coef": 0.1, "lam": 0.95},
    ],
    "areal": [
        {},
        {"kl_coef": 0.2, "gamma": 0.9, "lam": 0.8, "whiten": True},
        {"kl_estimator": "k2", "score_bias": -0.5, "score_scale": 10.0, "lam": 0.95},
        {"kl_estimator": "k3", "score_clip": 1.0, "zero_without_eos": True, "whiten": True},
    ],
}


def cases() -> list[Any]:
    """Every (name, options)."""
    return [pytest.param(name, options, id=f"{name}-{i}") for name, many in OPTIONS.items() for i, options in enumerate(many)]


def ours(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `ppo_advantages(preset=name)` that mean the same. What it has no option for is done to the scores by its caller."""
    named = {
        key: value for key, value in options.items() if key not in ("kl_estimator", "whiten", "scale", "lam_policy", "zero_without_eos")
    }
    if "kl_estimator" in options:
        named["kl"] = options["kl_estimator"]
    if named.get("kl") == "low_var_kl":
        named |= {"kl": "k3", "kl_clamp": "exp", "log_ratio_limit": math.inf, "kl_limit": 10.0}
    if "whiten" in options:
        named["whiten_advantages"] = options["whiten"]
    if options.get("scale") is False:
        named["whiten_advantages"] = "shift"
    if "lam_policy" in options:
        named["lam"] = options["lam_policy"]
    if name == "openrlhf" and "kl_coef" in options:
        named["kl_coef"] = max(options["kl_coef"], 0.0)
    return named
