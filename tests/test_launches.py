"""Repeated launches run what Triton compiled for arguments that it would not tell apart, and nothing else."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler import CompiledKernel  # type: ignore[import-untyped]

import rlhf_scan
from rlhf_scan import Segments, repeats
from rlhf_scan.backends import tiles, triton_backend, triton_carry, triton_launch, triton_map, triton_solver

X = torch.zeros(64)


def key(*arguments: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    triton_launch.specialized(arguments, found)
    return tuple(found)


# Pairs for which Triton may compile different code.
DIFFERENT: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "dtype": ((X,), (X.double(),)),
    "dtypes of one size": ((X.half(),), (X.bfloat16(),)),
    "a bool is no byte": ((X.bool(),), (X.to(torch.uint8),)),
    "alignment": ((X,), (X[1:],)),
    "alignment in a tuple": (((X, X),), ((X, X[2:]),)),
    "which is not aligned": ((X, X[1:]), (X[1:], X)),
    "None": ((X,), (None,)),
    "None in a tuple": (((X, None),), ((None, X),)),
    "none at all": (((None, None),), ((X, X),)),
    "how many": (((X,),), ((X, X),)),
    "where tuples end": (((X, X), (X,)), ((X,), (X, X))),
    "absent": ((triton_launch.absent(2), X), ((X, X), None)),
    "one": ((1,), (2,)),
    "a multiple of 16": ((16,), (17,)),
    "zero is a multiple of 16": ((0,), (2,)),
    "an int32": ((2**31 - 1,), (2**31 + 1,)),
    "a multiple of 16 beyond int32": ((2**30,), (2**31,)),
    "a negative int32": ((-(2**31),), (-(2**31) - 16,)),
    "an int64": ((2**63 - 1,), (2**63 + 1,)),
    "int and float": ((2,), (2.0,)),
}
SAME: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "addresses": ((X, X[4:]), (X[16:], X.clone())),
    "addresses of unaligned ones": ((X[1:],), (X[3:],)),
    "ints": ((34, 2**31 - 1), (3, 5)),
    "multiples of 16": ((16,), (48,)),
    "floats": ((0.5, 1.0), (16.0, -2.0)),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_triton_tells_apart_has_another_key(case: str) -> None:
    first, second = DIFFERENT[case]
    assert key(*first) != key(*second)


@pytest.mark.parametrize("case", SAME)
def test_what_it_does_not_tell_apart_has_the_same_key(case: str) -> None:
    first, second = SAME[case]
    assert key(*first) == key(*second)


class Kernel:
    """Stands for a kernel of Triton: "compiles" one for each launch of its own."""

    arg_names = ("x", "n", "WIDTH")

    def __init__(self) -> None:
        self.by_triton: list[tuple[Any, ...]] = []
        self.direct: list[tuple[int, tuple[Any, ...]]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **named: Any) -> CompiledKernel:
            self.by_triton.append(arguments)
            number = len(self.by_triton)

            class Compiled(CompiledKernel):  # type: ignore[misc]
                run = staticmethod(lambda *given: self.direct.append((number, given)))
                function, packed_metadata = "function", "metadata"

                def __init__(self) -> None:
                    pass

            return Compiled()

        return launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU as far as a `Launcher` knows: `current` is its number, its stream that times ten."""
    found = SimpleNamespace(current=0)
    target = SimpleNamespace(backend="cuda", arch=90)
    driver = SimpleNamespace(
        get_current_device=lambda: found.current, get_current_stream=lambda number: 10 * number, get_current_target=lambda: target
    )
    monkeypatch.setattr(triton_launch, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr(triton_launch, "why_not_direct", lambda: None)
    return found


@pytest.mark.parametrize("alike", [False, True])
def test_the_second_launch_is_direct(device: SimpleNamespace, alike: bool) -> None:
    kernel = Kernel()
    launcher = triton_launch.Launcher(kernel, {"WIDTH": 8}, alike=alike, num_warps=4)
    for _ in range(3):
        launcher(5, X, 7)
    assert len(kernel.by_triton) == 1
    values = [(X.data_ptr(), 7, 8), (X if alike else X.data_ptr(), 7, 8)]
    assert [(number, given[:6], given[-3:]) for number, given in kernel.direct] == [
        (1, (5, 1, 1, 0, "function", "metadata"), value) for value in values
    ]


def test_each_specialization_device_and_constant_has_its_own(device: SimpleNamespace) -> None:
    kernel = Kernel()

    def launch(*arguments: Any, width: int = 8, warps: int = 4) -> int:
        """The number of the kernel that ran."""
        before = len(kernel.by_triton)
        triton_launch.Launcher(kernel, {"WIDTH": width}, num_warps=warps)(5, *arguments)
        return len(kernel.by_triton) if len(kernel.by_triton) > before else kernel.direct[-1][0]

    assert launch(X, 7) == 1
    assert launch(X[1:], 7) == 2
    assert launch(X.double(), 7) == 3
    assert launch(X, 2**40 + 1) == 4
    assert launch(X, 7, width=16) == 5
    assert launch(X, 7, warps=8) == 6
    device.current = 1
    assert launch(X, 7) == 7
    assert (launch(X[4:], 9), kernel.direct[-1][1][3]) == (7, 10), "on the stream of that device"
    device.current = 0
    assert [launch(X, 7), launch(X[3:], 7), launch(X, 2**40 + 1), launch(X, 7, width=16), launch(X, 7, warps=8)] == [1, 2, 4, 5, 6]


def test_who_asked_to_be_told_is_told_by_triton(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    launcher = triton_launch.Launcher(kernel, {"WIDTH": 8}, alike=True)
    for _ in range(3):
        launcher(5, X, 7)
    for hook in (lambda metadata: None, SimpleNamespace(calls=[print])):
        monkeypatch.setattr(triton_launch, "_HOOKS", SimpleNamespace(launch_enter_hook=hook, launch_exit_hook=None))
        launcher(5, X, 7)
    assert (len(kernel.by_triton), len(kernel.direct)) == (3, 2)
    monkeypatch.setattr(triton_launch, "_HOOKS", SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None))
    launcher(5, X, 7)
    assert (len(kernel.by_triton), len(kernel.direct)) == (3, 3)


def test_where_it_may_not_be_direct_it_is_not(device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "why_not_direct", lambda: "the internals of Triton 9.9 were not read")
    kernel = Kernel()
    launcher = triton_launch.Launcher(kernel, {"WIDTH": 8}, alike=True)
    for _ in range(3):
        launcher(5, X, 7)
    assert (len(kernel.by_triton), len(kernel.direct)) == (3, 0)


def test_an_unread_version_is_not_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr("triton.__version__", "4.0.1")
    monkeypatch.setattr(triton_launch, "VERSION", (4, 0))
    assert "Triton 4.0.1" in str(triton_launch.why_not_direct.__wrapped__())


def unaligned(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


@pytest.mark.parametrize("length", [5, 100, 9000])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_scan_keeps_its_promise_that_launches_are_alike(
    monkeypatch: pytest.MonkeyPatch, length: int, packed: bool, dtype: torch.dtype
) -> None:
    """Whatever the addresses, pack and numbers: what it tells a launcher of it is one specialization."""
    keys: list[set[tuple[Any, ...]]] = []

    class Recorder(triton_launch.Launcher):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.keys: set[tuple[Any, ...]] = set()
            keys.append(self.keys)

        def __call__(self, programs: int, *arguments: Any) -> None:
            self.keys.add(key(*arguments))

    monkeypatch.setattr(triton_solver, "Launcher", Recorder)
    monkeypatch.setattr(triton_backend, "why_not", lambda device: None)
    monkeypatch.setattr(triton_solver, "on_device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(triton_map, "_KEPT", {})
    monkeypatch.setattr(triton_map, "_launcher", lambda *sizes: lambda *given: None)
    monkeypatch.setattr(triton_carry, "_clearer", lambda: lambda *given: None)
    repeats._known.clear()
    rewards, bootstrap = torch.zeros(3 * length if packed else (3, length), dtype=dtype), torch.zeros(3)
    mask = torch.ones_like(rewards, dtype=torch.bool)
    for change in (Tensor.clone, unaligned, Tensor.clone):
        for lengths in ([length] * 3, [1, 3 * length - 1, 0]):
            rlhf_scan.gae(
                change(rewards),
                change(rewards),
                gamma=0.5,
                lam=change(rewards),
                mask=change(mask),
                bootstrap=change(bootstrap),
                segments=Segments.from_lengths(lengths) if packed else None,
                backend="triton",
            )
    assert keys
    assert [found for found in keys if len(found) > 1] == []
    repeats._known.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [8, 100, 5000])
def test_direct_launches_give_the_bits_of_triton_s_own(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    assert triton_launch.why_not_direct() is None
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    calls: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rewards, values = normal(7, length).to(dtype), normal(7, length).to(dtype)
        plain = {"rewards": rewards, "values": values, "gamma": 0.9}
        flags = {"mask": normal(7, length) > -1, "terminated": normal(7, length) > 2, "bootstrap": normal(7)}
        lengths = Segments.from_lengths([length, 0, 3 * length, 3, 3 * length - 3])
        pack = {"rewards": rewards.flatten(), "values": values.flatten(), "segments": lengths}
        calls += [plain, {**plain, **flags}, {**plain, "rewards": unaligned(rewards)}, pack, {**pack, "gamma": 0.5, "lam_value": 1.0}]
    direct = [rlhf_scan.gae(**call) for _ in range(3) for call in calls][-len(calls) :]
    monkeypatch.setattr(triton_launch, "_observed", lambda: True)
    for call, found in zip(calls, direct, strict=True):
        own = rlhf_scan.gae(**call)
        assert torch.equal(found.advantages, own.advantages)
        assert torch.equal(found.returns, own.returns)


@pytest.mark.gpu
def test_triton_s_hooks_are_called() -> None:
    triton = pytest.importorskip("triton")
    rewards = torch.randn(4, 100, device="cuda")
    names: list[str] = []

    def told(metadata: Any) -> None:
        names.append(metadata.get()["name"])

    for _ in range(3):
        rlhf_scan.discounted_returns(rewards)
    triton.knobs.runtime.launch_enter_hook.add(told)
    try:
        rlhf_scan.discounted_returns(rewards)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(told)
    rlhf_scan.discounted_returns(rewards)
    assert names == ["scan_rows"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_a_gpu_that_is_not_the_current_one() -> None:
    def call(index: int, **layout: Any) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        shape = (6000,) if layout else (2, 3000)
        rewards, values = (torch.randn(shape, generator=generator).to(f"cuda:{index}") for _ in range(2))
        found = rlhf_scan.gae(rewards, values, **layout)
        assert found.advantages.device == rewards.device
        expected = rlhf_scan.gae(rewards.cpu(), values.cpu(), **layout)
        torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-4, atol=1e-4, check_device=False)
        torch.testing.assert_close(rlhf_scan.whiten(rewards), rlhf_scan.whiten(rewards.cpu()), check_device=False)
        return found

    for _ in range(3):
        for index in (1, 0):
            call(index)
            call(index, segments=Segments.from_lengths([5, 5900, 95]))
            assert torch.cuda.current_device() == 0


def first_line(function: Any) -> str:
    """The first statement after the docstring."""
    statements = ast.parse(inspect.getsource(function)).body[0].body  # type: ignore[attr-defined]
    documented = isinstance(statements[0], ast.Expr) and isinstance(statements[0].value, ast.Constant)
    return ast.unparse(statements[1 if documented else 0])


@pytest.mark.skipif(not triton_launch.INTERPRETED, reason="the interpreter's launches are in one place")
def test_every_launch_is_on_its_tensors_device_and_awaits_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which need not be the tensors', and programs may start before what they read is written."""
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    inside, names, first_lines = 0, [], {}

    @contextlib.contextmanager
    def entered(tensor: Tensor) -> Iterator[None]:
        nonlocal inside
        inside += 1
        yield
        inside -= 1

    launch = interpreter.GridExecutor.__call__

    def recorded(executor: Any, *given: Any, **options: Any) -> Any:
        names.append((executor.fn.__name__, inside))
        first_lines[executor.fn.__name__] = first_line(executor.fn)
        return launch(executor, *given, **options)

    def calls() -> None:
        pack = Segments.from_lengths([5, 3])
        rlhf_scan.gae(long, long, backend="triton")
        for whiten_rewards in (False, True):
            rlhf_scan.ppo_advantages(
                flat, flat, flat, torch.ones(2), mask=torch.ones(8), segments=pack, whiten_rewards=whiten_rewards, backend="triton"
            )
        policy = {"policy_probs": actions, "actions": torch.zeros(2, 4, dtype=torch.int64)}
        rlhf_scan.retrace_from_policy(rows, rows, actions, actions, rows, **policy, backend="triton")

    rows, long, actions = torch.zeros(2, 4), torch.zeros(1, 3 * tiles.WIDTH), torch.zeros(2, 4, 3)
    flat = rows.flatten()
    calls()  # which imports what launches
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recorded)
    for name, module in list(sys.modules.items()):
        if name.startswith("rlhf_scan.backends.") and name != triton_launch.__name__ and hasattr(module, "on_device_of"):
            monkeypatch.setattr(module, "on_device_of", entered)
    calls()
    ours = {"_locate", "_place", "_shape", "_kept", "_tile_statistics", "_sound_statistics", "_merge", "_whiten"}
    ours |= {"scan_rows", "scan_pack", "_fill_slots", "_clear", "sum_of_products", "logarithm_of_chosen"}
    assert ours <= {name for name, _ in names}
    assert [name for name, depth in names if depth == 0] == []
    assert first_lines == dict.fromkeys(first_lines, "await_previous()")
