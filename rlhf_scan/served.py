"""The functions, beside the estimators, that requests may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .groups import STD_OVER, grpo, reinforce_plus_plus, rloo
from .operations import BOOTSTRAP, DTYPE, EITHER, MASK, PER_SEQUENCE, PER_TOKEN, TERMINATED, TRUNCATED, Argument, Operation, Option
from .operations import register_operation as register
from .ppo import PPOAdvantages, ppo_advantages
from .ppo_inputs import STOP_REASONS
from .ppo_options import PRESETS, WORDS, PPOOptions
from .turns import turn_returns
from .whitening import EPS_PLACES, whiten

_NONFINITE = WORDS["nonfinite"]
_EPS = {
    "eps": Option(default=1e-8, meaning="what keeps the divisor from 0"),
    "eps_at": Option("word", "inside", EPS_PLACES, meaning="where eps enters: sqrt(variance + eps), + eps, or sqrt(max(variance, eps))"),
}
_UNBIASED = Option("switch", True, meaning="divide squared deviations by count - 1")
_GROUP_OUTPUTS = ("advantages", "degenerate")
_GROUP_FLAGS = ("degenerate",)


def _number(default: float | None, meaning: str, largest: float = float("inf"), least: float = 0.0) -> Option:
    return Option("number", default, least=least, largest=largest, meaning=meaning)


def _nonfinite(default: str | None, meaning: str) -> Option:
    return Option("word", default, _NONFINITE, meaning=meaning)


_GROUP_TENSORS = {
    "scores": Argument(PER_SEQUENCE, meaning="one score per response", required=True),
    "groups": Argument(PER_SEQUENCE, "integer", "which prompt each answers", required=True),
    "keep": Argument(PER_SEQUENCE, "flag", "nonzero at responses that count"),
}
_GROUP_NONFINITE = _nonfinite("propagate", "what a score that is not finite does")

register(
    Operation(
        name="whiten",
        summary="(x - mean) / sqrt(variance + eps) over the trainable tokens",
        tensors={"x": Argument(meaning="the numbers", required=True), "mask": MASK},
        options={
            "shift_mean": Option("switch", True, meaning="false: the mean is added again"),
            "scale": Option("switch", True, meaning="false: only the mean is taken off"),
            "unbiased": _UNBIASED,
            **_EPS,
            "dtype": DTYPE,
        },
        outputs=("whitened",),
        packs=False,
        run=whiten,
    )
)
register(
    Operation(
        name="grpo",
        summary="(score - mean of its group) / (std + eps)",
        tensors=_GROUP_TENSORS,
        options={
            "scale": Option("switch", True, meaning="false: not divided by the std (Dr. GRPO)"),
            "std_over": Option("word", STD_OVER[0], STD_OVER, meaning="whose std"),
            "unbiased": _UNBIASED,
            "eps": Option(default=1e-6, meaning="added to the std"),
            "nonfinite": _GROUP_NONFINITE,
            "dtype": DTYPE,
        },
        outputs=_GROUP_OUTPUTS,
        flags=_GROUP_FLAGS,
        packs=False,
        run=grpo,
        takes_backend=False,
    )
)
register(
    Operation(
        name="rloo",
        summary="score - mean of the other scores of its group",
        tensors=_GROUP_TENSORS,
        options={"nonfinite": _GROUP_NONFINITE, "dtype": DTYPE},
        outputs=_GROUP_OUTPUTS,
        flags=_GROUP_FLAGS,
        packs=False,
        run=rloo,
        takes_backend=False,
    )
)
register(
    Operation(
        name="reinforce_plus_plus",
        summary="scores whitened over the batch; with groups, after their group's mean was taken off",
        tensors={
            **_GROUP_TENSORS,
            "groups": Argument(PER_SEQUENCE, "integer", "which prompt each answers"),
            "tokens": Argument(PER_SEQUENCE, "integer", "trainable tokens of each response, which then weighs so much"),
        },
        options={"unbiased": _UNBIASED, **_EPS, "nonfinite": _GROUP_NONFINITE, "dtype": DTYPE},
        outputs=_GROUP_OUTPUTS,
        flags=_GROUP_FLAGS,
        packs=False,
        run=reinforce_plus_plus,
        takes_backend=False,
    )
)
register(
    Operation(
        name="turn_returns",
        summary="each token's return is its turn's: G_k = r_k + gamma * G_{k+1}",
        tensors={
            "clock": Argument(PER_TOKEN, "integer", "the turn of each token; negative: none", required=True),
            "turn_rewards": Argument("[S, K], one per sequence and turn", meaning="the reward of each turn", required=True),
            "mask": MASK,
            "gamma": Argument("[S], or [S, K]", meaning="discount per turn, instead of the parameter"),
        },
        options={"gamma": _number(1.0, "discount per turn", 1.0), "dtype": DTYPE},
        outputs=("returns",),
        run=turn_returns,
    )
)


def _ppo_advantages(**arguments: Any) -> PPOAdvantages:
    """With what a request may leave out."""
    return ppo_advantages(**{"ref_logprobs": None, "scores": None, **arguments})


def _ppo_report(found: PPOAdvantages) -> Mapping[str, Any]:
    return dict(found.report)


_PPO_MEANINGS = {
    "kl": "KL estimator",
    "kl_at": "tokens whose KL counts",
    "kl_clamp": "estimators that the two limits hold for",
    "score_at": "the token that gets the score: the last trainable one, or the slot after the sequence",
    "trailing": "what a score or step reward does that ends on a masked token",
    "whiten_rewards": "before GAE; true: the preset's way",
    "whiten_advantages": "after GAE; true: the preset's way",
    "masked": "what a masked token that is no padding does to the recursion",
    "nonfinite": "what a number that is not finite does",
}
_PPO_NUMBERS = {
    "kl_coef": _number(None, "weight of the KL penalty"),
    "log_ratio_limit": _number(None, "largest log-ratio before the estimator"),
    "kl_limit": _number(None, "largest KL after it"),
    "score_bias": _number(None, "added to the score", least=float("-inf")),
    "score_scale": _number(None, "factor of the score, bias added", least=float("-inf")),
    "missing_eos_penalty": _number(None, "subtracted from the score of a sequence without end-of-sequence token"),
    "gamma": _number(None, "discount per step", 1.0),
    "lam": _number(None, "trace parameter per step", 1.0),
    "lam_value": _number(None, "trace parameter of the returns alone", 1.0),
    "length_adaptive_alpha": _number(None, "VAPO's lambda for the advantages: 1 - 1 / (alpha * length)"),
}
_PPO_OPTIONS = {
    "preset": Option("word", None, tuple(PRESETS), meaning="every option as that project has it; without one, the recommended options"),
    **{
        name: Option("word or switch" if name.startswith("whiten") else "word", None, words, meaning=_PPO_MEANINGS[name])
        for name, words in WORDS.items()
    },
    **_PPO_NUMBERS,
    "score_clip": Option("range", meaning="largest size of the score, or [lowest, highest]"),
    "stop_reasons": Option("words", words=tuple(STOP_REASONS), meaning="of each sequence, in place of terminated, truncated and has_eos"),
    "dtype": DTYPE,
}
register(
    Operation(
        name="ppo_advantages",
        summary="KL penalty, score, whitening and GAE: PPO's advantages from log-probabilities, values and scores",
        tensors={
            "logprobs": Argument(meaning="of the policy that sampled", required=True),
            "ref_logprobs": Argument(meaning="of the reference policy; without them there is no KL penalty"),
            "values": Argument(meaning="V(s_t)", required=True),
            "scores": Argument(PER_SEQUENCE, meaning="of each sequence"),
            "rewards": Argument(meaning="token rewards"),
            "step_rewards": Argument("[K, 3]", meaning="rows of sequence, end token counted from the sequence's first, reward"),
            "mask": MASK,
            "attention_mask": Argument(PER_TOKEN, "flag", "nonzero at tokens that are no padding"),
            "has_eos": Argument(EITHER, "flag", "nonzero at end-of-sequence tokens, or for each sequence that has one"),
            "terminated": TERMINATED,
            "truncated": TRUNCATED,
            "bootstrap": BOOTSTRAP,
            "kl_coef": Argument(PER_SEQUENCE, meaning="weight of the KL penalty, instead of the parameter"),
            **{
                name: Argument(EITHER, meaning=f"{_PPO_NUMBERS[name].meaning}, instead of the parameter")
                for name in ("gamma", "lam", "lam_value")
            },
        },
        options=_PPO_OPTIONS,
        outputs=PPOAdvantages._fields[:4],
        run=_ppo_advantages,
        report=_ppo_report,
    )
)

if missing := {field.name for field in fields(PPOOptions)} - set(_PPO_OPTIONS):
    raise RuntimeError(f"options of ppo_advantages that no request could set: {sorted(missing)}")
