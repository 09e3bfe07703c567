"""Compiles the Triton backend's kernels for an sm_90 GPU on a machine without one, and prints the layouts of their scans.

Run as the module tests.offline_compiler, without TRITON_INTERPRET: one JSON line per launch, {"variant", "scans": [{"axis", "layout"}]}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

import rlhf_scan
from rlhf_scan import CreditRequest, LocalEngine, Segments
from rlhf_scan.backends import triton_map, triton_scan
from scripts import no_gpu

from . import toy_estimator

_SCAN = re.compile(r'"tt\.scan"\(.*?<\{axis = (\d+) : i32.*?\}\) : \(tensor<[^>]*?, (#\w+)>', re.DOTALL)
_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>$", re.MULTILINE)


class Pointer:
    """A device tensor to the compiler: a dtype and an aligned address."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 1 << 40


def pointers(value: Any) -> Any:
    """`value` with a pointer for each tensor."""
    if type(value) is tuple:
        return tuple(pointers(item) for item in value)
    return Pointer(value.dtype) if isinstance(value, Tensor) else value


class Compiled:
    """Stands for a kernel: compiles each launch instead of running it."""

    def __init__(self, kernel: Any, found: Callable[[str], None]) -> None:
        self.kernel = kernel
        self.found = found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            compiled = self.kernel.warmup(*pointers(arguments), grid=grid, **{name: pointers(value) for name, value in options.items()})
            self.found(compiled.asm["ttgir"])

        return launch


def scans(ttgir: str) -> list[dict[str, Any]]:
    """Each scan's axis and its operands' layout, a blocked one as text."""
    layouts = dict(_LAYOUT.findall(ttgir))
    found = [{"axis": int(axis), "layout": layouts.get(name, name)} for axis, name in _SCAN.findall(ttgir)]
    if len(found) != ttgir.count('"tt.scan"'):
        raise RuntimeError(f"{ttgir.count('tt.scan')} scans, but {len(found)} were understood; the text of the compiler has changed")
    return found


def variants() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of each kind of kernel."""
    for length in (8, 100, 500, 3000, 4096, 5000):
        row = torch.zeros(37, length)
        yield f"rows of {length}", lambda row=row: rlhf_scan.gae(row, row, backend="triton")
    x = torch.zeros(3 * 5000)
    wide = torch.zeros(3, 5000, dtype=torch.float64)
    flag = torch.zeros(3 * 5000, dtype=torch.bool)
    pack: dict[str, Any] = {"segments": Segments.from_lengths([5000] * 3), "backend": "triton"}
    flags: dict[str, Any] = {"mask": flag, "terminated": flag, "truncated": flag}
    end = torch.zeros(3)
    yield "pack", lambda: rlhf_scan.gae(x, x, **pack)
    yield "pack of few tokens", lambda: rlhf_scan.gae(x[:40], x[:40], segments=Segments.from_lengths([30, 10]), backend="triton")
    yield "pack, mask", lambda: rlhf_scan.gae(x, x, mask=flag, **pack)
    yield "pack, mask and flag", lambda: rlhf_scan.gae(x, x, mask=flag, terminated=flag, **pack)
    yield "pack, everything", lambda: rlhf_scan.gae(x, x, lam_value=1.0, bootstrap=end, **flags, **pack)
    yield "pack, zero", lambda: rlhf_scan.gae(x, x, masked="zero", gamma=end, lam=x, **flags, **pack)
    yield "pack, bfloat16", lambda: rlhf_scan.gae(x.bfloat16(), x.bfloat16(), bootstrap=x, **flags, **pack)
    yield "rows, float64, mask", lambda: rlhf_scan.gae(wide, wide, mask=flag.reshape(3, 5000), backend="triton")
    yield "vtrace", lambda: rlhf_scan.vtrace(x, x, x, x, **pack)
    yield "retrace, mask", lambda: rlhf_scan.retrace(x, x, x, x, x, mask=flag, **pack)
    rates: dict[str, Any] = {"gamma": x, "lam": x, "rho_bar": x, "c_bar": x, "terminated": flag}
    yield "vtrace, rates per token", lambda: rlhf_scan.vtrace(x, x, x, x, truncated=flag, bootstrap=x, **rates, **pack)
    yield "retrace, rates per token", lambda: rlhf_scan.retrace(x, x, x, x, x, **rates, **pack)
    yield "retrace, rates per token, mask", lambda: rlhf_scan.retrace(x, x, x, x, x, mask=flag, **rates, **pack)
    yield "eligibility_traces, mask", lambda: rlhf_scan.eligibility_traces(x, mask=flag, initial=end, **pack)
    yield "episodic_cumsum", lambda: rlhf_scan.episodic_cumsum(x, terminated=flag, boundary="starts_at", **pack)
    yield "linear_scan", lambda: rlhf_scan.linear_scan(x, x, initial=end, **pack)
    toy_estimator.add()
    request = CreditRequest(toy_estimator.NAME, {"rewards": x, "log_visits": x, "cu_seqlens": torch.tensor([0, 5000, 10000, 15000])})
    yield "a new estimator", lambda: LocalEngine("triton").run(request)


def main() -> None:
    variant = ""

    def report(ttgir: str) -> None:
        print(json.dumps({"variant": variant, "scans": scans(ttgir)}), flush=True)

    no_gpu.stand_in()
    triton_scan.scan_rows, triton_scan.scan_pack = Compiled(triton_scan.scan_rows, report), Compiled(triton_scan.scan_pack, report)
    triton_map._fill_slots = Compiled(triton_map._fill_slots, lambda ttgir: None)
    for variant, call in variants():  # noqa: B007  # `report` reads it
        call()


if __name__ == "__main__":
    if triton.knobs.runtime.interpret:
        raise SystemExit("unset TRITON_INTERPRET: the interpreter compiles nothing")
    main()
