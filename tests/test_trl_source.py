"""Whose `train` the TRL door takes on: the block of every release and none that was altered."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from tiny_ppo import tiny_tokenizer
from trl.experimental.ppo import PPOTrainer, ppo_trainer
from trl_runs import MARKS, Witness, built, logged, trl_alone

from rlhf_scan import InputError
from rlhf_scan.integrations.trl import AdvantageCallback
from rlhf_scan.integrations.trl_block import BLOCK, REWARDS, SCOPES

pytestmark = MARKS


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """`built`, with a place to write to."""
    return partial(built, tmp_path)


def test_block_is_the_installed_one() -> None:
    source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(PPOTrainer.train))))
    for statement in [*REWARDS[0], *BLOCK]:
        assert textwrap.indent(ast.unparse(statement), "            ") in source


def test_another_class_is_refused(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    config = LlamaConfig(vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(str(tmp_path), bf16=False, use_cpu=True, report_to=[]),
        train_dataset=Dataset.from_list([{"input_ids": [2, 3, 4]}]),
        processing_class=tiny_tokenizer(),
    )
    for wrong in (trainer, None, object()):
        with pytest.raises(InputError, match=r"trainer must be a PPOTrainer of trl 0\.15\.2 to 1\.12\.0, got"):
            AdvantageCallback(wrong)
    assert "train" not in vars(trainer)


def module_from(path: Path, source: str) -> Any:
    """A module beside TRL's own, so that its relative imports work."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"trl.experimental.ppo.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("delta + args.gamma * args.lam * lastgaelam", "delta + args.lam * lastgaelam", "at line .* there must be `for t in"),
        ("returns = advantages + values\n", "returns = advantages + values.clone()\n", "there must be `returns = advantages"),
        ("advantages = masked_whiten(advantages, ~padding_mask)\n", "pass\n", "there must be `advantages = masked_whiten"),
        ("gen_length = responses.shape[1]\n", "gen_length = responses.shape[1]; print()\n", "there must be `for t in"),
        ("lastgaelam = 0\n", "lastgaelam = 0.0\n", "with 0 advantage blocks"),
        ("padding_mask_p1", "padding_mask_plus_1", "sets no `padding_mask_p1`"),
        ("    def train(self):\n", "    @torch.no_grad()\n    def train(self):\n", "a decorator or a patch wraps"),
    ],
)
def test_an_altered_block_is_refused(make: Any, tmp_path: Path, old: str, new: str, message: str) -> None:
    source = Path(ppo_trainer.__file__).read_text()
    assert old in source
    altered = module_from(tmp_path / "altered.py", source.replace(old, new))
    trainer = make(trainer_class=altered.PPOTrainer)
    with pytest.raises(InputError, match=f"PPOTrainer of trl 0.15.2 to 1.12.0, got .*{message}"):
        AdvantageCallback(trainer)
    assert trainer.train.__func__ is altered.PPOTrainer.train


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("non_score_reward = -args.kl_coef * kl\n", "non_score_reward = -2 * args.kl_coef * kl\n"),
        ("mask=~padding_mask_p1, shift_mean=False)", "mask=~padding_mask_p1)"),
    ],
)
def test_other_rewards_are_left_to_the_trainer(make: Any, tmp_path: Path, old: str, new: str, scope: str) -> None:
    source = Path(ppo_trainer.__file__).read_text()
    assert old in source
    trainer = make(trainer_class=module_from(tmp_path / "altered.py", source.replace(old, new)).PPOTrainer)
    if scope == "rewards":
        with pytest.raises(
            InputError, match=r"makes its rewards in another way before line \d+ \(scope=\"advantages\" leaves them to it\)"
        ):
            AdvantageCallback(trainer, scope=scope)
    else:
        AdvantageCallback(trainer, scope=scope)


@pytest.mark.parametrize("known", REWARDS, ids=["0.25", "0.17", "0.16"])
def test_rewards_of_every_release_are_found(make: Any, tmp_path: Path, known: list[ast.stmt]) -> None:
    lines = [textwrap.indent(ast.unparse(statement), " " * 16) for statement in known]
    source = Path(ppo_trainer.__file__).read_text()
    start, stop = source.index("                # 4. compute rewards"), source.index("                # 6. compute advantages")
    altered = module_from(tmp_path / "release.py", source[:start] + "\n".join(lines) + "\n" + source[stop:])
    engine = Witness()
    logged(make(updates=1, trainer_class=altered.PPOTrainer), engine, "rewards")
    assert [request.op for request in engine.requests] == ["ppo_advantages"]


def test_train_keeps_its_closure_super_and_private_names(make: Any, tmp_path: Path) -> None:
    train = inspect.getsource(PPOTrainer.train).replace(
        "        args = self.args\n",
        "        args = self.args\n        self.__own = super().is_world_process_zero()\n        seen.append(self.__own)\n",
        1,
    )
    source = f"""
from trl.experimental.ppo import ppo_trainer
globals().update({{name: value for name, value in vars(ppo_trainer).items() if not name.startswith("__")}})

def child(seen):
    class Child(PPOTrainer):
{textwrap.indent(train, "    ")}
    return Child
"""
    seen: list[bool] = []
    child = module_from(tmp_path / "child.py", source).child(seen)
    engine, trainer = Witness(), make(updates=2, trainer_class=child, dtype=torch.float64)
    assert logged(trainer, engine) == trl_alone(updates=2, dtype=torch.float64)
    assert len(engine.requests) == 2
    assert seen == [True]
    assert trainer._Child__own is True
    assert trainer.train.__func__.__qualname__ == child.train.__qualname__


def test_a_subclass_that_keeps_train(make: Any) -> None:
    class Mine(PPOTrainer):
        pass

    engine = Witness()
    logged(make(updates=1, trainer_class=Mine), engine)
    assert len(engine.requests) == 1
