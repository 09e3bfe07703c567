"""`rlhf-scan demo`: a recorded PPO rollout through the HTTP service, checked against the reference and timed beside TRL's own loop."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, NoReturn

import httpx
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from torch import Tensor

from .engine import Engine, LocalEngine
from .errors import EngineError
from .functional import gae
from .requests import CreditRequest, CreditResult
from .rollout import read_request
from .segments import Segments

ROLLOUT = Path(__file__).parent / "data" / "trl_ppo_rollout.safetensors"
LARGE = 1 << 20  # tokens of the tiled rollout, about
START_SECONDS = 120.0
READY_SECONDS = 300.0  # every estimator is compiled and tested
STOP_SECONDS = 3.0

Recursion = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Rollout:
    """A packed "gae" request, what the reference backend makes of it, and how far float32 may be from that."""

    request: CreditRequest
    expected: Mapping[str, Tensor]
    tolerance: float

    @property
    def tokens(self) -> int:
        """N."""
        return self.request.tensors["rewards"].numel()


@dataclass(frozen=True)
class Timing:
    """Median milliseconds for one rollout."""

    tokens: int
    over_http: float
    alone: float
    trl: float


def main() -> None:
    """Run the demo and print what it found.

    Raises:
        EngineError: the service did not start, or its answer is not the reference's.
    """
    from rlhf_scan.integrations import trl_block
    from rlhf_scan.server.client import HttpEngine

    recursion, origin = trl_block.recursion()
    console = Console(highlight=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        step = _steps(progress, 10)
        step("reading the rollout")
        recorded = with_reference(read_request(ROLLOUT))
        large = tiled(recorded, max(1, LARGE // recorded.tokens))
        step("starting rlhf-scan serve")
        with service("triton" if device.type == "cuda" else "cpu") as url, HttpEngine(url) as engine:
            step("waiting until it has compiled and tested itself")
            wait_until_ready(url)
            step("sending the rollout")
            result = engine.run(recorded.request)
            difference = check(recorded, result.tensors, "the service's answer")
            timings = [timing(rollout, engine, recursion, device, step) for rollout in (recorded, large)]
    show_answer(console, recorded, result, difference)
    remark = (
        f"The larger rollout is the recorded one over and over. TRL's loop is from {origin}; it ran over padded rows, on {_name(device)}."
    )
    show_times(console, timings, remark)


@contextmanager
def service(backend: str) -> Iterator[str]:
    """The address of an `rlhf-scan serve` of its own on a free port; it is stopped in the end, also by SIGTERM."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))
    command = [
        sys.executable,
        "-c",
        "from rlhf_scan.cli import main; main()",
        "serve",
        "--host=127.0.0.1",
        "--port=0",
        f"--backend={backend}",
    ]
    early: list[int] = []  # a SIGTERM that comes while the process is being made; an exception then would lose it
    before = signal.signal(signal.SIGTERM, lambda number, _: early.append(number))
    try:
        with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            try:
                signal.signal(signal.SIGTERM, _exit)
                if early:
                    _exit()
                yield _address(process, log)
            finally:
                _stop(process)
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_until_ready(url: str) -> None:
    """Wait until the service has compiled and tested its backend, so that nothing else runs while it is timed."""
    until = time.monotonic() + READY_SECONDS
    while (said := _readiness(url)) is not None:
        if time.monotonic() > until:
            raise EngineError(f"demo: the service must be ready within {READY_SECONDS:.0f} s, but: {said}; run `rlhf-scan doctor`")
        time.sleep(0.1)


def _readiness(url: str) -> str | None:
    """Why the service is not ready, or None."""
    try:
        answer = httpx.get(f"{url}/readyz")
    except httpx.TransportError as error:
        raise EngineError(f"demo: the service must go on running, but it cannot be reached ({error}); run `rlhf-scan doctor`") from error
    return None if answer.status_code == httpx.codes.OK else answer.text


def with_reference(request: CreditRequest) -> Rollout:
    """The request with what the reference backend makes of it.

    The tolerance: a step rounds at most eight times (its own sums and products, and those that join the pieces of a scan), each time by
    half a unit in the last place of a number no larger than `scale`; an error fades by gamma * lam a step, so it lasts for `horizon` steps.
    """
    expected = LocalEngine("reference").run(request).tensors
    rewards, values, cu_seqlens = (request.tensors[name] for name in ("rewards", "values", "cu_seqlens"))
    decay = request.params["gamma"] * request.params["lam"]
    horizon = min(int(cu_seqlens.diff().max()), 1 / max(1 - decay, 1e-9))
    scale = float(rewards.abs().max() + 2 * values.abs().max() + expected["advantages"].abs().max())
    return Rollout(request, expected, 8 * horizon * scale * torch.finfo(torch.float32).eps / 2)


def check(rollout: Rollout, got: Mapping[str, Tensor], whose: str) -> float:
    """The largest difference from the reference; EngineError where it is not within the tolerance."""
    differences = [(got[name].cpu() - expected).abs().nan_to_num(nan=torch.inf) for name, expected in rollout.expected.items()]
    largest = max(float(difference.max()) for difference in differences)
    if largest > rollout.tolerance:
        raise EngineError(
            f"demo: {whose} must agree with the reference within {rollout.tolerance:.1e}, got a difference of {largest:.1e}; "
            "run `rlhf-scan doctor` and report what it says"
        )
    return largest


def tiled(rollout: Rollout, copies: int) -> Rollout:
    """The rollout `copies` times, one after the other."""
    tensors = {name: rollout.request.tensors[name].repeat(copies) for name in ("rewards", "values")}
    lengths = rollout.request.tensors["cu_seqlens"].diff().repeat(copies)
    request = replace(rollout.request, tensors={**tensors, "cu_seqlens": Segments.from_lengths(lengths).cu_seqlens})
    return Rollout(request, {name: expected.repeat(copies) for name, expected in rollout.expected.items()}, rollout.tolerance)


def timing(rollout: Rollout, engine: Engine, recursion: Recursion, device: torch.device, step: Callable[[str], None]) -> Timing:
    """Time one rollout in three ways, each only once its answer is right."""
    step(f"timing {rollout.tokens:,} tokens: over HTTP")
    check(rollout, engine.run(rollout.request).tensors, "the service's answer")
    over_http = _median_milliseconds(lambda: engine.run(rollout.request), device)

    step(f"timing {rollout.tokens:,} tokens: gae alone")
    rewards, values = (rollout.request.tensors[name].to(device) for name in ("rewards", "values"))
    segments = Segments.from_cu_seqlens(rollout.request.tensors["cu_seqlens"])
    alone = partial(gae, rewards, values, segments=segments, **rollout.request.params)
    check(rollout, alone()._asdict(), "gae's answer")
    alone_milliseconds = _median_milliseconds(alone, device)

    step(f"timing {rollout.tokens:,} tokens: TRL's loop")
    mask = torch.arange(int(segments.lengths().max())) < segments.lengths()[:, None]
    rows = [torch.zeros(mask.shape).masked_scatter(mask, tensor.cpu()).to(device) for tensor in (rewards, values)]
    loop = partial(recursion, *rows, SimpleNamespace(**rollout.request.params))
    advantages, returns = loop()
    check(rollout, {"advantages": advantages.cpu()[mask], "returns": returns.cpu()[mask]}, "TRL's loop")
    return Timing(rollout.tokens, over_http, alone_milliseconds, _median_milliseconds(loop, device))


def show_answer(console: Console, rollout: Rollout, result: CreditResult, difference: float) -> None:
    """Print what was computed, where, and whether it is right."""
    params, report = rollout.request.params, result.report
    lengths = rollout.request.tensors["cu_seqlens"].diff()
    facts = Table.grid(padding=(0, 2))
    facts.add_row(
        "rollout", f"{report['segments']:,} segments, {report['tokens']:,} tokens ({lengths.min()} to {lengths.max()} each), TRL PPO"
    )
    facts.add_row("computed", f"gae, gamma {params['gamma']}, lambda {params['lam']}")
    facts.add_row("where", f"rlhf-scan serve {report['version']}, backend {report['backend']} on {_name(torch.device(report['device']))}")
    facts.add_row("check", f"agrees with the reference: off by at most {difference:.1e}, tolerance {rollout.tolerance:.1e}")
    console.print(facts)
    table = Table("", *(Column(name, justify="right") for name in ("mean", "std", "min", "max")))
    for name, tensor in result.tensors.items():
        table.add_row(name, *(f"{float(number):.4f}" for number in (tensor.mean(), tensor.std(), tensor.min(), tensor.max())))
    console.print(table)


def show_times(console: Console, timings: Sequence[Timing], remark: str) -> None:
    """Print the medians side by side."""
    table = Table("median, milliseconds", *(Column(f"{timing.tokens:,} tokens", justify="right") for timing in timings))
    table.add_row("request over HTTP, there and back", *(f"{timing.over_http:.2f}" for timing in timings))
    table.add_row("gae alone", *(f"{timing.alone:.3f}" for timing in timings))
    table.add_row("TRL's loop over tokens", *(f"{timing.trl:.2f}" for timing in timings))
    table.add_row("TRL's loop / gae alone", *(f"{timing.trl / timing.alone:.0f} x" for timing in timings))
    console.print(table)
    console.print(remark)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the CPU, {torch.get_num_threads()} threads"


def _steps(progress: Progress, total: int) -> Callable[[str], None]:
    """``step(what)``: say what comes next; what came before is done."""
    task = progress.add_task("", total=total)
    done = iter(range(total))
    return lambda what: progress.update(task, description=what, completed=next(done))


def _median_milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median of at least 5 calls, and of more while they take less than half a second in all; after two calls that warm up."""
    times: list[float] = []
    while len(times) < 2 + 5 or (sum(times) < 0.5 and len(times) < 2 + 100):
        _finish(device)
        started = time.perf_counter()
        work()
        _finish(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:]) * 1e3


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _address(process: subprocess.Popen[str], log: IO[str]) -> str:
    """The address that the service prints once it listens."""
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.daemon = True  # never keeps the demo from ending
    try:
        timer.start()
        line = process.stdout.readline() if process.stdout else ""
    finally:
        timer.cancel()
    found = re.search(r"http://\S+", line)
    if found is None:
        process.kill()
        process.wait()
        log.seek(0)
        said = (line + log.read()).strip() or "nothing"
        raise EngineError(
            f"demo: rlhf-scan serve must start within {START_SECONDS:.0f} s, but said: {said}; see what `rlhf-scan doctor` says"
        )
    return found[0]


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _exit(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
