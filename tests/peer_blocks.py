"""What six trainers compute between the log-probabilities and the advantages, each as a plain loop over tokens in float64.

The loops are written from the trainers' behaviour and share nothing with the library; tests/test_peer_blocks.py holds them against the trainers' own
functions where those can be had, tests/test_presets.py holds the presets against them. A keyword's default is that trainer's own default
(`whiten=False`, which TRL, verl and OpenRLHF do not offer, leaves out the last step).

Tokens are those of the response, t = 0 the first. A trainer that stores whole sequences is spoken of in the same terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Rollout:
    """One batch of responses."""

    logprobs: Floats  # [B, T], as are ref_logprobs and values
    ref_logprobs: Floats
    values: Floats
    scores: Floats  # [B]
    mask: Flags  # [B, T]: the tokens that the policy chose, without tool tokens and padding
    lengths: NDArray[np.int64]  # [B]: tokens of the response, tool tokens included; what comes after is padding
    has_eos: Flags  # [B]
    bootstrap: Floats  # [B]: V of the state after the last token, read where has_eos is False by those who bootstrap


@dataclass(frozen=True)
class Block:
    """What a trainer has at the end: each [B, T], 0 where it computes nothing, and not cleared at tool tokens."""

    advantages: Floats
    returns: Floats
    rewards: Floats
    kl: Floats


def trl(
    rollout: Rollout,
    *,
    kl_estimator: str = "k1",
    kl_coef: float = 0.05,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten_rewards: bool = False,
    missing_eos_penalty: float = 0.0,
    whiten: bool = True,
) -> Block:
    """TRL 1.12.0, trl/experimental/ppo/ppo_trainer.py, steps 3 to 6 of `PPOTrainer.train`. It knows no tool tokens.

    The slot after the last token is a step too, where there is one: the score stands there, its value is read, its return is written.
    """
    block = _empty(rollout)
    width = rollout.mask.shape[1]
    steps = [min(int(length) + 1, width) for length in rollout.lengths]
    for row, length in enumerate(rollout.lengths):
        for t in range(length):
            block.kl[row, t] = _estimate(kl_estimator, rollout.logprobs[row, t] - rollout.ref_logprobs[row, t])
            block.rewards[row, t] = -kl_coef * block.kl[row, t]
        block.rewards[row, steps[row] - 1] += rollout.scores[row] - (0.0 if rollout.has_eos[row] else missing_eos_penalty)
    if whiten_rewards:
        places = [(row, t) for row in range(len(steps)) for t in range(steps[row])]
        mean, variance = _moments([block.rewards[place] for place in places], unbiased=True)
        for place in places:
            block.rewards[place] = (block.rewards[place] - mean) / math.sqrt(variance + 1e-8) + mean
    for row in range(len(steps)):
        advantage = next_value = 0.0
        for t in reversed(range(steps[row])):
            value = rollout.values[row, t]
            advantage = block.rewards[row, t] + gamma * next_value - value + gamma * lam * advantage
            next_value = value
            block.advantages[row, t], block.returns[row, t] = advantage, advantage + value
    return _whitened(block, rollout.mask, lambda mean, variance, x: (x - mean) / math.sqrt(variance + 1e-8)) if whiten else block


def verl(
    rollout: Rollout, *, kl_estimator: str = "k1", kl_coef: float = 0.0, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True
) -> Block:
    """verl 0.9.1: `assemble_rm_scores` (experimental/reward_loop/reward_manager/base.py), then of trainer/ppo `apply_kl_penalty`
    (ray_trainer.py), `kl_penalty_forward` and `compute_gae_advantage_return` (core_algos.py).

    The KL enters the reward only with algorithm.use_kl_in_reward, which is off; algorithm.kl_ctrl.kl_coef is 0.001 then. The score stands on the
    last token of the response, and is lost where that is a tool token, which the recursion skips. Only k3 is clamped.
    """
    block = _empty(rollout)
    for row, length in enumerate(rollout.lengths):
        advantage = next_value = 0.0
        for t in reversed(range(length)):
            if rollout.mask[row, t]:
                ratio = rollout.logprobs[row, t] - rollout.ref_logprobs[row, t]
                if kl_estimator == "k3":
                    block.kl[row, t] = _clamp(_estimate("k3", _clamp(ratio, 20.0)), 10.0)
                else:
                    block.kl[row, t] = _estimate(kl_estimator, ratio)
            block.rewards[row, t] = -kl_coef * block.kl[row, t] + (rollout.scores[row] if t == length - 1 else 0.0)
            if rollout.mask[row, t]:
                value = rollout.values[row, t]
                advantage = block.rewards[row, t] + gamma * next_value - value + gamma * lam * advantage
                next_value = value
                block.advantages[row, t], block.returns[row, t] = advantage, advantage + value
    return _whitened(block, rollout.mask, lambda mean, variance, x: (x - mean) / math.sqrt(variance + 1e-8)) if whiten else block


def openrlhf(
    rollout: Rollout,
    *,
    kl_estimator: str = "k1",
    kl_coef: float = 0.01,
    gamma: float = 1.0,
    lam: float = 1.0,
    score_clip: tuple[float, float] = (-10.0, 10.0),
    scale: bool = True,
    whiten: bool = True,
) -> Block:
    """OpenRLHF 0.11.2: `compute_approx_kl` and `compute_reward` (models/utils.py), `get_advantages_and_returns` and the normalisation of
    `compute_advantages_and_returns` (trainer/ppo_utils/experience_maker.py). `scale=False` is its --algo.advantage.no_std_norm.

    The score stands on the last trainable token. A token that is not trainable is a step with reward 0 and value 0.
    """
    block = _empty(rollout)
    for row, length in enumerate(rollout.lengths):
        chosen = [t for t in range(length) if rollout.mask[row, t]]
        advantage = next_value = 0.0
        for t in reversed(range(length)):
            value = 0.0
            if t in chosen:
                value = rollout.values[row, t]
                block.kl[row, t] = _clamp(_estimate(kl_estimator, rollout.logprobs[row, t] - rollout.ref_logprobs[row, t]), 10.0)
                block.rewards[row, t] = -max(kl_coef, 0.0) * block.kl[row, t]
                if t == chosen[-1]:
                    block.rewards[row, t] += min(max(rollout.scores[row], score_clip[0]), score_clip[1])
            advantage = block.rewards[row, t] + gamma * next_value - value + gamma * lam * advantage
            next_value = value
            block.advantages[row, t], block.returns[row, t] = advantage, advantage + value
    if not whiten:
        return block

    def apply(mean: float, variance: float, x: float) -> float:
        return (x - mean) / (math.sqrt(max(variance, 1e-8)) if scale else 1.0)

    return _whitened(block, rollout.mask, apply, unbiased=False)


def nemo_rl(
    rollout: Rollout,
    *,
    kl_estimator: str = "k3",
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_policy: float | None = None,
    lam_value: float | None = None,
    length_adaptive_alpha: float = 0.0,
    whiten: bool = True,
) -> Block:
    """NeMo-RL 0.6.0 (commit 7ea279a): `GeneralizedAdvantageEstimator` (nemo_rl/algorithms/advantage_estimator.py), `calculate_kl`, `masked_mean`
    and `masked_var` (nemo_rl/algorithms/utils.py); defaults of `PPOConfig` (ppo.py) and `ClippedPGLossConfig` (loss/loss_functions.py).

    The KL enters the reward only with loss_fn.use_kl_in_reward, which is off; loss_fn.reference_policy_kl_penalty is 0.01 then. Every estimator is
    clamped before and after. The score stands on the last trainable token; the recursion skips the others.
    """
    block = _empty(rollout)
    for row, length in enumerate(rollout.lengths):
        chosen = [t for t in range(length) if rollout.mask[row, t]]
        lam_row = lam if lam_policy is None else lam_policy
        if length_adaptive_alpha > 0:
            lam_row = min(max(1.0 - 1.0 / max(length_adaptive_alpha * len(chosen), 1.0), 0.0), 1.0)
        lam_returns = lam if lam_value is None else lam_value
        advantage = for_return = next_value = 0.0
        for t in reversed(chosen):
            ratio = _clamp(rollout.logprobs[row, t] - rollout.ref_logprobs[row, t], 20.0)
            block.kl[row, t] = _clamp(_estimate(kl_estimator, ratio), 10.0)
            block.rewards[row, t] = -kl_coef * block.kl[row, t] + (rollout.scores[row] if t == chosen[-1] else 0.0)
            value = rollout.values[row, t]
            delta = block.rewards[row, t] + gamma * next_value - value
            advantage = delta + gamma * lam_row * advantage
            for_return = delta + gamma * lam_returns * for_return
            next_value = value
            block.advantages[row, t], block.returns[row, t] = advantage, for_return + value
    return _whitened(block, rollout.mask, lambda mean, variance, x: (x - mean) / math.sqrt(variance + 1e-8)) if whiten else block


def slime(
    rollout: Rollout, *, kl_estimator: str = "k1", kl_coef: float = 0.0, gamma: float = 1.0, lam: float = 1.0, whiten: bool = False
) -> Block:
    """slime 0.3.1 (commit 624b824): the "ppo" branch of `compute_advantages_and_returns` (slime/backends/megatron_utils/loss.py), and of
    slime/utils `compute_approx_kl`, `get_advantages_and_returns_batch` (ppo_utils.py) and `distributed_masked_whiten` (distributed_utils.py).

    Up to the whitening the mask is not looked at: tool tokens pay KL, have values and pass credit on, and the score stands on the last token
    whatever it is. `kl_estimator="low_var_kl"` is k3 clamped after; nothing else is clamped. `whiten` is its --normalize-advantages.
    """
    block = _empty(rollout)
    for row, length in enumerate(rollout.lengths):
        advantage = next_value = 0.0
        for t in reversed(range(length)):
            kl = _estimate(kl_estimator.replace("low_var_kl", "k3"), rollout.logprobs[row, t] - rollout.ref_logprobs[row, t])
            block.kl[row, t] = _clamp(kl, 10.0) if kl_estimator == "low_var_kl" else kl
            block.rewards[row, t] = -kl_coef * block.kl[row, t] + (rollout.scores[row] if t == length - 1 else 0.0)
            value = rollout.values[row, t]
            advantage = block.rewards[row, t] + gamma * next_value - value + gamma * lam * advantage
            next_value = value
            block.advantages[row, t], block.returns[row, t] = advantage, advantage + value
    return _whitened(block, rollout.mask, lambda mean, variance, x: (x - mean) / math.sqrt(variance + 1e-8)) if whiten else block


def areal(
    rollout: Rollout,
    *,
    kl_estimator: str = "k1",
    kl_coef: float = 0.1,
    gamma: float = 1.0,
    lam: float = 1.0,
    score_bias: float = 0.0,
    score_scale: float = 1.0,
    score_clip: float = 20.0,
    zero_without_eos: bool = False,
    whiten: bool = False,
) -> Block:
    """AReaL 1.0.4 (commit 4aef98d): `PPOActor._compute_advantages` (areal/trainer/ppo/actor.py), `KLEstimator` and `Normalization`
    (areal/utils/data.py); defaults of `PPOActorConfig` and `NormConfig` (areal/api/cli_args.py). `whiten` is adv_norm with both levels "batch".

    It takes a row as wide as the batch for one without EOS, and continues with the value of the state after the last token there. The score is
    biased, scaled, then clipped; it stands on the last token, and is lost where that is a tool token, which the recursion skips.
    """
    block = _empty(rollout)
    for row, length in enumerate(rollout.lengths):
        score = _clamp((rollout.scores[row] + score_bias) * score_scale, score_clip)
        if zero_without_eos and not rollout.has_eos[row]:
            score = 0.0
        advantage = 0.0
        next_value = 0.0 if rollout.has_eos[row] else rollout.bootstrap[row]
        for t in reversed(range(length)):
            if rollout.mask[row, t]:
                block.kl[row, t] = _clamp(_estimate(kl_estimator, rollout.logprobs[row, t] - rollout.ref_logprobs[row, t]), 10.0)
            block.rewards[row, t] = -kl_coef * block.kl[row, t] + (score if t == length - 1 else 0.0)
            if rollout.mask[row, t]:
                value = rollout.values[row, t]
                advantage = block.rewards[row, t] + gamma * next_value - value + gamma * lam * advantage
                next_value = value
                block.advantages[row, t], block.returns[row, t] = advantage, advantage + value
    return _whitened(block, rollout.mask, lambda mean, variance, x: (x - mean) / (math.sqrt(variance) + 1e-5)) if whiten else block


BLOCKS: dict[str, Callable[..., Block]] = {
    "trl": trl,
    "verl": verl,
    "openrlhf": openrlhf,
    "nemo-rl": nemo_rl,
    "slime": slime,
    "areal": areal,
}


def _empty(rollout: Rollout) -> Block:
    return Block(*(np.zeros(rollout.mask.shape) for _ in range(4)))


def _estimate(estimator: str, ratio: float) -> float:
    """`ratio` = logprob - ref_logprob; http://joschu.net/blog/kl-approx.html."""
    if estimator == "k3":
        return math.exp(min(-ratio, 700.0)) - 1.0 + ratio
    return {"k1": ratio, "k2": ratio * ratio / 2.0, "abs": abs(ratio)}[estimator]


def _clamp(value: float, limit: float) -> float:
    return min(max(value, -limit), limit)


def _moments(values: list[float], unbiased: bool) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / (len(values) - unbiased)


def _whitened(block: Block, mask: Flags, apply: Callable[[float, float, float], float], unbiased: bool = True) -> Block:
    """`block` with advantages of mean and variance over the trainable tokens; the returns are from before."""
    mean, variance = _moments([float(value) for value in block.advantages[mask]], unbiased)
    whitened = np.zeros_like(block.advantages)
    for place in zip(*np.nonzero(mask), strict=True):
        whitened[place] = apply(mean, variance, float(block.advantages[place]))
    return Block(whitened, block.returns, block.rewards, block.kl)
