"""A real TRL PPOTrainer, tiny: random weights and a tokenizer of 60 words, made on the spot. Nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer

WORDS = 60


class LogKeeper(TrainerCallback):
    """Keeps what the trainer logs, without what depends on the clock."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        self.logs.append({name: value for name, value in (logs or {}).items() if name != "eps"})


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """<pad>, <eos> and words w2 ... w59."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def tiny_trainer(
    output_dir: Path | str,
    *,
    trainer_class: type = PPOTrainer,
    updates: int = 3,
    batch_size: int = 8,
    response_length: int = 12,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """A PPOTrainer that runs `updates` updates of `batch_size` responses each. Seeds every generator that TRL draws from."""
    random.seed(0)
    np.random.seed(0)  # TRL shuffles its minibatches with numpy's global generator
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        num_labels=1,
        initializer_range=0.5,
    )
    prompts = [{"input_ids": torch.randint(2, WORDS, (4 + i % 4,)).tolist()} for i in range(updates * batch_size)]
    arguments = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": 1,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "local_rollout_forward_batch_size": batch_size,
        "total_episodes": updates * batch_size,
        "response_length": response_length,
        "stop_token": "eos",
        "temperature": 1.0,
        "learning_rate": 1e-3,
        "num_sample_generations": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
        "seed": 0,
    }
    return trainer_class(
        args=PPOConfig(**(arguments | options)),
        processing_class=tokenizer,
        model=LlamaForCausalLM(config).to(dtype),
        ref_model=None,
        reward_model=LlamaForSequenceClassification(config).to(dtype),
        value_model=LlamaForSequenceClassification(config).to(dtype),
        train_dataset=Dataset.from_list(prompts),
    )
