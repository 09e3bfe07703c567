"""Segments: its constructors, and that packing, padding, order and neighbours change no bit at a trainable token."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of
from oracle import ORACLES, Batch
from samples import Sample, call, for_samples
from torch import Tensor

import rlhf_scan
from rlhf_scan import InputError, Segments

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

each_op = pytest.mark.parametrize("op", sorted(ORACLES))


def ranges(lengths: list[int]) -> list[slice]:
    ends = np.cumsum([0, *lengths]).tolist()
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def taken(sample: Sample, order: list[int], layout: str) -> Sample:
    """The segments of `sample` named by `order`, in that order."""
    batch = sample.batch
    spans = ranges(batch.lengths)

    def pick(name: str, numbers: Any) -> Any:
        if not isinstance(numbers, np.ndarray):
            return numbers
        return numbers[order] if name in batch.per_segment else np.concatenate([numbers[spans[index]] for index in order])

    arrays = {name: pick(name, getattr(batch, name)) for name in ("mask", "terminated", "truncated", "bootstrap")}
    inputs = {name: pick(name, numbers) for name, numbers in batch.inputs.items()}
    rates = {name: pick(name, rate) for name, rate in batch.rates.items()}
    return replace(sample.changed(lengths=[batch.lengths[index] for index in order], inputs=inputs, rates=rates, **arrays), layout=layout)


@each_op
def test_a_segment_alone(op: str, backend: str) -> None:
    def check(sample: Sample) -> None:
        together = sample.run(backend)
        for index, span in enumerate(ranges(sample.batch.lengths)):
            for layout in ("one", "rows"):
                alone = taken(sample, [index], layout).run(backend)
                assert all(torch.equal(output[span], other) for output, other in zip(together, alone, strict=True))

    for_samples(op, backend, check, layouts=("rows", "pack"), examples=0.5)


@each_op
def test_order(op: str, backend: str) -> None:
    def check(sample: Sample) -> None:
        order = np.random.default_rng(sample.batch.tokens).permutation(len(sample.batch.lengths)).tolist()
        spans = ranges(sample.batch.lengths)
        shuffled = [torch.cat([output[spans[index]] for index in order]) for output in sample.run(backend)]
        for output, other in zip(shuffled, taken(sample, order, "pack").run(backend), strict=True):
            assert torch.equal(output, other)

    for_samples(op, backend, check, layouts=("pack",))


@each_op
def test_neighbours(op: str, backend: str) -> None:
    """Everything in the other segments is NaN, masks and flags reversed: no bit of this one changes."""

    def check(sample: Sample) -> None:
        batch = sample.batch
        keep = len(batch.lengths) // 2
        span = ranges(batch.lengths)[keep]

        def spoiled(name: str, numbers: Any) -> Any:
            if not isinstance(numbers, np.ndarray):
                return numbers
            here = slice(keep, keep + 1) if name in batch.per_segment else span
            other = ~numbers if numbers.dtype == bool else np.full_like(numbers, np.nan)
            other[here] = numbers[here]
            return other

        arrays = {name: spoiled(name, getattr(batch, name)) for name in ("mask", "terminated", "truncated", "bootstrap")}
        inputs = {name: spoiled(name, numbers) for name, numbers in batch.inputs.items()}
        rates = {name: spoiled(name, rate) for name, rate in batch.rates.items()}
        others = sample.changed(inputs=inputs, rates=rates, **arrays).run(backend)
        assert all(torch.equal(output[span], other[span]) for output, other in zip(sample.run(backend), others, strict=True))

    for_samples(op, backend, check, layouts=("rows", "pack"))


@each_op
@pytest.mark.parametrize(("masked", "bootstraps"), [("skip", ("none", "segment", "token")), ("zero", ("none",))])
def test_right_padding(op: str, backend: str, masked: str, bootstraps: tuple[str, ...]) -> None:
    """Rows padded with masked garbage are the pack. In mode "zero" a padding token is a step, which nothing shows without a bootstrap."""

    def check(sample: Sample) -> None:
        batch = sample.batch
        if batch.truncated is not None and "truncated" not in batch.per_segment and batch.per_segment & {"bootstrap", "terminated"}:
            # What is said per segment is said of the row's last token, which a cut before the padding keeps from the rest: the pack's last
            # token needs no flag.
            batch.truncated[[end - 1 for end, length in zip(batch.ends, batch.lengths, strict=True) if length]] = False
        width = max(batch.lengths) + 3
        rows = padded(sample, width).run(backend)
        for output, row in zip(sample.run(backend), rows, strict=True):
            matrix = row.reshape(len(batch.lengths), width)
            assert torch.equal(output, torch.cat([matrix[i, :length] for i, length in enumerate(batch.lengths)]))
            assert all(bool((matrix[i, length:] == 0).all()) for i, length in enumerate(batch.lengths))

    for_samples(op, backend, check, layouts=("pack",), masked=(masked,), bootstraps=bootstraps)


def padded(sample: Sample, width: int) -> Sample:
    batch = sample.batch
    spans = ranges(batch.lengths)

    def pad(name: str, numbers: Any, filler: float) -> Any:
        if not isinstance(numbers, np.ndarray) or name in batch.per_segment:
            return numbers
        matrix = np.full((len(spans), width), filler, dtype=numbers.dtype)
        for row, span in zip(matrix, spans, strict=True):
            row[: span.stop - span.start] = numbers[span]
            if name == "bootstrap" and span.stop > span.start:
                row[-1] = numbers[span.stop - 1]
        return matrix.reshape(-1)

    mask = np.ones(batch.tokens, dtype=bool) if batch.mask is None else batch.mask
    inputs = {name: pad(name, numbers, np.nan) for name, numbers in batch.inputs.items()}
    rates = {name: pad(name, rate, np.nan if batch.masked == "skip" else 0.5) for name, rate in batch.rates.items()}
    flags = {name: pad(name, getattr(batch, name), False) for name in ("terminated", "truncated")}
    bootstrap = pad("bootstrap", batch.bootstrap, np.nan)
    changed = sample.changed(
        lengths=[width] * len(spans), inputs=inputs, rates=rates, mask=pad("mask", mask, False), **flags, bootstrap=bootstrap
    )
    return replace(changed, layout="rows")


@each_op
def test_rows_are_a_pack(op: str, backend: str) -> None:
    """[B, T] alone, as a flat pack, and [B, T] with Segments that say the same."""

    def check(sample: Sample) -> None:
        rows = sample.run(backend)
        inputs, options = sample.arguments(device_of(backend))
        described = call(op, inputs, {**options, "segments": Segments.from_lengths(sample.batch.lengths), "backend": backend})
        for output, packed, other in zip(rows, replace(sample, layout="pack").run(backend), described, strict=True):
            assert torch.equal(output, packed)
            assert torch.equal(output, other)

    for_samples(op, backend, check, layouts=("rows",), examples=0.5)


@pytest.mark.parametrize("lengths", [[3, 1, 4], [1], [5, 5], [64, 1, 2]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_four_descriptions_agree(lengths: list[int], dtype: torch.dtype) -> None:
    positions = torch.cat([torch.arange(length) for length in lengths]).to(dtype)
    ids = torch.repeat_interleave(torch.arange(len(lengths)) * 3 - 5, torch.tensor(lengths)).to(dtype)
    boundaries = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=dtype)
    four = [
        Segments.from_cu_seqlens(boundaries),
        Segments.from_lengths(torch.tensor(lengths, dtype=dtype)),
        Segments.from_position_ids(positions),
        Segments.from_segment_ids(ids),
    ]
    x = torch.linspace(-1, 1, sum(lengths))
    results = [rlhf_scan.gae(x, x.cos(), segments=segments, backend="reference").advantages for segments in four]
    for segments, result in zip(four, results, strict=True):
        assert segments.cu_seqlens.tolist() == boundaries.tolist()
        assert segments.lengths().tolist() == lengths
        assert (segments.count, segments.total) == (len(lengths), sum(lengths))
        assert torch.equal(result, results[0])


@pytest.mark.parametrize(
    ("segments", "boundaries"),
    [
        (Segments.from_cu_seqlens([0, 2, 2, 5]), [0, 2, 2, 5]),
        (Segments.from_cu_seqlens([0]), [0]),
        (Segments.from_lengths([]), [0]),
        (Segments.from_lengths([0, 2, 0]), [0, 0, 2, 2]),
        (Segments.from_lengths(torch.tensor([2, 3])), [0, 2, 5]),
        (Segments.from_position_ids([0, 1, 0, 0, 1]), [0, 2, 3, 5]),
        (Segments.from_position_ids([5, 6, 7, 3, 4]), [0, 3, 5]),
        (Segments.from_position_ids(torch.tensor([[0, 1], [2, 3]])), [0, 2, 4]),
        (Segments.from_segment_ids([7, 7, 1, 1, 7]), [0, 2, 4, 5]),
        (Segments.from_segment_ids(torch.tensor([[1, 1], [1, 2]])), [0, 2, 3, 4]),
        (Segments.from_segment_ids([]), [0]),
        (Segments.from_position_ids(torch.zeros(0, 3, dtype=torch.int64)), [0]),
        (Segments.from_position_ids(torch.tensor([255, 0], dtype=torch.uint8)), [0, 1, 2]),
    ],
)
def test_boundaries(segments: Segments, boundaries: list[int]) -> None:
    assert segments.cu_seqlens.tolist() == boundaries
    assert segments.cu_seqlens.dtype == torch.int64
    assert segments.count == len(boundaries) - 1
    assert str(boundaries[-1]) in repr(segments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Segments.from_cu_seqlens([1, 2]), "cu_seqlens must start at 0, got 1"),
        (lambda: Segments.from_cu_seqlens([0, 3, 2]), "cu_seqlens must not decrease, got 3 then 2 at index 1"),
        (lambda: Segments.from_cu_seqlens([]), "at least|>= 1 entries"),
        (lambda: Segments.from_cu_seqlens(torch.zeros(2, 2, dtype=torch.int64)), r"cu_seqlens must be 1-D .* got shape \[2, 2\]"),
        (
            lambda: Segments.from_cu_seqlens(torch.tensor([0.0, 2.0])),
            r"cu_seqlens must be an integer tensor, got torch.float32; convert it",
        ),
        (lambda: Segments.from_cu_seqlens(torch.tensor([False, True])), "got torch.bool; pass boundaries or ids, not a mask"),
        (lambda: Segments.from_cu_seqlens("abc"), "cu_seqlens must be integers, got 'abc'"),  # type: ignore[arg-type]
        (lambda: Segments.from_cu_seqlens(None), "cu_seqlens must be integers, got None"),  # type: ignore[arg-type]
        (lambda: Segments.from_lengths([2, -1]), "lengths must be >= 0, got -1"),
        (lambda: Segments.from_lengths([[2]]), "lengths must be 1-D"),  # type: ignore[list-item]
        (lambda: Segments.from_lengths([1.5]), "lengths must be an integer tensor"),  # type: ignore[list-item]
        (lambda: Segments.from_position_ids(torch.tensor(3)), r"position_ids must be \[N\] or \[B, T\], got shape \[\]"),
        (lambda: Segments.from_segment_ids(torch.zeros(1, 1, 1, dtype=torch.int8)), r"segment_ids must be \[N\] or \[B, T\]"),
    ],
)
def test_bad_descriptions(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        make()
    assert str(caught.value).startswith("Segments.from_")
    assert "; " in str(caught.value)


def test_boundaries_are_copied_to_a_device_once() -> None:
    segments = Segments.from_lengths([2, 3])
    device = torch.device("meta")
    assert segments.on(device) is segments.on(device)
    assert segments.on(torch.device("cpu")) is segments.cu_seqlens


def test_the_caller_may_reuse_the_boundaries() -> None:
    boundaries = torch.tensor([0, 2, 4])
    segments = Segments.from_cu_seqlens(boundaries)
    boundaries[1] = 3
    assert segments.cu_seqlens.tolist() == [0, 2, 4]


def test_the_value_after_a_padded_row_is_at_its_last_token() -> None:
    """A bootstrap per token stands at the row's last token, masked or not."""
    rewards = torch.tensor([[1.0, 2.0, 9.0]])
    bootstrap = torch.tensor([[7.0, 7.0, 4.0]])
    mask = torch.tensor([[1, 1, 0]])
    returns: Tensor = rlhf_scan.discounted_returns(rewards, gamma=0.5, mask=mask, bootstrap=bootstrap, backend="reference")
    assert returns.tolist() == [[1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 0]]


def test_batch_and_library_agree_on_what_a_segment_is() -> None:
    batch = Batch([0, 2, 0, 1], {}, {})
    assert batch.segment_of == [1, 1, 3]
    assert [batch.last(token) for token in range(3)] == [False, True, True]
