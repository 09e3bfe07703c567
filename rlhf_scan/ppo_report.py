"""What `ppo_advantages` says of what it did. Nothing is read from the device before somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import InputError
from .ppo_inputs import OP
from .ppo_options import PPOOptions
from .ranks import gathered
from .shaping import FAULTS, NO_FAULT, RESULT_FAULT, Sequences

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Number = int | float | str | None


@dataclass(frozen=True)
class Facts:
    """What a report is made of: nothing that has an entry per token, and nothing of the caller's.

    Attributes:
        tokens: N.
        sequences: what there is once per sequence.
        kl_sum, clamped, fault: [S], as in `rlhf_scan.shaping.Shaped`.
        step_rewards: by name, how many went where, on the device.
        dropping, taking_for_zero: what `nonfinite` does.
        whitened: by name of what was whitened, with which count, mean and M2.
    """

    tokens: int
    sequences: Sequences
    kl_sum: Tensor
    clamped: Tensor
    fault: Tensor
    step_rewards: Mapping[str, Tensor]
    dropping: bool
    taking_for_zero: bool
    whitened: Mapping[str, Tensor]

    def counts(self) -> dict[str, Tensor | int | None]:
        """Numbers on the device by name. Means are over sequences that statistics may hold."""
        located, placed = self.sequences.located, self.sequences.placed
        last, truncated, missing_eos = located.last, self.sequences.truncated, self.sequences.missing_eos
        empty, faulty = last < 0, self.fault != NO_FAULT
        counted = ~faulty | self.taking_for_zero
        kl = torch.where(counted, self.kl_sum, 0.0).double()
        scored = counted & (placed.place >= 0)
        filled = (counted & ~empty).sum().clamp(min=1)
        carried = (located.end > last) & (placed.place == last) & (placed.slot < 0)
        trainable = located.trainable.sum()
        return {
            "sequences": len(last),
            "tokens": self.tokens,
            "trainable_tokens": trainable,
            "masked_tokens": self.tokens - trainable,
            "empty_sequences": empty.sum(),
            "truncated": 0 if truncated is None else truncated.sum(),
            "missing_eos": None if missing_eos is None else missing_eos.sum(),
            "nonfinite_sequences": faulty.sum(),
            "dropped_sequences": faulty.sum() if self.dropping else 0,
            "clamped_tokens": self.clamped.sum(),
            "scores_post_eos": (placed.slot >= 0).sum(),
            "scores_carried_back": carried.sum(),
            "scores_lost": ((placed.place < 0) & ~empty).sum(),
            "score_mean": torch.where(scored, placed.score, 0.0).double().sum() / scored.sum().clamp(min=1),
            "kl_mean": kl.sum() / torch.where(counted, located.trainable, 0).sum().clamp(min=1),
            "kl_per_sequence": kl.sum() / filled,
            "kl_penalty_per_sequence": torch.where(counted, self.sequences.kl_coef * kl, 0.0).sum() / filled,
            "step_rewards_carried_back": 0,
            "step_rewards_lost": 0,
            **self.step_rewards,
        }

    def first_fault(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first sequence with a fault, its token and which; -1 thrice without one."""
        if not self.fault.numel():
            nothing = self.fault.new_tensor(-1)
            return nothing, nothing, nothing
        at = (self.fault != NO_FAULT).int().argmax()
        code = self.fault[at]
        there, code = code != NO_FAULT, torch.where(code >= RESULT_FAULT, code - RESULT_FAULT, code)
        return tuple(torch.where(there, number, -1) for number in (at, code // len(FAULTS), code % len(FAULTS)))  # type: ignore[return-value]


class PPOReport(Mapping[str, Number]):
    """A mapping of names to plain numbers. The first look reads the device, once; until then a call waits for nothing.

    Everything is of this process; the statistics of whitening are of all ranks of its process group.
    """

    def __init__(self, facts: Callable[[], Facts]) -> None:
        """Of one call, whose facts are made when they are looked at."""
        self._make = facts

    def __getstate__(self) -> dict[str, Facts]:
        return {"_facts": self._facts}

    @cached_property
    def _facts(self) -> Facts:
        return self._make()

    @property
    def score_tokens(self) -> Tensor:
        """The token of its sequence, counted from the sequence's first, that got the score, int64 [S] on the device; -1: none did."""
        place = self._facts.sequences.placed.place
        return torch.where(place >= 0, place - self._facts.sequences.start, -1)

    @property
    def nonfinite_sequences(self) -> Tensor:
        """Sequences with a number that is not finite where it counts, bool [S] on the device."""
        return self._facts.fault != NO_FAULT

    def first_nonfinite(self) -> tuple[int, int, str] | None:
        """Sequence, token of it, and argument of the first number that is not finite where it counts."""
        row, token, argument = (self[f"nonfinite_{name}"] for name in ("row", "token", "argument"))
        return None if row is None else (int(row), int(token or 0), str(argument))

    def __getitem__(self, name: str) -> Number:
        """What is known under that name."""
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._read)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self._read)

    def __repr__(self) -> str:
        """All of it."""
        return f"PPOReport({self._read})"

    @cached_property
    def _read(self) -> dict[str, Number]:
        counts = self._facts.counts()
        tensors = [value for value in counts.values() if isinstance(value, Tensor)]
        read = _together([*tensors, *self._facts.first_fault(), *self._facts.whitened.values()])
        result: dict[str, Number] = {}
        for name, value in counts.items():
            if isinstance(value, Tensor):
                (number,) = next(read)
                result[name] = number if value.dtype.is_floating_point else int(number)
            else:
                result[name] = value
        (row,), (token,), (which,) = next(read), next(read), next(read)
        found = row >= 0
        result["nonfinite_row"] = int(row) if found else None
        result["nonfinite_token"] = int(token) if found else None
        result["nonfinite_argument"] = FAULTS[int(which)] if found else None
        for name, (count, mean, m2) in zip(self._facts.whitened, read, strict=True):
            result[f"{name}_count"], result[f"{name}_mean"] = int(count), mean
            result[f"{name}_std"] = (m2 / (count - 1)) ** 0.5 if count > 1 else 0.0
        return result


def _together(tensors: list[Tensor]) -> Iterator[list[float]]:
    """The numbers of each tensor, all in one transfer. Counts and places stay exact up to 2^53."""
    numbers = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).tolist()
    at = 0
    for tensor in tensors:
        yield numbers[at : at + tensor.numel()]
        at += tensor.numel()


def raise_if_asked(options: PPOOptions, report: PPOReport, group: ProcessGroup | None, *, full: bool, rates: str | None) -> None:
    """Raise, on all ranks together, for what `nonfinite="raise"` and `trailing="error"` forbid, and for `rates`, what is wrong with these.

    Reads the device for the two, and on several ranks where `full` contents were asked for.
    """
    if options.nonfinite != "raise" and options.trailing != "error" and not full:
        return
    problem = rates or _problem(options, report)
    if group is not None:
        others = gathered(torch.tensor([float(problem is not None)]), group)
        if problem is None and bool(others.any()):
            problem = f"all ranks must have sound sequences, got trouble on rank {int(others.argmax())} of the process group; see its error"
    if problem is not None:
        raise InputError(f"{OP}: {problem}")


def _problem(options: PPOOptions, report: PPOReport) -> str | None:
    """What the two options forbid of what was found; None: nothing."""
    if options.nonfinite == "raise" and report["nonfinite_row"] is not None:
        row, token, argument = report["nonfinite_row"], report["nonfinite_token"], report["nonfinite_argument"]
        return (
            f"{argument} must be finite where it counts, got a number that is not at token {token} of sequence {row} "
            f'({report["nonfinite_sequences"]} such sequences in all); mask that token, mend it, or choose nonfinite="drop" or "zero"'
        )
    if options.trailing == "error" and (report["scores_carried_back"] or report.get("step_rewards_carried_back", 0)):
        return (
            f'scores must end on trainable tokens with trailing="error", got {report["scores_carried_back"]} sequences and '
            f'{report.get("step_rewards_carried_back", 0)} step rewards that end on another; choose trailing="carry_back" to put them on the '
            "trainable token before"
        )
    return None
