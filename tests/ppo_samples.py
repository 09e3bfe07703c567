"""Random calls of `ppo_advantages`, and the oracle's answer to them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import ppo_oracle
import torch
from conftest import device_of
from torch import Tensor

from rlhf_scan import Segments
from rlhf_scan.ppo import PPOAdvantages, ppo_advantages
from rlhf_scan.ppo_options import PRESETS, WHITENINGS, PPOOptions, whitenings

OUTPUTS = ("advantages", "returns", "rewards", "kl")


def random_options(rng: random.Random) -> dict[str, Any]:
    """Any options that go together."""
    masked = rng.choice(["skip", "zero", "keep"])
    options: dict[str, Any] = {
        "kl": rng.choice(["k1", "k2", "k3", "abs"]),
        "kl_at": rng.choice(["trainable", "all"]) if masked == "keep" else "trainable",
        "kl_clamp": rng.choice(["exp", "all", "off"]),
        "log_ratio_limit": rng.choice([0.5, 20.0, float("inf")]),
        "kl_limit": rng.choice([0.4, 10.0, float("inf")]),
        "score_at": rng.choice(["last", "post_eos"]),
        "trailing": rng.choice(["carry_back", "drop", *(["stay"] if masked == "keep" else [])]),
        "score_bias": rng.choice([0.0, 0.3]),
        "score_scale": rng.choice([1.0, -2.0]),
        "score_clip": rng.choice([float("inf"), 0.7, (-1.5, 0.2)]),
        "missing_eos_penalty": rng.choice([0.0, 0.9]),
        "whiten_rewards": rng.choice(["off", *WHITENINGS]),
        "whiten_advantages": rng.choice(["off", *WHITENINGS]),
        "gamma": rng.choice([1.0, 0.9]),
        "lam": rng.choice([0.95, 1.0]),
        "lam_value": rng.choice([None, 1.0, 0.5]),
        "length_adaptive_alpha": rng.choice([0.0, 0.0, 0.8]),
        "masked": masked,
    }
    return options


def random_call(rng: random.Random, *, packed: bool, dtype: torch.dtype = torch.float32, size: int = 6) -> dict[str, Any]:
    """Tensors of a call, rows with right padding or a pack; tool tokens inside and at the end."""
    count = rng.randint(1, size)
    lengths = [rng.randint(0, 9) for _ in range(count)] if packed else [rng.randint(1, 9)] * count
    total = sum(lengths)
    seed = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=seed, dtype=torch.float64).to(dtype)

    shape = (total,) if packed else (count, lengths[0])
    call: dict[str, Any] = {name: normal(*shape) for name in ("logprobs", "ref_logprobs", "values")}
    call["scores"] = normal(count)
    mask, real = torch.zeros(total, dtype=torch.bool), torch.zeros(total, dtype=torch.bool)
    start = 0
    for length in lengths:
        used = rng.randint(0, length)
        real[start : start + used] = True
        for t in range(start, start + used):
            mask[t] = rng.random() < 0.75
        start += length
    if rng.random() < 0.8:
        call["mask"] = mask.reshape(shape)
        if rng.random() < 0.5:
            call["attention_mask"] = real.reshape(shape)
    if rng.random() < 0.5:
        call["rewards"] = normal(*shape)
    if rng.random() < 0.5:
        call["bootstrap"] = normal(count)
        call["terminated"] = torch.rand(count, generator=seed) < 0.5
    call["has_eos"] = torch.rand(count, generator=seed) < 0.6
    if rng.random() < 0.5:
        call["kl_coef"] = torch.rand(count, generator=seed).to(dtype)
    if packed:
        call["segments"] = Segments.from_lengths(lengths)
    filled = [s for s in range(count) if lengths[s]]
    if filled and rng.random() < 0.5:
        places = [(s, rng.randrange(lengths[s])) for s in (rng.choice(filled) for _ in range(3))]
        call["step_rewards"] = [(s, t, rng.choice([-1.0, 0.5])) for s, t in places]
    return call


def bounds_of(call: dict[str, Any]) -> list[tuple[int, int]]:
    """Where each sequence lies among the flat tokens."""
    shape = call["logprobs"].shape
    if "segments" in call:
        cu = call["segments"].cu_seqlens.tolist()
        return list(pairwise(cu))
    if len(shape) == 1:
        return [(0, shape[0])]
    return [(s * shape[1], (s + 1) * shape[1]) for s in range(shape[0])]


def expected(call: dict[str, Any], options: dict[str, Any], preset: str | None = None) -> dict[str, Tensor]:
    """By the oracle: outputs as flat float64 tensors."""
    chosen = {name: value for name, value in options.items() if value is not None}
    o = replace(PPOOptions() if preset is None else PRESETS[preset], **chosen)
    sequences = [_sequence(call, o, s, start, stop) for s, (start, stop) in enumerate(bounds_of(call))]
    found = ppo_oracle.block(sequences, o, whitenings("oracle", o))
    return {name: torch.tensor([x for out in found for x in getattr(out, name)], dtype=torch.float64) for name in OUTPUTS}


def _sequence(call: dict[str, Any], o: PPOOptions, s: int, start: int, stop: int) -> ppo_oracle.Sequence:
    def tokens(name: str, default: float) -> list[Any]:
        return call[name].double().flatten()[start:stop].tolist() if name in call else [default] * (stop - start)

    coefficient = call.get("kl_coef", o.kl_coef)
    real = None
    if "attention_mask" in call:
        real = [x != 0 for x in tokens("attention_mask", 1)]
    return ppo_oracle.Sequence(
        logprobs=tokens("logprobs", 0.0),
        ref_logprobs=tokens("ref_logprobs", 0.0),
        values=tokens("values", 0.0),
        rewards=tokens("rewards", 0.0),
        mask=[x != 0 for x in tokens("mask", 1)],
        real=real,
        score=float(call["scores"][s]),
        has_eos=bool(call["has_eos"][s]) if "has_eos" in call else True,
        kl_coef=float(coefficient[s]) if isinstance(coefficient, Tensor) else coefficient,
        gamma=float(o.gamma),
        lam=float(o.lam),
        terminated=bool(call["terminated"][s]) if "terminated" in call else False,
        bootstrap=float(call["bootstrap"][s]) if "bootstrap" in call else 0.0,
        packed="segments" in call,
        step_rewards=[(t, reward) for sequence, t, reward in call.get("step_rewards", []) if sequence == s],
    )


def run(call: dict[str, Any], options: dict[str, Any], **others: Any) -> PPOAdvantages:
    """The library's answer."""
    return ppo_advantages(**call, **{name: value for name, value in options.items() if name not in call}, **others)


def on_device(call: dict[str, Any], backend: str) -> dict[str, Any]:
    """The call's tensors where the tests of `backend` have theirs."""
    device = device_of(backend)
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in call.items()}
