"""What runs here: versions, GPUs, backends, and a self-test of each usable backend against the reference."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .backend_choice import backend_module, choose_backend
from .call import BACKENDS
from .engine import LocalEngine
from .errors import BackendError
from .operations import EITHER, PER_ACTION, PER_SEQUENCE, PER_TOKEN, Argument, Operation, operations
from .requests import CreditRequest
from .rollout import device_for, on_device
from .version import __version__

PACKAGES = ("torch", "numpy", "numba", "triton", "safetensors", "fastapi", "uvicorn", "httpx", "ray", "trl", "transformers")


@dataclass(frozen=True)
class SelfTest:
    """One estimator on one backend, against the reference.

    Attributes:
        op: the estimator.
        ok: whether every output was within the tolerance.
        error: largest difference from the reference, in units of the tolerance; None where the backend raised.
        detail: what went wrong, or "".
    """

    op: str
    ok: bool
    error: float | None
    detail: str


def examine() -> dict[str, Any]:
    """Everything that `rlhf-scan doctor` says, as plain data; ``ok`` is False where a self-test failed."""
    backends = {name: _examine_backend(name) for name in BACKENDS if name != "auto"}
    return {
        "versions": {"rlhf-scan": __version__, "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "backends": backends,
        "ok": all(test["ok"] for backend in backends.values() for test in backend["self_tests"]),
    }


def self_test(backend: str, ops: Collection[str] | None = None) -> Iterator[SelfTest]:
    """Run `ops` (None: all that are served) on `backend` and on the reference, over rows and packs with masks, ends and bootstraps."""
    tested = (entry for entry in operations() if entry.takes_backend)
    return (_test_operation(entry, backend) for entry in tested if ops is None or entry.name in ops)


def show(report: dict[str, Any], console: Console) -> None:
    """Print what `examine` found."""
    versions = Table("package", "version")
    for name, version in report["versions"].items():
        versions.add_row(name, version or "not installed")
    console.print(versions)
    console.print("GPUs: " + ("; ".join(report["gpus"]) or "none"))
    for name, backend in report["backends"].items():
        console.print(f"backend {name}: {backend['why_not'] or 'usable, ' + backend['note']}", soft_wrap=True, markup=False)
        for test in backend["self_tests"]:
            verdict = "agrees with the reference" if test["ok"] else f"FAILED: {test['detail']}"
            console.print(f"  {test['op']} {verdict}", soft_wrap=True, markup=False)


def _examine_backend(name: str) -> dict[str, Any]:
    try:
        choose_backend(name, device_for(name))
    except BackendError as error:
        return {"why_not": str(error), "note": "", "self_tests": []}
    return {"why_not": None, "note": backend_module(name).note(), "self_tests": [asdict(test) for test in self_test(name)]}


def _test_operation(entry: Operation, backend: str) -> SelfTest:
    worst = 0.0
    for request in _samples(entry):
        try:
            want = LocalEngine("reference").run(request)
            got = LocalEngine(backend, validate="full").run(on_device(request, device_for(backend)))
        except Exception as error:  # whatever a broken backend raises is the finding
            return SelfTest(entry.name, False, None, f"{type(error).__name__}: {error}")
        for name, expected in want.tensors.items():
            # Each token adds a few roundings, none larger than half a unit of the largest number.
            largest = max(1.0, float(expected.abs().max()))
            tolerance = expected.numel() * torch.finfo(torch.float32).eps * largest
            difference = float((got.tensors[name].cpu() - expected).abs().nan_to_num(nan=torch.inf).max())
            worst = max(worst, difference / tolerance)
    detail = "" if worst <= 1 else f"differs from the reference by {worst:.3g} times the tolerance"
    return SelfTest(entry.name, worst <= 1, worst, detail)


def _samples(entry: Operation) -> Iterator[CreditRequest]:
    """Small requests that use every optional tensor, in both layouts, with each meaning of a masked token."""
    generator = torch.Generator().manual_seed(0)
    masked = entry.options.get("masked")
    for word in masked.words if masked is not None else ("",):
        option = {"masked": word} if word else {}
        rates = {name: 0.9 for name in entry.options if name in entry.tensors}
        yield CreditRequest(entry.name, _tensors(entry, (3, 17), 3, generator), {**option, **rates})
        if entry.packs:
            pack = _tensors(entry, (40,), 4, generator)
            yield CreditRequest(entry.name, {**pack, "cu_seqlens": torch.tensor([0, 1, 1, 23, 40])}, option)


def _tensors(entry: Operation, shape: tuple[int, ...], segments: int, generator: torch.Generator) -> dict[str, Tensor]:
    """One of each that is no parameter and stands in no other's place."""
    left_out = {name for pair in entry.choices.values() for name in pair} | set(entry.options)
    sizes = {PER_TOKEN: shape, PER_ACTION: (*shape, 3), PER_SEQUENCE: (segments,)}
    tensors: dict[str, Tensor] = {}
    for name, argument in entry.tensors.items():
        if name in left_out or not (argument.required or argument.shape in (*sizes, EITHER)):
            continue
        either = shape if argument.kind == "flag" else (segments,)
        tensors[name] = _tensor(argument, sizes.get(argument.shape, (segments, 3)) if argument.shape != EITHER else either, generator)
    if "mask" in tensors and "attention_mask" in tensors:  # a trainable token is no padding
        tensors["attention_mask"] |= tensors["mask"]
    return tensors


def _tensor(argument: Argument, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if argument.kind == "integer":
        return torch.randint(0, 3, size, generator=generator)
    if argument.kind == "flag":
        return torch.rand(size, generator=generator) < (0.1 if argument.shape == EITHER else 0.8)
    return torch.randn(size, generator=generator)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return f"{properties.name}, compute capability {properties.major}.{properties.minor}, {properties.total_memory / 2**30:.0f} GiB"
