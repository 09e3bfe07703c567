"""What `ppo_advantages` must never do: see a neighbour, padding or poison, depend on the order of rows, or let one bad sequence spoil a batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from conftest import device_of
from ppo_samples import OUTPUTS, bounds_of, expected, on_device, random_call, random_options, run
from torch import Tensor

from rlhf_scan import PPOAdvantages, Segments, ppo_advantages

CASES = {"reference": 15, "cpu": 25, "triton": 5}
FLAGS = [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16]
PER_TOKEN = ("logprobs", "ref_logprobs", "values", "rewards", "mask", "attention_mask")
POISON = (float("nan"), float("inf"), -float("inf"), 1e30)
OFF = {"whiten_rewards": "off", "whiten_advantages": "off"}


def same(got: Tensor, want: Tensor, exact: bool = True) -> None:
    torch.testing.assert_close(got, want, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-4, equal_nan=True)


def outputs_of(result: PPOAdvantages) -> list[Tensor]:
    return [getattr(result, name) for name in OUTPUTS]


def random_rows(rng: random.Random, rows: int, width: int) -> dict[str, Any]:
    """Rows with a tool answer here and there, padded to the right."""
    seed = torch.Generator().manual_seed(rng.randrange(1 << 30))
    lengths = torch.tensor([rng.randint(1, width - 1) for _ in range(rows)])
    real = torch.arange(width) < lengths[:, None]
    call: dict[str, Any] = {name: torch.randn(rows, width, generator=seed) for name in ("logprobs", "ref_logprobs", "values", "rewards")}
    call |= {"scores": torch.randn(rows, generator=seed), "bootstrap": torch.randn(rows, generator=seed)}
    call |= {"mask": real & (torch.rand(rows, width, generator=seed) < 0.8), "attention_mask": real}
    return call | {"has_eos": torch.rand(rows, generator=seed) < 0.5, "terminated": torch.rand(rows, generator=seed) < 0.5}


def picked(call: dict[str, Any], order: Any) -> dict[str, Any]:
    return {name: value[order] for name, value in call.items()}


def test_a_sequence_does_not_see_its_neighbours(backend: str) -> None:
    rng = random.Random(1)
    for _ in range(CASES[backend]):
        call, options = on_device(random_rows(rng, 4, 9), backend), random_options(rng) | OFF
        together = outputs_of(run(call, options, backend=backend))
        for row in range(4):
            for mine, alone in zip(together, outputs_of(run(picked(call, [row]), options, backend=backend)), strict=True):
                same(mine[row : row + 1], alone)


def test_whitening_is_all_that_neighbours_do(backend: str) -> None:
    rng = random.Random(2)
    for _ in range(CASES[backend]):
        call, options = on_device(random_rows(rng, 4, 9), backend), random_options(rng) | {"whiten_rewards": "off"}
        plain = run(call, options | OFF, backend=backend).advantages.cpu()
        for neighbours in ([0, 1, 2, 3], [0, 1, 3]):
            some = picked(call, neighbours)
            whitened = run(some, options | {"whiten_advantages": "unbiased"}, backend=backend).advantages.cpu()
            live = some["mask"].cpu()
            x = plain[neighbours][live].double()
            if len(x) > 1:
                same(whitened[live].double(), (x - x.mean()) / (x.var() + 1e-8).sqrt(), exact=False)


def test_padding_and_layout_change_nothing(backend: str) -> None:
    rng = random.Random(3)
    for _ in range(CASES[backend]):
        call, options = random_rows(rng, 4, 9), random_options(rng) | OFF
        lengths = (call["attention_mask"].sum(1) + 1).tolist()  # with the slot after the last token
        kept = torch.arange(9) < torch.tensor(lengths)[:, None]
        wide = {name: torch.nn.functional.pad(value, (0, 7)) if name in PER_TOKEN else value for name, value in call.items()}
        pack = {name: value[kept] if name in PER_TOKEN else value for name, value in call.items()}
        want = outputs_of(run(on_device(call, backend), options, backend=backend))
        padded = run(on_device(wide, backend), options, backend=backend)
        packed = run(on_device(pack, backend), options, segments=Segments.from_lengths(lengths), backend=backend)
        for mine, one, other in zip(want, outputs_of(padded), outputs_of(packed), strict=True):
            same(one[:, :9], mine)
            assert not one[:, 9:].any()
            same(other, mine[kept.to(mine.device)])


@pytest.mark.parametrize("poison", POISON)
def test_what_stands_at_masked_tokens_changes_nothing(backend: str, poison: float) -> None:
    rng = random.Random(4)
    for _ in range(CASES[backend]):
        packed = rng.random() < 0.5
        call, options = random_call(rng, packed=packed), random_options(rng)
        if "mask" not in call or not call["mask"].numel():
            continue
        unread = call["mask"] == 0
        if options["masked"] == "keep":  # tokens up to the end of a sequence are read, and a pack has no padding
            unread &= call["attention_mask"] == 0 if "attention_mask" in call else torch.zeros_like(unread)
        clean = run(on_device(call, backend), options, backend=backend)
        spoilt = {name: torch.where(unread, poison, value) if name in PER_TOKEN[:4] else value for name, value in call.items()}
        if options["score_at"] == "post_eos":  # the slot's value is read
            at = clean.report.score_tokens.cpu()
            for (start, _), token in zip(bounds_of(call), at.tolist(), strict=True):
                if token >= 0:
                    spoilt["values"].flatten()[start + token] = call["values"].flatten()[start + token]
        dirty = run(on_device(spoilt, backend), options, backend=backend)
        for mine, other in zip(outputs_of(clean), outputs_of(dirty), strict=True):
            same(other, mine)
        assert dict(dirty.report) == dict(clean.report)


def test_rows_in_any_order(backend: str) -> None:
    rng = random.Random(5)
    for _ in range(CASES[backend]):
        call, options = on_device(random_rows(rng, 5, 9), backend), random_options(rng)
        order = rng.sample(range(5), 5)
        whitens = options["whiten_rewards"] != "off" or options["whiten_advantages"] != "off"
        want, got = (outputs_of(run(each, options, backend=backend)) for each in (call, picked(call, order)))
        for mine, other in zip(want, got, strict=True):
            same(other, mine[order], exact=not whitens)


def test_every_flag_dtype_and_stride_means_the_same(backend: str) -> None:
    rng = random.Random(6)
    call, options = random_rows(rng, 4, 9), random_options(rng)
    want = outputs_of(run(on_device(call, backend), options, backend=backend))
    for dtype in FLAGS:
        other = {
            name: value.to(dtype) if value.dtype == torch.bool else value.t().contiguous().t()
            for name, value in call.items()
            if value.dim()
        }
        before = {name: value.clone() for name, value in other.items()}
        for mine, one in zip(want, outputs_of(run(on_device(other, backend), options, backend=backend)), strict=True):
            same(one, mine)
        assert all(torch.equal(other[name], before[name]) for name in other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    rng = random.Random(7)
    for _ in range(max(3, CASES[backend] // 3)):
        call, options = random_call(rng, packed=rng.random() < 0.5, dtype=dtype), random_options(rng)
        got, want = run(on_device(call, backend), options, backend=backend), expected(call, options)
        for name in OUTPUTS:
            found = getattr(got, name)
            assert found.dtype == dtype
            # Half-precision outputs are rounded once; the interpreter truncates them.
            bound = 1e-9 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
            scale = max(1.0, float(want[name].abs().max()) if want[name].numel() else 1.0)
            torch.testing.assert_close(found.double().flatten().cpu(), want[name], rtol=0, atol=bound * scale)
        assert run(on_device(call, backend), options, backend=backend, dtype=torch.float32).advantages.dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_nothing_in_nothing_out(backend: str, shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape, device=device_of(backend))
    for options in ({}, {"preset": "trl"}, {"preset": "openrlhf", "nonfinite": "drop", "whiten_rewards": True}):
        result = ppo_advantages(empty, empty, empty, empty.new_zeros(shape[0]), mask=empty, backend=backend, **options)
        assert all(output.shape == shape for output in outputs_of(result))
        assert (result.report["tokens"], result.report["sequences"]) == (0, shape[0])
    segments = Segments.from_lengths([0] * shape[0])
    one = torch.zeros(0, device=device_of(backend))
    assert ppo_advantages(one, one, one, empty.new_zeros(shape[0]), segments=segments, backend=backend).advantages.shape == (0,)


BAD = ("logprobs", "ref_logprobs", "values", "rewards", "scores", "bootstrap")


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(("poison", "score_at"), [(float("nan"), "last"), (-float("inf"), "post_eos")])
def test_a_bad_sequence_spoils_no_other(backend: str, name: str, poison: float, score_at: str) -> None:
    rng = random.Random(8)
    call = random_rows(rng, 4, 9) | {"terminated": torch.zeros(4)}
    call["mask"][2] = torch.arange(9) < 5
    call["attention_mask"][2] = torch.arange(9) < 6
    options = random_options(rng) | {"masked": "skip", "kl_at": "trainable", "trailing": "carry_back", "score_at": score_at}
    options |= {"whiten_rewards": "keep_mean", "whiten_advantages": "unbiased", "score_clip": float("inf")}
    spoilt = {key: value.clone() for key, value in call.items()}
    spoilt[name][(2, 3) if name in PER_TOKEN else 2] = poison
    others = [0, 1, 3]

    def run_with(call: dict[str, Any], **more: Any) -> PPOAdvantages:
        return run(on_device(call, backend), options, backend=backend, **more)

    want = outputs_of(run_with(picked(call, others)))
    results = {policy: run_with(spoilt, nonfinite=policy) for policy in ("propagate", "drop", "zero")}
    for policy in ("propagate", "drop"):
        for mine, other in zip(outputs_of(results[policy]), want, strict=True):
            same(mine[others], other, exact=False)
    assert not any(output[2].any() for output in outputs_of(results["drop"]))
    assert not results["propagate"].returns[2].isfinite().all()
    assert all(output.isfinite().all() for output in outputs_of(results["zero"]))
    for policy, result in results.items():
        at = {"scores": 4 if score_at == "last" else 6, "bootstrap": 5 if score_at == "last" else 6}.get(name, 3)
        assert result.report.first_nonfinite() == (2, at, name)
        assert result.report.nonfinite_sequences.tolist() == [False, False, True, False]
        assert (result.report["nonfinite_sequences"], result.report["dropped_sequences"]) == (1, int(policy == "drop"))
    with pytest.raises(
        ValueError, match=rf"ppo_advantages: {name} must be finite where it counts, got a number that is not at token {at} of sequence 2"
    ):
        run_with(spoilt, nonfinite="raise")
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        run_with(spoilt, validate="full")
    assert run_with(spoilt, validate="full", nonfinite="drop").advantages[others].isfinite().all()


def test_zero_takes_a_number_for_zero(backend: str) -> None:
    rng = random.Random(9)
    call = random_rows(rng, 3, 9)
    call["mask"][1, 0] = True
    for name in ("values", "rewards"):
        spoilt, mended = ({**call, name: call[name].clone()} for _ in range(2))
        spoilt[name][1, 0], mended[name][1, 0] = float("nan"), 0.0
        for options, exact in (({"whiten_advantages": "off"}, True), ({}, False)):
            one = run(on_device(spoilt, backend), options, nonfinite="zero", backend=backend)
            two = run(on_device(mended, backend), options, backend=backend)
            for mine, other in zip(outputs_of(one), outputs_of(two), strict=True):
                same(mine, other, exact)
