"""Under torch's compilers a call is one opaque node: opcheck, torch.compile in one graph, torch.export."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rlhf_scan
from rlhf_scan import Segments
from rlhf_scan.dispatch import estimate
from rlhf_scan.estimators import Estimator, estimator, served

SEVERAL = ("gae", "retrace_from_policy", "linear_scan")
NAMES = [entry.name for entry in served()]
SEGMENTS = Segments.from_lengths([3, 0, 4, 1])

each_compiler = pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
each_layout = pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["rows", "pack"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arguments(entry: Estimator, segments: Segments | None, backend: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of `estimate`, with each tensor that `entry` takes."""
    generator = torch.Generator().manual_seed(0)
    shape, count = ((2, 4), 2) if segments is None else ((8,), segments.count)

    def random(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64).to(device_of(backend), dtype)

    rates: dict[str, Any] = dict.fromkeys(entry.rates, 0.5)
    rates |= {"gamma": random(count), "lam": random(*shape)} if "gamma" in rates and "lam" in rates else {}
    return {
        "name": entry.name,
        "tensors": {name: random(*shape, *((3,) if name in (entry.expectation or ()) else ())) for name in entry.arguments},
        "rates": rates,
        "segments": segments,
        "bootstrap": None if entry.end_name is None else random(count),
        "backend": backend,
        **{name: random(*shape) > 0.3 for name in entry.takes},
    }


class Recorded(TorchDispatchMode):
    """The library's ops that run, with their arguments. Unwatched, a call need not be an op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "rlhf_scan":
            self.calls.append((op, args))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "reference") for name in (*NAMES, "linear_scan", "linear_scan_reverse")), *itertools.product(SEVERAL, ("cpu", "triton"))],
)
@each_layout
def test_opcheck(name: str, backend: str, segments: Segments | None) -> None:
    """The arguments with which the public functions call the op, through torch's own checks of it."""
    with Recorded() as recorded:
        estimate(**arguments(estimator(name), segments, backend))
    assert len(recorded.calls) == (1 if estimator(name).expectation is None else 2)
    for op, given in recorded.calls:
        torch.library.opcheck(op, given)


CALLS: dict[str, Callable[..., Any]] = {
    "gae": lambda r, v, w, segments, backend: rlhf_scan.gae(
        r * 2, v, gamma=0.9, lam_value=1.0, mask=w > 0, segments=segments, backend=backend
    ),
    "discounted_returns": lambda r, v, w, segments, backend: rlhf_scan.discounted_returns(
        r + v, gamma=w.abs() / 4, terminated=w > 1, segments=segments, backend=backend
    ),
    "vtrace": lambda r, v, w, segments, backend: rlhf_scan.vtrace(r, v, w, w + r / 8, truncated=v > 1, segments=segments, backend=backend),
    "linear_scan": lambda r, v, w, segments, backend: rlhf_scan.linear_scan(r, v, reverse=True, segments=segments, backend=backend) * w,
}


@pytest.mark.parametrize("name", CALLS)
@each_layout
@each_compiler
def test_one_graph(name: str, segments: Segments | None, compiler: str, backend: str) -> None:
    tensors = [torch.randn(8 if segments else (2, 4), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    tensors = [tensor.to(device_of(backend)) for tensor in tensors]

    def function(*tensors: Tensor) -> Any:
        return CALLS[name](*tensors, segments, backend)

    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    for found in (compiled(*tensors), compiled(*tensors)):
        torch.testing.assert_close(found, function(*tensors), rtol=0, atol=0)


@each_layout
@each_compiler
@pytest.mark.parametrize("reverse", [False, True])
def test_backward_of_a_compiled_linear_scan(segments: Segments | None, compiler: str, reverse: bool, backend: str) -> None:
    given = arguments(estimator("linear_scan"), segments, backend, torch.float64)
    tensors = [*given["tensors"].values(), given["bootstrap"]]

    def loss(a: Tensor, b: Tensor, initial: Tensor) -> Tensor:
        x = rlhf_scan.linear_scan(a.exp(), b.tanh(), initial=initial, reverse=reverse, segments=segments, backend=backend)
        return (x * torch.arange(1.0, x.numel() + 1, device=x.device).reshape(x.shape)).sum()

    gradients = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=compiler)):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        function(*leaves).backward()
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("layout", ["rows", "columns", "one", "pack", "segments"])
def test_other_shapes_need_no_other_graphs(layout: str) -> None:
    """Sizes that change from call to call become symbols: torch gives up on a function after eight graphs."""
    graphs = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    def advantages(rewards: Tensor, values: Tensor, segments: Segments | None) -> Tensor:
        return rlhf_scan.gae(rewards, values, gamma=0.9, segments=segments, backend="cpu").advantages

    compiled = torch.compile(advantages, fullgraph=True, backend=counting)
    for size in (4, 5, 9, 30, 31, 17, 3, 11, 40, 50):
        shape = {"rows": (2, size), "columns": (size, 7)}.get(layout, (size,))
        lengths = {"pack": [size - 2, 2], "segments": [1] * (size // 2) + [size - size // 2]}.get(layout)
        given = torch.randn(shape), torch.randn(shape), None if lengths is None else Segments.from_lengths(lengths)
        assert torch.equal(compiled(*given), advantages(*given))
    assert graphs <= 3


def test_an_error_is_the_library_s_own() -> None:
    compiled = torch.compile(lambda r, v: rlhf_scan.gae(r, v), backend="eager")
    with pytest.raises(rlhf_scan.InputError, match=r"gae: values must have shape \[2, 4\]"):
        compiled(torch.zeros(2, 4), torch.zeros(2, 5))


@each_layout
def test_export(segments: Segments | None, backend: str) -> None:
    class Advantages(torch.nn.Module):
        def forward(self, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            found = rlhf_scan.gae(rewards, values, gamma=0.9, segments=segments, backend=backend)
            return found.advantages, found.returns

    tensors = [torch.randn(8 if segments else (2, 4), device=device_of(backend)) for _ in range(2)]
    program = torch.export.export(Advantages(), tuple(tensors))
    called = [node for node in program.graph.nodes if node.target is torch.ops.rlhf_scan.estimate.default]
    assert len(called) == 1
    torch.testing.assert_close(tuple(program.module()(*tensors)), Advantages()(*tensors), rtol=0, atol=0)


LAYOUTS: dict[str, Callable[[Tensor], Segments]] = {"cu_seqlens": Segments.from_cu_seqlens, "lengths": Segments.from_lengths}


@pytest.mark.parametrize(("layout", "numbers"), [("cu_seqlens", [0, 3, 3, 8]), ("lengths", [3, 0, 5])])
def test_segments_are_made_in_the_graph(layout: str, numbers: list[int], backend: str) -> None:
    def advantages(rewards: Tensor, values: Tensor, described: Tensor) -> Tensor:
        return rlhf_scan.gae(rewards, values, gamma=0.9, segments=LAYOUTS[layout](described), backend=backend).advantages

    device = device_of(backend)
    given = torch.randn(8, device=device), torch.randn(8, device=device), torch.tensor(numbers, device=device)
    compiled = torch.compile(advantages, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), advantages(*given), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layout", "numbers", "message"),
    [
        ("cu_seqlens", [1, 3, 8], "cu_seqlens must start at 0, got 1"),
        ("cu_seqlens", [0, 5, 3, 8], "cu_seqlens must not decrease, got 5 then 3"),
        ("cu_seqlens", [0, 3, 9], "segments must cover the 8 tokens of rewards, got 9"),
        ("lengths", [9, -4, 3], "cu_seqlens must not decrease, got 9 then 5"),
    ],
)
def test_wrong_segments_made_in_the_graph_are_found_by_the_call(layout: str, numbers: list[int], message: str) -> None:
    def returns(rewards: Tensor, described: Tensor) -> Tensor:
        return rlhf_scan.discounted_returns(rewards, segments=LAYOUTS[layout](described), backend="cpu")

    compiled = torch.compile(returns, fullgraph=True, backend="eager")
    with pytest.raises(rlhf_scan.InputError, match=f"discounted_returns: {message}"):
        compiled(torch.randn(8), torch.tensor(numbers))
