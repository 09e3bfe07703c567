"""Identities between the estimators, and each as `linear_scan` of coefficients built by hand. In float64; tolerances are some thousand roundings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor

import rlhf_scan
from rlhf_scan import Segments

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

LENGTHS = [1, 7, 0, 30, 2]
TOKENS = sum(LENGTHS)


class Rollout:
    """A pack with every kind of end, on the device of `backend`: terminated and truncated inside, bootstraps, flags at last tokens."""

    def __init__(self, backend: str, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)

        def normal(size: int = TOKENS) -> Tensor:
            return torch.randn(size, generator=random, dtype=torch.float64).to(device_of(backend))

        def chance(probability: float) -> Tensor:
            return (torch.rand(TOKENS, generator=random) < probability).to(device_of(backend))

        self.backend = backend
        self.rewards, self.values, self.behavior, self.target, self.bootstrap = (normal() for _ in range(5))
        self.terminated, self.truncated = chance(0.1), chance(0.1)
        self.segments = Segments.from_lengths(LENGTHS)
        last = torch.zeros(TOKENS, dtype=torch.bool, device=self.rewards.device)
        last[(self.segments.cu_seqlens[1:] - 1)[self.segments.lengths() > 0]] = True
        self.cut = self.terminated | self.truncated | last
        self.cuts: dict[str, Any] = {
            "segments": self.segments,
            "terminated": self.terminated,
            "truncated": self.truncated,
            "backend": backend,
        }
        self.options: dict[str, Any] = {"bootstrap": self.bootstrap, **self.cuts}

    def next(self, numbers: Tensor) -> Tensor:
        """The next token's number, whatever it is worth where credit is cut."""
        return numbers.roll(-1)

    def after(self, numbers: Tensor) -> Tensor:
        """The number that follows: the next token's, the bootstrap at a cut, 0 after a terminated token."""
        return torch.where(self.terminated, 0.0, torch.where(self.cut, self.bootstrap, self.next(numbers)))

    def scan(self, a: Tensor, b: Tensor) -> Tensor:
        return rlhf_scan.linear_scan(a, torch.where(self.cut, 0.0, b), reverse=True, segments=self.segments, backend=self.backend)


@pytest.fixture(params=[0, 1, 2])
def rollout(request: pytest.FixtureRequest, backend: str) -> Rollout:
    return Rollout(backend, request.param)


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("bar", [1.0, 3.0, math.inf])
def test_vtrace_of_equal_policies_is_gae_and_the_value(rollout: Rollout, lam: float, bar: float) -> None:
    found = rlhf_scan.vtrace(
        rollout.rewards, rollout.values, rollout.target, rollout.target, gamma=0.9, lam=lam, rho_bar=bar, c_bar=bar, **rollout.options
    )
    expected = rlhf_scan.gae(rollout.rewards, rollout.values, gamma=0.9, lam=lam, **rollout.options)
    close(found.targets, expected.returns)
    # Its policy advantage is one step to the next target, as in the paper, and not the trace's own sum.
    close(found.advantages, rollout.rewards + 0.9 * rollout.after(found.targets) - rollout.values)
    if lam == 1.0:
        close(found.advantages, expected.advantages)


def test_vtrace_on_policy_is_the_discounted_return(rollout: Rollout) -> None:
    """Remark 1 of the paper: with lambda 1 and equal policies, the n-step Bellman target."""
    found = rlhf_scan.vtrace(rollout.rewards, rollout.values, rollout.target, rollout.target, gamma=0.9, **rollout.options)
    close(found.targets, rlhf_scan.discounted_returns(rollout.rewards, gamma=0.9, **rollout.options))


def test_vtrace_that_weighs_nothing_is_the_value(rollout: Rollout) -> None:
    found = rlhf_scan.vtrace(rollout.rewards, rollout.values, rollout.behavior, rollout.target, rho_bar=0.0, c_bar=0.0, **rollout.options)
    assert torch.equal(found.targets, rollout.values)
    assert not found.advantages.any()


@pytest.mark.parametrize("zero", ["c_bar", "lam"])
def test_retrace_without_trace_is_one_step(rollout: Rollout, zero: str) -> None:
    found = rlhf_scan.retrace(
        rollout.rewards,
        rollout.values,
        rollout.bootstrap,
        rollout.behavior,
        rollout.target,
        gamma=0.9,
        **{zero: 0.0},
        **rollout.cuts,
    )
    close(found.targets, rollout.rewards + 0.9 * torch.where(rollout.terminated, 0.0, rollout.bootstrap))


def test_retrace_of_equal_policies_and_exact_expectations_is_the_return(rollout: Rollout) -> None:
    """Where E[Q] is the next Q, each correction telescopes."""
    expected = rollout.after(rollout.values)
    found = rlhf_scan.retrace(rollout.rewards, rollout.values, expected, rollout.target, rollout.target, gamma=0.9, **rollout.cuts)
    returns = rlhf_scan.discounted_returns(rollout.rewards, gamma=0.9, **rollout.options)
    close(found.targets, returns)
    close(found.advantages, returns - rollout.values)


def test_retrace_on_policy_with_the_value_of_the_state_is_vtrace_shifted(rollout: Rollout) -> None:
    """On policy with E[Q] = V_next and Q = V both are the same recurrence."""
    expected = rollout.after(rollout.values)
    found = rlhf_scan.retrace(rollout.rewards, rollout.values, expected, rollout.target, rollout.target, gamma=0.9, lam=0.6, **rollout.cuts)
    close(found.targets, rlhf_scan.lambda_returns(rollout.rewards, rollout.values, gamma=0.9, lam=0.6, **rollout.options))


def test_lambda_returns_of_0_are_td_targets(rollout: Rollout) -> None:
    found = rlhf_scan.lambda_returns(rollout.rewards, rollout.values, gamma=0.9, lam=0.0, **rollout.options)
    close(found, rollout.rewards + 0.9 * rollout.after(rollout.values))


def test_lambda_returns_of_1_are_discounted_returns(rollout: Rollout) -> None:
    found = rlhf_scan.lambda_returns(rollout.rewards, rollout.values, gamma=0.9, lam=1.0, **rollout.options)
    close(found, rlhf_scan.discounted_returns(rollout.rewards, gamma=0.9, **rollout.options))


def test_lambda_returns_are_gae_and_the_value(rollout: Rollout) -> None:
    found = rlhf_scan.lambda_returns(rollout.rewards, rollout.values, gamma=0.9, lam=0.7, **rollout.options)
    close(found, rlhf_scan.gae(rollout.rewards, rollout.values, gamma=0.9, lam=0.7, **rollout.options).returns)


def test_lambda_returns_mix_the_n_step_returns(backend: str) -> None:
    """Sutton & Barto 12.3: (1 - lam) * sum over n of lam^(n-1) * G_{t:t+n} + lam^(T-t-1) * G_t."""
    random = torch.Generator().manual_seed(7)
    rewards, values = (torch.randn(9, generator=random, dtype=torch.float64) for _ in range(2))
    bootstrap, gamma, lam = 0.25, 0.9, 0.7
    known = [*values.tolist(), bootstrap]
    expected = []
    for t in range(9):
        steps = [sum(gamma**k * float(rewards[t + k]) for k in range(n)) + gamma**n * known[t + n] for n in range(1, 10 - t)]
        mixed = sum((1 - lam) * lam ** (n - 1) * step for n, step in enumerate(steps[:-1], 1))
        expected.append(mixed + lam ** (len(steps) - 1) * steps[-1])
    device = device_of(backend)
    found = rlhf_scan.lambda_returns(
        rewards.to(device), values.to(device), gamma=gamma, lam=lam, bootstrap=torch.tensor([bootstrap], device=device), backend=backend
    )
    close(found.cpu(), torch.tensor(expected, dtype=torch.float64))


def test_traces_forward_view_is_the_backward_view(rollout: Rollout) -> None:
    """sum_t delta_t * e_t (traces) is sum_t x_t * A_t (advantages), within each episode: Sutton & Barto 12.1-12.2."""
    features = rollout.behavior
    traces = rlhf_scan.eligibility_traces(features, gamma=0.9, lam=0.7, **rollout.cuts)
    deltas = rlhf_scan.gae(rollout.rewards, rollout.values, gamma=0.9, lam=0.0, **rollout.options).advantages
    advantages = rlhf_scan.gae(rollout.rewards, rollout.values, gamma=0.9, lam=0.7, **rollout.options).advantages
    episode = rollout.cut.long().cumsum(0) - rollout.cut.long()
    total = torch.zeros(TOKENS, dtype=torch.float64, device=features.device)
    close(total.index_add(0, episode, deltas * traces), total.index_add(0, episode, features * advantages), scale=100)


def test_traces_without_decay_are_sums(rollout: Rollout) -> None:
    initial = rollout.bootstrap[: len(LENGTHS)]
    ends = rollout.terminated | rollout.truncated
    options: dict[str, Any] = {"segments": rollout.segments, "initial": initial, "backend": rollout.backend}
    found = rlhf_scan.eligibility_traces(rollout.rewards, gamma=1.0, lam=1.0, terminated=ends, **options)
    close(found, rlhf_scan.episodic_cumsum(rollout.rewards, terminated=ends, **options))


def test_cumsum_without_flags_is_torch_cumsum(backend: str) -> None:
    inputs = torch.randn(3, 50, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(device_of(backend))
    for flags in (None, torch.zeros_like(inputs), torch.zeros_like(inputs, dtype=torch.bool)):
        for boundary in ("ends_at", "starts_at"):
            close(rlhf_scan.episodic_cumsum(inputs, terminated=flags, boundary=boundary, backend=backend), inputs.cumsum(1), scale=50)
    whole = torch.arange(1, 301, device=inputs.device).float()
    assert torch.equal(rlhf_scan.episodic_cumsum(whole, backend=backend), whole.cumsum(0))


def test_cumsum_that_starts_at_t_ends_at_the_token_before(rollout: Rollout) -> None:
    options: dict[str, Any] = {"segments": rollout.segments, "backend": rollout.backend}
    starts = rollout.terminated.roll(1)
    found = rlhf_scan.episodic_cumsum(rollout.rewards, terminated=starts, boundary="starts_at", **options)
    assert torch.equal(found, rlhf_scan.episodic_cumsum(rollout.rewards, terminated=rollout.terminated, **options))


def test_cumsum_goes_on_from_what_came_before(backend: str) -> None:
    """Two calls, the second with the first one's last sum as `initial`, are one."""
    inputs = torch.arange(40, device=device_of(backend)).float().reshape(2, 20)
    whole = rlhf_scan.episodic_cumsum(inputs, backend=backend)
    rest = rlhf_scan.episodic_cumsum(inputs[:, 13:], initial=whole[:, 12], backend=backend)
    assert torch.equal(rest, whole[:, 13:])


# Each as the plain scan of (a, b)


def test_gae_is_a_linear_scan(rollout: Rollout) -> None:
    deltas = rollout.rewards + 0.9 * rollout.after(rollout.values) - rollout.values
    found = rlhf_scan.gae(rollout.rewards, rollout.values, gamma=0.9, lam=0.7, **rollout.options)
    close(found.advantages, rollout.scan(deltas, torch.full_like(deltas, 0.9 * 0.7)))


def test_discounted_returns_are_a_linear_scan(rollout: Rollout) -> None:
    zero = torch.zeros_like(rollout.rewards)
    a = rollout.rewards + 0.9 * torch.where(rollout.cut, rollout.after(zero), 0.0)
    close(rlhf_scan.discounted_returns(rollout.rewards, gamma=0.9, **rollout.options), rollout.scan(a, torch.full_like(a, 0.9)))


def test_lambda_returns_are_a_linear_scan(rollout: Rollout) -> None:
    follows = rollout.after(rollout.values)
    a = rollout.rewards + 0.9 * torch.where(rollout.cut, follows, 0.3 * follows)
    found = rlhf_scan.lambda_returns(rollout.rewards, rollout.values, gamma=0.9, lam=0.7, **rollout.options)
    close(found, rollout.scan(a, torch.full_like(a, 0.9 * 0.7)))


def test_vtrace_is_a_linear_scan(rollout: Rollout) -> None:
    ratio = (rollout.target - rollout.behavior).exp()
    rho, c = ratio.clamp(max=1.5), ratio.clamp(max=0.8)
    follows = rollout.after(rollout.values)
    targets = rollout.values + rollout.scan(rho * (rollout.rewards + 0.9 * follows - rollout.values), 0.9 * 0.7 * c)
    found = rlhf_scan.vtrace(
        rollout.rewards, rollout.values, rollout.behavior, rollout.target, gamma=0.9, lam=0.7, rho_bar=1.5, c_bar=0.8, **rollout.options
    )
    close(found.targets, targets)
    close(found.advantages, rho * (rollout.rewards + 0.9 * rollout.after(targets) - rollout.values))


@pytest.mark.parametrize("bars", ["number", "token"])
def test_retrace_is_a_linear_scan(rollout: Rollout, bars: str) -> None:
    q_values, expected = rollout.values, torch.where(rollout.terminated, 0.0, rollout.bootstrap)
    ratio = (rollout.target - rollout.behavior).exp()
    rho_bar, c_bar = torch.full_like(ratio, 1.5), torch.full_like(ratio, 0.8)
    if bars == "token":
        rho_bar, c_bar = rollout.values.abs(), rollout.rewards.abs()
    rho, next_c = ratio.minimum(rho_bar), rollout.next(ratio.minimum(c_bar))
    deltas = rollout.rewards + 0.9 * expected - q_values
    targets = q_values + rollout.scan(deltas, 0.9 * 0.7 * next_c)
    found = rlhf_scan.retrace(
        rollout.rewards,
        q_values,
        rollout.bootstrap,
        rollout.behavior,
        rollout.target,
        gamma=0.9,
        lam=0.7,
        rho_bar=rho_bar if bars == "token" else 1.5,
        c_bar=c_bar if bars == "token" else 0.8,
        **rollout.cuts,
    )
    close(found.targets, targets)
    next_targets = torch.where(rollout.cut, expected, rollout.next(targets))
    close(found.advantages, rho * (rollout.rewards + 0.9 * next_targets - q_values))


def test_eligibility_traces_are_a_linear_scan(rollout: Rollout) -> None:
    initial = rollout.bootstrap[: len(LENGTHS)]
    after_end = (rollout.terminated | rollout.truncated).roll(1)
    after_end[rollout.segments.cu_seqlens[:-1][rollout.segments.lengths() > 0]] = False
    b = torch.where(after_end, 0.0, torch.full_like(rollout.rewards, 0.9 * 0.7))
    expected = rlhf_scan.linear_scan(rollout.rewards, b, initial=initial, segments=rollout.segments, backend=rollout.backend)
    close(rlhf_scan.eligibility_traces(rollout.rewards, gamma=0.9, lam=0.7, initial=initial, **rollout.cuts), expected)


def test_episodic_cumsum_is_a_linear_scan(rollout: Rollout) -> None:
    b = (~rollout.terminated).double()
    expected = rlhf_scan.linear_scan(rollout.rewards, b, segments=rollout.segments, backend=rollout.backend)
    options: dict[str, Any] = {"segments": rollout.segments, "backend": rollout.backend}
    close(rlhf_scan.episodic_cumsum(rollout.rewards, terminated=rollout.terminated, boundary="starts_at", **options), expected)
