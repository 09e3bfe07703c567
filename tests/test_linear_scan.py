"""The recurrence itself: against a loop, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of
from oracle import linear_scan as loop
from torch import Tensor

import rlhf_scan
from rlhf_scan import Segments, linear_scan
from rlhf_scan.backends import tiles

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

each_direction = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
each_initial = pytest.mark.parametrize("with_initial", [False, True], ids=["from zero", "initial"])

# (shape of a and b, lengths of the segments, whether they are handed over as Segments)
LAYOUTS: dict[str, tuple[tuple[int, ...], list[int], bool]] = {
    "one": ((11,), [11], False),
    "rows": ((2, 4), [4, 4], False),
    "long rows": ((2, 300), [300, 300], False),
    "pack": ((9,), [0, 3, 1, 0, 0, 4, 1, 0], True),
    "long pack": ((412,), [0, 130, 1, 64, 17, 200], True),
    "rows as a pack": ((3, 4), [2, 7, 0, 3], True),
    "empty segments": ((0,), [0, 0], True),
    "no tokens": ((3, 0), [0, 0, 0], False),
    "no rows": ((0, 4), [], False),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def arguments(
    layout: str, backend: str, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """a, b (some of it 0), initial, and the other arguments."""
    shape, lengths, packed = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(shape, generator=generator, dtype=torch.float64)
    b = torch.rand(shape, generator=generator, dtype=torch.float64) * 2.2 - 1.1
    b = torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, b)
    initial = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    options = {"segments": Segments.from_lengths(lengths) if packed else None, "backend": backend}
    a, b, initial = (tensor.to(device_of(backend), dtype) for tensor in (a, b, initial))
    return a, b, initial, options


def in_torch(a: Tensor, b: Tensor, initial: Tensor | None, lengths: list[int], reverse: bool) -> Tensor:
    """The recurrence in torch operations, one token at a time: autograd differentiates it by itself."""

    def solved() -> Iterator[Tensor]:
        start = 0
        for segment, length in enumerate(lengths):
            x = a.new_zeros(()) if initial is None else initial[segment]
            found = []
            for token in range(start, start + length)[:: -1 if reverse else 1]:
                x = a.flatten()[token] + b.flatten()[token] * x
                found.append(x)
            yield from reversed(found) if reverse else found
            start += length

    return torch.stack(list(solved())).reshape(a.shape)


@each_layout
@each_direction
@each_initial
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_as_the_loop(layout: str, reverse: bool, with_initial: bool, dtype: torch.dtype, backend: str) -> None:
    a, b, initial, options = arguments(layout, backend, dtype)
    before = a.clone(), b.clone(), initial.clone()
    x = linear_scan(a, b, reverse=reverse, initial=initial if with_initial else None, **options)
    assert (x.shape, x.dtype, x.device) == (a.shape, dtype, a.device)
    assert not x.requires_grad
    assert all(torch.equal(*pair) for pair in zip(before, (a, b, initial), strict=True))
    flat_a, flat_b, start = (tensor.double().flatten().cpu().numpy() for tensor in (a, b, initial))
    numbers = loop(flat_a, flat_b, LAYOUTS[layout][1], reverse=reverse, initial=start if with_initial else None)
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-53
    for got, number in zip(x.double().flatten().tolist(), numbers, strict=True):
        assert abs(got - number.value) <= number.error(unit, a.numel()) + unit * abs(number.value)


@pytest.mark.parametrize("layout", ["rows", "pack"])
@each_direction
@each_initial
def test_first_and_second_derivatives(layout: str, reverse: bool, with_initial: bool, backend: str) -> None:
    a, b, initial, options = arguments(layout, backend)
    given = [tensor.requires_grad_() for tensor in ((a, b, initial) if with_initial else (a, b))]

    def scan(a: Tensor, b: Tensor, initial: Tensor | None = None) -> Tensor:
        return linear_scan(a, b, reverse=reverse, initial=initial, **options)

    # "Fast" compares a random projection of the Jacobian: the interpreter would take minutes over each of its entries.
    fast = backend == "triton"
    assert torch.autograd.gradcheck(scan, given, fast_mode=fast)
    assert torch.autograd.gradgradcheck(scan, given, fast_mode=True)


@pytest.mark.parametrize("layout", [name for name, (shape, _, _) in LAYOUTS.items() if 0 not in shape])
@each_direction
@each_initial
def test_gradients_as_autograd_finds_them(layout: str, reverse: bool, with_initial: bool, backend: str) -> None:
    a, b, initial, options = arguments(layout, backend)
    given = [tensor.requires_grad_() for tensor in ((a, b, initial) if with_initial else (a, b))]
    start = initial if with_initial else None
    weights = torch.randn(a.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(a.device)
    found = torch.autograd.grad(linear_scan(a, b, reverse=reverse, initial=start, **options), given, weights)
    expected = torch.autograd.grad(in_torch(a, b, start, LAYOUTS[layout][1], reverse), given, weights)
    for name, gradient, other in zip(("a", "b", "initial"), found, expected, strict=False):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-10, msg=f"the gradient of {name} differs")


@pytest.mark.parametrize("layout", [name for name, (shape, _, _) in LAYOUTS.items() if 0 in shape])
@each_direction
def test_gradients_of_nothing(layout: str, reverse: bool, backend: str) -> None:
    a, b, initial, options = arguments(layout, backend)
    given = [tensor.requires_grad_() for tensor in (a, b, initial)]
    linear_scan(a, b, reverse=reverse, initial=initial, **options).sum().backward()
    for tensor in given:
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


@pytest.mark.parametrize("wanted", ["a", "b", "initial"])
def test_one_gradient_alone(wanted: str, backend: str) -> None:
    a, b, initial, options = arguments("pack", backend)
    tensors = {"a": a, "b": b, "initial": initial}
    all_of_them = [tensor.clone().requires_grad_() for tensor in tensors.values()]
    expected = torch.autograd.grad(linear_scan(all_of_them[0], all_of_them[1], initial=all_of_them[2], **options).sum(), all_of_them)
    tensors[wanted].requires_grad_()
    linear_scan(a, b, initial=initial, **options).sum().backward()
    for (name, tensor), other in zip(tensors.items(), expected, strict=True):
        if name == wanted:
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, other)
        else:
            assert tensor.grad is None


def test_each_gradient_has_its_tensors_dtype(backend: str) -> None:
    a, b, initial, options = arguments("rows", backend)
    half, wide, single = a.half().requires_grad_(), b.requires_grad_(), initial.float().requires_grad_()
    x = linear_scan(half, wide, initial=single, **options)
    assert x.dtype == torch.float64
    x.sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (half, wide, single)]
    linear_scan(exact[0], exact[1], initial=exact[2], **options).sum().backward()
    for tensor, other in zip((half, wide, single), exact, strict=True):
        assert tensor.grad is not None
        assert other.grad is not None
        assert tensor.grad.dtype == tensor.dtype
        assert torch.equal(tensor.grad, other.grad.to(tensor.dtype))


def test_dtype_of_the_output(backend: str) -> None:
    a, b, _, options = arguments("rows", backend, torch.float32)
    a.requires_grad_()
    x = linear_scan(a, b, dtype=torch.float64, **options)
    assert x.dtype == torch.float64
    torch.testing.assert_close(x.float(), linear_scan(a, b, **options))
    x.sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == torch.float32


@each_direction
def test_views(reverse: bool, backend: str) -> None:
    """Transposed and expanded inputs and a gradient that is expanded."""
    a, b, _, options = arguments("rows", backend)
    across = a.T.contiguous().T.requires_grad_()
    decay = b[:, :1].clone().requires_grad_()
    linear_scan(across, decay.expand_as(a), reverse=reverse, **options).sum().backward()
    plain, dense = a.clone().requires_grad_(), decay.detach().expand_as(a).contiguous().requires_grad_()
    (linear_scan(plain, dense, reverse=reverse, **options) * torch.ones_like(a)).sum().backward()
    assert across.grad is not None
    assert decay.grad is not None
    assert dense.grad is not None
    assert plain.grad is not None
    assert torch.equal(across.grad, plain.grad)
    torch.testing.assert_close(decay.grad, dense.grad.sum(1, keepdim=True))


@each_direction
def test_b_multiplies_nothing_where_a_segment_starts(reverse: bool, backend: str) -> None:
    a, b, _, options = arguments("pack", backend)
    starts, stop = [], 0
    for length in LAYOUTS["pack"][1]:
        start, stop = stop, stop + length
        starts += [stop - 1 if reverse else start] if length else []
    poisoned = b.clone()
    poisoned[starts] = np.nan
    assert torch.equal(linear_scan(a, b, reverse=reverse, **options), linear_scan(a, poisoned, reverse=reverse, **options))


@pytest.mark.parametrize("layout", ["long rows", "long pack", "rows"])
def test_gae_is_a_linear_scan(layout: str, backend: str) -> None:
    rewards, values, bootstrap, options = arguments(layout, backend)
    _, lengths, _ = LAYOUTS[layout]
    gamma, lam = 0.97, 0.9
    terminated = torch.rand(rewards.shape, generator=torch.Generator().manual_seed(2)).to(rewards.device) < 0.1
    ends = torch.zeros(rewards.numel(), dtype=torch.bool, device=rewards.device)
    last = torch.tensor([end - 1 for end, length in zip(np.cumsum(lengths), lengths, strict=True) if length], device=rewards.device)
    ends[last] = True
    ends = ends.reshape(rewards.shape)
    next_values = values.flatten().roll(-1)
    next_values[last] = bootstrap[[segment for segment, length in enumerate(lengths) if length]]
    next_values = torch.where(terminated, 0.0, next_values.reshape(rewards.shape))
    deltas = rewards + gamma * next_values - values
    decay = torch.where(terminated | ends, 0.0, torch.full_like(rewards, gamma * lam))
    found = rlhf_scan.gae(rewards, values, gamma=gamma, lam=lam, terminated=terminated, bootstrap=bootstrap, **options)
    torch.testing.assert_close(found.advantages, linear_scan(deltas, decay, reverse=True, **options), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [math.inf, -math.inf, math.nan])
@each_direction
def test_bits_do_not_depend_on_the_layout_where_a_factor_is_not_finite(factor: float, reverse: bool) -> None:
    length = tiles.WIDTH + 8
    a = torch.ones(2, length, device=device_of("triton"))
    b = torch.full_like(a, 0.5)
    b[0, tiles.WIDTH - 1], b[1, tiles.WIDTH] = factor, factor
    rows = linear_scan(a, b, reverse=reverse, backend="triton")
    packed = linear_scan(a.flatten(), b.flatten(), segments=Segments.from_lengths([length] * 2), reverse=reverse, backend="triton")
    torch.testing.assert_close(rows.flatten(), packed, rtol=0, atol=0, equal_nan=True)
