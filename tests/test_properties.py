"""Properties of any call, on every backend: as the oracle says, what must change no bit, and the algebra of the recurrence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of
from oracle import ORACLES, Flags, Floats, Number
from samples import Sample, assert_as_the_oracle, call, for_samples
from torch import Tensor

from rlhf_scan.estimators import estimator

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

each_op = pytest.mark.parametrize("op", sorted(ORACLES))
POISONS = (np.nan, np.inf, -np.inf, 1e38)


def assert_same_bits(sample: Sample, outputs: list[Tensor], others: list[Tensor]) -> None:
    for name, output, other in zip(estimator(sample.op).outputs, outputs, others, strict=True):
        assert torch.equal(output, other), f"{name}: {output} against {other}"


@each_op
def test_as_the_oracle(op: str, backend: str) -> None:
    def check(sample: Sample) -> None:
        assert_as_the_oracle(sample, sample.run(backend))

    for_samples(op, backend, check, examples=2)


@each_op
def test_pieces_and_threads_of_the_cpu_backend(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long segments are cut, here into pieces of 8 tokens, and pieces are shared out, which changes no bit."""
    monkeypatch.setattr("rlhf_scan.backends.cpu_backend.PIECE", 8)

    def check(sample: Sample) -> None:
        outputs = sample.run("cpu")
        assert_as_the_oracle(sample, outputs)
        with monkeypatch.context() as threads:
            threads.setattr("rlhf_scan.backends.cpu_backend.TOKENS_PER_THREAD", 4)
            threads.setattr(torch, "get_num_threads", lambda: 3)
            assert_same_bits(sample, outputs, sample.run("cpu"))

    for_samples(op, "cpu", check)


@each_op
def test_poison_changes_no_bit(op: str, backend: str) -> None:
    """Neither at masked tokens nor where nothing reads: rates of skipped tokens and empty segments, a bootstrap inside an episode."""

    def check(sample: Sample) -> None:
        clean = sample.run(backend)
        for poison in POISONS:
            assert_same_bits(sample, clean, poisoned(sample, poison).run(backend))

    for_samples(op, backend, check)


def poisoned(sample: Sample, poison: float) -> Sample:
    batch = sample.batch
    masked = np.zeros(batch.tokens, dtype=bool) if batch.mask is None else ~batch.mask
    empty = np.array(batch.lengths) == 0
    ORACLES[sample.op](batch)
    read = np.isin(np.arange(batch.tokens), list(batch.read))
    read_segments = np.zeros(len(batch.lengths), dtype=bool)
    read_segments[[batch.segment_of[token] for token in batch.read if batch.last(token)]] = True

    def at(where: Flags, numbers: Any) -> Any:
        return np.where(where, poison, numbers) if isinstance(numbers, np.ndarray) else numbers

    def unread(name: str, tokens: Flags, segments: Flags) -> Flags:
        return segments if name in batch.per_segment else tokens

    nowhere = np.zeros_like(masked)
    inputs = batch.inputs if batch.masked == "keep" else {name: at(masked, numbers) for name, numbers in batch.inputs.items()}
    skipped = masked if batch.masked == "skip" else nowhere
    rates = {name: at(unread(name, skipped, empty), rate) for name, rate in batch.rates.items()}
    return sample.changed(inputs=inputs, rates=rates, bootstrap=at(unread("bootstrap", ~read, ~read_segments), batch.bootstrap))


@each_op
def test_nan_at_a_trainable_token_spreads_no_further_than_the_recurrence(op: str, backend: str) -> None:
    """Where the oracle does not carry it, no bit changes; nor does a backend wait for ever for a carry that is NaN."""

    def check(sample: Sample) -> None:
        spoilt = with_nan(sample)
        for clean, output, numbers in zip(sample.run(backend), spoilt.run(backend), ORACLES[op](spoilt.batch), strict=True):
            beyond = torch.tensor([number.value == number.value for number in numbers], dtype=torch.bool)
            assert torch.equal(clean[beyond], output[beyond])

    for_samples(op, backend, check)


def with_nan(sample: Sample) -> Sample:
    """NaN at the token in the middle, in every input and rate, and in the rates of its segment."""
    batch = sample.batch
    if not batch.tokens:
        return sample
    token = batch.tokens // 2

    def spoilt(name: str, numbers: Any) -> Any:
        if isinstance(numbers, np.ndarray):
            numbers = numbers.copy()
            numbers[batch.segment_of[token] if name in batch.per_segment else token] = np.nan
        return numbers

    inputs = {name: spoilt(name, numbers) for name, numbers in batch.inputs.items()}
    return sample.changed(inputs=inputs, rates={name: spoilt(name, rate) for name, rate in batch.rates.items()})


@each_op
def test_a_second_run_gives_the_same_bits_and_inputs_are_not_written(op: str, backend: str) -> None:
    def check(sample: Sample) -> None:
        inputs, options = sample.arguments(device_of(backend))
        tensors = [value for value in (*inputs, *options.values()) if isinstance(value, Tensor)]
        before = [(tensor.clone(), tensor._version) for tensor in tensors]
        first = call(op, inputs, {**options, "backend": backend})
        assert_same_bits(sample, first, call(op, inputs, {**options, "backend": backend}))
        for tensor, (copy, version) in zip(tensors, before, strict=True):
            assert torch.equal(tensor, copy)
            assert tensor._version == version

    for_samples(op, backend, check)


@each_op
def test_strides_change_no_bit(op: str, backend: str) -> None:
    def check(sample: Sample) -> None:
        inputs, options = sample.arguments(device_of(backend))
        strided = {name: every_other(value) if isinstance(value, Tensor) else value for name, value in options.items()}
        outputs = call(op, [every_other(tensor) for tensor in inputs], {**strided, "backend": backend})
        assert_same_bits(sample, call(op, inputs, {**options, "backend": backend}), outputs)

    for_samples(op, backend, check)


def every_other(tensor: Tensor) -> Tensor:
    """The same numbers in a view with gaps; a matrix also lies column by column."""
    spread = torch.full((*tensor.shape[::-1], 2), 77, dtype=torch.float64, device=tensor.device).to(tensor.dtype)
    view = spread[..., 0].permute(*reversed(range(tensor.dim())))
    view.copy_(tensor)
    return view


@each_op
def test_expanded_inputs(op: str, backend: str) -> None:
    """Stride 0 along rows and along tokens."""
    entry, device = estimator(op), device_of(backend)
    rows = [torch.linspace(-1, 1, 5, device=device).expand(3, 5)] + [torch.ones(1, 1, device=device).expand(3, 5) for _ in entry.inputs[1:]]
    mask = torch.tensor([1, 1, 0, 1, 1], device=device).expand(3, 5)
    ends = torch.tensor([0.5], device=device).expand(3)
    copies = [row.contiguous() for row in rows]
    outputs = call(op, rows, {"mask": mask, "bootstrap": ends, "backend": backend})
    for output, copied in zip(
        outputs, call(op, copies, {"mask": mask.clone(), "bootstrap": ends.clone(), "backend": backend}), strict=True
    ):
        assert torch.equal(output, copied)
        assert torch.isfinite(output).all()


@each_op
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (0, 0)])
def test_zero_size_inputs(op: str, backend: str, shape: tuple[int, ...]) -> None:
    entry = estimator(op)
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device=device_of(backend)) for _ in entry.inputs]
    mask = torch.ones(shape, device=device_of(backend))
    outputs = call(op, inputs, {"mask": mask, "backend": backend})
    assert [(output.numel(), output.dtype) for output in outputs] == [(0, torch.bfloat16)] * len(entry.outputs)


@each_op
def test_scaling_by_a_power_of_two_is_exact(op: str, backend: str) -> None:
    def check(sample: Sample) -> None:
        batch = sample.batch
        scaled = sample.changed(
            inputs={name: 8 * numbers for name, numbers in batch.inputs.items()},
            bootstrap=None if batch.bootstrap is None else 8 * batch.bootstrap,
        )
        assert_same_bits(sample, [8 * output for output in sample.run(backend)], scaled.run(backend))

    for_samples(op, backend, check, examples=0.5, dtypes=(torch.float32, torch.float64, torch.bfloat16))


@each_op
def test_linear_in_rewards(op: str, backend: str) -> None:
    """One batch's result plus another's, with the values and bootstrap in one of them, is the result of the sum of their rewards."""

    def check(sample: Sample) -> None:
        batch = sample.batch
        zeros = {name: np.zeros_like(numbers) for name, numbers in batch.inputs.items()}
        extra = np.sin(np.arange(batch.tokens)).astype(np.float32).astype(np.float64)
        total = (batch.inputs["rewards"] + extra).astype(np.float64)
        parts = [sample, sample.changed(inputs={**zeros, "rewards": extra}, bootstrap=None)]
        whole = sample.changed(inputs={**batch.inputs, "rewards": total})
        assert_sum(whole, parts, backend)

    for_samples(op, backend, check, examples=0.5, dtypes=(torch.float64,))


def assert_sum(whole: Sample, parts: list[Sample], backend: str) -> None:
    results = [part.run(backend) for part in parts]
    bounds = [ORACLES[part.op](part.batch) for part in (whole, *parts)]
    for index, output in enumerate(whole.run(backend)):
        allowed = sum(errors(bound[index]) for bound in bounds)
        difference = (output - sum(result[index] for result in results)).abs().numpy()
        assert (difference <= allowed).all(), difference - allowed


def errors(numbers: list[Number]) -> Floats:
    return np.array([number.error(2.0**-53, len(numbers)) for number in numbers])


def test_lambda_one_is_the_discounted_return(backend: str) -> None:
    """With lambda 1 the values telescope: returns are the discounted returns, advantages those minus V."""

    def check(sample: Sample) -> None:
        limit = sample.changed(rates={**sample.batch.rates, "lam": 1.0, "lam_value": None})
        as_returns = replace(
            limit, op="discounted_returns", batch=replace(limit.batch, inputs={"rewards": limit.batch.inputs["rewards"]})
        ).changed(rates={"gamma": limit.batch.rates["gamma"]})
        allowed = errors(ORACLES["gae"](limit.batch)[1]) + errors(ORACLES["discounted_returns"](as_returns.batch)[0])
        advantages, returns = limit.run(backend)
        assert ((returns - as_returns.run(backend)[0]).abs().numpy() <= allowed).all()
        live = np.array([limit.batch.live(token) for token in range(limit.batch.tokens)], dtype=bool)
        difference = (advantages - returns).numpy() + np.where(live, limit.batch.inputs["values"], 0)
        assert (np.abs(difference) <= allowed).all()

    for_samples("gae", backend, check, dtypes=(torch.float64,))


def test_lambda_zero_is_the_one_step_error(backend: str) -> None:
    def check(sample: Sample) -> None:
        batch = sample.changed(rates={**sample.batch.rates, "lam": 0.0}).batch
        limit = replace(sample, batch=batch)
        rewards, values = batch.inputs["rewards"], batch.inputs["values"]
        advantages = limit.run(backend)[0].numpy()
        for token in range(batch.tokens - 1):
            inside = not batch.last(token) and batch.live(token) and batch.live(token + 1)
            if inside and not batch.flag("terminated", token) and not batch.flag("truncated", token):
                gamma = batch.rate("gamma", token).value
                assert advantages[token] == pytest.approx(rewards[token] + gamma * values[token + 1] - values[token], rel=1e-14, abs=1e-14)

    for_samples("gae", backend, check, dtypes=(torch.float64,))


def test_the_second_lambda_is_a_second_pass(backend: str) -> None:
    """Advantages do not know of lam_value; the returns are the bits that lam=lam_value alone gives."""

    def check(sample: Sample) -> None:
        rates = sample.batch.rates
        if rates["lam_value"] is None:
            rates = {**rates, "lam_value": 0.5}
        swapped = frozenset({"lam" if name == "lam_value" else name for name in sample.batch.per_segment - {"lam"}})
        both = sample.changed(rates=rates)
        first = both.changed(rates={**rates, "lam_value": None})
        second = both.changed(rates={**rates, "lam": rates["lam_value"], "lam_value": None}, per_segment=swapped)
        advantages, returns = both.run(backend)
        assert torch.equal(advantages, first.run(backend)[0])
        assert torch.equal(returns, second.run(backend)[1])

    for_samples("gae", backend, check)
