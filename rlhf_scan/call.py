"""One resolved call: what every backend gets, whatever layout and shorthand the caller used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .estimators import Estimator

MASK_MODES = ("skip", "zero", "keep")
BOUNDARIES = ("ends_at", "starts_at")
BACKENDS = ("auto", "triton", "cpu", "reference")

Rate = float | Tensor


class Tensors(NamedTuple):
    """What differs between calls with the same shapes, dtypes and options. Contiguous.

    Attributes:
        inputs: the estimator's inputs.
        rates: those of the channels that run, one channel after the other.
        flags: mask, terminated, truncated.
        bootstrap: the value after the end.
        cu_seqlens: of a pack.
    """

    inputs: tuple[Tensor, ...]
    rates: tuple[Rate, ...]
    flags: tuple[Tensor | None, Tensor | None, Tensor | None]
    bootstrap: Tensor | None
    cu_seqlens: Tensor | None


# Takes tensors in any shape that has their number of entries; gives one tensor per output, in the shape of the first input.
Solver = Callable[[Tensors], Sequence[Tensor]]


@dataclass(frozen=True)
class Call:
    """Tokens lie flat, segment after segment. A tensor with one entry per segment has shape [S, 1], one with an entry per token [N].

    Attributes:
        estimator: which.
        inputs: the estimator's inputs, each [N], contiguous, in the dtype they came in.
        rates: per channel, the rates its builder takes: float, [S, 1] or [N].
        segments: S.
        length: tokens of each segment where all are equally long, else None.
        cu_seqlens: int64 [S + 1] where `length` is None.
        mask, terminated, truncated: any dtype, nonzero is True; [N], the last two also [S, 1] (the segment's last token).
        masked: what a masked token does to the recursion.
        bootstrap: the value after the end, [S, 1] or [N].
        starts: a flag marks the first token of an episode, not the last.
        dtype: of the outputs.
    """

    estimator: Estimator
    inputs: tuple[Tensor, ...]
    rates: tuple[tuple[Rate, ...], ...]
    segments: int
    length: int | None
    cu_seqlens: Tensor | None
    mask: Tensor | None
    masked: str
    terminated: Tensor | None
    truncated: Tensor | None
    bootstrap: Tensor | None
    starts: bool
    dtype: torch.dtype

    @property
    def tensors(self) -> Tensors:
        """All of them."""
        rates = tuple(rate for channel in self.rates for rate in channel)
        return Tensors(self.inputs, rates, (self.mask, self.terminated, self.truncated), self.bootstrap, self.cu_seqlens)

    @property
    def tokens(self) -> int:
        """N."""
        return self.inputs[0].numel()

    @property
    def compute_dtype(self) -> torch.dtype:
        """float64 where an input is float64, else float32."""
        return torch.float64 if any(t.dtype == torch.float64 for t in self.inputs) else torch.float32

    @property
    def following(self) -> tuple[int, ...]:
        """Positions in `inputs` that the builder reads at the next step."""
        return tuple(self.estimator.inputs.index(name) for name in self.estimator.following)

    @property
    def rates_following(self) -> tuple[int, ...]:
        """Positions among a channel's rates of those that its builder reads at the next step; the same in each channel."""
        return tuple(i for i, name in enumerate(self.estimator.channels[0]) if name in self.estimator.rates_following)

    @property
    def continuation(self) -> int:
        """Position in `inputs` of the one that is itself the value that follows its step; -1 if none is."""
        name = self.estimator.continuation
        return -1 if name is None else self.estimator.inputs.index(name)


def is_per_segment(tensor: Tensor) -> bool:
    """Whether a resolved tensor has an entry per segment rather than per token."""
    return tensor.dim() == 2


def channel_rates(estimator: Estimator, rates: Sequence[Rate | None]) -> tuple[tuple[Rate, ...], ...]:
    """Rates in the order of ``estimator.rates`` -> per channel that runs, the rates its builder takes."""
    by_name = dict(zip(estimator.rates, rates, strict=True))
    channels: list[tuple[Rate, ...]] = []
    for names in estimator.channels:
        values = [by_name[name] for name in names]
        given = tuple(value for value in values if value is not None)
        if len(given) == len(values):
            channels.append(given)
    return tuple(channels)
