"""What callers get wrong: each error names the argument, what it must be, what it was, and what to do."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from wrong_calls import error_of, inputs_of, public

import rlhf_scan
from rlhf_scan import BackendError, Segments
from rlhf_scan.estimators import estimator, served

nan, inf = math.nan, math.inf
ROWS = torch.zeros(2, 3)
SEGMENTS = Segments.from_lengths([4, 0, 2])
META = torch.device("meta")

GAE: list[tuple[dict[str, Any], str]] = [
    # Shapes.
    ({"rewards": torch.zeros(())}, "gae: rewards must be [B, T] or packed [N], got shape []; pass one entry per token"),
    (
        {"rewards": torch.zeros(1, 2, 3)},
        "gae: rewards must be [B, T] or packed [N], got shape [1, 2, 3]; drop or merge the other dimensions",
    ),
    (
        {"values": torch.zeros(2, 4)},
        "gae: values must have shape [2, 3] to match rewards, got [2, 4]; pass V(s_T) as bootstrap= instead of appending it",
    ),
    ({"values": torch.zeros(3, 2)}, "gae: values must have shape [2, 3] to match rewards, got [3, 2]; transpose it: the layout is [B, T]"),
    ({"values": torch.zeros(6)}, "gae: values must have shape [2, 3] to match rewards, got [6]; reshape it to [2, 3]"),
    ({"values": torch.zeros(2)}, "gae: values must have shape [2, 3] to match rewards, got [2]; pass one entry per token"),
    ({"values": torch.zeros(())}, "gae: values must have shape [2, 3] to match rewards, got []; pass one entry per token"),
    ({"mask": torch.ones(2)}, "gae: mask must have shape [2, 3] to match rewards, got [2]; pass one entry per token"),
    (
        {"mask": torch.ones(2, 4)},
        "gae: mask must have shape [2, 3] to match rewards, got [2, 4]; pass one entry per token",
    ),
    (
        {"terminated": torch.ones(3)},
        "gae: terminated must have shape [2] (one per segment) or [2, 3] (one per token), got [3]; pass one entry per token",
    ),
    (
        {"truncated": torch.ones(3, 2)},
        "gae: truncated must have shape [2] (one per segment) or [2, 3] (one per token), got [3, 2]; transpose it: the layout is [B, T]",
    ),
    (
        {"bootstrap": torch.ones(6)},
        "gae: bootstrap must have shape [2] (one per segment) or [2, 3] (one per token), got [6]; reshape it to [2, 3]",
    ),
    (
        {"bootstrap": torch.ones(2, 1)},
        "gae: bootstrap must have shape [2] (one per segment) or [2, 3] (one per token), got [2, 1]; pass one entry per token",
    ),
    (
        {"gamma": torch.ones(3)},
        "gae: gamma must have shape [2] (one per segment) or [2, 3] (one per token), got [3]; pass one entry per token",
    ),
    # Types and dtypes.
    ({"rewards": [0.0]}, "gae: rewards must be a torch.Tensor, got list; convert it with torch.as_tensor"),
    ({"values": np.zeros((2, 3))}, "gae: values must be a torch.Tensor, got ndarray; convert it with torch.as_tensor"),
    ({"values": None}, "gae: values must be a torch.Tensor, got NoneType; convert it with torch.as_tensor"),
    ({"rewards": ROWS.long()}, "gae: rewards must be float32, float64, bfloat16 or float16, got torch.int64; convert it with .float()"),
    ({"values": ROWS.bool()}, "gae: values must be float32, float64, bfloat16 or float16, got torch.bool; convert it with .float()"),
    (
        {"values": ROWS.to(torch.float8_e4m3fn)},
        "gae: values must be float32, float64, bfloat16 or float16, got torch.float8_e4m3fn; convert it with .float()",
    ),
    (
        {"bootstrap": torch.ones(2, dtype=torch.int32)},
        "gae: bootstrap must be float32, float64, bfloat16 or float16, got torch.int32; convert it with .float()",
    ),
    ({"bootstrap": 0.5}, "gae: bootstrap must be a torch.Tensor, got float; convert it with torch.as_tensor"),
    ({"mask": [[1, 1, 1]] * 2}, "gae: mask must be a torch.Tensor, got list; convert it with torch.as_tensor"),
    ({"terminated": True}, "gae: terminated must be a torch.Tensor, got bool; convert it with torch.as_tensor"),
    (
        {"mask": ROWS.to(torch.complex64)},
        "gae: mask must be bool, an integer or a float dtype, got torch.complex64; convert it with .bool()",
    ),
    (
        {"gamma": torch.ones(2, dtype=torch.int64)},
        "gae: gamma must be float32, float64, bfloat16 or float16, got torch.int64; convert it with .float()",
    ),
    (
        {"dtype": torch.int32},
        "gae: dtype must be one of ['torch.float32', 'torch.float64', 'torch.bfloat16', 'torch.float16'] or None, got torch.int32; "
        "leave it out for the inputs' dtype",
    ),
    (
        {"dtype": "float32"},
        "gae: dtype must be one of ['torch.float32', 'torch.float64', 'torch.bfloat16', 'torch.float16'] or None, got 'float32'; "
        "leave it out for the inputs' dtype",
    ),
    # Rates.
    ({"gamma": 1.5}, "gae: gamma must lie in [0, 1], got 1.5; pass a value in that range"),
    ({"gamma": -0.1}, "gae: gamma must lie in [0, 1], got -0.1; pass a value in that range"),
    ({"gamma": nan}, "gae: gamma must lie in [0, 1], got nan; pass a value in that range"),
    ({"lam": inf}, "gae: lam must lie in [0, 1], got inf; pass a value in that range"),
    ({"lam_value": 2}, "gae: lam_value must lie in [0, 1], got 2; pass a value in that range"),
    ({"gamma": True}, "gae: gamma must be a number or a tensor, got bool; pass a float such as 0.99"),
    ({"gamma": "0.9"}, "gae: gamma must be a number or a tensor, got str; pass a float such as 0.99"),
    ({"gamma": None}, "gae: gamma must be a number or a tensor, got NoneType; pass a float such as 0.99"),
    ({"lam": [0.9, 0.8]}, "gae: lam must be a number or a tensor, got list; pass a float such as 0.99"),
    # Options.
    ({"masked": "drop"}, "gae: masked must be one of ['skip', 'zero', 'keep'], got 'drop'; choose one of these"),
    ({"masked": None}, "gae: masked must be one of ['skip', 'zero', 'keep'], got None; choose one of these"),
    ({"backend": "cuda"}, "gae: backend must be one of ['auto', 'triton', 'cpu', 'reference'], got 'cuda'; choose one of these"),
    ({"validate": "deep"}, "gae: validate must be one of ['shapes', 'full'], got 'deep'; choose one of these"),
    ({"validate": True}, "gae: validate must be one of ['shapes', 'full'], got True; choose one of these"),
    # Segments.
    (
        {"segments": [4, 2]},
        "gae: segments must be a Segments, got list; build one with Segments.from_cu_seqlens, from_lengths, from_position_ids or from_segment_ids",
    ),
    (
        {"segments": Segments.from_lengths([4, 3])},
        "gae: segments must cover the 6 tokens of rewards, got 7 tokens; cu_seqlens must end at N and lengths must add up to N",
    ),
    (
        {"segments": Segments.from_lengths([])},
        "gae: segments must cover the 6 tokens of rewards, got 0 tokens; cu_seqlens must end at N and lengths must add up to N",
    ),
    # Devices.
    ({"values": ROWS.to(META)}, "gae: values must be on cpu like rewards, got meta; move it with .to('cpu')"),
    ({"mask": ROWS.to(META)}, "gae: mask must be on cpu like rewards, got meta; move it with .to('cpu')"),
    ({"terminated": ROWS.to(META)}, "gae: terminated must be on cpu like rewards, got meta; move it with .to('cpu')"),
    ({"truncated": torch.ones(2, device=META)}, "gae: truncated must be on cpu like rewards, got meta; move it with .to('cpu')"),
    ({"bootstrap": torch.ones(2, device=META)}, "gae: bootstrap must be on cpu like rewards, got meta; move it with .to('cpu')"),
    ({"gamma": torch.ones(2, device=META)}, "gae: gamma must be on cpu like rewards, got meta; move it with .to('cpu')"),
    ({"lam": torch.ones((), device=META)}, "gae: lam must be on cpu like rewards, got meta; move it with .to('cpu')"),
]

PACKED: list[tuple[str, dict[str, Any], str]] = [
    (
        "gae",
        {"values": torch.zeros(7)},
        "gae: values must have shape [6] to match rewards, got [7]; pass V(s_T) as bootstrap= instead of appending it",
    ),
    (
        "gae",
        {"values": torch.zeros(5)},
        "gae: values must have shape [6] to match rewards, got [5]; pass one entry per token, in the order of the pack",
    ),
    (
        "vtrace",
        {"values": torch.zeros(7)},
        "vtrace: values must have shape [6] to match rewards, got [7]; pass V(s_T) as bootstrap= instead of appending it",
    ),
    (  # It takes no bootstrap.
        "retrace",
        {"q_values": torch.zeros(7)},
        "retrace: q_values must have shape [6] to match rewards, got [7]; pass one entry per token, in the order of the pack",
    ),
    (
        "lambda_returns",
        {"bootstrap": torch.zeros(2)},
        "lambda_returns: bootstrap must have shape [3] (one per segment) or [6] (one per token), got [2]; "
        "pass one entry per token, in the order of the pack",
    ),
    (
        "linear_scan",
        {"b": torch.zeros(7)},
        "linear_scan: b must have shape [6] to match a, got [7]; pass one entry per token, in the order of the pack",
    ),
    ("linear_scan", {"initial": torch.zeros(6)}, "linear_scan: initial must have shape [3], got [6]; pass one entry per segment"),
    (
        "episodic_cumsum",
        {"initial": torch.zeros(3, 1)},
        "episodic_cumsum: initial must have shape [3], got [3, 1]; pass one entry per segment",
    ),
    (
        "episodic_cumsum",
        {"boundary": "at"},
        "episodic_cumsum: boundary must be one of ['ends_at', 'starts_at'], got 'at'; choose one of these",
    ),
    ("vtrace", {"rho_bar": -1.0}, "vtrace: rho_bar must lie in [0, inf], got -1.0; pass a value in that range"),
    ("vtrace", {"c_bar": nan}, "vtrace: c_bar must lie in [0, inf], got nan; pass a value in that range"),
    ("retrace", {"c_bar": -inf}, "retrace: c_bar must lie in [0, inf], got -inf; pass a value in that range"),
    (
        "retrace_from_policy",
        {"next_q": torch.zeros(6)},
        "retrace_from_policy: next_q must have shape [6, A] to match rewards, got [6]; pass one entry per token and action",
    ),
    (
        "retrace_from_policy",
        {"next_q": torch.zeros(6, 0)},
        "retrace_from_policy: next_q must have shape [6, A] to match rewards, got [6, 0]; pass one entry per token and action",
    ),
    (
        "retrace_from_policy",
        {"target_probs": torch.zeros(6, 3)},
        "retrace_from_policy: target_probs must have shape [6, 2] to match rewards and next_q, got [6, 3]; pass one entry per token and action",
    ),
    (
        "retrace_from_policy",
        {"target_probs": torch.zeros(6, 2, device=META)},
        "retrace_from_policy: target_probs must be on cpu like rewards, got meta; move it with .to('cpu')",
    ),
]


UNSPLIT = "without segments= all tokens are one sequence: pass Segments (in a request cu_seqlens), which say where each of a pack lies"
# A pack of 12 tokens whose segments= was forgotten.
FORGOTTEN: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("gae", {name: torch.ones(3)}, f"gae: {name} must have shape [1] (one per segment) or [12] (one per token), got [3]; {UNSPLIT}")
        for name in ("bootstrap", "terminated", "truncated", "gamma")
    ),
    (
        "gae",
        {"terminated": torch.ones(13)},
        "gae: terminated must have shape [1] (one per segment) or [12] (one per token), got [13]; pass one entry per token",
    ),
    ("gae", {"values": torch.ones(3)}, "gae: values must have shape [12] to match rewards, got [3]; pass one entry per token"),
    (
        "episodic_cumsum",
        {"initial": torch.ones(3)},
        f"episodic_cumsum: initial must have shape [1], got [3]; pass one entry per segment; {UNSPLIT}",
    ),
    *(
        (
            "ppo_advantages",
            {name: torch.ones(3)},
            f"ppo_advantages: {name} must have shape [1] (one per segment) or [12] (one per token), got [3]; {UNSPLIT}",
        )
        for name in ("bootstrap", "terminated", "truncated", "has_eos", "lam")
    ),
    (
        "ppo_advantages",
        {"scores": torch.ones(3)},
        f"ppo_advantages: scores must have shape [1], one entry per sequence, got [3]; {UNSPLIT}",
    ),
    (
        "ppo_advantages",
        {"stop_reasons": ["stop"] * 3},
        f"ppo_advantages: stop_reasons must have 1 entries, one per sequence, got 3; {UNSPLIT}",
    ),
]


@pytest.mark.parametrize(("op", "changed", "message"), FORGOTTEN, ids=[f"{op}-{next(iter(changed))}" for op, changed, _ in FORGOTTEN])
def test_forgotten_segments(op: str, changed: dict[str, Any], message: str) -> None:
    given = ("logprobs", "ref_logprobs", "values", "scores") if op == "ppo_advantages" else inputs_of(op, (12,))
    arguments = {**{name: torch.zeros(1 if name == "scores" else 12) for name in given}, **changed}
    assert error_of(lambda: public(op)(**arguments, backend="reference")) == message


@pytest.mark.parametrize(("changed", "message"), GAE, ids=[f"{next(iter(changed))}-{i}" for i, (changed, _) in enumerate(GAE)])
def test_rows(changed: dict[str, Any], message: str) -> None:
    arguments = {"rewards": ROWS, "values": ROWS, "backend": "reference", **changed}
    assert error_of(lambda: rlhf_scan.gae(**arguments)) == message


@pytest.mark.parametrize(("op", "changed", "message"), PACKED, ids=[f"{op}-{next(iter(changed))}" for op, changed, _ in PACKED])
def test_packs(op: str, changed: dict[str, Any], message: str) -> None:
    arguments = {**inputs_of(op, (6,)), "segments": SEGMENTS, "backend": "reference", **changed}
    assert error_of(lambda: public(op)(**arguments)) == message


@pytest.mark.parametrize("op", [*(entry.name for entry in served()), "linear_scan"])
def test_every_input_of_every_estimator(op: str) -> None:
    """Shape, type, dtype and device of each one after the first, which has nothing to match."""
    inputs = inputs_of(op, (2, 3))
    for name, tensor in list(inputs.items())[1:]:
        for wrong, got in (
            (tensor[:, :2], str(list(tensor[:, :2].shape))),
            (tensor.tolist(), "list"),
            (tensor.long(), "torch.int64"),
            (tensor.to(META), "meta"),
        ):
            message = error_of(partial(public(op), **{**inputs, name: wrong}, backend="reference"))
            assert message.startswith(f"{op}: {name} must ")
            assert f", got {got}; " in message


@pytest.mark.parametrize("op", [entry.name for entry in served()])
def test_every_rate_of_every_estimator(op: str) -> None:
    for name, rate in estimator(op).rates.items():
        for number in (-1e-9, nan) + (() if rate.largest == inf else (rate.largest + 1e-9,)):
            message = error_of(partial(public(op), **inputs_of(op, (2, 3)), **{name: number}, backend="reference"))
            assert message == f"{op}: {name} must lie in [0, {rate.largest:g}], got {number}; pass a value in that range"
        for edge in (0, 0.0, rate.largest, torch.tensor(0.5), torch.full((2,), 0.5), torch.full((2, 3), 0.5)):
            public(op)(**inputs_of(op, (2, 3)), **{name: edge}, backend="reference")


STEPS = "ppo_advantages: step_rewards must be (sequence, end token, reward) triples, got {}; pass a list of triples"
PLACES = "ppo_advantages: step_rewards must name tokens of the batch, got token {}; count sequences from 0"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([(0, 3)], STEPS.format("2 numbers at entry 0")),
        ([(0, 1), (0, 2), (1, 1)], STEPS.format("2 numbers at entry 0")),  # six numbers, but no two triples
        ([(0, 1, 1.0), (0, 1, 1.0, 2)], STEPS.format("4 numbers at entry 1")),
        ([(0, 1, 1.0), 7], STEPS.format("int at entry 1")),
        (7, STEPS.format("int")),
        (torch.zeros(3, 2), STEPS.format("torch.float32 of shape [3, 2]")),
        ((torch.zeros(2), torch.zeros(2).half(), torch.zeros(2)), STEPS.format("torch.float16 at entry 1")),
        ([(0, 1.5, 1.0)], PLACES.format("1.5 of sequence 0 at entry 0 (of 3 tokens)")),
        (torch.tensor([[0, nan, 1.0]]), PLACES.format("nan of sequence 0 at entry 0 (of 3 tokens)")),
        ([(0, 1, 1.0), (1, 3, 1.0)], PLACES.format("3 of sequence 1 at entry 1 (of 3 tokens)")),
        ([(0.5, 1, 1.0)], PLACES.format("1 of sequence 0.5 at entry 0 (the batch has 2 sequences)")),
        ([(2, 1, 1.0)], PLACES.format("1 of sequence 2 at entry 0 (the batch has 2 sequences)")),
    ],
)
def test_step_rewards(given: Any, message: str) -> None:
    assert error_of(lambda: rlhf_scan.ppo_advantages(ROWS, ROWS, ROWS, None, step_rewards=given)).startswith(message)


def test_a_backend_that_cannot_run_names_the_function() -> None:
    rows = ROWS.to(META)
    for op, tensors in {"gae": (rows, rows), "ppo_advantages": (rows, rows, rows, None), "whiten": (rows,)}.items():
        for backend in ("cpu", "triton"):
            assert error_of(partial(public(op), *tensors, backend=backend), BackendError).startswith(f"{op}: backend {backend!r} ")


def test_the_message_comes_before_any_work() -> None:
    """Every check precedes the backend's own: no backend has to run to say what is wrong."""
    assert "values must have shape" in error_of(lambda: rlhf_scan.gae(ROWS, torch.zeros(2, 4), backend="cpu"))
