"""Plain float64 loops, token by token: the definition that the other backends are checked against."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from ..call import Call, Rate, is_per_segment
from ..errors import FormulaError
from ..estimators import Estimator
from ..naive import Step, Tokens


def why_not(device: torch.device) -> str | None:
    """It runs anywhere: tensors are copied to the CPU and back."""
    return None


def note() -> str:
    """How it works here."""
    return "token by token"


def run(call: Call) -> list[Tensor]:
    """Solve each segment with the estimator's naive loop."""
    device = call.inputs[0].device
    outputs = [torch.zeros(call.tokens, dtype=torch.float64) for _ in call.estimator.outputs]
    trainable = [True] * call.tokens if call.mask is None else [bool(x) for x in (call.mask != 0).tolist()]
    inputs = [_numbers(tensor) for tensor in call.inputs]
    if call.masked == "zero":
        inputs = [[x if live else 0.0 for x, live in zip(tokens, trainable, strict=True)] for tokens in inputs]
    rates = {name: _rate_of(rate) for name, rate in _named_rates(call).items()}
    bounds = _boundaries(call)
    for segment, (start, stop) in enumerate(pairwise(bounds)):
        steps = _steps(call, segment, start, stop, trainable)
        results = call.estimator.naive(steps, *inputs, **{name: rate(segment) for name, rate in rates.items()})
        _check_results(call.estimator, steps, results)
        for output, result in zip(outputs, results, strict=True):
            for token, number in result.items():
                output[token] = number if trainable[token] else 0.0
    return [output.to(call.dtype).to(device) for output in outputs]


def prepare(call: Call) -> None:
    """Nothing: `run` it is."""


def expectation(values: Tensor, probabilities: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the actions of values * probabilities."""
    products = torch.where(probabilities != 0, values.double() * probabilities.double(), 0.0)
    return products.sum(-1).flatten().to(dtype)


def chosen_logprobs(probabilities: Tensor, actions: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithm of the probability of each token's action."""
    rows = probabilities.double().reshape(-1, probabilities.shape[-1]).tolist()
    chosen = [row[action] if 0 <= action < len(row) else math.nan for row, action in zip(rows, actions.tolist(), strict=True)]
    return torch.tensor(chosen, dtype=torch.float64).log().to(dtype).to(probabilities.device)


def _check_results(entry: Estimator, steps: list[Step], results: object) -> None:
    """Raise FormulaError unless they are one number per step for each output."""
    wanted = f"{entry.name}: naive must return a tuple of {len(entry.outputs)} {{token: number}} ({', '.join(entry.outputs)}), got"
    remedy = "end it with return (x,), x having a number for the token of each step"
    if not isinstance(results, tuple | list) or not all(isinstance(result, Mapping) for result in results):
        found = [type(result).__name__ for result in results] if isinstance(results, tuple | list) else type(results).__name__
        raise FormulaError(f"{wanted} {found}; {remedy}")
    if len(results) != len(entry.outputs):
        raise FormulaError(f"{wanted} {len(results)}; {remedy}")
    for name, result in zip(entry.outputs, results, strict=True):
        missing = [step.token for step in steps if step.token not in result]
        if missing:
            raise FormulaError(f"{wanted} {name} without token {missing[0]}; {remedy}")


def _steps(call: Call, segment: int, start: int, stop: int, trainable: list[bool]) -> list[Step]:
    """The steps of one segment in the order of the scan."""
    order = range(stop - 1, start - 1, -1) if call.estimator.reverse else range(start, stop)
    steps: list[Step] = []
    following: int | None = None
    end, terminated = 0.0, False
    for token in order:
        edge = token == order[0]
        if edge or _ends_before(call, token, segment, stop):
            # An end that nothing follows; forward one that nothing precedes, which only a flagged start is.
            terminated = (call.estimator.reverse or call.starts) and _flag(call.terminated, token, segment, stop)
            following, end = None, 0.0 if terminated else _end_value(call, token, segment, edge)
        if trainable[token] or call.masked != "skip":
            steps.append(Step(token, following, end, terminated))
            following, end, terminated = token, 0.0, False
    return steps


def _ends_before(call: Call, token: int, segment: int, stop: int) -> bool:
    """Whether an end separates `token` from what precedes it in scan order: backward it is flagged at the token, forward before it."""
    at = token if call.estimator.reverse or call.starts else token - 1
    return _flag(call.terminated, at, segment, stop) or _flag(call.truncated, at, segment, stop)


def _end_value(call: Call, token: int, segment: int, edge: bool) -> float:
    """The value that follows where the segment ends without terminating (forward: that precedes where it starts)."""
    if call.bootstrap is None:
        return 0.0
    if is_per_segment(call.bootstrap):
        return float(call.bootstrap[segment]) if edge else 0.0
    return float(call.bootstrap[token])


def _flag(flag: Tensor | None, token: int, segment: int, stop: int) -> bool:
    if flag is None:
        return False
    if is_per_segment(flag):
        return token == stop - 1 and bool(flag[segment] != 0)
    return bool(flag[token] != 0)


def _boundaries(call: Call) -> list[int]:
    if call.cu_seqlens is not None:
        return [int(x) for x in call.cu_seqlens.tolist()]
    return [row * (call.length or 0) for row in range(call.segments + 1)]


def _named_rates(call: Call) -> dict[str, Rate | None]:
    named: dict[str, Rate | None] = dict.fromkeys(call.estimator.rates)
    for names, rates in zip(call.estimator.channels, call.rates, strict=False):
        named.update(zip(names, rates, strict=True))
    return named


def _rate_of(rate: Rate | None) -> Callable[[int], Tokens | None]:
    """segment -> the rate at each token, as that segment sees it."""
    if rate is None:
        return lambda segment: None
    if not isinstance(rate, Tensor):
        return lambda segment: defaultdict(lambda: rate)
    numbers = _numbers(rate.flatten())
    if is_per_segment(rate):
        return lambda segment: defaultdict(lambda: numbers[segment])
    return lambda segment: numbers


def _numbers(tensor: Tensor) -> list[float]:
    return [float(x) for x in tensor.double().tolist()]
