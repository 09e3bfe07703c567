"""Random calls for the property tests: drawn by hypothesis, run through the public functions, compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from conftest import device_of
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from oracle import ORACLES, Batch, Floats
from torch import Tensor

import rlhf_scan
from rlhf_scan import Segments
from rlhf_scan.estimators import estimator

# The interpreter takes some 80 us per element and scan.
EXAMPLES = {"reference": 40, "cpu": 60, "triton": 5}
SKIPPED_PHASES = {"reference": (), "cpu": (), "triton": (Phase.shrink, Phase.explain)}
# Around the tiles and groups of tiles (rlhf_scan.backends.tiles) that the Triton backend uses in the interpreter.
LONG = (16, 17, 63, 64, 65, 130, 200, 300)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# bfloat16 stores truncate in the interpreter instead of rounding to nearest: a whole unit in the last place instead of half.
STORE_ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022, torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24}


@dataclass(frozen=True)
class Sample:
    """A batch and how it is handed over: `rows` as [B, T], "pack" as [N] with Segments, "one" as [N] without."""

    op: str
    batch: Batch
    layout: str
    dtype: torch.dtype
    flag_dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        lengths = self.batch.lengths
        return (len(lengths), lengths[0] if lengths else 0) if self.layout == "rows" else (self.batch.tokens,)

    def arguments(self, device: torch.device) -> tuple[list[Tensor], dict[str, Any]]:
        """Positional and keyword arguments of the public function."""
        batch = self.batch

        def floats(name: str, numbers: Floats) -> Tensor:
            return torch.tensor(numbers, dtype=self.dtype, device=device).reshape(-1 if name in batch.per_segment else self.shape)

        def flags(name: str) -> Tensor | None:
            found = getattr(batch, name)
            if found is None:
                return None
            return torch.tensor(found, device=device).to(self.flag_dtype).reshape(-1 if name in batch.per_segment else self.shape)

        options: dict[str, Any] = {name: floats(name, rate) if isinstance(rate, np.ndarray) else rate for name, rate in batch.rates.items()}
        options |= {name: flags(name) for name in ("mask", "terminated", "truncated")}
        options |= {
            "masked": batch.masked,
            "bootstrap": None if batch.bootstrap is None else floats("bootstrap", batch.bootstrap),
            "segments": Segments.from_lengths(batch.lengths) if self.layout == "pack" else None,
        }
        return [floats(name, batch.inputs[name]) for name in batch.inputs], options

    def run(self, backend: str) -> list[Tensor]:
        """The outputs, flat and on the CPU."""
        inputs, options = self.arguments(device_of(backend))
        return call(self.op, inputs, {**options, "backend": backend})

    def changed(self, **changes: Any) -> Sample:
        """The same with other arguments."""
        return replace(self, batch=replace(self.batch, **changes))


def call(op: str, inputs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The public function `op`; its outputs flat and on the CPU."""
    outputs = getattr(rlhf_scan, op)(*inputs, **options)
    return [output.flatten().cpu() for output in ([outputs] if isinstance(outputs, Tensor) else outputs)]


def assert_as_the_oracle(sample: Sample, outputs: list[Tensor]) -> None:
    """Raise unless `outputs` are as near to the oracle as rounding allows."""
    roundoff = 2.0**-53 if sample.dtype == torch.float64 else 2.0**-24
    for name, output, numbers in zip(estimator(sample.op).outputs, outputs, ORACLES[sample.op](sample.batch), strict=True):
        assert output.dtype == sample.dtype
        expected = np.array([number.value for number in numbers])
        allowed = np.array([number.error(roundoff, sample.batch.tokens) for number in numbers])
        allowed += STORE_ROUNDOFF[sample.dtype] * (np.abs(expected) + allowed) + SMALLEST[sample.dtype]
        got = output.double().numpy()
        wrong = np.flatnonzero(~(np.abs(got - expected) <= allowed))
        assert not wrong.size, (
            f"{name}[{wrong[0]}] is {got[wrong[0]]}, must be {expected[wrong[0]]} +- {allowed[wrong[0]]:.2g}; wrong at {wrong}"
        )


def for_samples(op: str, backend: str, check: Callable[[Sample], None], *, examples: float = 1.0, **wanted: Any) -> None:
    """Run `check` on random samples; `examples` scales their number, `wanted` is passed on to `samples`."""
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]

    phases = [phase for phase in Phase if phase not in SKIPPED_PHASES[backend]]

    @settings(max_examples=max(4, int(examples * EXAMPLES[backend])), deadline=None, suppress_health_check=slow, phases=phases)
    @given(samples(op, **wanted))
    def run(sample: Sample) -> None:
        check(sample)

    run()


@st.composite
def samples(
    draw: st.DrawFn,
    op: str,
    layouts: tuple[str, ...] = ("rows", "pack", "one"),
    masked: tuple[str, ...] = ("skip", "zero", "keep"),
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    bootstraps: tuple[str, ...] = ("none", "segment", "token"),
) -> Sample:
    """A random call of `op`; the numbers come from a seed, what matters for boundaries is drawn so that it shrinks."""
    layout = draw(st.sampled_from(layouts))
    lengths = draw(_lengths(layout))
    tokens, segments = sum(lengths), len(lengths)
    # A tensor [N] is read as [S] where both are equal: the same thing where each segment has one token.
    assume(layout != "pack" or tokens != segments or set(lengths) <= {1})
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(dtypes))
    per_segment: set[str] = set()

    def numbers(size: int, low: float = -2.0, high: float = 2.0) -> Floats:
        return torch.tensor(random.uniform(low, high, size)).to(dtype).double().numpy()

    def shaped(name: str, kind: str) -> int:
        per_segment.update({name} if kind == "segment" else ())
        return segments if kind == "segment" else tokens

    rates: dict[str, Any] = {}
    for name, default in estimator(op).rates.items():
        kind = draw(st.sampled_from(("number", "segment", "token") + (("none",) if default is None else ())))
        if kind in ("number", "none"):
            rates[name] = None if kind == "none" else draw(st.sampled_from((0.0, 0.5, 0.9, 0.95, 1.0)))
        else:
            rates[name] = np.where(random.random(shaped(name, kind)) < 0.2, random.integers(0, 2), numbers(shaped(name, kind), 0.0, 1.0))
    flags: dict[str, Any] = {}
    for name in ("terminated", "truncated"):
        kind, chance = draw(st.sampled_from(("none", "token", "segment"))), draw(st.sampled_from((0.05, 0.3)))
        flags[name] = None if kind == "none" else random.random(shaped(name, kind)) < chance
    trainable = draw(st.sampled_from((None, 0.0, 0.3, 0.8, 0.97)))
    mask = None if trainable is None else random.random(tokens) < trainable
    kind = draw(st.sampled_from(bootstraps))
    bootstrap = None if kind == "none" else numbers(shaped("bootstrap", kind))
    inputs = {name: numbers(tokens) for name in estimator(op).inputs}
    batch = Batch(
        lengths, inputs, rates, mask, draw(st.sampled_from(masked)), **flags, bootstrap=bootstrap, per_segment=frozenset(per_segment)
    )
    return Sample(op, batch, layout, dtype, draw(st.sampled_from((torch.bool, torch.int64, torch.float32, torch.uint8))))


def _lengths(layout: str) -> st.SearchStrategy[list[int]]:
    if layout == "one":
        return st.lists(st.integers(0, 12) | st.sampled_from(LONG), min_size=1, max_size=1)
    if layout == "rows":
        return st.builds(lambda rows, length: [length] * rows, st.integers(1, 5), st.integers(0, 12)) | st.sampled_from(LONG).map(
            lambda n: [n] * 2
        )
    return st.lists(st.integers(0, 12) | st.just(0), min_size=1, max_size=8) | st.lists(
        st.sampled_from((0, 1, *LONG)), min_size=1, max_size=3
    )
