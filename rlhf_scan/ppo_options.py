"""The options of `ppo_advantages`: what each may be, and what each project sets them to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from .call import MASK_MODES
from .checks import check_floats, check_option, number_of
from .errors import InputError
from .reward_formulas import KL_ESTIMATORS
from .whitening import Whitening

OFF = "off"
WHITENINGS: dict[str, Whitening | None] = {
    OFF: None,
    "unbiased": Whitening(),
    "keep_mean": Whitening(shift_mean=False),
    "shift": Whitening(scale=False),
    "population": Whitening(unbiased=False, eps_at="floor"),
    "eps_outside": Whitening(eps=1e-5, eps_at="outside"),
}
WORDS: dict[str, tuple[str, ...]] = {
    "kl": tuple(KL_ESTIMATORS),
    "kl_at": ("trainable", "all"),
    "kl_clamp": ("exp", "all", OFF),
    "score_at": ("last", "post_eos"),
    "trailing": ("carry_back", "drop", "error", "stay"),
    "whiten_rewards": tuple(WHITENINGS),
    "whiten_advantages": tuple(WHITENINGS),
    "masked": MASK_MODES,
    "nonfinite": ("propagate", "raise", "zero", "drop"),
}


@dataclass(frozen=True)
class PPOOptions:
    """Every option of `ppo_advantages`, see there. The defaults are the recommended set; docs/ppo.md says why."""

    kl: str = "k1"
    kl_coef: float | Tensor = 0.05
    kl_at: str = "trainable"
    kl_clamp: str = "exp"
    log_ratio_limit: float = 20.0
    kl_limit: float = math.inf
    score_at: str = "last"
    trailing: str = "carry_back"
    score_bias: float = 0.0
    score_scale: float = 1.0
    score_clip: float | tuple[float, float] = math.inf
    missing_eos_penalty: float = 0.0
    whiten_rewards: str | Whitening = OFF
    whiten_advantages: str | Whitening = "unbiased"
    gamma: float | Tensor = 1.0
    lam: float | Tensor = 0.95
    lam_value: float | Tensor | None = None
    length_adaptive_alpha: float = 0.0
    masked: str = "skip"
    nonfinite: str = "propagate"

    @property
    def limits(self) -> tuple[float, float]:
        """How far log-ratio and KL may lie from 0."""
        if self.kl_clamp == "all" or (self.kl_clamp == "exp" and self.kl == "k3"):
            return self.log_ratio_limit, self.kl_limit
        return math.inf, math.inf

    @property
    def score_range(self) -> tuple[float, float]:
        """Lowest and highest score."""
        clip = self.score_clip
        return clip if isinstance(clip, tuple) else (-clip, clip)


NAMES = tuple(field.name for field in fields(PPOOptions))
_PLAIN = frozenset({type(None), bool, int, float, str})  # of which equal ones are alike, and which hold on to nothing

# Checked against each project's own code by tests/test_presets.py.
PRESETS: dict[str, PPOOptions] = {
    "trl": PPOOptions(kl_clamp=OFF, score_at="post_eos"),
    "verl": PPOOptions(kl_coef=0.0, kl_limit=10.0, trailing="drop", lam=1.0),
    "openrlhf": PPOOptions(
        kl_coef=0.01,
        kl_clamp="all",
        log_ratio_limit=math.inf,
        kl_limit=10.0,
        score_clip=10.0,
        whiten_advantages="population",
        lam=1.0,
        masked="zero",
    ),
    "nemo-rl": PPOOptions(kl="k3", kl_coef=0.0, kl_clamp="all", kl_limit=10.0),
    "slime": PPOOptions(kl_coef=0.0, kl_at="all", kl_clamp=OFF, trailing="stay", whiten_advantages=OFF, lam=1.0, masked="keep"),
    "areal": PPOOptions(
        kl_coef=0.1,
        kl_clamp="all",
        log_ratio_limit=math.inf,
        kl_limit=10.0,
        trailing="drop",
        score_clip=20.0,
        whiten_advantages=OFF,
        lam=1.0,
    ),
}
# What True means, where a project can whiten but does not by default.
_WHITENED: dict[str | None, tuple[str, str]] = {"trl": ("keep_mean", "unbiased"), "openrlhf": ("unbiased", "population")}
_WHITENED["areal"] = ("unbiased", "eps_outside")


def resolve_options(op: str, preset: str | None, given: Mapping[str, Any]) -> PPOOptions:
    """The preset's options (None: the recommended ones) with those `given` that are not None in their place, checked."""
    values = given.values()
    if type(preset) in _PLAIN and _PLAIN.issuperset(map(type, values)):
        return _resolved_once(op, preset, tuple(given), *values)
    return _resolved(op, preset, tuple(given), *values)


def _resolved(op: str, preset: str | None, names: tuple[str, ...], *values: Any) -> PPOOptions:
    if preset is not None:
        check_option(op, "preset", preset, tuple(PRESETS))
    base = PPOOptions() if preset is None else PRESETS[preset]
    chosen = {name: value for name, value in zip(names, values, strict=True) if value is not None}
    for name, meant in zip(("whiten_rewards", "whiten_advantages"), _WHITENED.get(preset, ("unbiased", "unbiased")), strict=True):
        if isinstance(chosen.get(name), bool):
            chosen[name] = meant if chosen[name] else OFF
    if isinstance(chosen.get("score_clip"), list):
        chosen["score_clip"] = tuple(chosen["score_clip"])
    options = replace(base, **chosen)
    _check(op, options)
    return options


# Checks take longer than a launch, and a run calls with the same options again and again. 1, 1.0 and True are told apart.
_resolved_once = lru_cache(maxsize=256, typed=True)(_resolved)


def whitenings(op: str, options: PPOOptions) -> tuple[Whitening | None, Whitening | None]:
    """How rewards, and how advantages, are whitened; None: not at all."""
    found: list[Whitening | None] = []
    for option in (options.whiten_rewards, options.whiten_advantages):
        if isinstance(option, Whitening):
            option.check(op)
        found.append(option if isinstance(option, Whitening) else WHITENINGS[option])
    return found[0], found[1]


def _check(op: str, options: PPOOptions) -> None:
    for name, words in WORDS.items():
        value = getattr(options, name)
        if not isinstance(value, Whitening):
            check_option(op, name, value, words)
    for name in NAMES:
        if name in ("score_bias", "score_scale"):
            _check_number(op, name, getattr(options, name), -math.inf, finite=True)
        if name in ("missing_eos_penalty", "length_adaptive_alpha"):
            _check_number(op, name, getattr(options, name), 0.0, finite=True)
        if name in ("log_ratio_limit", "kl_limit"):
            _check_number(op, name, getattr(options, name), 0.0, finite=False)
    if isinstance(options.kl_coef, Tensor):
        check_floats(op, "kl_coef", options.kl_coef)
    else:
        _check_number(op, "kl_coef", options.kl_coef, 0.0, finite=True)
    for name in ("gamma", "lam", "lam_value"):
        rate = getattr(options, name)
        if rate is not None and not isinstance(rate, Tensor):
            number_of(op, name, rate, "a number or a tensor")  # True equals 1.0, for which a call is known later
    _check_clip(op, options)
    if options.masked != "keep" and (options.kl_at == "all" or options.trailing == "stay"):
        name, value = ("kl_at", "all") if options.kl_at == "all" else ("trailing", "stay")
        raise InputError(
            f'{op}: {name}="{value}" must come with masked="keep", got masked="{options.masked}"; a reward at a masked token that is no step is lost'
        )


def _check_clip(op: str, options: PPOOptions) -> None:
    clip = options.score_clip
    pair = clip if isinstance(clip, tuple) else (clip, clip)
    if len(pair) != 2:
        raise InputError(f"{op}: score_clip must be a number or (lowest, highest), got {clip!r}; pass one such as 10.0 or (-10.0, 10.0)")
    for number in pair:
        _check_number(op, "score_clip", number, -math.inf if isinstance(clip, tuple) else 0.0, finite=False)
    low, high = options.score_range
    if low > high:
        raise InputError(f"{op}: score_clip must be (lowest, highest), got {clip!r}; swap them")


def _check_number(op: str, name: str, value: object, least: float, *, finite: bool) -> None:
    number = number_of(op, name, value)
    if math.isnan(number) or number < least or (finite and math.isinf(number)):
        wanted = ("a finite number" if finite else "a number") + ("" if least == -math.inf else f" >= {least:g}")
        raise InputError(f"{op}: {name} must be {wanted}, got {value}; pass a value in that range")
