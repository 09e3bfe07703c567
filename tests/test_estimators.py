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
from estimator_samples import DTYPES, assert_as_the_oracle, run, sample
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
                beside = replace(case, inputs={name: spoil(numbers, slice(start, stop)) for name, numbers in case.inputs.items()})
                assert_same_bits(mine, [output[start:stop] for output in run(op, beside, "pack", dtype, backend)], label)


def spoil(numbers: Array, but: slice) -> Array:
    spoilt = np.full_like(numbers, math.nan)
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
            filled = np.full((size, *numbers.shape[1:]), math.nan) if numbers.dtype == np.float64 else np.zeros(size, dtype=bool)
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
    """Neither at masked tokens nor where nothing is read: a bootstrap inside an episode, E[Q] after its end, an action of probability 0."""
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
        inputs = {name: np.where(masked if numbers.ndim == 1 else masked[:, None], poison, numbers) for name, numbers in inputs.items()}
    if "expected_next_q" in inputs:
        inputs["expected_next_q"] = np.where(terminated, poison, inputs["expected_next_q"])
    if "next_q" in inputs:
        inputs["next_q"] = np.where((case.inputs["target_probs"] == 0) | terminated[:, None], poison, inputs["next_q"])
    rates: dict[str, Any] = dict(case.rates)
    for name, rate in rates.items():
        unread = empty if name in case.per_segment else masked & (case.masked == "skip")
        rates[name] = np.where(unread, poison, rate) if isinstance(rate, np.ndarray) else rate
    end = case.end
    if end is not None:
        end = np.where(empty if "end" in case.per_segment else ~truncated, poison, end)
    return replace(case, inputs=inputs, rates=rates, end=end)


@each_op
def test_a_second_run_gives_the_same_bits_and_inputs_are_not_written(op: str, backend: str) -> None:
    inputs = arguments(op, (3, 7), backend)
    before = [tensor.clone() for tensor in inputs]
    first, second = ([output.clone() for output in outputs_of(op, inputs, backend)] for _ in range(2))
    assert_same_bits(first, second, op)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, before, strict=True))
    turned = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in inputs]
    assert_same_bits(first, outputs_of(op, turned, backend), "strides")
    expanded = [tensor[:1].expand_as(tensor) for tensor in inputs]
    assert_same_bits(outputs_of(op, [tensor.contiguous() for tensor in expanded], backend), outputs_of(op, expanded, backend), "expanded")


def arguments(op: str, shape: tuple[int, ...], backend: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    entry, random = estimator(op), torch.Generator().manual_seed(3)
    shapes = [(*shape, 4) if name in (entry.expectation or ()) else shape for name in entry.arguments]
    return [torch.rand(size, generator=random).to(dtype).to(device_of(backend)) for size in shapes]


def outputs_of(op: str, inputs: list[Tensor], backend: str, **options: Any) -> list[Tensor]:
    found = getattr(rlhf_scan, op)(*inputs, backend=backend, **options)
    return [found] if isinstance(found, Tensor) else list(found)


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
    wider = [inputs[0].float(), *inputs[1:]]
    assert {output.dtype for output in outputs_of(op, wider, backend)} == {
        torch.promote_types(dtype, torch.float32) if len(inputs) > 1 else torch.float32
    }


@each_op
def test_outputs_know_nothing_of_autograd(op: str, backend: str) -> None:
    inputs = [tensor.requires_grad_() for tensor in arguments(op, (2, 3), backend)]
    assert not any(output.requires_grad for output in outputs_of(op, inputs, backend))


@pytest.mark.parametrize("op", ["vtrace", "retrace", "retrace_from_policy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_finite_log_probability_makes_a_ratio_infinite(op: str, dtype: torch.dtype, backend: str) -> None:
    """Not even the largest: log-ratios are cut at 20, and the ratio of an action that the new policy never takes is 0."""
    largest = torch.finfo(dtype).max
    targets = torch.tensor([largest, largest, -largest, 20.5, 0.0, -math.inf], dtype=dtype, device=device_of(backend))
    behavior = torch.tensor([-largest, 0.0, largest, 0.0, largest, 0.0], dtype=dtype, device=device_of(backend))
    ones = [tensor.fill_(1) for tensor in arguments(op, (6,), backend, dtype)[:-2]]
    outputs = outputs_of(op, [*ones, behavior, targets], backend, rho_bar=math.inf, c_bar=1.0, gamma=0.5, dtype=torch.float64)
    assert all(torch.isfinite(output).all() for output in outputs)
    advantages = outputs[1].tolist()
    assert advantages[2] == advantages[4] == advantages[5] == 0
    assert abs(advantages[0]) <= math.exp(2 * 20) * 20


@pytest.mark.parametrize("op", ["vtrace", "retrace", "retrace_from_policy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reports_count_the_ratios_that_were_cut(op: str, dtype: torch.dtype) -> None:
    """In the arithmetic in which they are formed: 24.125 - 4.0625 passes 20, though in bfloat16 that difference is 20."""
    entry = estimator(op)
    tensors = dict(zip(entry.arguments, arguments(op, (6,), "reference", dtype), strict=True))
    tensors["target_logprobs"] = torch.tensor([0.0, 21.0, 30.0, 25.0, 24.125, 24.0], dtype=dtype)
    tensors["behavior_logprobs"] = torch.tensor([0.0, 0.0, 0.0, 10.0, 4.0625, 4.0], dtype=dtype)
    tensors["mask"] = torch.tensor([1, 1, 0, 1, 1, 1])
    assert LocalEngine("reference").run(CreditRequest(op, tensors)).report["log_ratios_cut"] == 2


@pytest.mark.parametrize("actions", [1, 3, 64, 1000, 1024])
def test_expected_values_of_many_actions(actions: int, backend: str) -> None:
    """E[Q] from the policy gives what `retrace` makes of the same expectation, taken in float64."""
    rewards, q_values, _, behavior, target = arguments("retrace", (9,), backend)
    random = torch.Generator().manual_seed(1)
    next_q = torch.randn(9, actions, generator=random).to(rewards.device)
    probabilities = torch.softmax(4 * torch.randn(9, actions, generator=random), 1).to(rewards.device)
    expected = (next_q.double() * probabilities.double()).sum(1)
    exact = rlhf_scan.retrace(rewards, q_values, expected.to(rewards.device), behavior, target, backend="reference", dtype=torch.float64)
    found = rlhf_scan.retrace_from_policy(rewards, q_values, next_q, probabilities, behavior, target, backend=backend)
    # Each product and each sum rounds once, all terms are below 4 in magnitude and weigh 1 in all; nine tokens carry it on.
    allowed = 9 * (math.log2(actions + 1) + actions / 16 + 20) * 2.0**-24 * 4
    for got, true in zip(found, exact, strict=True):
        assert (got.double() - true).abs().max() <= allowed


@each_op
def test_full_validation_names_the_token(op: str) -> None:
    inputs = arguments(op, (4,), "reference")
    inputs[0][2] = math.nan
    with pytest.raises(InputError, match=rf"^{op}: {estimator(op).arguments[0]} must be finite at trainable tokens, got nan at token 2"):
        outputs_of(op, inputs, "reference", validate="full")


@pytest.mark.parametrize("op", ["eligibility_traces", "episodic_cumsum"])
def test_full_validation_of_the_initial_value(op: str) -> None:
    """It is read before the segment's first token, whatever is flagged at its last; not in an empty segment."""
    inputs, segments = arguments(op, (3,), "reference"), Segments.from_lengths([2, 0, 1])
    ends = torch.tensor([0, 1, 1])
    fine = torch.tensor([1.0, math.nan, 2.0])
    outputs_of(op, inputs, "reference", validate="full", segments=segments, initial=fine, terminated=ends)
    for segment in (0, 2):
        bad = fine.clone()
        bad[segment] = math.inf
        with pytest.raises(InputError, match=rf"^{op}: initial must be finite.*got inf at segment {segment}"):
            outputs_of(op, inputs, "reference", validate="full", segments=segments, initial=bad, terminated=ends)


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
