"""Against torchrl's own functions, where it is installed (`pip install --no-deps torchrl==0.14.1 tensordict==0.15.3 pyvers cloudpickle`).

Conventions that differ, and how each is bridged here:

- torchrl takes V(s_{t+1}) of every step as `next_state_value`; here V(s_t) alone is given and the next one is read from the next token. They agree
  inside an episode if the same critic made both; at a truncated or last token torchrl's `next_state_value` is our `bootstrap` per token.
- `done` is terminated or truncated, `terminated` the part of it after which nothing follows: done = terminated | truncated. A window's last step
  cuts there even where `done` is False, and here.
- torchrl keeps time in the last but one dimension, [B, T, 1].
- torchrl's V-trace has no lambda (it is 1) and does not cut log-ratios; its docstring calls `log_pi` the collection policy, yet its code, as the
  paper, weighs by exp(log_pi - log_mu), pi being the policy that is learnt. It returns (advantages, targets), here (targets, advantages).
- torchrl's GAE returns (advantages, advantages + values), as here. It has neither masks nor packs.
- torchrl forms gamma and the bars in float32 where its inputs are float64: the rates here are sums of few powers of two.
- Its vectorized functions leave out terms whose decay is below 1e-7 (none here), and lambda = 0 is an IndexError in them, so not asked of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor

import rlhf_scan

peer: Any = pytest.importorskip("torchrl.objectives.value.functional", reason="torchrl is not installed", exc_type=ImportError)

B, T = 4, 37

lambdas = pytest.mark.parametrize(("lam", "vectorized"), [(0.0, False), (0.875, False), (0.875, True), (1.0, False), (1.0, True)])


@dataclass
class Rollout:
    rewards: Tensor
    values: Tensor
    next_values: Tensor
    terminated: Tensor
    truncated: Tensor
    behavior: Tensor
    target: Tensor

    def of_torchrl(self) -> dict[str, Tensor]:
        return {
            "state_value": self.values[..., None],
            "next_state_value": self.next_values[..., None],
            "reward": self.rewards[..., None],
            "done": (self.terminated | self.truncated)[..., None],
            "terminated": self.terminated[..., None],
        }

    def of_ours(self, backend: str) -> dict[str, Any]:
        tensors = {"terminated": self.terminated, "truncated": self.truncated, "bootstrap": self.next_values}
        return {name: tensor.to(device_of(backend)) for name, tensor in tensors.items()} | {"backend": backend}


@pytest.fixture(params=[0, 1, 2])
def rollout(request: pytest.FixtureRequest) -> Rollout:
    random = torch.Generator().manual_seed(request.param)
    rewards, values, behavior, target, other = (torch.randn(B, T, generator=random, dtype=torch.float64) for _ in range(5))
    terminated, truncated = (torch.rand(B, T, generator=random) < chance for chance in (0.08, 0.08))
    next_values = values.roll(-1, 1)
    next_values[:, -1] = 0
    cut = terminated | truncated
    cut[:, -1] = True
    next_values = torch.where(cut, other, next_values)  # the value of the state that was cut off, not of the next episode's first
    return Rollout(rewards, values, next_values, terminated, truncated, behavior, target)


def close(found: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), theirs.squeeze(-1), rtol=1e-11, atol=1e-11)


@lambdas
def test_gae(rollout: Rollout, lam: float, vectorized: bool, backend: str) -> None:
    function = peer.vec_generalized_advantage_estimate if vectorized else peer.generalized_advantage_estimate
    advantages, returns = function(0.96875, lam, **rollout.of_torchrl())
    device = device_of(backend)
    found = rlhf_scan.gae(rollout.rewards.to(device), rollout.values.to(device), gamma=0.96875, lam=lam, **rollout.of_ours(backend))
    close(found.advantages, advantages)
    close(found.returns, returns)


@lambdas
def test_td_lambda(rollout: Rollout, lam: float, vectorized: bool, backend: str) -> None:
    function = peer.vec_td_lambda_return_estimate if vectorized else peer.td_lambda_return_estimate
    theirs = rollout.of_torchrl()
    del theirs["state_value"]
    returns = function(0.96875, lam, **theirs)
    device = device_of(backend)
    found = rlhf_scan.lambda_returns(
        rollout.rewards.to(device), rollout.values.to(device), gamma=0.96875, lam=lam, **rollout.of_ours(backend)
    )
    close(found, returns)


def test_discounted_returns(rollout: Rollout, backend: str) -> None:
    theirs = rollout.of_torchrl()
    del theirs["state_value"]
    found = rlhf_scan.discounted_returns(rollout.rewards.to(device_of(backend)), gamma=0.96875, **rollout.of_ours(backend))
    close(found, peer.td1_return_estimate(0.96875, **theirs))


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (2.0, 0.5), (0.25, 1.5)])
def test_vtrace(rollout: Rollout, rho_bar: float, c_bar: float, backend: str) -> None:
    logprobs = {"log_pi": rollout.target[..., None], "log_mu": rollout.behavior[..., None]}
    advantages, targets = peer.vtrace_advantage_estimate(0.96875, **logprobs, **rollout.of_torchrl(), rho_thresh=rho_bar, c_thresh=c_bar)
    inputs = (tensor.to(device_of(backend)) for tensor in (rollout.rewards, rollout.values, rollout.behavior, rollout.target))
    found = rlhf_scan.vtrace(*inputs, gamma=0.96875, rho_bar=rho_bar, c_bar=c_bar, **rollout.of_ours(backend))
    close(found.targets, targets)
    close(found.advantages, advantages)
