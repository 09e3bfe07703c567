"""`ppo_advantages` on every backend, against an independent loop and by its rules."""

from __future__ import annotations

import math
import random
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import device_of
from ppo_samples import OUTPUTS, expected, on_device, random_call, random_options, run
from torch import Tensor

from rlhf_scan import InputError, ppo_advantages, whiten
from rlhf_scan.ppo_options import WORDS, PPOOptions
from rlhf_scan.whitening import Whitening

CASES = {"reference": 60, "cpu": 60, "triton": 12}


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "pack"])
def test_against_the_oracle(backend: str, packed: bool) -> None:
    rng = random.Random(f"{backend}{packed}")
    for _ in range(CASES[backend]):
        call, options = random_call(rng, packed=packed), random_options(rng)
        wanted, got = expected(call, options), run(on_device(call, backend), options, backend=backend)
        for name in OUTPUTS:
            found = getattr(got, name).double().flatten().cpu()
            scale = max(1.0, float(wanted[name].abs().max()) if wanted[name].numel() else 1.0)
            torch.testing.assert_close(found, wanted[name], rtol=0, atol=3e-5 * scale, msg=lambda m: f"{name} {options} {call}\n{m}")  # noqa: B023


def rows(**others: Any) -> dict[str, Any]:
    """Two rows: three tokens and a tool's answer, four tokens."""
    call: dict[str, Any] = {name: torch.zeros(2, 5) for name in ("logprobs", "ref_logprobs", "values")}
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    real = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]])
    return call | {"scores": torch.tensor([2.0, 3.0]), "mask": mask, "attention_mask": real} | others


def test_the_score_is_never_on_padding_and_never_lost(backend: str) -> None:
    def rewards(**options: Any) -> tuple[list[list[float]], Any]:
        result = ppo_advantages(**on_device(rows(), backend), backend=backend, **options)
        return result.rewards.tolist(), result.report

    placed, report = rewards()
    assert placed == [[0, 0, 2, 0, 0], [0, 0, 0, 3, 0]]
    assert report.score_tokens.tolist() == [2, 3]
    assert (report["scores_carried_back"], report["scores_lost"]) == (1, 0)
    placed, report = rewards(trailing="drop")
    assert placed == [[0, 0, 0, 0, 0], [0, 0, 0, 3, 0]]
    assert (report["scores_carried_back"], report["scores_lost"]) == (0, 1)
    assert report.score_tokens.tolist() == [-1, 3]
    placed, report = rewards(score_at="post_eos")
    assert placed == [[0, 0, 0, 0, 2], [0, 0, 0, 0, 3]]
    assert report["scores_post_eos"] == 2
    # A tool's answer is a step of the recursion there, and the score on it counts; outputs are cleared there.
    stays = ppo_advantages(**on_device(rows(), backend), masked="keep", trailing="stay", whiten_advantages=False, lam=1.0, backend=backend)
    assert stays.advantages.tolist() == [[2, 2, 2, 0, 0], [3, 3, 3, 3, 0]]
    assert stays.rewards.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 3, 0]]
    with pytest.raises(InputError, match='scores must end on trainable tokens with trailing="error", got 1 sequences and 0 step rewards'):
        rewards(trailing="error")
    full = rows(mask=torch.ones(2, 5))
    del full["attention_mask"]
    filled = ppo_advantages(**on_device(full, backend), score_at="post_eos", backend=backend)
    assert filled.rewards.tolist() == [[0, 0, 0, 0, 2], [0, 0, 0, 0, 3]]
    assert filled.report["scores_post_eos"] == 0


def test_step_rewards_go_to_the_trainable_token_before(backend: str) -> None:
    steps = [(0, 0, 1.0), (0, 3, 10.0), (1, 2, 5.0), (1, 2, 5.0)]
    call = on_device(rows(scores=torch.zeros(2), mask=torch.tensor([[0, 1, 1, 0, 0], [1, 1, 1, 1, 0]])), backend)
    three = tuple(torch.tensor([step[i] for step in steps], device=device_of(backend)) for i in range(3))
    for given in (steps, torch.tensor(steps), three):
        result = ppo_advantages(**call, step_rewards=given, backend=backend)
        assert result.rewards.tolist() == [[0, 0, 10, 0, 0], [0, 0, 10, 0, 0]]
        assert (result.report["step_rewards_carried_back"], result.report["step_rewards_lost"]) == (1, 1)
    dropped = ppo_advantages(**call, step_rewards=steps, trailing="drop", backend=backend)
    assert dropped.rewards.tolist() == [[0, 0, 0, 0, 0], [0, 0, 10, 0, 0]]
    assert dropped.report["step_rewards_lost"] == 2
    assert not any(given.any() for given in (call["scores"], call["logprobs"]))


def test_the_penalty_counts_end_tokens_that_are_trainable(backend: str) -> None:
    # The first row's end token is the tool's own; the second's is the policy's.
    at = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 1, 0]])
    result = ppo_advantages(**on_device(rows(has_eos=at), backend), missing_eos_penalty=7.0, score_clip=2.5, backend=backend)
    assert result.rewards.tolist() == [[0, 0, 2 - 7, 0, 0], [0, 0, 0, 2.5, 0]]
    assert result.report["missing_eos"] == 1
    looked = ppo_advantages(**on_device(rows(has_eos=at), backend), backend=backend)
    assert looked.report["missing_eos"] == 1, "it is counted where nobody pays, too"
    said = ppo_advantages(**on_device(rows(), backend), missing_eos_penalty=7.0, stop_reasons=["stop", "length"], backend=backend)
    assert said.rewards.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 3 - 7, 0]]


def test_a_mask_and_an_attention_mask_that_are_swapped(backend: str) -> None:
    call = on_device(rows(), backend)
    swapped = {**call, "attention_mask": call["mask"], "mask": torch.ones_like(call["mask"])}
    first = tuple((call["mask"] == 0).nonzero()[0].tolist())
    with pytest.raises(InputError, match=rf"mask must be 0 where attention_mask is, got .* at \[{first[0]}, {first[1]}\] .*; swap the two"):
        ppo_advantages(**swapped, backend=backend, validate="full")
    ppo_advantages(**{**call, "attention_mask": torch.ones_like(call["mask"])}, backend=backend, validate="full")


@pytest.mark.parametrize("masked", ["skip", "zero", "keep"])
def test_truncation_is_what_the_stop_reason_says(backend: str, masked: str) -> None:
    call = on_device(rows(bootstrap=torch.tensor([100.0, 100.0]), mask=torch.tensor([[1, 1, 1, 1, 0]] * 2)), backend)
    result = ppo_advantages(
        **call, stop_reasons=["length", "stop"], masked=masked, whiten_advantages="off", lam=1.0, gamma=0.5, backend=backend
    )
    # The value follows the last token, not the row's width.
    assert result.advantages[:, 3].tolist() == [2 + 50, 3]
    assert result.advantages[:, 0].tolist() == [0.125 * (2 + 50), 0.125 * 3]
    assert result.report["truncated"] == 1
    # Flags and values per token mean the same.
    ends, after = (torch.zeros(2, 5, device=device_of(backend)) for _ in range(2))
    ends[:, 3], after[:, 3] = 1, 100
    stopped = ends * torch.tensor([[0.0], [1.0]], device=ends.device)
    call["bootstrap"] = after
    options: dict[str, Any] = {"masked": masked, "whiten_advantages": "off", "lam": 1.0, "gamma": 0.5, "backend": backend}
    for truncated in (ends, None):
        again = ppo_advantages(**call, truncated=truncated, terminated=stopped, **options)
        assert torch.equal(again.advantages, result.advantages)


def test_length_adaptive_lambda(backend: str) -> None:
    call: dict[str, Any] = on_device(rows(values=torch.arange(10.0).reshape(2, 5)), backend)
    options: dict[str, Any] = {"whiten_advantages": "off", "backend": backend}
    adaptive = ppo_advantages(**call, length_adaptive_alpha=0.5, lam=0.9, **options)
    # Lengths 3 and 4: 1 - 1 / 1.5 and 1 - 1 / 2. Short sequences have 0, not less.
    by_hand = ppo_advantages(**call, lam=torch.tensor([1 / 3, 0.5], device=device_of(backend)), lam_value=0.9, **options)
    torch.testing.assert_close(adaptive.advantages, by_hand.advantages)
    torch.testing.assert_close(adaptive.returns, by_hand.returns)
    short = ppo_advantages(**call, length_adaptive_alpha=0.05, **options)
    assert torch.equal(short.advantages, ppo_advantages(**call, lam=0.0, **options).advantages)


def test_the_log_ratio_is_clamped_before_exp(backend: str) -> None:
    call = on_device(rows(ref_logprobs=torch.full((2, 5), 800.0)), backend)
    k3 = ppo_advantages(**call, kl="k3", backend=backend)
    assert float(k3.kl[0, 0]) == pytest.approx(math.exp(20) - 1 - 20, rel=1e-6)
    assert (k3.report["clamped_tokens"], k3.report["nonfinite_sequences"]) == (7, 0)
    assert ppo_advantages(**call, kl="k1", backend=backend).kl[0, 0] == -800
    overflowing = ppo_advantages(**call, kl="k3", preset="trl", nonfinite="drop", backend=backend)
    assert overflowing.report.first_nonfinite() == (0, 0, "kl")
    assert not overflowing.advantages.any()


def test_the_report_is_read_when_it_is_looked_at(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Tensor] = []
    tolist = Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        reads.append(tensor)
        return tolist(tensor)

    call = on_device(rows(truncated=torch.tensor([1, 0])), backend)
    with monkeypatch.context() as patched:
        if backend == "triton":  # the others compute where they read
            for name in ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero"):
                patched.setattr(Tensor, name, lambda *_: pytest.fail("the device was read"))
        result = ppo_advantages(**call, score_at="post_eos", whiten_rewards="keep_mean", nonfinite="drop", backend=backend)
    monkeypatch.setattr(Tensor, "tolist", counted)
    assert result.report["trainable_tokens"] == 7
    assert dict(result.report) | {"rewards_mean": 0, "rewards_std": 0} == {
        "sequences": 2,
        "tokens": 10,
        "trainable_tokens": 7,
        "masked_tokens": 3,
        "empty_sequences": 0,
        "truncated": 1,
        "missing_eos": None,
        "step_rewards_carried_back": 0,
        "step_rewards_lost": 0,
        "scores_post_eos": 2,
        "scores_carried_back": 0,
        "scores_lost": 0,
        "score_mean": 2.5,
        "kl_mean": 0.0,
        "kl_per_sequence": 0.0,
        "kl_penalty_per_sequence": 0.0,
        "clamped_tokens": 0,
        "nonfinite_sequences": 0,
        "dropped_sequences": 0,
        "nonfinite_row": None,
        "nonfinite_token": None,
        "nonfinite_argument": None,
        "rewards_count": 9,
        "rewards_mean": 0,
        "rewards_std": 0,
        "advantages_count": 7,
        "advantages_mean": result.report["advantages_mean"],
        "advantages_std": result.report["advantages_std"],
    }
    assert result.report["rewards_mean"] == pytest.approx(5 / 9)
    assert len(reads) == 1


def test_kl_of_the_report_leaves_out_what_statistics_leave_out(backend: str) -> None:
    call = rows(ref_logprobs=torch.full((2, 5), -0.5))
    call["values"][0, 0] = float("nan")
    report = ppo_advantages(**on_device(call, backend), kl_coef=0.2, backend=backend).report
    assert (report["kl_mean"], report["kl_per_sequence"], report["score_mean"]) == (0.5, 2.0, 3.0)
    assert report["kl_penalty_per_sequence"] == pytest.approx(0.4)


def test_whitening_twice_is_refused(backend: str) -> None:
    call = on_device(rows(values=torch.arange(10.0).reshape(2, 5)), backend)
    once = ppo_advantages(**call, backend=backend).advantages
    with pytest.raises(InputError, match="whiten: x must not be whitened yet"):
        whiten(once, call["mask"], backend=backend)
    with pytest.raises(InputError, match="ppo_advantages: rewards must not be whitened yet"):
        ppo_advantages(**call, rewards=once, whiten_rewards=True, backend=backend)
    plain = ppo_advantages(**call, whiten_advantages=False, backend=backend).advantages
    same = whiten(plain, call["mask"], backend=backend)
    torch.testing.assert_close(same, once)


def test_an_option_beats_the_preset() -> None:
    call = rows(ref_logprobs=torch.randn(2, 5))
    ours = ppo_advantages(**call, preset="trl", kl="k2", score_at="last", kl_coef=0.3)
    assert torch.equal(ours.kl[0, :3], call["ref_logprobs"][0, :3] ** 2 / 2)
    assert ours.rewards[0, 2] == pytest.approx(2 - 0.3 * float(ours.kl[0, 2]))
    trues = [ppo_advantages(**call, preset=name, whiten_advantages=True).advantages for name in ("trl", "openrlhf", "areal")]
    named = [
        ppo_advantages(**call, preset=name, whiten_advantages=kind).advantages
        for name, kind in (("trl", "unbiased"), ("openrlhf", "population"), ("areal", Whitening(eps=1e-5, eps_at="outside")))
    ]
    assert all(torch.equal(one, other) for one, other in zip(trues, named, strict=True))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"preset": "trlx"}, "preset must be one of"),
    ({"kl": "k4"}, r"kl must be one of \['k1', 'k2', 'k3', 'abs'\], got 'k4'"),
    ({"score_at": "first"}, "score_at must be one of"),
    ({"nonfinite": "ignore"}, "nonfinite must be one of"),
    ({"whiten_advantages": "twice"}, "whiten_advantages must be one of"),
    ({"whiten_rewards": Whitening(eps=-1)}, "eps must be a number from 0 on"),
    ({"kl_coef": -0.1}, "kl_coef must be a finite number >= 0, got -0.1"),
    ({"kl_coef": "0.1"}, "kl_coef must be a number, got str"),
    ({"kl_coef": torch.zeros(3)}, r"kl_coef must have shape \[2\], one entry per sequence, got \[3\]"),
    ({"log_ratio_limit": math.nan}, "log_ratio_limit must be a number >= 0, got nan"),
    ({"length_adaptive_alpha": -1.0}, "length_adaptive_alpha must be a finite number >= 0"),
    ({"score_clip": (1.0, -1.0)}, r"score_clip must be \(lowest, highest\), got \(1.0, -1.0\); swap them"),
    ({"score_clip": -1.0}, "score_clip must be a number >= 0, got -1.0"),
    ({"score_clip": (1.0,)}, r"score_clip must be a number or \(lowest, highest\)"),
    (
        {"scores": torch.zeros(2, 5)},
        r"scores must have shape \[2\], one entry per sequence, got \[2, 5\]; pass rewards per token as rewards=",
    ),
    ({"scores": torch.zeros(2, 1)}, r"got \[2, 1\]; squeeze it"),
    ({"scores": [1.0, 2.0]}, "scores must be a torch.Tensor, got list"),
    ({"values": torch.zeros(2, 6)}, r"values must have shape \[2, 5\] to match logprobs, got \[2, 6\]; pass V\(s_T\) as bootstrap="),
    ({"ref_logprobs": torch.zeros(5, 2)}, "ref_logprobs must have shape .* transpose it"),
    ({"mask": torch.zeros(2)}, "mask must have shape"),
    ({"missing_eos_penalty": 1.0}, "has_eos must be given for missing_eos_penalty"),
    ({"kl_at": "all"}, 'kl_at="all" must come with masked="keep", got masked="skip"'),
    ({"trailing": "stay"}, 'trailing="stay" must come with masked="keep"'),
    ({"score_at": "post_eos", "terminated": torch.zeros(2, 5)}, 'terminated must have one entry per sequence with score_at="post_eos"'),
    ({"stop_reasons": ["stop"]}, "stop_reasons must have 2 entries, one per sequence, got 1"),
    ({"stop_reasons": ["stop", "bored"]}, "stop_reasons must be one of"),
    ({"stop_reasons": ["stop", "stop"], "truncated": torch.zeros(2)}, "stop_reasons must not be given with truncated"),
    ({"step_rewards": [(0, 5, 1.0)]}, "step_rewards must name tokens of the batch, got token 5 of sequence 0 at entry 0"),
    ({"step_rewards": [(2, 0, 1.0)]}, "got token 0 of sequence 2"),
    ({"step_rewards": torch.zeros(3)[:2]}, r"step_rewards must be \(sequence, end token, reward\) triples"),
    ({"step_rewards": (torch.zeros(2), torch.zeros(2), torch.zeros(3))}, "step_rewards must be three tensors"),
    ({"gamma": 1.5}, r"gamma must lie in \[0, 1\], got 1.5"),
    ({"masked": "drop"}, "masked must be one of"),
    ({"process_group": "world"}, "process_group must be"),
    ({"validate": "all"}, "validate must be one of"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[f"{'-'.join(wrong)} {i}" for i, (wrong, _) in enumerate(WRONG)])
def test_wrong_arguments(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^ppo_advantages: .*{message}"):
        ppo_advantages(**rows() | wrong)


def test_a_pack_that_is_not_said_to_be_one() -> None:
    flat = {name: value.flatten() if value.dim() == 2 else value for name, value in rows().items()}
    with pytest.raises(InputError, match=r"scores must have shape \[1\].*, got \[2\]; without segments= all tokens are one sequence"):
        ppo_advantages(**flat)


def test_no_reference_policy_no_penalty(backend: str) -> None:
    call = on_device(rows(), backend)
    call["logprobs"][0, 0] = float("nan")  # which nothing reads then
    result = ppo_advantages(**call | {"ref_logprobs": None}, backend=backend)
    assert not result.kl.any()
    assert result.report["nonfinite_sequences"] == 0


def test_the_docs_say_what_the_options_are() -> None:
    text = (Path(__file__).parent.parent / "docs" / "ppo.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| `?([^`|]*)`? \|", text, re.MULTILINE))
    defaults = {field.name: "none" if field.default is None else str(field.default) for field in fields(PPOOptions)}
    assert {name: table.get(name, "").strip() for name in defaults} == defaults
    for name, words in WORDS.items():
        (row,) = re.findall(rf"^\| `{name}` .*$", text, re.MULTILINE)
        assert name == "whiten_advantages" or all(f"`{word}`" in row for word in words)
    call = rows(bootstrap=torch.zeros(2))
    report = ppo_advantages(**call, step_rewards=[], whiten_rewards=True).report
    assert all(name in text or name.removeprefix("rewards").removeprefix("advantages") in text for name in report)


def test_within_a_compiled_function() -> None:
    """Graphs before and after it, which serve further calls."""
    call = rows(values=torch.arange(10.0).reshape(2, 5))
    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def step(values: Tensor, bias: float = 1.0) -> Tensor:
        return ppo_advantages(**call | {"values": values * 2}).advantages + bias

    compiled = [torch.compile(function, backend=kept) for function in (step, lambda values: step(values, 2.0))]
    counts = []
    for _ in range(3):
        assert torch.equal(compiled[0](call["values"]), step(call["values"]))
        assert torch.equal(compiled[1](call["values"]), step(call["values"], 2.0))
        counts.append(len(graphs))
    assert counts[0] >= 2
    assert counts == counts[:1] * 3
    with pytest.raises(InputError, match=r"ppo_advantages: values must have shape \[2, 5\]"):
        compiled[0](torch.zeros(2, 6))
