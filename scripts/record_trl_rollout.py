"""Record rlhf_scan/data/trl_ppo_rollout.safetensors: the rollout of a real TRL PPO update, as its advantage block sent it to an engine.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/record_trl_rollout.py

The trainer is the tests' (tests/tiny_ppo.py): real generation, reward and value models, reference model and KL; only the weights are small
and random. Recorded is the last of a few updates, since at the first the policy is its own reference and the KL is 0.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rlhf_scan import CreditRequest, CreditResult, LocalEngine, Segments
from rlhf_scan.integrations.trl import AdvantageCallback
from rlhf_scan.rollout import write_request

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "rlhf_scan" / "data" / "trl_ppo_rollout.safetensors"
UPDATES, RESPONSES, RESPONSE_LENGTH = 4, 256, 128


class Recorder:
    """An engine that keeps what it is asked."""

    def __init__(self) -> None:
        self.requests: list[CreditRequest] = []

    def run(self, request: CreditRequest) -> CreditResult:
        """Run it here."""
        self.requests.append(request)
        return LocalEngine().run(request)


def packed(request: CreditRequest) -> CreditRequest:
    """TRL's padded rows as a pack: of each row the response and, where it fits, the one step after it, which holds the score."""
    mask = request.tensors["mask"]
    segments = Segments.from_lengths(mask.sum(1))
    tensors = {name: request.tensors[name][mask] for name in ("rewards", "values")}
    return CreditRequest("gae", {**tensors, "cu_seqlens": segments.cu_seqlens}, {name: request.params[name] for name in ("gamma", "lam")})


def main() -> None:
    """Train, and write the rollout of the last update."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny_ppo import tiny_trainer

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as directory:
        trainer = tiny_trainer(directory, updates=UPDATES, batch_size=RESPONSES, response_length=RESPONSE_LENGTH, num_ppo_epochs=4)
        trainer.add_callback(AdvantageCallback(trainer, recorder))
        trainer.train()
    rollout = packed(recorder.requests[-1])
    OUTPUT.parent.mkdir(exist_ok=True)
    write_request(rollout, OUTPUT)
    lengths = rollout.tensors["cu_seqlens"].diff()
    print(
        f"{OUTPUT.relative_to(ROOT)}: {len(lengths)} responses with {int(lengths.min())} to {int(lengths.max())} steps, "
        f"{int(lengths.sum())} in all, {OUTPUT.stat().st_size / 1e3:.0f} kB"
    )


if __name__ == "__main__":
    main()
