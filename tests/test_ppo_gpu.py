"""`ppo_advantages` on a GPU: large and mixed shapes against the CPU backend in float64, no wait for the device, the same bits everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ppo_samples import OUTPUTS
from torch import Tensor

from rlhf_scan import Segments, ppo_advantages
from rlhf_scan.ppo_options import PRESETS

pytestmark = pytest.mark.gpu

ROWS = [(4096, 16), (1024, 2048), (300, 2049), (16, 131072), (1, 1048576)]
MIXED = [1, 131072, 0, 5, 7, 4096, 0, 0, 100_000, 128, 129, 2048, 2049, 33_333, 64, 0, *range(1, 300, 7)]
OPTIONS: list[dict[str, Any]] = [
    {},
    *({"preset": name, "kl_coef": 0.1} for name in PRESETS),
    {"preset": "trl", "whiten_rewards": True, "kl": "k3"},
]
PER_SEQUENCE = ("scores", "terminated", "bootstrap", "has_eos")


def batch(shape: tuple[int, ...], lengths: list[int]) -> dict[str, Tensor]:
    """Tokens of the given sequences, padded within their room, with tool answers in between."""
    generator = torch.Generator().manual_seed(len(lengths))
    tokens, count = sum(lengths), len(lengths)
    call = {name: torch.randn(tokens, generator=generator).reshape(shape) for name in ("logprobs", "values", "rewards")}
    call["ref_logprobs"] = call["logprobs"] + 0.1 * torch.randn(tokens, generator=generator).reshape(shape)
    call |= {"scores": torch.randn(count, generator=generator), "bootstrap": torch.randn(count, generator=generator)}
    call |= {name: torch.rand(count, generator=generator) < 0.5 for name in ("terminated", "has_eos")}
    used = torch.tensor([int(length * float(torch.rand(1, generator=generator))) for length in lengths])
    start = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    owner = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    real = torch.arange(tokens) - start[owner] < used[owner]
    return call | {"attention_mask": real.reshape(shape), "mask": (real & (torch.rand(tokens, generator=generator) < 0.9)).reshape(shape)}


def assert_agrees(call: dict[str, Tensor], options: dict[str, Any], segments: Segments | None = None) -> None:
    want = ppo_advantages(
        **{name: value.double() if value.is_floating_point() else value for name, value in call.items()},  # type: ignore[arg-type]
        segments=segments,
        backend="cpu",
        **options,
    )
    got = ppo_advantages(**{name: value.cuda() for name, value in call.items()}, segments=segments, **options)  # type: ignore[arg-type]
    for name in OUTPUTS:
        expected = getattr(want, name)
        scale = max(1.0, float(expected.abs().max()) if expected.numel() else 1.0)
        torch.testing.assert_close(getattr(got, name).cpu().double(), expected, rtol=0, atol=2e-4 * scale)
    assert set(got.report) == set(want.report)
    for name, number in want.report.items():
        assert got.report[name] == (pytest.approx(number, rel=1e-4, abs=1e-4) if isinstance(number, float) else number), name


@pytest.mark.parametrize("options", OPTIONS, ids=[str(option.get("preset")) + str(len(option)) for option in OPTIONS])
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rows(shape: tuple[int, int], options: dict[str, Any]) -> None:
    assert_agrees(batch(shape, [shape[1]] * shape[0]), options)


@pytest.mark.parametrize("options", OPTIONS, ids=[str(option.get("preset")) + str(len(option)) for option in OPTIONS])
def test_a_mixed_pack(options: dict[str, Any]) -> None:
    assert_agrees(batch((sum(MIXED),), MIXED), options, Segments.from_lengths(MIXED))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    call = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch((64, 500), [500] * 64).items()}
    want = ppo_advantages(**{n: v.double() if v.is_floating_point() else v for n, v in call.items()}, backend="cpu")  # type: ignore[arg-type]
    got = ppo_advantages(**{name: value.cuda() for name, value in call.items()})  # type: ignore[arg-type]
    for name in OUTPUTS:
        expected = getattr(want, name)
        bound = torch.finfo(dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(getattr(got, name).cpu().double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "options",
    [{}, {"nonfinite": "drop", "whiten_rewards": "keep_mean"}, {"preset": "trl"}, {"preset": "openrlhf"}, {"length_adaptive_alpha": 0.05}],
)
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_waits_for_the_device(packed: bool, options: dict[str, Any]) -> None:
    call: dict[str, Any] = {name: value.cuda() for name, value in batch((64, 500), [500] * 64).items()}
    if packed:
        call = {name: value if name in PER_SEQUENCE else value.flatten() for name, value in call.items()}
        call["segments"] = Segments.from_cu_seqlens(torch.arange(65, device="cuda") * 500)
    ppo_advantages(**call, **options)  # compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = ppo_advantages(**call, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.report["sequences"] == 64


def test_the_same_bits_each_time_and_in_a_pack() -> None:
    call: dict[str, Any] = {name: value.cuda() for name, value in batch((256, 3000), [3000] * 256).items()}
    first, second = ppo_advantages(**call), ppo_advantages(**call)
    plain = ppo_advantages(**call, whiten_advantages=False)
    flat = {name: value if name in PER_SEQUENCE else value.flatten() for name, value in call.items()}
    packed = ppo_advantages(**flat, segments=Segments.from_lengths([3000] * 256), whiten_advantages=False)
    for name in OUTPUTS:
        assert torch.equal(getattr(first, name), getattr(second, name))
        assert torch.equal(getattr(plain, name).flatten(), getattr(packed, name))


def test_one_bad_sequence_on_the_gpu() -> None:
    call = batch((64, 500), [500] * 64)
    call["mask"][7, :20], call["attention_mask"][7, :20] = True, True
    call["values"][7, 11] = float("nan")
    others = [row for row in range(64) if row != 7]
    want = ppo_advantages(**{name: value[others].cuda() for name, value in call.items()})  # type: ignore[arg-type]
    for policy in ("propagate", "drop"):
        got = ppo_advantages(**{name: value.cuda() for name, value in call.items()}, nonfinite=policy)  # type: ignore[arg-type]
        torch.testing.assert_close(got.advantages[others], want.advantages, rtol=1e-5, atol=1e-5)
        assert got.report.first_nonfinite() == (7, 11, "values")
