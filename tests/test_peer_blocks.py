"""The loops of tests/peer_blocks.py against the trainers' own functions (tests/peer_projects.py), wherever those can be had.

Last compared, and equal: trl 1.12.0, verl 0.9.1 and openrlhf 0.11.2 as released; NeMo-RL 0.6.0 at 7ea279a, slime 0.3.1 at 624b824 and
AReaL 1.0.4 at 4aef98d as checked out: advantages and returns at trainable tokens (trl: and returns at the slot after the last token), rewards
and KL. TRL, verl and NeMo-RL compute in float64 there, but for n / (n - 1) in the variance, the others in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peer_blocks import BLOCKS, Rollout
from peer_options import cases
from peer_projects import PROJECTS
from peer_rollouts import rollout

FLOAT64 = ("trl", "verl", "nemo-rl")


# Usual numbers; some beyond every clamp; and so small that what is added to the variance shows.
@pytest.mark.parametrize(("spread", "size"), [(0.3, 1.0), (12.0, 10.0), (1e-4, 5e-5)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "options"), cases())
def test_loop_is_what_the_project_computes(name: str, options: dict[str, Any], seed: int, spread: float, size: float) -> None:
    estimator = options.get("kl_estimator")
    overflows = spread > 1 and estimator == "k3" and name in ("trl", "slime")
    cancels = spread < 1e-3 and estimator in ("k3", "low_var_kl") and name not in FLOAT64
    if overflows or cancels:
        pytest.skip("exp(x) - 1 - x keeps too few digits, x being as large, or in float32 as small, as that")
    batch = rollout(seed, tools=name != "trl", empty=name != "slime", spread=spread, size=size)
    theirs, ours = PROJECTS[name](batch, **options), BLOCKS[name](batch, **options)
    response = np.arange(batch.mask.shape[1]) < batch.lengths[:, None]
    steps = np.arange(batch.mask.shape[1]) <= batch.lengths[:, None] if name == "trl" else batch.mask
    tolerance = 1e-7 if name in FLOAT64 else 2e-5
    for output, places in (("advantages", batch.mask), ("returns", steps), ("rewards", steps | response), ("kl", response)):
        found, expected = getattr(ours, output)[places], getattr(theirs, output)[places]
        if np.isnan(expected).all():
            continue  # the project does not hand this one out
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max(), err_msg=output)


# What docs/presets.md says of the projects themselves. NeMo-RL's own loop raises before it gets to this function without tokens.
TOO_FEW: dict[str, dict[int, float | type[Exception]]] = {
    "trl": {0: ValueError, 1: np.nan},
    "verl": {0: ValueError, 1: ValueError},
    "openrlhf": {0: np.nan, 1: 0.0},
    "nemo-rl": {1: np.nan},
    "slime": {0: ValueError, 1: 0.0},
    "areal": {0: 0.0, 1: 0.0},
}


@pytest.mark.parametrize(("name", "tokens"), [(name, tokens) for name, known in TOO_FEW.items() for tokens in known])
def test_what_the_project_makes_of_too_few_tokens(name: str, tokens: int) -> None:
    lengths = np.array([tokens, 0]) if name == "trl" else np.array([3, 2])  # trl has no tool tokens to fill up with
    mask = np.zeros((2, 3), bool)
    mask[0, :tokens] = True
    logprobs, ref_logprobs, values = np.random.default_rng(0).standard_normal((3, 2, 3))
    batch = Rollout(logprobs, ref_logprobs, values, np.ones(2), mask, lengths, np.array([tokens > 0, False]), np.zeros(2))
    options = {"whiten": True} if name in ("slime", "areal") else {}
    outcome = TOO_FEW[name][tokens]
    if isinstance(outcome, type):
        with pytest.raises(outcome):
            PROJECTS[name](batch, **options)
    else:
        np.testing.assert_allclose(PROJECTS[name](batch, **options).advantages[0, 0], outcome, atol=1e-6)


@pytest.mark.parametrize("name", ["verl", "openrlhf", "nemo-rl", "areal"])
def test_nan_at_a_tool_token_spreads_in_the_project(name: str) -> None:
    batch = rollout(0)
    tool = ~batch.mask & (np.arange(batch.mask.shape[1]) < batch.lengths[:, None])
    poisoned = {part: np.where(tool, np.nan, getattr(batch, part)) for part in ("logprobs", "ref_logprobs", "values")}
    theirs = PROJECTS[name](Rollout(**(vars(batch) | poisoned)), kl_coef=0.1)
    assert np.isnan(theirs.advantages[batch.mask]).any()
