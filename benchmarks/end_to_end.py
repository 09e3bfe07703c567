"""A PPO update with TRL's advantage block and with ours: how long it takes, and what part the block is.

    python -m benchmarks.end_to_end --out PREFIX

The update is what TRL's `PPOTrainer` does after it has the responses, with real transformers for policy and value: log-probabilities and values of
the rollout, KL penalty and score, the advantage block, then one epoch of micro-batches forward and backward and an optimizer step of each
model. Both ways run on the same models and responses, in turn; generation is left out. In TRL's way the recursion over the tokens is TRL's own
statements, in ours it is one call of `rlhf_scan.gae`, as `AdvantageCallback` does; the whitening is the same in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import rlhf_scan

from . import environment
from .providers import peers
from .transformer import Size, Transformer

LENGTHS = (512, 2048, 8192, 32768)
GAMMA, LAM, KL_COEFFICIENT, CLIP = 1.0, 0.95, 0.05, 0.2
Recursion = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Update:
    """One update: its models, its responses [B, T], and how many responses go forward and backward at once."""

    policy: Transformer
    value: Transformer
    optimizers: tuple[torch.optim.Optimizer, ...]
    responses: Tensor
    mask: Tensor
    scores: Tensor
    rows_at_once: int

    def step(self, recursion: Recursion) -> tuple[float, float]:
        """(seconds of the update, seconds of its advantage block)."""
        started = self._now()
        with torch.no_grad():
            parts = [self._predict(rows) for rows in self.responses.split(self.rows_at_once)]
        logprobs, values = (torch.cat(part) for part in zip(*parts, strict=True))
        rewards = -KL_COEFFICIENT * (logprobs - logprobs.mean()) * self.mask  # what stands in for a reference model's
        rewards[torch.arange(len(rewards), device=rewards.device), self.mask.sum(1) - 1] += self.scores
        values = values * self.mask
        block_started = self._now()
        advantages, returns = advantage_block(recursion, rewards, values, self.mask)
        block = self._now() - block_started
        self._learn(logprobs, advantages, returns)
        return self._now() - started, block

    def _learn(self, logprobs: Tensor, advantages: Tensor, returns: Tensor) -> None:
        """One epoch: clipped policy loss, squared value loss, over all responses."""
        tokens = self.mask.sum()
        for rows in torch.arange(len(self.responses), device=self.responses.device).split(self.rows_at_once):
            new, values = self._predict(self.responses[rows])
            ratio = torch.exp(new - logprobs[rows])
            surrogate = torch.minimum(ratio * advantages[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[rows])
            loss = (((values - returns[rows]) ** 2 - surrogate) * self.mask[rows]).sum() / tokens
            loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _predict(self, responses: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of these tokens, and values before them, [B, T] each."""
        before = torch.nn.functional.pad(responses[:, :-1], (1, 0))
        with torch.autocast(responses.device.type, torch.bfloat16, enabled=responses.is_cuda):
            logits, values = self.policy(before), self.value(before)
        logprobs = -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), responses.flatten(), reduction="none")
        return logprobs.view_as(responses), values.squeeze(-1).float()

    def _now(self) -> float:
        if self.responses.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def advantage_block(recursion: Recursion, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's block: the recursion, then whitened advantages, 0 at padding."""
    advantages, returns = recursion(rewards, values, mask)
    count = mask.sum()
    mean = (advantages * mask).sum() / count
    variance = ((advantages - mean) ** 2 * mask).sum() / (count - 1)
    return torch.where(mask, (advantages - mean) * torch.rsqrt(variance + 1e-8), 0), returns


def ours(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """One call."""
    return rlhf_scan.gae(rewards, values, gamma=GAMMA, lam=LAM, mask=mask, masked="keep")


def trl() -> Recursion:
    """TRL's own statements."""
    from rlhf_scan.integrations import trl_block

    recursion, _ = trl_block.recursion()
    arguments = SimpleNamespace(gamma=GAMMA, lam=LAM)
    return lambda rewards, values, mask: recursion(rewards, values, arguments)


def new_update(options: argparse.Namespace, length: int) -> Update:
    """Models and responses, from the same seed for every length."""
    torch.manual_seed(0)
    device = options.device
    size = Size(options.layers, options.width, options.heads, options.vocabulary, length)
    policy, value = Transformer(size, options.vocabulary).to(device), Transformer(size, 1).to(device)
    rows = max(1, options.tokens // length)
    lengths = torch.randint(length // 2, length + 1, (rows, 1), device=device)
    return Update(
        policy=policy,
        value=value,
        optimizers=tuple(torch.optim.AdamW(model.parameters(), lr=1e-6) for model in (policy, value)),
        responses=torch.randint(options.vocabulary, (rows, length), device=device),
        mask=torch.arange(length, device=device) < lengths,
        scores=torch.randn(rows, device=device),
        rows_at_once=max(1, options.tokens_at_once // length),
    )


def check(update: Update) -> None:
    """Both ways make the same advantages; RuntimeError if not."""
    rewards, values = (torch.randn(update.mask.shape, device=update.mask.device) * update.mask for _ in range(2))
    found, wanted = (advantage_block(way, rewards, values, update.mask) for way in (ours, trl()))
    for name, got, want in zip(("advantages", "returns"), found, wanted, strict=True):
        error = float(((got - want) * update.mask).abs().max())
        if not error <= 1e-4 * float(want.abs().max()):
            raise RuntimeError(f"{name} of the two ways differ by {error:.3g}")


def measure(options: argparse.Namespace, length: int, seconds: float) -> dict[str, Any]:
    """One row, of as many updates as were asked for or as there is time for."""
    started = time.perf_counter()
    update = new_update(options, length)
    check(update)
    ways: dict[str, Recursion] = {"trl": trl(), "ours": ours}
    for way in ways.values():
        update.step(way)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(options.updates):
        begun = time.perf_counter()
        for name, way in ways.items():
            samples[name].append(update.step(way))
        both = time.perf_counter() - begun
        if number and begun + 2 * both - started > seconds:
            break
    row: dict[str, Any] = {"length": length, "responses": len(update.responses)}
    for name, pairs in samples.items():
        step, block = (statistics.median(column) for column in zip(*pairs, strict=True))
        row[name] = {"step": step, "block": block, "share": block / step, "steps": [taken for taken, _ in pairs]}
    return row | {"gain": row["trl"]["step"] / row["ours"]["step"]}


def markdown(report: dict[str, Any]) -> str:
    """The report as a table."""
    found, sizes = report["environment"], report["sizes"]
    updates = " or ".join(str(count) for count in sorted({len(row["ours"]["steps"]) for row in report["rows"]}))
    lines = [
        "# A PPO update, end to end\n\n"
        "One PPO update (log-probabilities and values of the rollout, advantage block, an epoch forward and backward, optimizer steps) "
        f"on {found['device']}: "
        f"policy and value model of {report['parameters'] / 1e6:.0f}M parameters each ({sizes['layers']} layers, width {sizes['width']}), about "
        f"{sizes['tokens']:,} tokens an update, bfloat16 autocast on a GPU; generation is left out. Median of {updates} updates, in turn. "
        f"torch {found['versions']['torch']}, commit {found['commit']}, {found['date']}.\n\n",
        "| responses x length | update, s | TRL's block, s | its share | update with ours, s | our block, s | its share | gain |\n",
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n",
    ]
    for row in report["rows"]:
        cells = [f"{row['responses']} x {row['length']}"]
        for name in ("trl", "ours"):
            cells += [f"{row[name]['step']:.3f}", f"{row[name]['block']:.4f}", f"{row[name]['share']:.1%}"]
        lines.append(f"| {' | '.join(cells)} | {row['gain']:.2f} x |\n")
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("end_to_end"), metavar="PREFIX", help="writes PREFIX.json and PREFIX.md")
    add(
        "--lengths",
        type=lambda text: [int(part) for part in text.split(",")],
        default=list(LENGTHS),
        metavar="T,...",
        help="response lengths",
    )
    add("--seconds", type=float, default=120.0, help="for all lengths together: fewer updates where they take longer [%(default)g]")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 32000, "tokens": 65536, "tokens-at-once": 16384, "updates": 5}
    for name, size in sizes.items():
        add(f"--{name}", type=int, default=size, metavar="N", help=f"[{size}]")
    options = parser.parse_args(arguments)
    with torch.device("meta"):
        parameters = sum(
            p.numel() for p in Transformer(Size(options.layers, options.width, options.heads, options.vocabulary, 1), 1).parameters()
        )
    report: dict[str, Any] = {
        "environment": environment.environment(peers.folder()),
        "sizes": {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in sizes},
        "parameters": parameters,
        "rows": [],
    }
    end = time.perf_counter() + options.seconds
    for number, length in enumerate(options.lengths):
        started = time.perf_counter()
        report["rows"].append(measure(options, length, (end - started) / (len(options.lengths) - number)))
        print(f"{length} tokens a response: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_name(f"{options.out.name}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        options.out.with_name(f"{options.out.name}.md").write_text(markdown(report), encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main()
