"""What there is once per sequence in `ppo_advantages`: the same on every backend, in one launch, and nothing of the caller's."""

from __future__ import annotations

import random
import weakref
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor

from rlhf_scan import InputError, Segments, ppo_advantages
from rlhf_scan.ppo_inputs import resolve_inputs
from rlhf_scan.ppo_options import NAMES, resolve_options
from rlhf_scan.shaping import Located, Placed, Sequences, shaping_backend

BACKENDS = {"cpu": 150, "triton": 60}
REAL = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def random_call(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any], Segments | None]:
    """Tensors and options of any kind, sequences of up to several parts, and numbers that are not finite here and there."""
    seed = torch.Generator().manual_seed(rng.randrange(1 << 30))
    packed, count = rng.random() < 0.5, rng.randint(1, 6)
    lengths = [rng.choice([0, 1, 3, 17, 40]) for _ in range(count)] if packed else [rng.choice([1, 5, 16, 50])] * count
    shape = (sum(lengths),) if packed else (count, lengths[0])

    def flag(*size: int) -> Tensor:
        return (torch.rand(size, generator=seed) < rng.choice([0.1, 0.5, 0.9])).to(rng.choice(REAL))

    def numbers(*size: int) -> Tensor:
        found = torch.randn(size, generator=seed)
        spoilt = torch.rand(size, generator=seed) < 0.1
        return torch.where(spoilt, rng.choice([float("nan"), float("inf"), -float("inf")]), found)

    def maybe(tensor: Tensor, likely: float = 0.5) -> Tensor | None:
        return tensor if rng.random() < likely else None

    post_eos = rng.random() < 0.5
    call: dict[str, Any] = {name: torch.zeros(shape) for name in ("logprobs", "ref_logprobs", "values")}
    call |= {name: maybe(flag(*shape), 0.7) for name in ("mask", "attention_mask")}
    call |= {name: maybe(flag(*((count,) if post_eos else rng.choice([shape, (count,)])))) for name in ("terminated", "truncated")}
    call |= {"has_eos": flag(*rng.choice([shape, (count,)])), "rewards": None}
    call |= {
        "scores": maybe(numbers(count).to(rng.choice(REAL)), 0.9),
        "bootstrap": maybe(numbers(*rng.choice([shape, (count,)])).to(rng.choice(REAL[:4]))),
    }
    masked = rng.choice(["skip", "zero", "keep"])
    options = {
        "score_at": "post_eos" if post_eos else "last",
        "trailing": rng.choice(["carry_back", "drop", *(["stay"] if masked == "keep" else [])]),
        "score_bias": rng.choice([None, 0.1]),
        "score_scale": rng.choice([None, -1 / 3]),
        "score_clip": rng.choice([None, 0.7, (-1.5, 0.2)]),
        "missing_eos_penalty": rng.choice([None, 0.9]),
        "kl_coef": rng.choice([None, 0.1, numbers(count).abs()]),
        "nonfinite": rng.choice(["propagate", "zero"]),
        "masked": masked,
    }
    return call, options, Segments.from_lengths(lengths) if packed else None


def found_by(backend: str, call: dict[str, Any], options: dict[str, Any], segments: Segments | None, wide: bool) -> Sequences:
    """With arithmetic in float32, or in float64 if `wide`."""
    device = device_of(backend)
    call = {name: None if tensor is None else tensor.to(device) for name, tensor in call.items()}
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    resolved = resolve_options("test", None, {name: options.get(name) for name in NAMES})
    inputs = resolve_inputs(call, resolved, segments=segments, step_rewards=None, dtype=None, backend=backend, validate="shapes")
    return shaping_backend(backend).place(replace(inputs.call, dtype=torch.float64 if wide else torch.float32), inputs.scores)


def assert_same(got: Any, want: Any, context: str) -> None:
    for field in fields(want):
        one, other = getattr(got, field.name), getattr(want, field.name)
        if isinstance(other, Located | Placed):
            assert_same(one, other, context)
        else:
            assert (one is None) == (other is None), f"{field.name} {context}"
            if other is not None:
                torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True, msg=f"{field.name}: {one} {other} {context}")


@pytest.mark.parametrize("wide", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_backends_find_the_same(backend: str, wide: bool) -> None:
    rng = random.Random(f"{backend}{wide}")
    for _ in range(BACKENDS[backend]):
        call, options, segments = random_call(rng)
        want = found_by("reference", call, options, segments, wide)
        assert_same(found_by(backend, call, options, segments, wide), want, f"{call} {options} {segments}")


def held_by(thing: Any) -> list[Tensor]:
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        return [tensor for value in thing.values() for tensor in held_by(value)]
    return held_by(vars(thing)) if hasattr(thing, "__dict__") else []


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("options", [{}, {"preset": "trl", "whiten_rewards": True}, {"preset": "openrlhf", "nonfinite": "drop"}])
def test_a_report_holds_nothing_per_token_and_nothing_of_the_caller_s(backend: str, options: dict[str, Any], repeats: int) -> None:
    rows, width, device = 2, 40, device_of(backend)
    call = {name: torch.zeros(rows, width, device=device) for name in ("logprobs", "ref_logprobs", "values")}
    call |= {name: torch.zeros(rows, device=device) for name in ("has_eos", "terminated")}
    call |= {name: torch.ones(rows, device=device) for name in ("scores", "truncated", "bootstrap")}
    call["mask"] = torch.ones(rows, width, device=device)
    alive = {name: weakref.ref(tensor) for name, tensor in call.items()}
    memory = {tensor.untyped_storage().data_ptr() for tensor in call.values()}
    for _ in range(repeats):
        report = ppo_advantages(**call, kl_coef=1.0, missing_eos_penalty=1.0, backend=backend, **options).report  # type: ignore[arg-type]
    held = held_by(report._facts)
    assert len(held) > 10
    assert not {tensor.untyped_storage().data_ptr() for tensor in held} & memory
    assert max(tensor.numel() for tensor in held) < width
    for tensor in call.values():
        tensor.fill_(7)
    assert (report["trainable_tokens"], report["missing_eos"], report["truncated"], report["score_mean"]) == (80, 2, 2, 0.0)
    del call, tensor
    assert [name for name, reference in alive.items() if reference() is not None] == []


def test_options_that_python_takes_for_equal_are_told_apart() -> None:
    x = torch.zeros(2, 3)
    ppo_advantages(x, x, x, None, kl_coef=1.0, whiten_rewards=True)
    with pytest.raises(InputError, match="kl_coef must be a number, got bool"):
        ppo_advantages(x, x, x, None, kl_coef=True, whiten_rewards=True)
    with pytest.raises(InputError, match=r"whiten_rewards must be one of .*, got 1;"):
        ppo_advantages(x, x, x, None, kl_coef=1.0, whiten_rewards=1)  # type: ignore[arg-type]
    assert resolve_options("test", None, {"kl_coef": 1}) == resolve_options("test", None, {"kl_coef": 1.0})


def test_a_tensor_that_torch_negates_when_it_reads(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = {
        name: torch.randn(2, 5, generator=generator).to(device_of(backend)) for name in ("logprobs", "ref_logprobs", "values", "rewards")
    }
    plain |= {"scores": torch.randn(2, generator=generator).to(device_of(backend)), "kl_coef": torch.rand(2).to(device_of(backend))}
    negated = {name: torch._neg_view(-tensor) for name, tensor in plain.items()}
    assert all(tensor.is_neg() for tensor in negated.values())
    want, got = (ppo_advantages(**call, backend=backend, whiten_rewards=True) for call in (plain, negated))  # type: ignore[arg-type]
    for name in ("advantages", "returns", "rewards", "kl"):
        assert torch.equal(getattr(got, name), getattr(want, name))
