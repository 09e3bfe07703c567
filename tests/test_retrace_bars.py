"""Retrace with a bar per token, which bounds the ratio beside it and so acts on the step before: random calls, long segments, and full validation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from estimator_oracle import Case
from estimator_samples import assert_as_the_oracle, run, sample
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("nan_filled", "no_hang")

EXAMPLES = {"reference": 30, "cpu": 60, "triton": 6}
each_op = pytest.mark.parametrize("op", ["retrace", "retrace_from_policy"])


def with_bars(case: Case, seed: int) -> Case:
    """`case` with bars per token, most of them below the ratios."""
    bars = np.random.default_rng(seed).choice([0.0, 0.25, 0.5, 1.0, 4.0], case.tokens)
    return replace(case, rates={**case.rates, "c_bar": bars}, per_segment=case.per_segment - {"c_bar"})


@each_op
def test_random_calls(op: str, backend: str) -> None:
    phases = [phase for phase in Phase if backend != "triton" or phase not in (Phase.shrink, Phase.explain)]

    @settings(
        max_examples=EXAMPLES[backend],
        phases=phases,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        case, layout, dtype = sample(op, seed)
        case = with_bars(case, seed)
        assert_as_the_oracle(op, case, dtype, run(op, case, layout, dtype, backend), f"{seed}, {layout}, {dtype}")

    check()


def long(masked: str, flags: bool) -> Case:
    """Segments of up to four tiles and 32 pieces, a masked stretch across a tile's edge, flags on both sides of one."""
    lengths, random = [200, 3, 130, 65], np.random.default_rng(5)
    tokens = sum(lengths)
    names = ("rewards", "q_values", "expected_next_q", "behavior_logprobs", "target_logprobs")
    mask = random.random(tokens) < 0.8
    mask[50:90] = False
    ends = np.zeros(tokens, dtype=bool)
    ends[[63, 64, 70, 127, 128, 264]] = flags
    return Case(
        lengths,
        inputs={name: random.uniform(-1, 1, tokens).astype(np.float32).astype(np.float64) for name in names},
        rates={"gamma": 0.9, "lam": 1.0, "c_bar": random.choice([0.25, 0.5, 1.0], tokens), "rho_bar": random.choice([0.25, 4.0], tokens)},
        mask=mask,
        masked=masked,
        truncated=ends,
        terminated=np.roll(ends, 100) if flags else None,
    )


@pytest.mark.parametrize("masked", ["skip", "zero", "keep"])
@pytest.mark.parametrize("flags", [False, True])
def test_across_tiles_and_pieces(masked: str, flags: bool, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = long(masked, flags)
    whole = run("retrace", case, "pack", torch.float32, backend)
    assert_as_the_oracle("retrace", case, torch.float32, whole)
    if backend == "cpu":
        monkeypatch.setattr("rlhf_scan.backends.cpu_backend.PIECE", 8)
        assert_as_the_oracle("retrace", case, torch.float32, run("retrace", case, "pack", torch.float32, backend))


def test_a_bar_of_the_token_before_or_after_is_another_result() -> None:
    """The oracle can tell: bars moved by one place fail."""
    case = long("skip", flags=True)
    moved = replace(case, rates={**case.rates, "c_bar": np.roll(np.asarray(case.rates["c_bar"]), 1)})
    outputs: Any = run("retrace", moved, "pack", torch.float32, "cpu")
    with pytest.raises(AssertionError):
        assert_as_the_oracle("retrace", case, torch.float32, outputs)
