"""The inputs of a work, random with a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_scan import Segments
from rlhf_scan.errors import InputError
from rlhf_scan.estimators import Estimator, estimator
from rlhf_scan.operations import PER_ACTION, PER_SEQUENCE, Operation, of_estimator, operation

from .works import Work

L2_BYTES = 64 * 2**20
MOST_COPIES = 8


@dataclass(frozen=True)
class Batch:
    """The arguments of one call, as our own function takes them; providers translate.

    Attributes:
        work: what it is for.
        tensors: the inputs by name, [N] or [segments, length]; those per sequence [segments].
        ends: `mask`, `terminated`, `truncated`, `bootstrap`: those that are given.
        rates: gamma, lam, ... as numbers.
        segments: of a pack.
        actions: of `retrace_from_policy`, the action taken at each step, which peers ask for.
    """

    work: Work
    tensors: Mapping[str, Tensor]
    ends: Mapping[str, Tensor]
    rates: Mapping[str, float]
    segments: Segments | None = None
    actions: Tensor | None = None

    @property
    def estimator(self) -> Estimator:
        """The entry of the registry of estimators; InputError where it is none."""
        return estimator(self.work.estimator)

    @property
    def operation(self) -> Operation:
        """What goes in and what comes out."""
        return operation_of(self.work)

    @property
    def tokens(self) -> int:
        """N."""
        return self.first.numel()

    @property
    def first(self) -> Tensor:
        """The first input: shape, dtype and device of the outputs."""
        return next(iter(self.tensors.values()))

    @property
    def bytes(self) -> int:
        """Every input read once, every output written once."""
        read = (*self.tensors.values(), *self.ends.values())
        return sum(t.numel() * t.element_size() for t in read) + len(self.operation.outputs) * self.tokens * self.first.element_size()

    def rows(self) -> Batch:
        """The same with equal segments as rows, for peers that know no packs."""
        shape = (self.work.segments, self.work.length)

        def as_rows(tensor: Tensor) -> Tensor:
            return tensor if tensor.shape == shape[:1] else tensor.reshape(*shape, *tensor.shape[self.first.dim() :])

        return self.changed(as_rows, segments=None)

    def changed(self, change: Callable[[Tensor], Tensor], **fields: Any) -> Batch:
        """A copy with every tensor changed."""
        tensors, ends = ({name: change(tensor) for name, tensor in group.items()} for group in (self.tensors, self.ends))
        return replace(self, tensors=tensors, ends=ends, **fields)

    def flag(self, name: str) -> Tensor:
        """A flag as the float32 tensor that peers demand; zeros where it is not given."""
        given = self.ends.get(name)
        return torch.zeros_like(self.first) if given is None else given.float()


def operation_of(work: Work) -> Operation:
    """An estimator's, whether requests may name it or not, or another's."""
    try:
        return of_estimator(estimator(work.estimator))
    except InputError:
        return operation(work.estimator)


def batches(work: Work, most: int = MOST_COPIES) -> list[Batch]:
    """As many different batches as it takes to run past the L2 cache; at least one, at most `most`."""
    generator = torch.Generator(device=work.device).manual_seed(work.seed)
    first = _batch(work, generator)
    copies = 1 if work.device == "cpu" else max(1, min(most, math.ceil(3 * L2_BYTES / first.bytes)))
    return [first, *(_batch(work, generator) for _ in range(copies - 1))]


def _batch(work: Work, generator: torch.Generator) -> Batch:
    lengths = _lengths(work)
    tokens = int(lengths.sum())
    shape = (tokens,) if work.packed else (work.segments, work.length)
    taken = operation_of(work)
    per_action = any(argument.shape == PER_ACTION for argument in taken.tensors.values())
    actions = torch.randint(work.actions, shape, device=work.device, generator=generator) if per_action else None
    return Batch(
        work=work,
        tensors=_inputs(work, taken, shape, generator, actions),
        ends=_ends(work, taken, shape, generator),
        rates={name: rate for name, rate in work.rates.items() if name in taken.options},
        segments=Segments.from_cu_seqlens(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(work.device)) if work.packed else None,
        actions=actions,
    )


def _lengths(work: Work) -> Tensor:
    if work.length:
        return torch.full((work.segments,), work.length)
    normal = torch.randn(work.tokens // 64, generator=torch.Generator().manual_seed(work.seed))
    lengths = torch.exp(normal * 1.5 + math.log(1500)).long().clamp(16, 131072)
    return lengths[: int((lengths.cumsum(0) < work.tokens).sum())]


def _inputs(work: Work, taken: Operation, shape: tuple[int, ...], generator: torch.Generator, actions: Tensor | None) -> dict[str, Tensor]:
    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=work.device, generator=generator)

    made: dict[str, Tensor] = {}
    for name, argument in taken.tensors.items():
        if not (argument.required or name in taken.choices or name in work.given):
            continue
        if argument.shape == PER_SEQUENCE:
            made[name] = normal(work.segments)
        elif argument.shape == PER_ACTION:
            made[name] = normal(*shape, work.actions)
        elif name.endswith("logprobs"):
            made[name] = -torch.nn.functional.softplus(normal(*shape))
        elif name == "b":
            made[name] = torch.sigmoid(normal(*shape) + 3)  # a decay, mostly near 1
        else:
            made[name] = normal(*shape)
    if actions is not None:
        made["target_probs"] = torch.softmax(made["target_probs"], -1)
        made["target_logprobs"] = made["target_probs"].gather(-1, actions[..., None]).squeeze(-1).log()
    return {name: tensor.to(work.dtype) for name, tensor in made.items()}


def _ends(work: Work, taken: Operation, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    def chosen(chance: float) -> Tensor:
        return torch.rand(shape, device=work.device, generator=generator) < chance

    ends: dict[str, Tensor] = {}
    if work.mask:
        ends["mask"] = chosen(0.9)
    if work.padded:
        used = torch.randint(work.length // 2, work.length + 1, (work.segments, 1), device=work.device, generator=generator)
        response = torch.arange(work.length, device=work.device) < used
        ends["mask"] = ends.get("mask", response) & response
    if work.flags:
        terminated = chosen(work.chance)
        if not work.packed:
            terminated[:, -2] = True  # PufferLib's kernel writes no last step: up to here it does not matter
        ends["terminated"] = terminated.to(work.flag_dtype)
        if work.flags == "truncated" and "truncated" in taken.tensors:
            truncated = chosen(work.chance) & ~terminated
            ends["truncated"] = truncated.to(work.flag_dtype)
            if "bootstrap" in taken.tensors:
                read = truncated.clone()
                read[:, -1] = True  # peers demand 0 elsewhere
                ends["bootstrap"] = torch.where(read, torch.randn(shape, device=work.device, generator=generator), 0).to(work.dtype)
    return ends
