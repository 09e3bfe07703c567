"""What `validate="full"` finds in the tensors: whatever can reach a trainable token, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor
from wrong_calls import inputs_of, public

import rlhf_scan
from rlhf_scan import InputError, Segments

nan, inf = math.nan, math.inf
SEGMENTS = Segments.from_lengths([4, 0, 2])


def full(op: str, given: dict[str, Any], shape: tuple[int, ...] = (6,)) -> str | None:
    """The message of ``validate="full"``, or None where nothing is wrong."""
    arguments = {**inputs_of(op, shape), **({"segments": SEGMENTS} if shape == (6,) else {}), "backend": "reference", **given}
    try:
        public(op)(**arguments, validate="full")
    except InputError as error:
        return str(error)
    return None


def at(token: int, number: float, size: int = 6, fill: float = 0.0) -> Tensor:
    """`number` at `token`, `fill` elsewhere."""
    tensor = torch.full((size,), fill)
    tensor[token] = number
    return tensor


FIRST = {"mask": at(4, 0, fill=1.0)}  # all but token 4 are trainable


@pytest.mark.parametrize(
    ("op", "given", "message"),
    [
        ("gae", {}, None),
        # What stands at a masked token matters only where the recursion reads it.
        (
            "gae",
            {"rewards": at(4, nan)},
            "gae: rewards must be finite at trainable tokens, got nan at token 4 (1 in all); mask that token or mend it",
        ),
        ("gae", {"rewards": at(4, nan), **FIRST}, None),
        ("gae", {"rewards": at(4, nan), **FIRST, "masked": "zero"}, None),
        ("gae", {"rewards": at(4, nan), **FIRST, "masked": "keep"}, "rewards must be finite at trainable tokens, got nan at token 4"),
        ("gae", {"values": torch.full((6,), -inf), **FIRST}, "values must be finite at trainable tokens, got -inf at token 0 (5 in all)"),
        ("gae", {"values": at(5, inf), **FIRST}, "values must be finite at trainable tokens, got inf at token 5 (1 in all)"),
        # Probability 0 has the logarithm -inf, but what was done had some.
        ("vtrace", {"target_logprobs": at(1, -inf)}, None),
        (
            "vtrace",
            {"target_logprobs": at(1, inf)},
            "target_logprobs must be finite, or -inf for probability 0, at trainable tokens, got inf at token 1",
        ),
        (
            "retrace",
            {"target_logprobs": at(1, nan)},
            "retrace: target_logprobs must be finite, or -inf for probability 0, at trainable tokens",
        ),
        (
            "retrace",
            {"behavior_logprobs": at(1, -inf)},
            "retrace: behavior_logprobs must be finite at trainable tokens, got -inf at token 1",
        ),
        ("linear_scan", {"b": at(1, inf)}, "linear_scan: b must be finite at trainable tokens, got inf at token 1"),
        (
            "retrace_from_policy",
            {"next_q": torch.full((6, 2), nan), "target_probs": torch.ones(6, 2)},
            "next_q * target_probs must be finite at trainable tokens, got nan at token 0 (6 in all)",
        ),
        ("retrace_from_policy", {"next_q": torch.full((6, 2), nan)}, None),  # no action has any probability
        # Rates.
        ("gae", {"gamma": at(2, 1.5)}, "gae: gamma must lie in [0, 1], got 1.5 at token 2 (1 in all); pass a value in that range"),
        ("gae", {"lam": at(2, -0.5)}, "gae: lam must lie in [0, 1], got -0.5 at token 2"),
        ("gae", {"lam_value": at(2, nan)}, "gae: lam_value must lie in [0, 1], got nan at token 2"),
        ("gae", {"lam": at(4, nan), **FIRST}, None),
        ("gae", {"lam": at(0, 2.0, 3)}, "gae: lam must lie in [0, 1], got 2.0 at segment 0 (1 in all)"),
        ("gae", {"lam": at(1, 2.0, 3)}, None),  # an empty segment's
        ("gae", {"gamma": torch.tensor(1.5)}, "gae: gamma must lie in [0, 1], got 1.5 at segment 0"),
        ("vtrace", {"rho_bar": at(3, inf)}, None),
        ("vtrace", {"rho_bar": at(3, nan)}, "vtrace: rho_bar must lie in [0, inf], got nan at token 3"),
        ("vtrace", {"c_bar": at(2, -1.0)}, "vtrace: c_bar must lie in [0, inf], got -1.0 at token 2"),
        # The bootstrap, where it is read.
        (
            "gae",
            {"bootstrap": at(2, nan, 3)},
            "gae: bootstrap must be finite where the segment does not terminate, got nan at segment 2 (1 in all); "
            "set terminated there or pass the value that follows",
        ),
        ("gae", {"bootstrap": at(1, nan, 3)}, None),  # an empty segment's
        ("gae", {"bootstrap": at(2, nan, 3), "terminated": at(5, 1)}, None),
        ("gae", {"bootstrap": at(2, nan, 3), "terminated": at(2, 1, 3)}, None),
        ("gae", {"bootstrap": at(2, nan, 3), "terminated": at(4, 1)}, "bootstrap must be finite"),
        ("gae", {"bootstrap": at(2, nan, 3), "terminated": at(0, 1, 3)}, "bootstrap must be finite"),
        ("gae", {"bootstrap": at(3, nan)}, "bootstrap must be finite where the segment does not terminate, got nan at token 3 (1 in all)"),
        ("gae", {"bootstrap": at(2, nan)}, None),
        (
            "gae",
            {"bootstrap": at(2, nan), "truncated": at(2, 1)},
            "bootstrap must be finite where the segment does not terminate, got nan at token 2",
        ),
        ("gae", {"bootstrap": at(2, nan), "truncated": at(2, 1), "terminated": at(2, 1)}, None),
        ("gae", {"bootstrap": at(5, nan), "terminated": at(2, 1, 3)}, None),
        ("gae", {"bootstrap": torch.full((6,), nan), "terminated": torch.ones(6)}, None),
        # The initial x.
        (
            "linear_scan",
            {"initial": at(0, nan, 3)},
            "linear_scan: initial must be finite where the segment has tokens, got nan at segment 0 (1 in all); pass what precedes the first one",
        ),
        ("linear_scan", {"initial": at(1, nan, 3)}, None),
        ("episodic_cumsum", {"initial": at(0, nan, 3), "terminated": at(0, 1)}, "initial must be finite"),
        ("episodic_cumsum", {"initial": at(0, nan, 3), "terminated": at(0, 1), "boundary": "starts_at"}, None),
    ],
)
def test_full_validation(op: str, given: dict[str, Any], message: str | None) -> None:
    found = full(op, given)
    if message is None:
        assert found is None
    else:
        assert found is not None
        assert message in found
        assert found.startswith(f"{op}: ")
        assert "; " in found


def test_full_validation_names_row_and_column() -> None:
    values = torch.zeros(2, 3)
    values[1, 2] = nan
    assert "got nan at [1, 2] (1 in all)" in str(full("gae", {"values": values}, (2, 3)))
    assert "got nan at segment 1 (1 in all)" in str(full("gae", {"bootstrap": torch.tensor([0.0, nan])}, (2, 3)))


def without_checks(boundaries: list[int]) -> Segments:
    """Boundaries that nobody read, as those on a GPU."""
    segments = Segments(torch.tensor(boundaries))
    segments.total = None
    return segments


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 4, 7], "gae: cu_seqlens must end at N = 6, got 7; add the missing segments or cut the tensors to the pack"),
        ([0, 4], "gae: cu_seqlens must end at N = 6, got 4; add the missing segments or cut the tensors to the pack"),
        ([0, 5, 4, 6], "gae: cu_seqlens must not decrease, got 5 then 4 at index 1; pass the running sum of the lengths"),
        ([1, 4, 6], "gae: cu_seqlens must start at 0, got 1; put a 0 before the end of the first segment"),
        ([0, 2**63 - 1, -(2**63)], "gae: cu_seqlens must not decrease"),
    ],
)
def test_full_validation_of_boundaries(boundaries: list[int], message: str) -> None:
    assert str(full("gae", {"segments": without_checks(boundaries)})).startswith(message)


def test_full_validation_passes_what_is_right(backend: str) -> None:
    """And changes no bit."""
    device = device_of(backend)
    rewards, values = (torch.randn(2, 5, device=device) for _ in range(2))
    options: dict[str, Any] = {"mask": torch.ones(2, 5, device=device), "bootstrap": torch.ones(2, device=device), "backend": backend}
    plain, checked = rlhf_scan.gae(rewards, values, **options), rlhf_scan.gae(rewards, values, **options, validate="full")
    assert all(torch.equal(*pair) for pair in zip(plain, checked, strict=True))
    for shape in ((0, 4), (3, 0), (0,)):
        empty = torch.zeros(shape, device=device)
        assert rlhf_scan.gae(empty, empty, validate="full", backend=backend).returns.shape == shape
