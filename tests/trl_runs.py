"""Real PPOTrainers, whose weights alone are tiny and random, trained through an engine or by TRL itself."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("trl")

from tiny_ppo import LogKeeper, tiny_trainer

from rlhf_scan import CreditRequest, CreditResult, LocalEngine
from rlhf_scan.integrations.trl import AdvantageCallback

MARKS = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:trl", "ignore:var():UserWarning"),
]
UPDATES = 3
ALL_OPTIONS = {"gamma": 0.97, "lam": 0.9, "whiten_rewards": True, "kl_estimator": "k3", "missing_eos_penalty": 1.0}


class Witness:
    """An engine that passes requests on and keeps them, with what came back."""

    def __init__(self, engine: Any = None) -> None:
        self.engine = engine or LocalEngine()
        self.requests: list[CreditRequest] = []
        self.results: list[CreditResult] = []

    def run(self, request: CreditRequest) -> CreditResult:
        self.requests.append(request)
        self.results.append(self.engine.run(request))
        return self.results[-1]


def built(output_dir: Path, **options: Any) -> Any:
    """A tiny trainer with a LogKeeper as `kept`."""
    trainer = tiny_trainer(output_dir, **{"updates": UPDATES, "num_ppo_epochs": 2} | options)
    trainer.kept = LogKeeper()
    trainer.add_callback(trainer.kept)
    return trainer


def logged(trainer: Any, engine: Any = None, scope: str = "advantages") -> list[dict[str, float]]:
    """What the trainer logs, trained through `engine` where one is given."""
    if engine is not None:
        trainer.add_callback(AdvantageCallback(trainer, engine, scope))
    trainer.train()
    assert len(trainer.kept.logs) == trainer.args.num_total_batches
    return [{name: value for name, value in logs.items() if not math.isnan(value)} for logs in trainer.kept.logs]


@cache
def trl_alone(**options: Any) -> list[dict[str, float]]:
    """What TRL logs by itself, by the options of tiny_trainer."""
    with TemporaryDirectory() as folder:
        return logged(built(Path(folder), **options))
