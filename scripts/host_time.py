"""Host time of a call on small CUDA tensors, and where it goes: ``python -m scripts.host_time``.

Without a GPU it tells what takes longer than what, and how many kernels a call launches: see `scripts.no_gpu`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import rlhf_scan
from rlhf_scan import Segments, repeats
from rlhf_scan.backends import triton_backend
from rlhf_scan.backends.triton_launch import absent
from rlhf_scan.call import Tensors
from rlhf_scan.ppo_options import PRESETS

from . import no_gpu

SHAPE = 64, 128
CALLS, ROUNDS = 200, 50
DEVICE, BACKEND = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", "triton")


def microseconds(call: Callable[[], Any]) -> float:
    """Host time of one call, the least of many rounds; the GPU is idle when a round begins."""
    for _ in range(CALLS):
        call()
    least = float("inf")
    for _ in range(ROUNDS):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, (time.perf_counter() - started) / CALLS)
    return least * 1e6


def calls() -> dict[str, Callable[[], Any]]:
    """By name."""
    rewards, values = (torch.randn(SHAPE, device=DEVICE) for _ in range(2))
    actions = [torch.rand((*SHAPE, 4), device=DEVICE) for _ in range(2)]
    flags: Any = {name: torch.rand(SHAPE, device=DEVICE) > 0.1 for name in ("mask", "terminated")}
    tiled = [torch.randn(8, 5000, device=DEVICE) for _ in range(2)]
    flat = [tensor.flatten() for tensor in (rewards, values)]
    pack = Segments.from_lengths([128] * 60 + [512])
    block: list[Any] = [torch.randn(SHAPE, device=DEVICE) for _ in range(3)]
    scores, mask = torch.randn(SHAPE[0], device=DEVICE), {"mask": flags["mask"]}
    packed = [tensor.flatten() for tensor in block], {"mask": flags["mask"].flatten(), "segments": Segments.from_lengths([128] * 64)}
    reasons = {"stop_reasons": ["stop", "length"] * 32, "bootstrap": scores}
    found: dict[str, Callable[[], Any]] = {
        "torch.add": lambda: torch.add(rewards, values),
        "torch.empty_like": lambda: torch.empty_like(rewards),
        "gae": lambda: rlhf_scan.gae(rewards, values, gamma=0.99, lam=0.95, backend=BACKEND),
        "gae, mask, terminated": lambda: rlhf_scan.gae(rewards, values, gamma=0.99, lam=0.95, **flags, backend=BACKEND),
        "gae, 8 x 5000": lambda: rlhf_scan.gae(*tiled, gamma=0.99, lam=0.95, backend=BACKEND),
        "gae, strided": lambda: rlhf_scan.gae(tiled[0][:, :128], tiled[1][:, :128], gamma=0.99, lam=0.95, backend=BACKEND),
        "gae, packed": lambda: rlhf_scan.gae(*flat, gamma=0.99, lam=0.95, segments=pack, backend=BACKEND),
        "discounted_returns": lambda: rlhf_scan.discounted_returns(rewards, gamma=0.99, backend=BACKEND),
        "vtrace": lambda: rlhf_scan.vtrace(rewards, values, values, rewards, gamma=0.99, backend=BACKEND),
        "retrace_from_policy": lambda: rlhf_scan.retrace_from_policy(
            rewards, values, *actions, rewards, values, gamma=0.99, lam=0.95, backend=BACKEND
        ),
        "whiten": lambda: rlhf_scan.whiten(rewards, backend=BACKEND),
        "ppo_advantages": lambda: rlhf_scan.ppo_advantages(*block, scores, backend=BACKEND),
        "ppo_advantages, mask": lambda: rlhf_scan.ppo_advantages(*block, scores, **mask, backend=BACKEND),
        "ppo_advantages, mask, stop_reasons, bootstrap": lambda: rlhf_scan.ppo_advantages(
            *block, scores, **mask, **reasons, backend=BACKEND
        ),
        "ppo_advantages, packed, mask": lambda: rlhf_scan.ppo_advantages(*packed[0], scores, **packed[1], backend=BACKEND),
    }
    for preset in PRESETS:
        options: Any = {**mask, "preset": preset, "backend": BACKEND}
        found[f"ppo_advantages, mask, {preset}"] = partial(rlhf_scan.ppo_advantages, *block, scores, **options)
    return found


def parts(call: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
    """What a call of `gae` consists of, one inside the other."""
    call()
    repeat = list(repeats._known.values())[-1]
    rewards, values = (torch.randn(SHAPE, device=DEVICE) for _ in range(2))
    tensors = Tensors((rewards, values), (0.99, 0.95), (None, None, None), None, None)
    solve: Any = repeat._solve
    outputs = solve(tensors)
    (launcher,), programs = solve._launchers.values(), solve._programs
    arguments = tensors.inputs, outputs, absent(2), tensors.rates, absent(3), None, None, None, *solve._places
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
    absent_gpu = None if DEVICE == "cuda" else no_gpu.stand_in()
    found = calls()
    name = "no GPU" if absent_gpu is not None else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}; {triton_backend.note()}; microseconds a call")
    for call_name, call in (found if absent_gpu is not None else found | parts(found["gae"])).items():
        took = microseconds(call)
        launches = ""
        if absent_gpu is not None:
            absent_gpu.launched.clear()
            call()
            launches = f"{len(absent_gpu.launched):3d} kernels"
        print(f"{took:8.1f}{launches}  {call_name}")


if __name__ == "__main__":
    main()
