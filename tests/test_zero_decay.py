"""Where b is 0 nothing passes: what comes before it in scan order, be it NaN, changes no bit beyond. One meaning on every backend."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of
from estimator_oracle import Case
from estimator_samples import arguments, run, sample
from torch import Tensor

import rlhf_scan
from rlhf_scan import Segments, linear_scan
from rlhf_scan.backends import cpu_backend
from rlhf_scan.estimators import estimator, served

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

nan, inf = math.nan, math.inf
BAD = (nan, inf)
# Each estimator, and its rates of which each makes b 0.
DECAYS = [
    ("gae", "gamma"),
    ("gae", "lam"),
    ("discounted_returns", "gamma"),
    ("lambda_returns", "gamma"),
    ("lambda_returns", "lam"),
    ("vtrace", "lam"),
    ("vtrace", "c_bar"),
    ("retrace", "lam"),
    ("retrace", "c_bar"),
    ("retrace_from_policy", "lam"),
    ("eligibility_traces", "gamma"),
    ("eligibility_traces", "lam"),
]
each_decay = pytest.mark.parametrize(("op", "rate"), DECAYS, ids=["-".join(decay) for decay in DECAYS])
each_bad = pytest.mark.parametrize("bad", BAD, ids=str)
# (tokens, the step whose b is 0, where the bad number is, which), places in scan order: in one run, across runs, tiles, groups of tiles.
PLACES = [(2, 1, 0, nan), (9, 5, 3, inf), (40, 30, 2, nan), (150, 64, 63, inf), (150, 65, 1, nan), (300, 299, 0, inf)]


def in_scan_order(op: str, place: int, tokens: int) -> int:
    return tokens - 1 - place if estimator(op).reverse else place


def solved(op: str, backend: str, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The outputs by name, in scan order."""
    found = getattr(rlhf_scan, op)(**tensors, **options, backend=backend)
    outputs = (found,) if isinstance(found, Tensor) else found
    ordered = [output.flatten().flip(0) if estimator(op).reverse else output.flatten() for output in outputs]
    return dict(zip(estimator(op).outputs, ordered, strict=True))


def beyond(op: str, name: str, cut: int) -> int:
    """The first token that nothing passes to: off-policy advantages read the next target, not the trace."""
    return cut + 1 if name == "advantages" and op != "gae" else cut


@each_decay
@pytest.mark.parametrize(("tokens", "cut", "place", "bad"), PLACES)
def test_nothing_passes(op: str, rate: str, tokens: int, cut: int, place: int, bad: float, backend: str) -> None:
    """Bits beyond the step are those for a finite number in place of the bad one; between the two the bad one is seen."""
    tensors = arguments(op, (tokens,), backend)
    first = next(iter(tensors))
    rates = torch.full((tokens,), 0.9, device=device_of(backend))
    at = cut - 1 if rate in estimator(op).rates_following else cut  # read at the next step
    rates[in_scan_order(op, at, tokens)] = 0
    clean = solved(op, backend, tensors, **{rate: rates})
    tensors[first][in_scan_order(op, place, tokens)] = bad
    poisoned = solved(op, backend, tensors, **{rate: rates})
    for name, output in poisoned.items():
        border = beyond(op, name, cut)
        assert torch.equal(output[border:], clean[name][border:])
        assert torch.equal(output[:place], clean[name][:place])
        assert not output[place:cut].isfinite().any()


@each_decay
@each_bad
def test_a_rate_of_zero_for_all(op: str, rate: str, bad: float, backend: str) -> None:
    """As a number and per segment."""
    tensors = {name: tensor.reshape(2, 20, *tensor.shape[1:]) for name, tensor in arguments(op, (40,), backend).items()}
    clean = solved(op, backend, tensors, **{rate: 0.0})
    next(iter(tensors.values()))[1, 9] = bad
    place = in_scan_order(op, 29, 40)
    for zero in (0.0, torch.zeros(2, device=device_of(backend)), torch.zeros((2, 20), device=device_of(backend))):
        found = solved(op, backend, tensors, **{rate: zero})
        for name, output in found.items():
            bads = (~output.isfinite()).nonzero().flatten().tolist()
            assert bads == ([place, place + 1] if beyond(op, name, 0) else [place])
            kept = output.isfinite()
            assert torch.equal(output[kept], clean[name][kept])


@pytest.mark.parametrize("op", ["vtrace", "retrace"])
def test_an_action_that_the_policy_never_takes(op: str, backend: str) -> None:
    """Its ratio is 0, so the trace ends there."""
    tensors = arguments(op, (100,), backend)
    tensors["target_logprobs"][[50, 90]] = -inf
    clean = solved(op, backend, tensors)
    tensors["rewards"][95] = nan
    poisoned = solved(op, backend, tensors)["targets"]
    border = 100 - 1 - (90 if op == "vtrace" else 89)
    assert torch.equal(poisoned[border:], clean["targets"][border:])
    assert poisoned[4:border].isnan().all()


@pytest.mark.parametrize("op", ["gae", "discounted_returns", "lambda_returns", "vtrace", "retrace", "eligibility_traces"])
@pytest.mark.parametrize(("flag", "masked"), [("terminated", "skip"), ("truncated", "zero")])
def test_nothing_passes_an_end(op: str, flag: str, masked: str, backend: str) -> None:
    tokens = 90
    tensors = arguments(op, (tokens,), backend)
    ends = torch.zeros(tokens, dtype=torch.bool, device=device_of(backend))
    ends[45] = True
    mask = torch.arange(tokens, device=ends.device) % 7 != 3  # masked: 45, 80
    clean = solved(op, backend, tensors, mask=mask, masked=masked, **{flag: ends})
    tensors["inputs" if op == "eligibility_traces" else "rewards"][70 if estimator(op).reverse else 20] = nan
    poisoned = solved(op, backend, tensors, mask=mask, masked=masked, **{flag: ends})
    for name, output in poisoned.items():
        assert torch.equal(output[46:], clean[name][46:])
        assert output.isnan().any()


@each_decay
def test_nothing_passes_from_piece_to_piece(op: str, rate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU backend sweeps a long segment in pieces; a zero in a piece between keeps the bad number from the last."""
    monkeypatch.setattr(cpu_backend, "PIECE", 16)
    for cut in (8, 15, 16, 17, 23, 31, 32, 40):
        tokens = 60 + cut  # the pieces of rows of one length are kept from call to call
        test_nothing_passes(op, rate, tokens, cut, 3, nan, "cpu")
        test_nothing_passes(op, rate, tokens, cut, 7, inf, "cpu")


def poisoned(case: Case, random: np.random.Generator) -> Case:
    """With one number that is not finite among the inputs and the rates."""
    spoilt = copy.deepcopy(case)
    arrays = [array for array in (*spoilt.inputs.values(), *spoilt.rates.values()) if isinstance(array, np.ndarray)]
    array = arrays[random.integers(len(arrays))]
    array.flat[random.integers(array.size)] = random.choice(BAD)
    return spoilt


@pytest.mark.parametrize("op", [entry.name for entry in served()])
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_bad_number_is_seen_where_the_definition_has_it(op: str, backend: str) -> None:
    """Anywhere, and whatever the masks, flags and rates."""
    random = np.random.default_rng(7)
    for seed in range(60 if backend == "cpu" else 6):
        case, layout, dtype = sample(op, seed, torch.float32)
        if "actions" in case.inputs or not case.tokens:
            continue
        case = poisoned(replace(case, rates={name: _not_fading(rate) for name, rate in case.rates.items()}), random)
        for output, other in zip(*(run(op, case, layout, dtype, which) for which in (backend, "reference")), strict=True):
            assert torch.equal(output.isfinite(), other.isfinite())


def _not_fading(rate: Any) -> Any:
    """0, or far enough from it for products over all steps."""
    return np.where(rate < 0.3, 0.0, np.maximum(rate, 0.7)) if isinstance(rate, np.ndarray) else (max(rate, 0.7) if rate else rate)


each_direction = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def loop(a: Tensor, b: Tensor, lengths: list[int], reverse: bool) -> list[float]:
    """x_t = a_t + b_t * x_next in plain numbers, nothing where b is 0."""
    found, start = [0.0] * a.numel(), 0
    for length in lengths:
        x, order = 0.0, range(start, start + length)
        for token in reversed(order) if reverse else order:
            decay = float(b[token])
            x = float(a[token]) + (decay * x if decay != 0 else 0.0)
            found[token] = x
        start += length
    return found


@each_direction
@pytest.mark.parametrize("seed", range(4))
def test_linear_scan_as_the_loop(reverse: bool, seed: int, backend: str) -> None:
    """Many zeros, many bad numbers: NaN and infinities stand where the loop has them."""
    random, lengths = np.random.default_rng(seed), [1, 20, 0, 150, 64, 3]
    tokens = sum(lengths)
    b = torch.tensor(random.choice([0.0, -0.0, 0.5, 1.0, -1.0], tokens, p=[0.05, 0.05, 0.2, 0.6, 0.1]), dtype=torch.float32)
    a = torch.tensor(random.integers(-8, 8, tokens), dtype=torch.float32)
    a[torch.tensor(random.random(tokens) < 0.05)] = float(random.choice(BAD))
    device = device_of(backend)
    x = linear_scan(a.to(device), b.to(device), reverse=reverse, segments=Segments.from_lengths(lengths), backend=backend)
    torch.testing.assert_close(x.cpu(), torch.tensor(loop(a, b, lengths, reverse)), rtol=1e-5, atol=1e-5, equal_nan=True)


@each_direction
@each_bad
def test_gradients_stay_behind_a_zero(reverse: bool, bad: float, backend: str) -> None:
    """Of a loss over the finite x: those of a are as if the bad number were finite; that of a b is x_next, whatever it is."""
    random = torch.Generator().manual_seed(0)
    a, b = torch.randn(90, generator=random, dtype=torch.float64), torch.rand(90, generator=random, dtype=torch.float64) + 0.1
    b[45] = 0
    place = 70 if reverse else 20
    kept = slice(0, 46) if reverse else slice(45, 90)

    def gradients(number: float) -> tuple[Tensor, Tensor]:
        given = [tensor.clone().to(device_of(backend)) for tensor in (a, b)]
        given[0][place] = number
        left, right = (tensor.requires_grad_() for tensor in given)
        found = torch.autograd.grad(linear_scan(left, right, reverse=reverse, backend=backend)[kept].sum(), (left, right))
        return found[0], found[1]

    clean, poisoned = gradients(1.0), gradients(bad)
    assert torch.equal(poisoned[0], clean[0])
    assert not poisoned[1][45].isfinite()
    inner = torch.arange(90, device=clean[1].device)[kept]
    inner = inner[inner != 45]
    assert torch.equal(poisoned[1][inner], clean[1][inner])


@each_direction
def test_no_gradient_passes_back_through_a_zero(reverse: bool, backend: str) -> None:
    """A bad gradient of x beyond the zero reaches neither the a nor the initial on this side of it."""
    device = device_of(backend)
    a, b = torch.ones(90, device=device, requires_grad=True), torch.full((90,), 0.5, device=device)
    order = range(89, -1, -1) if reverse else range(90)
    b[[order[0], order[40]]] = 0
    initial = torch.ones(1, device=device, requires_grad=True)
    weights = torch.ones(90, device=device)
    weights[[order[0], order[60]]] = nan
    of_a, of_initial = torch.autograd.grad(linear_scan(a, b, reverse=reverse, initial=initial, backend=backend), (a, initial), weights)
    bad = (~of_a.isfinite()).nonzero().flatten().tolist()
    assert bad == sorted([order[0], *(order[place] for place in range(40, 61))])
    assert of_initial.tolist() == [0]


@each_direction
@each_bad
def test_a_bad_initial_behind_a_zero(reverse: bool, bad: float, backend: str) -> None:
    """It is the x that precedes the first step."""
    a, b = torch.ones(3, device=device_of(backend)), torch.full((3,), 0.5, device=device_of(backend))
    b[2 if reverse else 0] = 0
    x = linear_scan(a, b, reverse=reverse, initial=torch.full((1,), bad, device=a.device), backend=backend)
    assert x.tolist() == ([1.75, 1.5, 1.0] if reverse else [1.0, 1.5, 1.75])


@each_bad
def test_a_bad_bootstrap_behind_a_zero(bad: float, backend: str) -> None:
    """Of a return it is the x that follows; where it is a value, the formula multiplies it."""
    rewards, bootstrap = torch.ones(3, device=device_of(backend)), torch.full((1,), bad, device=device_of(backend))
    assert rlhf_scan.discounted_returns(rewards, gamma=0.0, bootstrap=bootstrap, backend=backend).tolist() == [1.0] * 3
    advantages, returns = rlhf_scan.gae(rewards, rewards, gamma=0.0, bootstrap=bootstrap, backend=backend)
    assert advantages.isnan().tolist() == returns.isnan().tolist() == [False, False, True]


def test_a_formula_multiplies_what_it_reads(backend: str) -> None:
    """gamma = 0 does not keep a NaN among the values out of delta = r + gamma * V_next - V."""
    rewards = torch.ones(4, device=device_of(backend))
    values = torch.tensor([1.0, 1.0, nan, 1.0], device=rewards.device)
    advantages = rlhf_scan.gae(rewards, values, gamma=0.0, backend=backend).advantages
    assert advantages.isnan().tolist() == [False, True, True, False]
