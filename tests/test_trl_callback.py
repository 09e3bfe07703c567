"""The callback of the TRL door: added, removed, added twice, added elsewhere; what is left of it afterwards."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from transformers import TrainerCallback
from trl.experimental.ppo import PPOTrainer, ppo_trainer
from trl_runs import MARKS, Witness, built, logged, trl_alone

from rlhf_scan import InputError
from rlhf_scan.integrations.trl import AdvantageCallback

pytestmark = MARKS


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """`built`, with a place to write to."""
    return partial(built, tmp_path)


@pytest.mark.parametrize(
    "remove",
    [
        lambda trainer, callback: trainer.remove_callback(callback),
        lambda trainer, callback: trainer.remove_callback(AdvantageCallback),
        lambda trainer, callback: trainer.pop_callback(callback),
        lambda trainer, callback: callback.restore(),
    ],
    ids=["remove", "remove class", "pop", "restore"],
)
def test_removal_restores(make: Any, remove: Any) -> None:
    engine, trainer = Witness(), make(updates=1)
    before = dict(vars(trainer))
    callback = AdvantageCallback(trainer, engine)
    trainer.add_callback(callback)
    assert trainer.train.__func__ is not PPOTrainer.train
    remove(trainer, callback)
    assert vars(trainer) == before
    assert trainer.train.__func__ is PPOTrainer.train
    assert callback not in trainer.callback_handler.callbacks
    assert logged(trainer) == trl_alone(updates=1)
    assert not engine.requests


def test_removing_another_callback_restores_nothing(make: Any) -> None:
    engine, trainer = Witness(), make(updates=1)
    callback = AdvantageCallback(trainer, engine)
    trainer.remove_callback(type(trainer.callback_handler.callbacks[-2]))
    trainer.add_callback(callback)
    trainer.train()
    assert len(engine.requests) == 1


def test_removal_during_training(make: Any) -> None:
    class Remover(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.remove_callback(AdvantageCallback)

    engine, trainer = Witness(), make(updates=2, dtype=torch.float64)
    trainer.add_callback(Remover())
    assert logged(trainer, engine) == trl_alone(updates=2, dtype=torch.float64)
    assert len(engine.requests) == 1
    assert trainer.train.__func__ is PPOTrainer.train


def test_another_trainer_is_unaffected(make: Any) -> None:
    original = PPOTrainer.train
    engine, trainer, other = Witness(), make(updates=1), make(updates=1)
    trainer.add_callback(AdvantageCallback(trainer, engine))
    assert PPOTrainer.train is original
    assert other.train.__func__ is original
    other.train()
    assert not engine.requests
    assert make(updates=1).train.__func__ is original
    assert "_credit" not in vars(ppo_trainer)


def test_never_added_says_so(make: Any) -> None:
    engine, trainer = Witness(), make(updates=1)
    AdvantageCallback(trainer, engine)
    with pytest.warns(UserWarning, match="not among its callbacks"):
        trainer.train()
    assert not engine.requests


def test_added_twice_is_added_once(make: Any) -> None:
    engine, trainer = Witness(), make(updates=1)
    callback = AdvantageCallback(trainer, engine)
    trainer.add_callback(callback)
    trainer.add_callback(callback)
    logged(trainer)
    assert len(engine.requests) == 1
    trainer.remove_callback(callback)
    assert trainer.train.__func__ is not PPOTrainer.train
    trainer.remove_callback(callback)
    assert trainer.train.__func__ is PPOTrainer.train


def test_two_callbacks_on_one_trainer(make: Any) -> None:
    trainer = make()
    first = AdvantageCallback(trainer)
    with pytest.raises(InputError, match="has an AdvantageCallback already"):
        AdvantageCallback(trainer)
    first.restore()
    trainer.add_callback(AdvantageCallback(trainer))


def test_a_callback_belongs_to_one_trainer(make: Any) -> None:
    trainer, other = make(), make()
    callback = AdvantageCallback(trainer)
    other.add_callback(callback)
    with pytest.raises(InputError, match="trainer must be the one it is added to"):
        other.train()


def test_added_again_after_removal(make: Any) -> None:
    trainer = make()
    callback = AdvantageCallback(trainer)
    trainer.add_callback(callback)
    trainer.add_callback(trainer.pop_callback(callback))
    with pytest.raises(InputError, match="make a new one"):
        trainer.train()


def test_an_unknown_scope(make: Any) -> None:
    with pytest.raises(InputError, match=r"AdvantageCallback: scope must be one of \['advantages', 'rewards'\], got 'everything'"):
        AdvantageCallback(make(), scope="everything")


def test_without_trl_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['transformers'] = None; import rlhf_scan.integrations.trl"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "ImportError: rlhf_scan.integrations.trl needs TRL" in finished.stderr
    assert "pip install 'rlhf-scan[trl]'" in finished.stderr
