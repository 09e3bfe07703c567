"""Whitening: what each definition means, numbers that are hard on it, and outputs that must not be whitened again."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import device_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_scan import InputError, whiten
from rlhf_scan.whitened import _KNOWN
from rlhf_scan.whitening import merge, statistics


def textbook(
    x: Tensor, *, shift_mean: bool = True, scale: bool = True, unbiased: bool = True, eps: float = 1e-8, eps_at: str = "inside"
) -> Tensor:
    """Of float64 numbers, all of them trainable."""
    mean = x.mean()
    variance = x.var(correction=1 if unbiased else 0)
    divisors = {
        "inside": torch.sqrt(variance + eps),
        "outside": torch.sqrt(variance) + eps,
        "floor": torch.sqrt(variance.clamp(min=eps)),
    }
    y = (x - mean) / divisors[eps_at] if scale else x - mean
    return y if shift_mean else y + mean


DEFINITIONS: list[dict[str, Any]] = [
    {},
    {"shift_mean": False},
    {"scale": False},
    {"unbiased": False},
    {"eps_at": "outside", "eps": 1e-1},
    {"eps_at": "floor", "eps": 1e-1},
    {"eps_at": "floor", "eps": 10.0, "unbiased": False},
    {"eps": 0.5, "shift_mean": False, "unbiased": False},
]


def case(backend: str, n: int = 150, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Numbers with NaN, inf and huge ones at masked places."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * 2 + 3
    mask = torch.rand(n, generator=generator) < 0.7
    x[~mask] = torch.tensor([math.nan, math.inf, -1e30])[torch.arange(int((~mask).sum())) % 3]
    return x.to(device_of(backend)), mask.to(device_of(backend))


@pytest.mark.parametrize("definition", DEFINITIONS, ids=str)
@pytest.mark.usefixtures("nan_filled")
def test_each_definition(backend: str, definition: dict[str, Any]) -> None:
    x, mask = case(backend)
    before = x.clone()
    y = whiten(x, mask, backend=backend, **definition)
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask]))
    torch.testing.assert_close(y[mask].double(), textbook(x[mask].double(), **definition), rtol=1e-6, atol=1e-6)
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    assert y.dtype == x.dtype


def trl_whiten(values: Tensor, mask: Tensor, shift_mean: bool) -> Tensor:
    ppo = pytest.importorskip("trl.experimental.ppo.ppo_trainer")
    result: Tensor = ppo.masked_whiten(values, mask, shift_mean)
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shift_mean", [True, False])
def test_as_trl_whitens(shift_mean: bool) -> None:
    x = torch.randn(6, 9) * 3 + 1
    mask = torch.rand(6, 9) < 0.7
    want = torch.where(mask, trl_whiten(x, mask, shift_mean), 0.0)
    torch.testing.assert_close(whiten(x, mask, shift_mean=shift_mean), want, rtol=1e-5, atol=1e-5)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def by_rsqrt(x: Tensor, mask: Tensor, unbiased: bool, floor: bool) -> Tensor:
    """TRL's, verl's, slime's and NeMo-RL's GAE's (variance + eps); OpenRLHF's and NeMo-RL's REINFORCE++'s (population, at least eps)."""
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean) ** 2, mask)
    if unbiased:
        variance = variance * mask.sum() / (mask.sum() - 1)
    return (x - mean) * (variance.clamp(min=1e-8) if floor else variance + 1e-8).rsqrt()


def by_std(x: Tensor, mask: Tensor, eps: float) -> Tensor:
    """AReaL's Normalization of a batch, in float64."""
    count = mask.sum()
    mean = (x * mask).sum() / count
    std = (((x * mask - mean * mask) ** 2).sum() / (count - 1)).sqrt()
    return ((x - mean) * mask) / (std + eps)


PROJECTS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "trl, verl, slime, nemo-rl": ({}, lambda x, mask: by_rsqrt(x, mask, True, False)),
    "openrlhf, nemo-rl reinforce++": ({"unbiased": False, "eps_at": "floor"}, lambda x, mask: by_rsqrt(x, mask, False, True)),
    "openrlhf no_std_norm": ({"scale": False}, lambda x, mask: x - masked_mean(x, mask)),
    "areal": ({"eps_at": "outside", "eps": 1e-5}, lambda x, mask: by_std(x, mask, 1e-5)),
}


@pytest.mark.parametrize("spread", [2.0, 1e-4])
@pytest.mark.parametrize("project", PROJECTS)
def test_as_each_project_whitens(project: str, spread: float) -> None:
    """With a spread at which it shows where eps enters."""
    definition, behaviour = PROJECTS[project]
    x = torch.randn(6, 9, dtype=torch.float64) * spread + 1
    mask = (torch.rand(6, 9) < 0.7).double()
    found = whiten(x, mask, **definition)
    torch.testing.assert_close(found, behaviour(x, mask) * mask, rtol=1e-7, atol=1e-9)
    others = [whiten(x, mask, **other) for other, _ in PROJECTS.values() if other != definition]
    if spread < 1e-3:
        assert all(float((found - other).abs().max()) > 1e-3 for other in others)


@pytest.mark.parametrize("layout", ["rows", "transposed", "every other", "expanded", "three dimensions"])
def test_layouts(backend: str, layout: str) -> None:
    base = torch.randn(8, 12)
    x = {
        "rows": base,
        "transposed": base.T,
        "every other": base[:, ::2],
        "expanded": base[:1].expand(8, 12),
        "three dimensions": base.reshape(2, 4, 12),
    }[layout].to(device_of(backend))
    y = whiten(x, backend=backend)
    assert y.shape == x.shape
    torch.testing.assert_close(y.double(), textbook(x.double().flatten()).reshape(x.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(backend: str, dtype: torch.dtype) -> None:
    x = torch.randn(200).to(dtype).to(device_of(backend))
    want = textbook(x.double())
    assert whiten(x, backend=backend).dtype == dtype
    # A unit in the last place: Triton's interpreter cuts what it stores as bfloat16.
    torch.testing.assert_close(whiten(x, backend=backend).double(), want, rtol=torch.finfo(dtype).eps, atol=1e-7)
    wide = whiten(x, backend=backend, dtype=torch.float64)
    torch.testing.assert_close(wide, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8], ids=str)
def test_masks_of_any_dtype(backend: str, dtype: torch.dtype) -> None:
    x, mask = case(backend)
    assert torch.equal(whiten(x, mask.to(dtype), backend=backend), whiten(x, mask, backend=backend))


def test_a_large_mean_survives(backend: str) -> None:
    x = (torch.randn(3000, generator=torch.Generator().manual_seed(1)) * 0.1 + 1e4).to(device_of(backend))
    count, mean, m2 = statistics(x, backend=backend).tolist()
    assert (count, mean) == (3000, pytest.approx(float(x.double().mean()), rel=1e-14))
    assert m2 / 2999 == pytest.approx(float(x.double().var()), rel=1e-9)
    torch.testing.assert_close(whiten(x, backend=backend).double(), textbook(x.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eps_at", ["inside", "outside", "floor"])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("unbiased", [True, False])
def test_equal_numbers_and_single_ones_become_0(backend: str, eps: float, eps_at: str, unbiased: bool) -> None:
    kind = {"eps": eps, "eps_at": eps_at, "unbiased": unbiased, "backend": backend}
    device = device_of(backend)
    for value in (0.1, 1e4 + 0.1, -3e37):
        for dtype in (torch.float32, torch.float64):
            x = torch.full((203,), value, dtype=dtype, device=device)
            lone = torch.zeros(203, device=device)
            lone[77] = 1
            for mask in (None, lone):
                live = torch.ones_like(x) if mask is None else mask
                assert torch.equal(whiten(x, mask, **kind), torch.zeros_like(x))
                assert torch.equal(whiten(x, mask, shift_mean=False, **kind), torch.where(live != 0, x, 0))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_without_a_trainable_token_all_is_0(backend: str, shift_mean: bool) -> None:
    x = torch.full((3, 40), math.nan, device=device_of(backend))
    y = whiten(x, torch.zeros_like(x), shift_mean=shift_mean, backend=backend)
    assert torch.equal(y, torch.zeros_like(x))
    assert statistics(x, torch.zeros_like(x), backend=backend).tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_zero_size(backend: str, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, device=device_of(backend))
    assert whiten(x, torch.ones_like(x), backend=backend).shape == x.shape


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nan_at_a_trainable_token_shows(backend: str, poison: float) -> None:
    x, mask = case(backend)
    x[mask.nonzero()[5]] = poison
    y = whiten(x, mask, backend=backend)
    assert bool(y[mask].isnan().all())
    assert torch.equal(y[~mask], torch.zeros_like(y[~mask]))
    where = int(mask.nonzero()[5])
    with pytest.raises(InputError, match=rf"whiten: x must be finite at trainable tokens, got .* at \[{where}\]; mask"):
        whiten(x, mask, backend=backend, validate="full")


def test_the_same_bits_each_time_and_for_any_number_of_threads() -> None:
    x = torch.randn(1 << 18) + 7
    threads = torch.get_num_threads()
    first = statistics(x)
    try:
        torch.set_num_threads(3)
        assert torch.equal(statistics(x), first)
        y = whiten(x)
        torch.set_num_threads(1)
        assert torch.equal(whiten(x), y)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(y.double(), textbook(x.double()), rtol=1e-6, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 60), max_size=6), mean=st.sampled_from([0.0, 1.0, -1e4, 1e6]), seed=st.integers(0, 99))
@pytest.mark.parametrize("on", ["reference", "cpu", "triton"])
def test_parts_merge_into_the_whole(on: str, cuts: list[int], mean: float, seed: int) -> None:
    x = (torch.randn(60, generator=torch.Generator().manual_seed(seed)) * 0.1 + mean).to(device_of(on))
    edges = [0, *sorted(cuts), 60]
    parts = torch.stack([statistics(x[a:b], backend=on) for a, b in pairwise(edges)])
    count, merged_mean, m2 = merge(parts, backend=on).tolist()
    numbers = x.double()
    assert count == 60
    assert merged_mean == pytest.approx(float(numbers.mean()), rel=1e-12)
    assert m2 == pytest.approx(float(((numbers - numbers.mean()) ** 2).sum()), rel=1e-8)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 999), n=st.integers(1, 200), scale=st.sampled_from([1e-3, 1.0, 1e5]))
@pytest.mark.parametrize("on", ["cpu", "triton"])
def test_backends_agree_with_the_reference(on: str, seed: int, n: int, scale: float) -> None:
    x, mask = case(on, n, seed)
    x = x * scale
    want = whiten(x.cpu(), mask.cpu(), backend="reference", dtype=torch.float64)
    torch.testing.assert_close(whiten(x, mask, backend=on, dtype=torch.float64).cpu(), want, rtol=1e-9, atol=1e-9)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "reshaped": lambda y: y.reshape(3, 4),
    "a view": lambda y: y.view(2, 6),
    "transposed": lambda y: y.view(3, 4).T,
    "detached": lambda y: y.detach(),
    "a part": lambda y: y[2:7],
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("view", VIEWS)
def test_whitening_twice_raises(backend: str, view: str) -> None:
    y = whiten(torch.randn(12, device=device_of(backend)), backend=backend)
    again = VIEWS[view](y)
    with pytest.raises(InputError, match=r"whiten: x must not be whitened yet, .* allow_whitened=True"):
        whiten(again, backend=backend)
    assert whiten(again, backend=backend, allow_whitened=True).shape == again.shape


def test_what_may_be_whitened_after_a_whitening() -> None:
    y = whiten(torch.randn(12))
    whiten(y.clone())
    whiten(y * 2)
    whiten(whiten(torch.randn(12), scale=False))
    y.mul_(3)
    whiten(y)


def test_knowing_what_is_whitened_holds_no_memory() -> None:
    gc.collect()
    whiten(torch.randn(4))
    before = len(_KNOWN)
    for _ in range(50):
        whiten(torch.randn(4))
    assert len(_KNOWN) <= before + 1


def test_inference_mode_keeps_no_version_so_it_is_not_told() -> None:
    with torch.inference_mode():
        y = whiten(torch.randn(12))
        whiten(y)


def test_compiled_without_a_break() -> None:
    compiled = torch.compile(whiten, fullgraph=True, backend="aot_eager")
    for n in (50, 70):
        x, mask = case("cpu", n)
        assert torch.equal(compiled(x, mask, shift_mean=False), whiten(x, mask, shift_mean=False))
        assert torch.equal(compiled(x, mask, eps_at="floor"), whiten(x, mask, eps_at="floor"))


def test_ops_keep_torchs_rules() -> None:
    x, mask = case("cpu")
    torch.library.opcheck(torch.ops.rlhf_scan.statistics.default, (x, mask, "cpu"))
    torch.library.opcheck(torch.ops.rlhf_scan.merge_statistics.default, (torch.ones(4, 3, dtype=torch.float64), "cpu"))
    arguments = (x, mask, statistics(x, mask), True, True, True, 1e-8, "inside", torch.float32, "cpu")
    torch.library.opcheck(torch.ops.rlhf_scan.whiten.default, arguments)


def test_detached_from_autograd() -> None:
    x = torch.randn(5, requires_grad=True)
    assert not whiten(x).requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": [1.0]}, r"whiten: x must be a torch.Tensor, got list"),
        ({"x": torch.ones(3, dtype=torch.int64)}, r"whiten: x must be float32.*got torch.int64"),
        ({"mask": torch.ones(4)}, r"whiten: mask must have shape \[3\] to match x, got \[4\]"),
        ({"mask": [1, 1, 1]}, r"whiten: mask must be a torch.Tensor, got list"),
        ({"mask": torch.ones(3, dtype=torch.complex64)}, r"whiten: mask must be bool, an integer or a float dtype"),
        ({"eps": -1e-8}, r"whiten: eps must be a number from 0 on, got -1e-08"),
        ({"eps": math.nan}, r"whiten: eps must be a number from 0 on, got nan"),
        ({"eps": True}, r"whiten: eps must be a number"),
        ({"eps_at": "within"}, r"whiten: eps_at must be one of .*got 'within'"),
        ({"shift_mean": False, "scale": False}, r"whiten: shift_mean and scale must not both be False"),
        ({"backend": "tpu"}, r"whiten: backend must be one of"),
        ({"validate": "all"}, r"whiten: validate must be one of"),
        ({"dtype": torch.int32}, r"whiten: dtype must be one of"),
        ({"process_group": "world"}, r"whiten: process_group must be None while torch.distributed is not initialized"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        whiten(**{"x": torch.tensor([1.0, 2.0, 4.0]), **arguments})


@pytest.mark.gpu
def test_on_the_gpu_the_bits_do_not_change_and_nothing_waits() -> None:
    x = torch.randn(5_000_001, device="cuda") * 0.1 + 1e4
    mask = torch.rand_like(x) < 0.8
    first = whiten(x, mask)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = whiten(x, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(again, first)
    numbers = x[mask].double()
    torch.testing.assert_close(first[mask].double(), textbook(numbers), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_gpu_and_cpu_agree() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = (torch.randn(70_001) * 3 - 1).to(dtype)
        mask = torch.rand(70_001) < 0.5
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(whiten(x.cuda(), mask.cuda()).cpu(), whiten(x, mask), rtol=max(eps, 1e-9), atol=1e-9)
