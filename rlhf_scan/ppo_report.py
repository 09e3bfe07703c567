"""What `ppo_advantages` says of what it did. Nothing is read from the device before somebody looks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .errors import InputError
from .ppo_inputs import OP, PPOInputs
from .ppo_options import PPOOptions
from .ranks import gathered
from .shaping import FAULTS, NO_FAULT, Located, Placed, Shaped

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Number = int | float | str | None


class PPOReport(Mapping[str, Number]):
    """A mapping of names to plain numbers. The first look reads the device, once; until then a call waits for nothing.

    Everything is of this process; the statistics of whitening are of all ranks of its process group.

    Attributes:
        score_tokens: int64 [S] on the device: the token of its sequence, counted from the sequence's first, that got the score; -1: none did.
        nonfinite_sequences: bool [S] on the device: sequences with a number that is not finite where it counts.
    """

    def __init__(self, numbers: Mapping[str, Tensor | int], fault: Tensor, score_tokens: Tensor) -> None:
        """`numbers`: 0-d tensors and numbers by name. `fault`: as `Shaped.fault`."""
        self._numbers = dict(numbers)
        self._fault = fault
        self._whitened: dict[str, Tensor] = {}
        self.score_tokens = score_tokens
        self.nonfinite_sequences = fault != NO_FAULT

    def add_statistics(self, name: str, statistics: Tensor) -> None:
        """Count, mean and M2 with which `name` was whitened."""
        self._whitened[name] = statistics
        self.__dict__.pop("_read", None)

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

    def first_nonfinite(self) -> tuple[int, int, str] | None:
        """Sequence, token of it, and argument of the first number that is not finite where it counts."""
        row, token, argument = (self[f"nonfinite_{name}"] for name in ("row", "token", "argument"))
        return None if row is None else (int(row), int(token or 0), str(argument))

    @cached_property
    def _read(self) -> dict[str, Number]:
        tensors = {name: value for name, value in self._numbers.items() if isinstance(value, Tensor)}
        row, fault = _first(self._fault)
        read = _together([*tensors.values(), row, fault, *self._whitened.values()])
        values = dict(zip(tensors, read, strict=False))
        result: dict[str, Number] = {}
        for name, value in self._numbers.items():
            result[name] = value if not isinstance(value, Tensor) else _plain(values[name][0], value)
        (at,), (code,) = read[len(tensors)], read[len(tensors) + 1]
        found = int(code) >= 0
        result["nonfinite_row"] = int(at) if found else None
        result["nonfinite_token"] = int(code) // len(FAULTS) if found else None
        result["nonfinite_argument"] = FAULTS[int(code) % len(FAULTS)] if found else None
        for name, (count, mean, m2) in zip(self._whitened, read[len(tensors) + 2 :], strict=True):
            result[f"{name}_count"], result[f"{name}_mean"] = int(count), mean
            result[f"{name}_std"] = (m2 / (count - 1)) ** 0.5 if count > 1 else 0.0
        return result


def _first(fault: Tensor) -> tuple[Tensor, Tensor]:
    """The first sequence with a fault, and the fault; -1 and -1 without one."""
    if not fault.numel():
        return fault.new_tensor(-1), fault.new_tensor(-1)
    at = (fault != NO_FAULT).int().argmax()
    code = fault[at]
    return at, torch.where(code == NO_FAULT, -1, code)


def _together(tensors: list[Tensor]) -> list[list[float]]:
    """The numbers of all tensors, in one transfer. Counts and places stay exact up to 2^53."""
    if not tensors:
        return []
    flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).tolist()
    parts: list[list[float]] = []
    for tensor in tensors:
        parts.append(flat[: tensor.numel()])
        flat = flat[tensor.numel() :]
    return parts


def _plain(value: float, tensor: Tensor) -> int | float:
    return value if tensor.dtype.is_floating_point else int(value)


def counts_of(
    inputs: PPOInputs, options: PPOOptions, located: Located, placed: Placed, shaped: Shaped, fault: Tensor, left_out: Tensor
) -> dict[str, Tensor | int]:
    """What a report says beyond what placing the score has counted. Means are over sequences that are not left out."""
    counted = ~left_out
    trainable = torch.where(counted, located.trainable, 0)
    kl = torch.where(counted, shaped.kl_sum, 0.0).double()
    penalty = torch.where(inputs.call.kl_coef != 0, inputs.call.kl_coef * kl, 0.0)
    scored = counted & (placed.place >= 0)
    filled = (counted & (located.last >= 0)).sum().clamp(min=1)
    truncated = torch.zeros((), dtype=torch.int64, device=left_out.device)
    if inputs.truncated is not None:
        cut = inputs.truncated != 0
        both = inputs.terminated is not None and inputs.terminated.shape == cut.shape
        truncated = (cut & (inputs.terminated == 0) if both else cut).sum()
    return {
        "sequences": inputs.call.segments,
        "tokens": inputs.call.tokens,
        "trainable_tokens": located.trainable.sum(),
        "masked_tokens": inputs.call.tokens - located.trainable.sum(),
        "truncated": truncated,
        "nonfinite_sequences": (fault != NO_FAULT).sum(),
        "dropped_sequences": left_out.sum() if options.nonfinite == "drop" else 0,
        "clamped_tokens": shaped.clamped.sum(),
        "kl_mean": kl.sum() / trainable.sum().clamp(min=1),
        "kl_per_sequence": kl.sum() / filled,
        "kl_penalty_per_sequence": penalty.sum() / filled,
        "score_mean": torch.where(scored, placed.score, 0.0).double().sum() / scored.sum().clamp(min=1),
    }


def raise_if_asked(options: PPOOptions, report: PPOReport, group: ProcessGroup | None) -> None:
    """Raise for what `nonfinite="raise"` and `trailing="error"` forbid, on all ranks together. Reads the device for these two alone."""
    problem = None
    if options.nonfinite == "raise" and report["nonfinite_row"] is not None:
        row, token, argument = report["nonfinite_row"], report["nonfinite_token"], report["nonfinite_argument"]
        problem = (
            f"{argument} must be finite where it counts, got a number that is not at token {token} of sequence {row} "
            f'({report["nonfinite_sequences"]} such sequences in all); mask that token, mend it, or choose nonfinite="drop" or "zero"'
        )
    elif options.trailing == "error" and (report["scores_carried_back"] or report.get("step_rewards_carried_back", 0)):
        problem = (
            f'scores must end on trainable tokens with trailing="error", got {report["scores_carried_back"]} sequences and '
            f'{report.get("step_rewards_carried_back", 0)} step rewards that end on another; choose trailing="carry_back" to put them on the '
            "trainable token before"
        )
    if group is not None and (options.nonfinite == "raise" or options.trailing == "error"):
        others = gathered(torch.tensor([float(problem is not None)]), group)
        if problem is None and bool(others.any()):
            problem = f"all ranks must have sound sequences, got trouble on rank {int(others.argmax())} of the process group; see its error"
    if problem is not None:
        raise InputError(f"{OP}: {problem}")
