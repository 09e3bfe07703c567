"""Whitening: layouts, dtypes, numbers that are hard on it, and the order of its sums."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from conftest import device_of
from hypothesis import given, settings
from hypothesis import strategies as st
from whitening_textbook import case, textbook

from rlhf_scan import InputError, whiten
from rlhf_scan.whitening import merge, statistics


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


def test_detached_from_autograd() -> None:
    x = torch.randn(5, requires_grad=True)
    assert not whiten(x).requires_grad


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
