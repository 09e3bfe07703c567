"""Random calls of the estimators beside GAE and returns, run through the public functions and compared with their oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from conftest import device_of
from estimator_oracle import ORACLES, Array, Case
from samples import SMALLEST, STORE_ROUNDOFF
from torch import Tensor

import rlhf_scan
from rlhf_scan import Segments
from rlhf_scan.estimators import estimator

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LONG = (16, 17, 63, 64, 65, 130)  # around the tiles of the Triton backend


def sample(op: str, seed: int, dtype: torch.dtype | None = None) -> tuple[Case, str, torch.dtype]:
    """A random call of `op`, its layout and dtype."""
    random = np.random.default_rng(seed)
    entry = estimator(op)

    def pick(*choices: Any) -> Any:
        return choices[random.integers(len(choices))]

    layout, dtype = pick("rows", "pack", "one"), dtype or pick(*DTYPES)
    lengths = _lengths(random, layout)
    tokens, segments = sum(lengths), len(lengths)
    per_segment: set[str] = set()

    def numbers(size: int | tuple[int, ...], low: float = -2.0, high: float = 2.0) -> Array:
        found: Array = torch.tensor(random.uniform(low, high, size)).to(dtype).double().numpy()
        return found

    def sized(name: str, kind: str) -> int:
        per_segment.update({name} if kind == "segment" else ())
        return segments if kind == "segment" else tokens

    actions = int(pick(1, 2, 5))
    names = entry.arguments
    if entry.choices and random.random() < 0.5:
        names = (*(name for name in names if name not in entry.choices), *entry.chosen)
    inputs = {name: numbers((tokens, actions) if name in entry.per_action else tokens) for name in names}
    for name in {"target_probs", "policy_probs"} & set(inputs):
        inputs[name] = np.where(random.random((tokens, actions)) < 0.3, 0.0, np.abs(inputs[name]))
    if "actions" in inputs:
        inputs["actions"] = random.integers(0, actions, tokens).astype(np.float64)
    if "target_logprobs" in inputs and dtype != torch.float16:
        far = random.random(tokens) < 0.03
        inputs["target_logprobs"] = np.where(far, float(pick(-300.0, 21.0, 30.0)), inputs["target_logprobs"])
    rates: dict[str, Any] = {}
    for name, rate in entry.rates.items():
        kind, bar = pick("number", "segment", "token"), not math.isfinite(rate.largest)
        if kind == "number":
            rates[name] = pick(0.0, 0.5, 1.0, *((1.5, math.inf) if name == "rho_bar" else (0.9,)))
        else:
            rates[name] = np.where(random.random(sized(name, kind)) < 0.2, 1.0, numbers(sized(name, kind), 0.0, 1.5 if bar else 1.0))
    flags: dict[str, Any] = {"mask": None, "terminated": None, "truncated": None}
    for name in set(entry.takes) & {"terminated", "truncated"}:
        kind, chance = pick("none", "token", "segment"), pick(0.05, 0.3)
        flags[name] = None if kind == "none" else random.random(sized(name, kind)) < chance
    if "mask" in entry.takes and random.random() < 0.7:
        flags["mask"] = random.random(tokens) < pick(0.0, 0.3, 0.8, 0.97)
    kind = "none" if entry.end_name is None else pick("none", "segment", *(() if entry.end == "initial" else ("token",)))
    end = None if kind == "none" else numbers(sized("end", kind))
    case = Case(lengths, inputs, rates, masked=pick("skip", "zero", "keep"), end=end, per_segment=frozenset(per_segment), **flags)
    return replace(case, boundary=pick("ends_at", "starts_at") if entry.starts else "ends_at"), layout, dtype


def _lengths(random: np.random.Generator, layout: str) -> list[int]:
    if layout == "one":
        return [int(random.choice((0, 1, 2, 5, 12, *LONG)))]
    if layout == "rows":
        return [int(random.integers(0, 13))] * int(random.integers(1, 6)) if random.random() < 0.7 else [int(random.choice(LONG))] * 2
    while True:
        lengths = [int(x) for x in random.choice((0, 0, 1, 2, 3, 7, 12, int(random.choice(LONG))), random.integers(1, 7))]
        # A tensor [N] is read as [S] where both are equal: the same thing where each segment has one token.
        if sum(lengths) != len(lengths) or set(lengths) == {1}:
            return lengths


def run(op: str, case: Case, layout: str, dtype: torch.dtype, backend: str, **options: Any) -> list[Tensor]:
    """The outputs of the public function, flat and on the CPU."""
    entry, device = estimator(op), device_of(backend)
    shape = (len(case.lengths), case.lengths[0]) if layout == "rows" else (case.tokens,)

    def tensor(name: str, numbers: Any, dtype: torch.dtype | None = dtype) -> Any:
        if not isinstance(numbers, np.ndarray):
            return numbers
        found = torch.tensor(numbers, dtype=torch.int64 if name == "actions" else dtype, device=device)
        return found if name in case.per_segment else found.reshape(*shape, *found.shape[1:])

    options |= {name: tensor(name, rate) for name, rate in case.rates.items()}
    options |= {name: tensor(name, getattr(case, name), None) for name in entry.takes}
    if "mask" in entry.takes:
        options["masked"] = case.masked
    if entry.end_name is not None:
        options[entry.end_name] = tensor("end", case.end)
    if entry.starts:
        options["boundary"] = case.boundary
    if layout == "pack":
        options["segments"] = Segments.from_lengths(case.lengths)
    outputs = outputs_of(op, {name: tensor(name, numbers) for name, numbers in case.inputs.items()}, backend, **options)
    assert all(output.shape == shape for output in outputs)
    return [output.flatten().cpu() for output in outputs]


def arguments(op: str, shape: tuple[int, ...], backend: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random inputs by name, without gaps or flags; four actions where there are any."""
    entry, random = estimator(op), torch.Generator().manual_seed(3)
    shapes = {name: (*shape, 4) if name in entry.per_action else shape for name in entry.arguments}
    return {name: torch.rand(size, generator=random).to(dtype).to(device_of(backend)) for name, size in shapes.items()}


def outputs_of(op: str, inputs: Mapping[str, Tensor], backend: str, **options: Any) -> list[Tensor]:
    """What the public function returns, as a list."""
    found = getattr(rlhf_scan, op)(**inputs, backend=backend, **options)
    return [found] if isinstance(found, Tensor) else list(found)


def assert_as_the_oracle(op: str, case: Case, dtype: torch.dtype, outputs: list[Tensor], label: str = "") -> None:
    """Raise unless `outputs` are as near to the oracle as rounding allows."""
    roundoff = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    for name, output, numbers in zip(estimator(op).outputs, outputs, ORACLES[op](case), strict=True):
        assert output.dtype == dtype, name
        expected = np.array([number.value for number in numbers])
        allowed = np.array([number.error(roundoff, case.tokens) for number in numbers])
        allowed += STORE_ROUNDOFF[dtype] * (np.abs(expected) + allowed) + SMALLEST[dtype]
        wrong = np.flatnonzero(~(np.abs(output.double().numpy() - expected) <= allowed))
        assert not wrong.size, f"{label}: {name}{wrong} is {output[wrong]}, must be {expected[wrong]} +- {allowed[wrong]}; {case}"
