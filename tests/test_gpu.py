"""On a GPU: long and wide shapes, mixed packs, and what only a GPU can get wrong. The CPU backend in float64 is the yardstick here; the
tests of the meanings hold it to the reference.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import rlhf_scan
from rlhf_scan import Segments
from rlhf_scan.dispatch import estimate
from rlhf_scan.estimators import Estimator, estimator, served

pytestmark = pytest.mark.gpu

ROWS = [(32768, 8), (65536, 16), (4096, 128), (1024, 2048), (300, 2049), (1024, 16384), (16, 131072), (1, 1048576), (1, 4194304)]
MIXED = [1, 131072, 0, 5, 7, 4096, 0, 0, 100_000, 128, 129, 2048, 2049, 33_333, 64, 0, *range(1, 300, 7)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def random_call(entry: Estimator, shape: tuple[int, ...], segments: int, seed: int = 0, flags: bool = True) -> dict[str, Any]:
    """Arguments of `estimate` on the CPU in float32, with every optional tensor that `entry` takes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    actions = entry.expectation or ()
    call: dict[str, Any] = {
        "name": entry.name,
        "tensors": {name: normal(*shape, 3) if name in actions else normal(*shape) for name in entry.arguments},
        "rates": {name: min(rate.largest, 1.2) * 0.97 for name, rate in entry.rates.items()},
    }
    if flags:
        for name, share in (("mask", 0.8), ("terminated", 0.002), ("truncated", 0.002)):
            if name in entry.takes:
                call[name] = torch.rand(shape, generator=generator) < share
        if "mask" in call and call["mask"].numel() > 60_000:
            call["mask"].view(-1)[5_000:50_000] = False
    if entry.end_name is not None:
        call["bootstrap"] = normal(segments)
    return call


def to_gpu(value: Any, dtype: torch.dtype = torch.float32) -> Any:
    if isinstance(value, dict):
        return {key: to_gpu(item, dtype) for key, item in value.items()}
    if isinstance(value, Tensor):
        return value.cuda().to(dtype) if value.is_floating_point() else value.cuda()
    return value


def in_float64(value: Any, dtype: torch.dtype) -> Any:
    """What the GPU is given, exactly, in float64."""
    if isinstance(value, dict):
        return {key: in_float64(item, dtype) for key, item in value.items()}
    return value.to(dtype).double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...], length: int, dtype: torch.dtype) -> None:
    """A sum of n rounded terms is off by about sqrt(n) roundings of the largest partial result; then one rounding of the output."""
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for output, exact in zip(got, want, strict=True):
        assert not output.isnan().any()
        scale = max(1.0, float(exact.abs().max()))
        bound = scale * (16 * eps * math.sqrt(length) + torch.finfo(dtype).eps)
        assert float((output.cpu().double() - exact).abs().max()) <= bound


def check(call: dict[str, Any], segments: list[int] | None, dtype: torch.dtype, length: int) -> tuple[Tensor, ...]:
    """Compare with the CPU in float64; the outputs on the GPU."""
    on_gpu = None if segments is None else Segments.from_cu_seqlens(Segments.from_lengths(segments).cu_seqlens.cuda())
    got = estimate(**to_gpu(call, dtype), segments=on_gpu)
    on_cpu = None if segments is None else Segments.from_lengths(segments)
    want = estimate(**in_float64(call, dtype), segments=on_cpu, backend="cpu")
    assert_close(got, want, length, dtype)
    return got


@pytest.fixture(params=[entry.name for entry in served()])
def entry(request: pytest.FixtureRequest) -> Estimator:
    return estimator(str(request.param))


@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rows_of_every_length(entry: Estimator, shape: tuple[int, int]) -> None:
    if entry.expectation is not None and math.prod(shape) > 5_000_000:
        shape = (shape[0] // 4 or 1, shape[1])
    check(random_call(entry, shape, shape[0]), None, torch.float32, shape[1])


@pytest.mark.parametrize("masked", ["skip", "zero", "keep"])
def test_a_mixed_pack(entry: Estimator, masked: str) -> None:
    call = random_call(entry, (sum(MIXED),), len(MIXED))
    if "mask" in entry.takes:
        call["masked"] = masked
    check(call, MIXED, torch.float32, max(MIXED))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(entry: Estimator, dtype: torch.dtype) -> None:
    lengths = [5000, 3, 0, 129, 2500]
    check(random_call(entry, (sum(lengths),), len(lengths)), lengths, dtype, max(lengths))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 100, 128, 129, 500, 2048, 2049, 5000, 70_000])
@pytest.mark.parametrize("flags", [False, True])
def test_same_bits_alone_packed_padded_and_again(length: int, flags: bool) -> None:
    rows = 3
    entry = estimator("gae")
    call = to_gpu(random_call(entry, (rows, length), rows, flags=flags))
    call.setdefault("mask", torch.ones(rows, length, dtype=torch.bool, device="cuda"))
    alone = estimate(**call)
    again = estimate(**call)

    def wrapped(value: Tensor, front: int, back: int, fill: float) -> Tensor:
        return torch.nn.functional.pad(value.float().flatten(), (front, back), value=fill).to(value.dtype)

    def mapped(change: Any) -> dict[str, Any]:
        tensors = {key: change(value) for key, value in call["tensors"].items()}
        return {**call, "tensors": tensors, **{key: change(call[key]) for key in ("mask", "terminated", "truncated") if key in call}}

    packed = mapped(lambda value: wrapped(value, 13, 5, 7.0))
    packed["bootstrap"] = torch.nn.functional.pad(call["bootstrap"], (1, 1), value=9.0)
    in_pack = estimate(**packed, segments=Segments.from_lengths([13, *[length] * rows, 5]))
    padding = torch.nn.functional.pad
    padded = mapped(lambda value: padding(value.float(), (0, 77), value=0.0).to(value.dtype))
    in_padding = estimate(**padded)
    for output, second, pack, pad in zip(alone, again, in_pack, in_padding, strict=True):
        assert torch.equal(output, second)
        assert torch.equal(output.flatten(), pack[13:-5])
        assert torch.equal(output, pad[:, :length])
        assert not pad[:, length:].any()


def test_no_host_sync_and_as_many_launches_for_any_length() -> None:
    launches = []
    for length in (10_000, 1_000_000):
        rewards, values = torch.randn(length, device="cuda"), torch.randn(length, device="cuda")
        segments = Segments.from_cu_seqlens(torch.tensor([0, length // 3, length]).cuda())
        rlhf_scan.gae(rewards, values, segments=segments)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                rlhf_scan.gae(rewards, values, segments=segments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        launches.append(sum(event.count for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA))
    assert launches[0] == launches[1]


def test_a_captured_graph_follows_its_inputs() -> None:
    """Boundaries and numbers may change between replays."""
    tokens = 20_000
    rewards, values = torch.randn(tokens, device="cuda"), torch.randn(tokens, device="cuda")
    bounds = torch.tensor([0, 5, 9_000, tokens]).cuda()
    segments = Segments.from_cu_seqlens(bounds)
    rlhf_scan.gae(rewards, values, segments=segments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = rlhf_scan.gae(rewards, values, segments=segments)
    for middle in (9_000, 17, 19_999):
        rewards.normal_()
        bounds[2] = middle
        graph.replay()
        fresh = rlhf_scan.gae(rewards, values, segments=Segments.from_cu_seqlens(bounds.clone()))
        assert torch.equal(captured.advantages, fresh.advantages)
        assert torch.equal(captured.returns, fresh.returns)


def test_streams_side_by_side() -> None:
    rewards, values = torch.randn(8, 300_000, device="cuda"), torch.randn(8, 300_000, device="cuda")
    want = rlhf_scan.gae(rewards, values, lam=1.0).advantages
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    got = []
    for stream in streams:
        with torch.cuda.stream(stream):
            got.append(rlhf_scan.gae(rewards, values, lam=1.0).advantages)
    torch.cuda.synchronize()
    assert all(torch.equal(want, output) for output in got)


def test_more_than_two_to_the_31_tokens() -> None:
    tokens, tail = 2**31 + 5_000, 6_000
    rewards = torch.zeros(tokens, dtype=torch.bfloat16, device="cuda")
    rewards[-tail:] = torch.randn(tail, device="cuda").to(torch.bfloat16)
    segments = Segments.from_lengths([tokens - tail, tail])
    returns = rlhf_scan.discounted_returns(rewards, gamma=0.99, segments=segments, dtype=torch.float32)
    alone = rlhf_scan.discounted_returns(rewards[-tail:].clone(), gamma=0.99, dtype=torch.float32)
    assert torch.equal(returns[-tail:], alone)
    assert not returns[: tokens - tail].any()
    one = rlhf_scan.discounted_returns(rewards, gamma=1.0, dtype=torch.float32)
    assert float(one[0]) == pytest.approx(float(rewards[-tail:].double().sum()), abs=1e-2)


def test_boundaries_that_lie_read_nothing_outside() -> None:
    """Unchecked boundaries on the GPU cannot make a kernel leave its tensors; a full check names them."""
    rewards = torch.randn(1000, device="cuda")
    segments = Segments.from_cu_seqlens(torch.tensor([0, 2_000_000, -50, 400, 1_000_000]).cuda())
    rlhf_scan.discounted_returns(rewards, segments=segments)
    torch.cuda.synchronize()
    with pytest.raises(rlhf_scan.InputError, match="cu_seqlens must not decrease"):
        rlhf_scan.discounted_returns(rewards, segments=segments, validate="full")


def test_compiled_calls_are_one_graph() -> None:
    rewards, values = torch.randn(4, 3000, device="cuda"), torch.randn(4, 3000, device="cuda")

    def advantages(rewards: Tensor, values: Tensor) -> Tensor:
        return rlhf_scan.gae(rewards * 2, values).advantages + 1

    compiled = torch.compile(advantages, fullgraph=True)
    torch.testing.assert_close(compiled(rewards, values), advantages(rewards, values))


def test_gradients() -> None:
    a, b = (torch.randn(2, 300, dtype=torch.float64, device="cuda", requires_grad=True) for _ in range(2))
    initial = torch.randn(2, dtype=torch.float64, device="cuda", requires_grad=True)
    for reverse in (False, True):

        def scan(a: Tensor, b: Tensor, initial: Tensor, reverse: bool = reverse) -> Tensor:
            return rlhf_scan.linear_scan(a, 0.5 * torch.tanh(b), initial=initial, reverse=reverse)

        assert torch.autograd.gradcheck(scan, (a[:, :40], b[:, :40], initial), fast_mode=True)


def test_a_bounded_number_of_kernels() -> None:
    """A thousand different shapes need a bounded number of compiled kernels."""
    from rlhf_scan.backends.triton_scan import scan_rows

    def kernels() -> int:
        return sum(len(cache[0]) for cache in scan_rows.device_caches.values())

    before = kernels()
    for length in range(1, 3000, 31):
        for rows in (1, 2, 16, 33):
            rewards = torch.randn(rows, length, device="cuda")
            rlhf_scan.discounted_returns(rewards, gamma=0.9)
    # A tile's width is a power of two up to 2,048; and rows whose length is a multiple of a thread's run are known to start at one.
    assert kernels() - before <= 20
