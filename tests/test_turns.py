"""Credit by turns against loops over turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import device_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf_scan import InputError, Segments, clock_rate, gae, turn_returns


def textbook_returns(turn_rewards: Sequence[Sequence[float]], clock: Sequence[Sequence[int]], gamma: float) -> list[list[float]]:
    """Each token: the sum over its turn and those after it of gamma^(turns between) * reward."""
    rows: list[list[float]] = []
    for rewards, turns in zip(turn_rewards, clock, strict=True):
        rows.append([sum(gamma ** (k - turn) * rewards[k] for k in range(turn, len(rewards))) if turn >= 0 else 0.0 for turn in turns])
    return rows


CLOCK = [[-1, 0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 2, 2, -1], [1, 0, 2, 1, -1, -1, -1]]
REWARDS = [[1.0, -2.0, 0.5], [0.25, 3.0, 1.0], [0.0, 1.0, -1.0]]


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_each_token_has_the_return_of_its_turn(backend: str, gamma: float) -> None:
    device = device_of(backend)
    rewards, clock = torch.tensor(REWARDS, device=device), torch.tensor(CLOCK, device=device)
    want = torch.tensor(textbook_returns(REWARDS, CLOCK, gamma), device=device)
    found = turn_returns(rewards, clock, gamma=gamma, backend=backend)
    torch.testing.assert_close(found, want)
    mask = torch.rand(clock.shape, device=device) < 0.6
    masked = turn_returns(rewards, clock, gamma=gamma, mask=mask, backend=backend)
    assert torch.equal(masked, torch.where(mask, found, 0))
    lengths = [7, 0, 7, 7]
    pack = Segments.from_lengths(lengths)
    packed = torch.stack([rewards[0], torch.full_like(rewards[0], math.nan), rewards[1], rewards[2]])
    flat = turn_returns(packed, clock.flatten(), gamma=gamma, segments=pack, backend=backend)
    assert torch.equal(flat, found.flatten())


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_turns(data: st.DataObject) -> None:
    rows, turns, tokens = (data.draw(st.integers(*span)) for span in ((0, 4), (1, 5), (0, 8)))
    number = st.floats(-5, 5, width=16)
    rewards = data.draw(st.lists(st.lists(number, min_size=turns, max_size=turns), min_size=rows, max_size=rows))
    clock = data.draw(st.lists(st.lists(st.integers(-2, turns - 1), min_size=tokens, max_size=tokens), min_size=rows, max_size=rows))
    gamma = data.draw(st.floats(0, 1))
    found = turn_returns(
        torch.tensor(rewards, dtype=torch.float64).reshape(rows, turns),
        torch.tensor(clock, dtype=torch.int64).reshape(rows, tokens),
        gamma=gamma,
    )
    want = torch.tensor(textbook_returns(rewards, clock, gamma), dtype=torch.float64).reshape(rows, tokens)
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


def test_the_length_of_a_turn_does_not_matter() -> None:
    rewards = torch.tensor([[0.0, 1.0]])
    short = turn_returns(rewards, torch.tensor([[0, 1]]), gamma=0.5)
    long = turn_returns(rewards, torch.tensor([[0] * 50 + [1] * 50]), gamma=0.5)
    assert short.tolist() == [[0.5, 1.0]]
    assert set(long[0, :50].tolist()) == {0.5}
    assert set(long[0, 50:].tolist()) == {1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_and_gamma_per_sequence(dtype: torch.dtype) -> None:
    rewards, clock = torch.tensor(REWARDS).to(dtype), torch.tensor(CLOCK, dtype=torch.int32)
    found = turn_returns(rewards, clock, gamma=torch.tensor([0.5, 1.0, 0.0]))
    assert found.dtype == dtype
    assert turn_returns(rewards, clock, dtype=torch.float64).dtype == torch.float64
    for row, gamma in enumerate((0.5, 1.0, 0.0)):
        want = torch.tensor(textbook_returns([REWARDS[row]], [CLOCK[row]], gamma)).to(dtype)
        torch.testing.assert_close(found[row : row + 1], want)


def textbook_gae(
    rewards: Sequence[float], values: Sequence[float], clock: Sequence[int], live: Sequence[bool], gamma: float, lam: float
) -> list[float]:
    """Generalized advantages in which only the clock's going on is discounted."""
    advantages = [0.0] * len(rewards)
    later: int | None = None
    for t in reversed(range(len(rewards))):
        if not live[t]:
            continue
        goes_on = later is None or clock[later] != clock[t]
        next_value, next_advantage = (0.0, 0.0) if later is None else (values[later], advantages[later])
        discount, trace = (gamma, gamma * lam) if goes_on else (1.0, 1.0)
        advantages[t] = rewards[t] + discount * next_value - values[t] + trace * next_advantage
        later = t
    return advantages


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_gae_by_the_clock(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    total = sum(lengths)
    assume(len(lengths) != total)  # else one rate per token would be one per segment
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rewards, values = torch.randn(2, total, generator=generator, dtype=torch.float64)
    clock = torch.randint(0, 3, (total,), generator=generator).sort().values if data.draw(st.booleans()) else torch.zeros(total).long()
    mask = torch.rand(total, generator=generator) < 0.7
    pack = Segments.from_lengths(lengths)
    gammas, lams = (clock_rate(rate, clock, mask=mask, segments=pack, dtype=torch.float64) for rate in (0.9, 0.35))
    found = gae(rewards, values, gamma=gammas, lam=lams, mask=mask, segments=pack).advantages
    want: list[float] = []
    for start, stop in zip(pack.cu_seqlens.tolist(), pack.cu_seqlens.tolist()[1:], strict=False):
        part = slice(start, stop)
        want += textbook_gae(rewards[part].tolist(), values[part].tolist(), clock[part].tolist(), mask[part].tolist(), 0.9, 0.35)
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_clock_rate_of_rows() -> None:
    clock = torch.tensor([[0, 0, 1, 1], [2, 3, 3, 3]])
    assert clock_rate(0.5, clock).tolist() == [[1, 0.5, 1, 0.5], [0.5, 1, 1, 0.5]]
    per_row = clock_rate(torch.tensor([0.5, 0.25], dtype=torch.float64), clock)
    assert per_row.dtype == torch.float64
    assert per_row.tolist() == [[1, 0.5, 1, 0.5], [0.25, 1, 1, 0.25]]
    # A tool's tokens between two turns: the clock goes on at the last trainable token before them.
    assert clock_rate(0.5, torch.tensor([[0, 9, 1, 1]]), mask=torch.tensor([[1, 0, 1, 1]])).tolist()[0][0] == 0.5
    assert clock_rate(0.5, torch.tensor([[0, 9, 0, 1]]), mask=torch.tensor([[1, 0, 1, 1]])).tolist()[0][0] == 1
    assert clock_rate(0.5, torch.zeros(0, 3).long()).shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clock": [[0]]}, r"turn_returns: clock must be an integer tensor, got list"),
        ({"clock": torch.zeros(3, 7)}, r"turn_returns: clock must be an integer tensor, got torch.float32"),
        ({"clock": torch.zeros(21).long()}, r"turn_returns: tokens must be \[B, T\] without segments"),
        ({"turn_rewards": torch.zeros(3)}, r"turn_returns: turn_rewards must have shape \[3, K\].* got \[3\]"),
        ({"turn_rewards": torch.zeros(2, 3)}, r"turn_returns: turn_rewards must have shape \[3, K\].* got \[2, 3\]"),
        ({"turn_rewards": torch.zeros(3, 2)}, r"turn_returns: clock must be below 2, .* got 2 at \[0, 6\]; add the missing turns"),
        ({"turn_rewards": torch.zeros(3, 0)}, r"turn_returns: clock must be below 0"),
        ({"mask": torch.ones(7)}, r"turn_returns: mask must have shape \[3, 7\]"),
        ({"gamma": 1.5}, r"turn_returns: gamma must lie in"),
        ({"segments": Segments.from_lengths([7, 7])}, r"turn_returns: segments must cover the 21 tokens, got 14"),
        ({"segments": [7, 7, 7]}, r"turn_returns: segments must be a Segments, got list"),
        ({"dtype": torch.int32}, r"turn_returns: dtype must be one of"),
        ({"validate": "some"}, r"turn_returns: validate must be one of"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        turn_returns(**{"turn_rewards": torch.tensor(REWARDS), "clock": torch.tensor(CLOCK), **arguments})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clock_rate(torch.ones(2), torch.zeros(3, 4).long()), r"clock_rate: rate must be a number or have shape \[3\], got \[2\]"),
        (lambda: clock_rate(0.5, torch.zeros(3, 4)), r"clock_rate: clock must be an integer tensor, got torch.float32"),
        (lambda: clock_rate(1.5, torch.zeros(3, 4).long()), r"clock_rate: rate must lie in \[0, 1\], got 1.5"),
        (lambda: clock_rate("fast", torch.zeros(3, 4).long()), r"clock_rate: rate must be a number or a tensor, got str"),
    ],
)
def test_wrong_clock_rates(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.gpu
def test_on_the_gpu_nothing_waits() -> None:
    rewards, clock = torch.tensor(REWARDS, device="cuda"), torch.tensor(CLOCK, device="cuda")
    mask = torch.ones_like(clock)
    turn_returns(rewards, clock, gamma=0.5)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found, rates = turn_returns(rewards, clock, gamma=0.5, mask=mask), clock_rate(0.5, clock, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), turn_returns(rewards.cpu(), clock.cpu(), gamma=0.5))
    assert torch.equal(rates.cpu(), clock_rate(0.5, clock.cpu()))
    with pytest.raises(InputError, match="clock must be below 3"):
        turn_returns(rewards, clock + 1, validate="full")
