"""The trainers' own functions, called with a `Rollout` and a loop's options, and answering with a `Block`: see tests/peer_blocks.py.

Each runs the project's code from its log-probabilities to its advantages; only what moves data between processes is replaced by one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from peer_blocks import Block, Rollout
from peer_source import execute, load, root, statements
from torch import Tensor

PAD, EOS, WORD = 0, 1, 2


def trl(rollout: Rollout, *, missing_eos_penalty: float = 0.0, **options: Any) -> Block:
    folder = root("trl", "trl") / "trl" / "experimental"
    names = load(
        folder, {"ppo/ppo_trainer.py": ["masked_mean", "masked_var", "masked_whiten"], "utils.py": ["first_true_indices"]}, {"torch": torch}
    )
    execute(statements(folder / "ppo" / "ppo_trainer.py", "INVALID_LOGPROB", "INVALID_LOGPROB"), names, "trl")
    args = SimpleNamespace(**{"kl_estimator": "k1", "kl_coef": 0.05, "gamma": 1.0, "lam": 0.95, "whiten_rewards": False} | options)
    args.missing_eos_penalty = missing_eos_penalty or None
    responses = torch.full(rollout.mask.shape, PAD)
    for row, length in enumerate(rollout.lengths):
        responses[row, :length] = WORD
        if rollout.has_eos[row]:
            responses[row, length - 1] = EOS
    names |= {
        "args": args,
        "self": SimpleNamespace(args=args, processing_class=SimpleNamespace(eos_token_id=EOS)),
        "responses": responses,
        "postprocessed_responses": responses,
        "sequence_lengths": names["first_true_indices"](responses == PAD) - 1,
        "scores": torch.tensor(rollout.scores),
    }
    names |= {name: torch.tensor(getattr(rollout, name)) for name in ("logprobs", "ref_logprobs", "values")}
    block = statements(folder / "ppo" / "ppo_trainer.py", "contain_eos_token", "advantages = torch.masked_fill(advantages")
    execute(block, names, "the advantage block of trl")
    return _block(*(names[name] for name in ("advantages", "returns", "rewards", "kl")))


class _Batch(dict[str, Any]):
    """What verl's functions use of a TensorDict."""

    def __init__(self, rows: int, **tensors: Tensor) -> None:
        super().__init__(tensors)
        self.batch_size = (rows,)


def verl(rollout: Rollout, *, kl_estimator: str = "k1", kl_coef: float = 0.0, gamma: float = 1.0, lam: float = 1.0) -> Block:
    folder = root("verl", "verl") / "verl"
    functional = load(folder, {"utils/torch_functional.py": ["masked_sum", "masked_mean", "masked_var", "masked_whiten"]}, {"torch": torch})
    wanted = ["AdvantageEstimator", "FixedKLController", "kl_penalty", "kl_penalty_forward", "compute_gae_advantage_return"]
    core = load(folder, {"trainer/ppo/core_algos.py": wanted}, {"torch": torch, "Enum": Enum, "verl_F": SimpleNamespace(**functional)})
    places = {
        "trainer/ppo/ray_trainer.py": ["apply_kl_penalty", "compute_advantage"],
        "experimental/reward_loop/reward_manager/base.py": ["RewardManagerBase.assemble_rm_scores"],
    }
    names = load(folder, places, functional | {"core_algos": SimpleNamespace(**core), "AdvantageEstimator": core["AdvantageEstimator"]})
    rows, width = rollout.mask.shape
    attention = np.arange(width) < rollout.lengths[:, None]
    batch = _Batch(
        rows,
        prompts=torch.zeros(rows, 3, dtype=torch.long),
        responses=torch.zeros(rows, width, dtype=torch.long),
        attention_mask=torch.tensor(np.concatenate([np.ones((rows, 3)), attention], 1), dtype=torch.long),
        response_mask=torch.tensor(rollout.mask, dtype=torch.long),
        old_log_probs=torch.tensor(rollout.logprobs),
        ref_log_prob=torch.tensor(rollout.ref_logprobs),
        values=torch.tensor(rollout.values),
    )
    data = SimpleNamespace(batch=batch, non_tensor_batch={})
    batch["token_level_scores"] = names["assemble_rm_scores"](None, data, rollout.scores.tolist())
    data, _ = names["apply_kl_penalty"](data, core["FixedKLController"](kl_coef), kl_penalty=kl_estimator)
    data = names["compute_advantage"](data, core["AdvantageEstimator"].GAE, gamma=gamma, lam=lam, config={})
    kl = core["kl_penalty"](batch["old_log_probs"], batch["ref_log_prob"], kl_estimator) * batch["response_mask"]
    return _block(batch["advantages"], batch["returns"], batch["token_level_rewards"], kl)


def openrlhf(
    rollout: Rollout,
    *,
    kl_estimator: str = "k1",
    kl_coef: float = 0.01,
    gamma: float = 1.0,
    lam: float = 1.0,
    score_clip: tuple[float, float] = (-10.0, 10.0),
    scale: bool = True,
) -> Block:
    places = {
        "models/utils.py": ["compute_approx_kl", "compute_reward"],
        "trainer/ppo_utils/length_penalty.py": ["apply_length_penalties"],
        "trainer/ppo_utils/experience_maker.py": [
            "RemoteExperienceMaker.compute_advantages_and_returns",
            "RemoteExperienceMaker.get_advantages_and_returns",
        ],
    }
    import itertools

    names = load(root("openrlhf", "openrlhf") / "openrlhf", places, {"torch": torch, "itertools": itertools})
    advantage = SimpleNamespace(estimator="gae", gamma=gamma, lambd=lam, no_std_norm=not scale)
    args = SimpleNamespace(
        reward=SimpleNamespace(clip_range=score_clip),
        rollout=SimpleNamespace(n_samples_per_prompt=1),
        algo=SimpleNamespace(advantage=advantage),
    )
    maker = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        advantage_estimator="gae",
        kl_ctl=SimpleNamespace(value=kl_coef),
        get_advantages_and_returns=partial(names["get_advantages_and_returns"], None),
    )
    kl = names["compute_approx_kl"](torch.tensor(rollout.logprobs), torch.tensor(rollout.ref_logprobs), kl_estimator=kl_estimator)
    mask, scores = torch.tensor(rollout.mask), torch.tensor(rollout.scores, dtype=torch.float32)
    experiences = [
        SimpleNamespace(
            index=index.tolist(),
            rewards=scores[index],
            kl=kl[index],
            action_mask=mask[index],
            values=torch.tensor(rollout.values, dtype=torch.float32)[index],
            info={},
        )
        for index in torch.arange(len(mask)).split(5)
    ]
    made = names["compute_advantages_and_returns"](maker, experiences)
    advantages, returns = (torch.cat([getattr(one, name) for one in made]) for name in ("advantages", "returns"))
    rewards = names["compute_reward"](scores, kl_coef, kl, action_mask=mask, reward_clip_range=score_clip)
    return _block(advantages, returns, rewards * mask, kl * mask)


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
    places = {
        "utils.py": ["calculate_kl", "masked_mean", "masked_var"],
        "advantage_estimator.py": ["GeneralizedAdvantageEstimator"],
    }
    names = load(root("nemo-rl", "nemo_rl") / "nemo_rl" / "algorithms", places, {"torch": torch})
    config = {
        "gae_lambda": lam,
        "gae_gamma": gamma,
        "normalize_advantages": whiten,
        "gae_lambda_value": lam_value,
        "gae_lambda_policy": lam_policy,
        "length_adaptive_alpha": length_adaptive_alpha,
    }
    loss = SimpleNamespace(use_kl_in_reward=True, reference_policy_kl_penalty=kl_coef, reference_policy_kl_type=kl_estimator)
    estimator = names["GeneralizedAdvantageEstimator"](config, loss)
    scores, mask = torch.tensor(rollout.scores), torch.tensor(rollout.mask, dtype=torch.float32)
    logprobs, reference = torch.tensor(rollout.logprobs), torch.tensor(rollout.ref_logprobs)
    advantages, returns = estimator.compute_advantage(None, scores, mask, torch.tensor(rollout.values), reference, logprobs)
    rewards = estimator._build_token_level_rewards(scores, mask, logprobs, reference)
    return _block(advantages, returns, rewards, names["calculate_kl"](logprobs, reference, kl_estimator) * mask)


def slime(
    rollout: Rollout, *, kl_estimator: str = "k1", kl_coef: float = 0.0, gamma: float = 1.0, lam: float = 1.0, whiten: bool = False
) -> Block:
    folder = root("slime", "slime") / "slime"
    one_process = SimpleNamespace(all_reduce=lambda tensor, group: None)
    mpu = mock.Mock(
        spec_set=["is_pipeline_last_stage", "get_context_parallel_rank", "get_context_parallel_world_size", "get_data_parallel_group"]
    )
    mpu.get_context_parallel_rank.return_value, mpu.get_context_parallel_world_size.return_value = 0, 1
    places = {
        "utils/ppo_utils.py": ["compute_approx_kl", "get_advantages_and_returns_batch", "chunked_gae", "chunked_discounted_returns"],
        "utils/distributed_utils.py": ["distributed_masked_whiten"],
        "backends/megatron_utils/loss.py": ["compute_advantages_and_returns"],
    }
    names = load(folder, places, {"torch": torch, "F": torch.nn.functional, "dist": one_process, "mpu": mpu})
    args = SimpleNamespace(
        use_rollout_logprobs=False,
        kl_coef=kl_coef,
        kl_loss_type=kl_estimator,
        custom_advantage_function_path=None,
        advantage_estimator="ppo",
        gamma=gamma,
        lambd=lam,
        use_opd=False,
        normalize_advantages=whiten,
    )
    lengths = rollout.lengths.tolist()
    data: dict[str, Any] = {
        "response_lengths": lengths,
        "total_lengths": [length + 3 for length in lengths],
        "rewards": rollout.scores.tolist(),
    }
    for name, array in (("log_probs", rollout.logprobs), ("ref_log_probs", rollout.ref_logprobs), ("values", rollout.values)):
        data[name] = [torch.tensor(row[:length], dtype=torch.float32) for row, length in zip(array, lengths, strict=True)]
    data["loss_masks"] = [torch.tensor(row[:length], dtype=torch.int) for row, length in zip(rollout.mask, lengths, strict=True)]
    megatron = ModuleType("megatron.core")
    megatron.mpu = mpu  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"megatron": ModuleType("megatron"), "megatron.core": megatron}):
        names["compute_advantages_and_returns"](args, data)
    width = rollout.mask.shape[1]
    rows = {name: torch.stack([_padded(row, width) for row in data[name]]) for name in ("advantages", "returns", "kl")}
    return _block(rows["advantages"], rows["returns"], None, rows["kl"] if kl_coef else None)


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
    places = {"utils/data.py": ["Normalization", "KLEstimator"], "trainer/ppo/actor.py": ["PPOActor._compute_advantages"]}
    names = load(root("areal", "areal") / "areal", places, {"torch": torch, "np": np, "dist": torch.distributed})
    norm = SimpleNamespace(mean_level="batch", mean_leave1out=False, std_level="batch", std_unbiased=True, group_size=1, eps=1e-5)
    actor = SimpleNamespace(
        config=SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=False, recompute_logprob=False),
        reward_bias=score_bias,
        reward_scaling=score_scale,
        reward_clip=score_clip,
        reward_norm=None,
        kl_ctl=kl_coef,
        kl_estimator=names["KLEstimator"](kl_estimator),
        discount=gamma,
        gae_lambda=lam,
        mask_no_eos_with_zero=zero_without_eos,
        adv_norm=names["Normalization"](norm) if whiten else None,
    )
    # A row without EOS is one that is as wide as the batch: its prompt is long enough for that. Token t is chosen one place before it stands.
    rows, width = rollout.mask.shape[0], rollout.mask.shape[1] + 2
    prompts = np.where(rollout.has_eos, 1, width - rollout.lengths)
    data = {name: torch.zeros(rows, width) for name in ("rewards", "logprobs", "ref_logp", "values", "loss_mask", "attention_mask")}
    for row, (prompt, length) in enumerate(zip(prompts, rollout.lengths, strict=True)):
        tokens, choices = slice(prompt, prompt + length), slice(prompt - 1, prompt - 1 + length)
        data["logprobs"][row, tokens] = torch.tensor(rollout.logprobs[row, :length], dtype=torch.float32)
        data["loss_mask"][row, tokens] = torch.tensor(rollout.mask[row, :length], dtype=torch.float32)
        data["ref_logp"][row, choices] = torch.tensor(rollout.ref_logprobs[row, :length], dtype=torch.float32)
        data["values"][row, choices] = torch.tensor(rollout.values[row, :length], dtype=torch.float32)
        data["values"][row, prompt - 1 + length] = float(rollout.bootstrap[row])
        data["attention_mask"][row, : prompt + length] = 1
    data["rewards"], data["input_ids"] = torch.tensor(rollout.scores, dtype=torch.float32), torch.zeros(rows, width)
    data = names["_compute_advantages"](actor, data)
    data["kl"] = data["kl_rewards"] / -kl_coef
    outputs = [
        torch.stack(
            [
                _padded(data[name][row, prompt - 1 : prompt - 1 + length], width - 2)
                for row, (prompt, length) in enumerate(zip(prompts, rollout.lengths, strict=True))
            ]
        )
        for name in ("advantages", "returns", "tot_rewards", "kl")
    ]
    return _block(*outputs)


PROJECTS: dict[str, Callable[..., Block]] = {
    "trl": trl,
    "verl": verl,
    "openrlhf": openrlhf,
    "nemo-rl": nemo_rl,
    "slime": slime,
    "areal": areal,
}


def _padded(row: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(row, (0, width - len(row)))


def _block(*tensors: Tensor | None) -> Block:
    """A project's own numbers; NaN where it does not say."""
    shape = next(tensor for tensor in tensors if tensor is not None).shape
    return Block(*(np.full(shape, np.nan) if tensor is None else tensor.double().numpy() for tensor in tensors))
