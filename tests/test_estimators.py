"""Every estimator beside GAE and returns, on every backend, against the oracle; and what must change no bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of
from estimator_oracle import ORACLES, Array, Case
from estimator_samples import DTYPES, arguments, assert_as_the_oracle, outputs_of, run, sample
from torch import Tensor

import rlhf_scan
from rlhf_scan import CreditRequest, InputError, LocalEngine, Segments
from rlhf_scan.estimators import estimator, served

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

each_op = pytest.mark.parametrize("op", ORACLES)
SAMPLES = {"reference": 80, "cpu": 120, "triton": 16}  # the interpreter takes some 80 us per element and scan
POISONS = (math.nan, math.inf, -math.inf)


def assert_same_bits(outputs: list[Tensor], others: list[Tensor], label: str) -> None:
    for output, other in zip(outputs, others, strict=True):
        assert torch.equal(output, other), f"{label}: {output} against {other}"


def test_every_estimator_has_an_oracle() -> None:
    assert {entry.name for entry in served()} == {"gae", "discounted_returns", *ORACLES}


@each_op
def test_as_the_oracle(op: str, backend: str) -> None:
    for seed in range(SAMPLES[backend]):
        case, layout, dtype = sample(op, seed)
        assert_as_the_oracle(op, case, dtype, run(op, case, layout, dtype, backend), f"seed {seed}, {layout}, {dtype}")


@pytest.mark.parametrize("op", ["lambda_returns", "retrace", "eligibility_traces"])
def test_long_segments_are_swept_in_pieces(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU backend cuts a long segment; here into pieces of 8 tokens."""
    monkeypatch.setattr("rlhf_scan.backends.cpu_backend.PIECE", 8)
    for seed in range(1000, 1060):
        case, layout, dtype = sample(op, seed, dtype=torch.float32)
        assert_as_the_oracle(op, case, dtype, run(op, case, layout, dtype, "cpu"), f"seed {seed}, {layout}, {dtype}")


def only(case: Case, segment: int) -> Case:
    """One segment of a pack."""
    return chosen(case, [segment])


def chosen(case: Case, segments: list[int]) -> Case:
    """Some segments of a pack, in that order."""
    starts = np.cumsum([0, *case.lengths])
    tokens = [token for segment in segments for token in range(starts[segment], starts[segment + 1])]

    def part(name: str, numbers: Any) -> Any:
        if not isinstance(numbers, np.ndarray):
            return numbers
        return numbers[segments] if name in case.per_segment else numbers[tokens]

    return replace(
        case,
        lengths=[case.lengths[segment] for segment in segments],
        inputs={name: part(name, numbers) for name, numbers in case.inputs.items()},
        rates={name: part(name, numbers) for name, numbers in case.rates.items()},
        **{name: part(name, getattr(case, name)) for name in ("mask", "terminated", "truncated", "end")},
    )


@each_op
def test_neither_order_nor_neighbours_nor_layout_change_a_bit(op: str, backend: str) -> None:
    """A segment alone, in a pack, in the pack turned round, and beside neighbours of NaN has the same bits."""
    for seed in range(2000, 2000 + SAMPLES[backend] // 4):
        case, layout, dtype = sample(op, seed)
        packed = run(op, case, "pack", dtype, backend)
        assert_same_bits(packed, run(op, case, layout, dtype, backend), f"seed {seed}, {layout}")
        starts = np.cumsum([0, *case.lengths])
        turned = chosen(case, list(reversed(range(len(case.lengths)))))
        backward = run(op, turned, "pack", dtype, backend)
        for segment in range(len(case.lengths)):
            start, stop = starts[segment], starts[segment + 1]
            mine = [output[start:stop] for output in packed]
            label = f"seed {seed}, segment {segment}"
            assert_same_bits(mine, run(op, only(case, segment), "one", dtype, backend), label)
            assert_same_bits(mine, [output[case.tokens - stop : case.tokens - start] for output in backward], label)
            if backend != "triton" or segment == 0:
                beside = replace(case, inputs={name: spoil(name, numbers, slice(start, stop)) for name, numbers in case.inputs.items()})
                assert_same_bits(mine, [output[start:stop] for output in run(op, beside, "pack", dtype, backend)], label)


def garbage(name: str, poison: float = math.nan) -> float:
    """What may stand where an input is not read: of actions, which are integers, one that there is not."""
    return poison if name != "actions" else -100.0 if math.isnan(poison) else math.copysign(2.0**40, poison)


def spoil(name: str, numbers: Array, but: slice) -> Array:
    spoilt = np.full_like(numbers, garbage(name))
    spoilt[but] = numbers[but]
    return spoilt


@each_op
def test_right_padding_changes_no_bit(op: str, backend: str) -> None:
    """Rows filled up with masked tokens, or for a running sum with tokens after the end, hold the bits of the pack."""
    for seed in range(3000, 3000 + SAMPLES[backend] // 4):
        case, _, dtype = sample(op, seed)
        case = replace(case, masked="skip", mask=None if "mask" not in estimator(op).takes else np.ones(case.tokens, dtype=bool))
        width, rows = max(case.lengths) + 3, len(case.lengths)
        places = [row * width + place for row, length in enumerate(case.lengths) for place in range(length)]

        def padded(name: str, numbers: Any, case: Case = case, places: list[int] = places, size: int = width * rows) -> Any:
            if not isinstance(numbers, np.ndarray) or name in case.per_segment:
                return numbers
            filled = np.full((size, *numbers.shape[1:]), garbage(name)) if numbers.dtype == np.float64 else np.zeros(size, dtype=bool)
            filled[places] = numbers
            return filled

        # Truncation at the last token says what the end of the pack's segment says; in a longer row it would ask for another bootstrap.
        last = np.array([case.last(token) for token in range(case.tokens)], dtype=bool)
        if {"terminated", "truncated"} & case.per_segment:
            continue
        if case.end is not None and "end" not in case.per_segment:
            continue  # a bootstrap per token stands at the last token, which is now a padded one
        wide = replace(
            case,
            lengths=[width] * rows,
            inputs={name: padded(name, numbers) for name, numbers in case.inputs.items()},
            rates={name: padded(name, numbers) for name, numbers in case.rates.items()},
            mask=padded("mask", case.mask),
            terminated=padded("terminated", case.terminated),
            truncated=padded("truncated", case.truncated if case.truncated is None else case.truncated & ~last),
        )
        packed = run(op, case, "pack", dtype, backend)
        assert_same_bits(packed, [output[places] for output in run(op, wide, "rows", dtype, backend)], f"seed {seed}")


@each_op
def test_poison_changes_no_bit(op: str, backend: str) -> None:
    """Neither at masked tokens nor where nothing is read: a bootstrap inside an episode, E[Q] after its end, an action of probability 0 or not taken,
    a bar of the trace where no trace passes."""
    for seed in range(4000, 4000 + SAMPLES[backend] // 4):
        case, layout, dtype = sample(op, seed)
        clean = run(op, case, layout, dtype, backend)
        for poison in POISONS:
            assert_same_bits(clean, run(op, poisoned(case, poison), layout, dtype, backend), f"seed {seed}, {poison}")


def poisoned(case: Case, poison: float) -> Case:
    masked = np.array([not case.live(token) for token in range(case.tokens)], dtype=bool)
    terminated = np.array([case.cut_after(token) == "terminated" for token in range(case.tokens)], dtype=bool)
    truncated = np.array([case.cut_after(token) == "truncated" for token in range(case.tokens)], dtype=bool)
    empty = np.array(case.lengths) == 0
    inputs = dict(case.inputs)
    if case.masked != "keep":
        inputs = {name: np.where(masked if x.ndim == 1 else masked[:, None], garbage(name, poison), x) for name, x in inputs.items()}
    if "expected_next_q" in inputs:
        inputs["expected_next_q"] = np.where(terminated, poison, inputs["expected_next_q"])
    if "next_q" in inputs:
        inputs["next_q"] = np.where((case.inputs["target_probs"] == 0) | terminated[:, None], poison, inputs["next_q"])
    if "policy_probs" in inputs:
        others = np.arange(inputs["policy_probs"].shape[1]) != case.inputs["actions"][:, None]
        inputs["policy_probs"] = np.where(others, poison, inputs["policy_probs"])
    rates: dict[str, Any] = dict(case.rates)
    for name, rate in rates.items():
        unread = empty if name in case.per_segment else masked & (case.masked == "skip")
        if name not in case.per_segment and name in ("c_bar", "lam") and "behavior_logprobs" in inputs:
            unread = ~through_traces(case, name == "c_bar" and "q_values" in inputs)
        rates[name] = np.where(unread, poison, rate) if isinstance(rate, np.ndarray) else rate
    end = case.end
    if end is not None:
        end = np.where(empty if "end" in case.per_segment else ~truncated, poison, end)
    return replace(case, inputs=inputs, rates=rates, end=end)


def through_traces(case: Case, following: bool) -> Array:
    """The steps that a trace leaves backward, or `following` those that it comes from."""
    found = np.zeros(case.tokens, dtype=bool)
    for token in case.backward():
        cut, source = case.follows(token)
        if cut is None:
            found[source if following else token] = True
    return found


@each_op
def test_a_second_run_gives_the_same_bits_and_inputs_are_not_written(op: str, backend: str) -> None:
    inputs = arguments(op, (3, 7), backend)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    first, second = ([output.clone() for output in outputs_of(op, inputs, backend)] for _ in range(2))
    assert_same_bits(first, second, op)
    assert all(torch.equal(tensor, before[name]) for name, tensor in inputs.items())
    turned = {name: tensor.transpose(0, 1).contiguous().transpose(0, 1) for name, tensor in inputs.items()}
    assert_same_bits(first, outputs_of(op, turned, backend), "strides")
    expanded = {name: tensor[:1].expand_as(tensor) for name, tensor in inputs.items()}
    copied = {name: tensor.contiguous() for name, tensor in expanded.items()}
    assert_same_bits(outputs_of(op, copied, backend), outputs_of(op, expanded, backend), "expanded")


@each_op
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (0, 0)])
def test_zero_size(op: str, shape: tuple[int, ...], backend: str) -> None:
    outputs = outputs_of(op, arguments(op, shape, backend, torch.bfloat16), backend)
    assert [(output.shape, output.dtype) for output in outputs] == [(shape, torch.bfloat16)] * len(estimator(op).outputs)


@each_op
def test_only_empty_segments(op: str, backend: str) -> None:
    end = estimator(op).end_name
    options = {"segments": Segments.from_lengths([0, 0])} | ({end: torch.ones(2, device=device_of(backend))} if end else {})
    assert all(output.shape == (0,) for output in outputs_of(op, arguments(op, (0,), backend), backend, **options))


@each_op
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_outputs(op: str, dtype: torch.dtype, backend: str) -> None:
    """Those of the inputs, the widest of mixed ones, or the one asked for."""
    inputs = arguments(op, (2, 3), backend, dtype)
    assert {output.dtype for output in outputs_of(op, inputs, backend)} == {dtype}
    assert {output.dtype for output in outputs_of(op, inputs, backend, dtype=torch.bfloat16)} == {torch.bfloat16}
    first = estimator(op).inputs[0]
    wider = {**inputs, first: inputs[first].float()}
    assert {output.dtype for output in outputs_of(op, wider, backend)} == {
        torch.promote_types(dtype, torch.float32) if len(inputs) > 1 else torch.float32
    }


@each_op
def test_outputs_know_nothing_of_autograd(op: str, backend: str) -> None:
    inputs = {name: tensor.requires_grad_() for name, tensor in arguments(op, (2, 3), backend).items()}
    assert not any(output.requires_grad for output in outputs_of(op, inputs, backend))


def test_what_is_not_taken_is_refused() -> None:
    zeros = torch.zeros(3)
    with pytest.raises(TypeError, match="bootstrap"):
        rlhf_scan.retrace(zeros, zeros, zeros, zeros, zeros, bootstrap=zeros)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"^retrace: tensor names must be among .*got 'bootstrap'"):
        LocalEngine("reference").run(CreditRequest("retrace", {"rewards": zeros, "bootstrap": zeros}))
    with pytest.raises(InputError, match=r"^episodic_cumsum: boundary must be one of .*got 'at'"):
        rlhf_scan.episodic_cumsum(zeros, boundary="at")
    with pytest.raises(InputError, match=r"^eligibility_traces: initial must have shape \[1\], got \[3\]; pass one entry per segment"):
        rlhf_scan.eligibility_traces(zeros, initial=zeros)
    with pytest.raises(InputError, match=r"^vtrace: rho_bar must lie in \[0, inf\], got -1"):
        rlhf_scan.vtrace(zeros, zeros, zeros, zeros, rho_bar=-1.0)
    with pytest.raises(
        InputError, match=r"^retrace_from_policy: target_probs must have shape \[3, 2\] to match rewards and next_q, got \[3, 4\]"
    ):
        rlhf_scan.retrace_from_policy(zeros, zeros, torch.zeros(3, 2), torch.zeros(3, 4), zeros, zeros)
