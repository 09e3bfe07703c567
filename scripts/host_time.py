"""Host time of a call on small CUDA tensors, and where it goes: ``python -m scripts.host_time``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import rlhf_scan
from rlhf_scan import Segments, repeats
from rlhf_scan.backends import triton_backend
from rlhf_scan.backends.triton_launch import absent
from rlhf_scan.call import Tensors

SHAPE = 64, 128
CALLS, ROUNDS = 200, 50


def microseconds(call: Callable[[], Any]) -> float:
    """Host time of one call, the least of many rounds; the GPU is idle when a round begins."""
    for _ in range(CALLS):
        call()
    least = float("inf")
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, (time.perf_counter() - started) / CALLS)
    return least * 1e6


def calls() -> dict[str, Callable[[], Any]]:
    """By name."""
    rewards, values = (torch.randn(SHAPE, device="cuda") for _ in range(2))
    flags: Any = {name: torch.rand(SHAPE, device="cuda") > 0.1 for name in ("mask", "terminated")}
    tiled = [torch.randn(8, 5000, device="cuda") for _ in range(2)]
    flat = [tensor.flatten() for tensor in (rewards, values)]
    pack = Segments.from_lengths([128] * 60 + [512])
    return {
        "torch.add": lambda: torch.add(rewards, values),
        "torch.empty_like": lambda: torch.empty_like(rewards),
        "gae": lambda: rlhf_scan.gae(rewards, values, gamma=0.99, lam=0.95),
        "gae, mask, terminated": lambda: rlhf_scan.gae(rewards, values, gamma=0.99, lam=0.95, **flags),
        "gae, 8 x 5000": lambda: rlhf_scan.gae(*tiled, gamma=0.99, lam=0.95),
        "gae, strided": lambda: rlhf_scan.gae(tiled[0][:, :128], tiled[1][:, :128], gamma=0.99, lam=0.95),
        "gae, packed": lambda: rlhf_scan.gae(*flat, gamma=0.99, lam=0.95, segments=pack),
        "discounted_returns": lambda: rlhf_scan.discounted_returns(rewards, gamma=0.99),
        "vtrace": lambda: rlhf_scan.vtrace(rewards, values, values, rewards, gamma=0.99),
    }


def parts(call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """What a call of `gae` consists of, one inside the other."""
    call()
    repeat = list(repeats._known.values())[-1]
    rewards, values = (torch.randn(SHAPE, device="cuda") for _ in range(2))
    tensors = Tensors((rewards, values), (0.99, 0.95), (None, None, None), None, None)
    solve: Any = repeat._solve
    outputs = solve(tensors)
    launcher, programs, _ = next(iter(solve.launches.values()))
    arguments = tensors.inputs, outputs, absent(2), tensors.rates, absent(3), None, None, None, *SHAPE, SHAPE[0]
    run, function, metadata, constants = launcher._by_device[torch.cuda.current_device()]
    stream = torch.cuda.current_stream().cuda_stream

    def new_shape() -> None:
        repeats._known.clear()
        call()

    def through_the_op() -> None:
        with torch.overrides.BaseTorchFunctionMode():
            call()

    return {
        "the whole call": call,
        "  the backend's part": lambda: solve(tensors),
        "    its two outputs": lambda: [torch.empty_like(rewards), torch.empty_like(rewards)],
        "    its launch": lambda: launcher(programs, *arguments),
        "      of it Triton's launcher": lambda: run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *constants),
        "the first call of a shape": new_shape,
        "a call that is watched": through_the_op,
    }


def main() -> None:
    """Print them."""
    found = calls()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {triton_backend.note()}; microseconds a call")
    for name, call in (found | parts(found["gae"])).items():
        print(f"{microseconds(call):8.1f}  {name}")


if __name__ == "__main__":
    main()
