"""A call of `ppo_advantages` like two earlier ones replays what they launched, and is the call that it is: its own numbers, its own errors."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import device_of
from ppo_samples import OUTPUTS, random_call, random_options
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rlhf_scan
from rlhf_scan import InputError, Segments, ppo_advantages, replays
from rlhf_scan.ppo import PPOAdvantages
from rlhf_scan.ppo_options import PRESETS

BACKEND = "triton"
Arguments = dict[str, Any]


def forget() -> None:
    replays._known.clear()


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    forget()
    yield
    forget()


def is_replayed() -> bool:
    """Whether a kind of call that was made is replayed from now on."""
    return any(isinstance(known, replays.Replay) for known in replays._known.values())


def other_numbers(call: Arguments, seed: int) -> Arguments:
    """A call like it with other contents, in other memory."""
    generator = torch.Generator().manual_seed(seed)

    def other(value: Any) -> Any:
        if isinstance(value, Segments):
            return Segments.from_cu_seqlens(value.cu_seqlens)
        if not isinstance(value, Tensor):
            return value
        order = torch.randperm(value.numel(), generator=generator)
        return value.flatten()[order.to(value.device)].reshape(value.shape)

    return {name: other(value) for name, value in call.items()}


def assert_same(got: PPOAdvantages, want: PPOAdvantages) -> None:
    for name in OUTPUTS:
        assert torch.equal(getattr(got, name).nan_to_num(9.0), getattr(want, name).nan_to_num(9.0)), name
        assert getattr(got, name).dtype == getattr(want, name).dtype
    assert repr(got.report) == repr(want.report)
    assert torch.equal(got.report.score_tokens, want.report.score_tokens)
    assert torch.equal(got.report.nonfinite_sequences, want.report.nonfinite_sequences)


def assert_replays_agree(call: Arguments, options: Arguments) -> bool:
    """With the call in full; whether the last of three was a replay."""
    calls = [other_numbers(call, seed) for seed in range(4)]
    want = []
    for each in calls:
        want.append(ppo_advantages(**each, **options, backend=BACKEND))
        forget()
    got = [ppo_advantages(**each, **options, backend=BACKEND) for each in calls]
    for mine, full in zip(got, want, strict=True):  # each after all of them: none has the memory of another
        assert_same(mine, full)
    return is_replayed()


def rows(batch: int = 4, length: int = 7, dtype: torch.dtype = torch.float32) -> Arguments:
    generator = torch.Generator().manual_seed(5)
    call: Arguments = {
        name: torch.randn(batch, length, generator=generator, dtype=dtype) for name in ("logprobs", "ref_logprobs", "values")
    }
    call |= {"scores": torch.randn(batch, generator=generator), "mask": torch.rand(batch, length, generator=generator) < 0.8}
    return {name: value.to(device_of(BACKEND)) for name, value in call.items()}


def packed() -> Arguments:
    return {name: value if value.dim() == 1 else value.flatten() for name, value in rows().items()} | {
        "segments": Segments.from_lengths([9, 0, 12, 7])
    }


@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("make", [rows, packed], ids=["rows", "packed"])
def test_a_repeated_call_is_replayed(make: Any, preset: str | None) -> None:
    assert assert_replays_agree(make(), {"preset": preset})


@pytest.mark.parametrize(
    "given", ["attention_mask", "rewards", "bootstrap", "has_eos", "whiten_rewards", "post_eos", "drop", "zero", "bfloat16"]
)
def test_whatever_is_given(given: str) -> None:
    call = rows()
    tokens, sequences = call["values"], call["scores"]
    call |= {
        "attention_mask": {"attention_mask": torch.ones_like(call["mask"])},
        "rewards": {"rewards": tokens.neg()},
        "bootstrap": {"bootstrap": sequences.neg(), "terminated": sequences > 0},
        "has_eos": {"has_eos": tokens > 1},
    }.get(given, {})
    options = {
        "has_eos": {"missing_eos_penalty": 0.5},
        "whiten_rewards": {"whiten_rewards": True, "preset": "trl"},
        "post_eos": {"score_at": "post_eos", "whiten_advantages": "off", "gamma": 0.9, "lam_value": 0.5},
        "drop": {"nonfinite": "drop", "masked": "zero"},
        "zero": {"nonfinite": "zero"},
        "bfloat16": {"dtype": torch.bfloat16},
    }.get(given, {})
    assert_replays_agree(call, options)


@pytest.mark.parametrize("seed", range(12))
def test_any_call(seed: int) -> None:
    rng = random.Random(seed)
    call = random_call(rng, packed=seed % 2 == 0)
    call.pop("step_rewards", None)
    assert_replays_agree({n: v.to(device_of(BACKEND)) if isinstance(v, Tensor) else v for n, v in call.items()}, random_options(rng))


@pytest.mark.parametrize("count", [4, 16, 19])
def test_stop_reasons(count: int) -> None:
    """Other words are other numbers."""
    call, words = rows(count, 5), ["stop", "length", "abort", "tool_calls"] * count
    turns = [words[:count], words[1 : count + 1], words[2 : count + 2], words[3 : count + 3]]
    call["bootstrap"] = call["scores"] + 1
    want = []
    for reasons in turns:
        want.append(ppo_advantages(**call, stop_reasons=reasons, missing_eos_penalty=0.5, backend=BACKEND))
        forget()
    for reasons, full in zip(turns, want, strict=True):
        assert_same(ppo_advantages(**call, stop_reasons=reasons, missing_eos_penalty=0.5, backend=BACKEND), full)
    assert is_replayed()


def test_what_is_not_finite_is_named_in_the_call_that_has_it() -> None:
    call = rows()
    for _ in range(3):
        ppo_advantages(**call, backend=BACKEND)
    assert is_replayed()
    bad = {name: value.clone() for name, value in call.items()}
    row, token = call["mask"].nonzero()[3].tolist()
    bad["ref_logprobs"][row, token] = float("nan")
    assert ppo_advantages(**bad, backend=BACKEND).report.first_nonfinite() == (row, token, "ref_logprobs")
    assert ppo_advantages(**call, backend=BACKEND).report.first_nonfinite() is None


def test_one_tensor_for_two_arguments_is_not_taken_for_two() -> None:
    call = rows()
    twice = {**call, "ref_logprobs": call["logprobs"]}
    for _ in range(3):
        assert float(ppo_advantages(**twice, backend=BACKEND).kl.abs().sum()) == 0.0
    assert is_replayed()
    want = ppo_advantages(**call, backend=BACKEND)
    forget()
    for _ in range(3):
        assert_same(want, ppo_advantages(**call, backend=BACKEND))
    for _ in range(2):
        assert float(ppo_advantages(**twice, backend=BACKEND).kl.abs().sum()) == 0.0


def test_two_arguments_in_one_memory() -> None:
    call = rows(4, 8)
    both = torch.stack([call["values"], call["logprobs"]])
    halves = {**call, "values": both[0], "logprobs": both[1]}
    want = ppo_advantages(**call, backend=BACKEND)
    for each in (halves, halves, halves, call):
        assert_same(ppo_advantages(**each, backend=BACKEND), want)
    assert is_replayed()


def test_memory_that_begins_elsewhere() -> None:
    call = rows()
    for _ in range(3):
        want = ppo_advantages(**call, backend=BACKEND)
    shifted = torch.empty(call["values"].numel() + 1, device=call["values"].device)[1:].view_as(call["values"]).copy_(call["values"])
    assert_same(ppo_advantages(**{**call, "values": shifted}, backend=BACKEND), want)


def test_other_boundaries() -> None:
    call = packed()
    for lengths in ([9, 0, 12, 7], [9, 0, 12, 7], [9, 0, 12, 7], [1, 26, 1, 0], [0, 0, 28, 0]):
        call["segments"] = Segments.from_lengths(lengths)
        got = ppo_advantages(**call, backend=BACKEND)
        want = ppo_advantages(**{n: v.cpu() if isinstance(v, Tensor) else v for n, v in call.items()}, backend="cpu")
        torch.testing.assert_close(got.advantages.cpu(), want.advantages)
    assert is_replayed()


def test_a_wrong_call_is_refused_after_right_ones() -> None:
    call = rows()
    for _ in range(3):
        ppo_advantages(**call, backend=BACKEND)
    with pytest.raises(InputError, match="values must have shape"):
        ppo_advantages(**{**call, "values": call["values"][:, :-1]}, backend=BACKEND)
    with pytest.raises(InputError, match="kl_coef must be"):
        ppo_advantages(**call, kl_coef=-1.0, backend=BACKEND)
    with pytest.raises(InputError, match="scores"):
        ppo_advantages(**{**call, "scores": 1.0}, backend=BACKEND)
    with pytest.raises(InputError, match="validate"):
        ppo_advantages(**call, backend=BACKEND, validate="ful")
    with pytest.raises(InputError, match="backend"):
        ppo_advantages(**call, backend="gpu")
    whitened = ppo_advantages(**call, backend=BACKEND).advantages
    with pytest.raises(InputError, match="must not be whitened"):
        ppo_advantages(**call, rewards=whitened, whiten_rewards=True, backend=BACKEND)


@pytest.mark.parametrize("rate", [True, np.int64(1), 1 + 0j, [1.0]], ids=lambda rate: type(rate).__name__)
@pytest.mark.parametrize("name", ["gamma", "lam", "lam_value"])
def test_what_equals_a_number_is_none(name: str, rate: Any) -> None:
    call = rows()
    for _ in range(3):
        ppo_advantages(**call, **{name: 1.0}, backend=BACKEND)
    assert is_replayed()
    with pytest.raises(InputError, match=f"{name} must be a number or a tensor"):
        ppo_advantages(**call, **{name: rate}, backend=BACKEND)


@pytest.mark.parametrize("option", ["masked", "dtype", "backend"])
@pytest.mark.parametrize("value", [["skip"], {"a": 1}, np.ones(1)], ids=lambda value: type(value).__name__)
def test_an_option_that_cannot_be_looked_up_is_refused(option: str, value: Any) -> None:
    call, probs = policy()
    policies = {"target_probs": probs[:, 1:], "policy_probs": probs[:, :-1]}
    with pytest.raises(InputError, match=f"{option} must be"):
        ppo_advantages(**rows(), **{"backend": BACKEND, option: value})
    with pytest.raises(InputError, match=f"{option} must be"):
        rlhf_scan.retrace_from_policy(**call, **policies, **{"backend": BACKEND, option: value})


@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn], ids=lambda convert: convert.__name__)
def test_what_is_not_dense_is_refused_after_what_is(convert: Any) -> None:
    call = rows()
    odd = convert(call["values"].cpu())
    for values in (call["values"], call["values"].t().contiguous().t()):
        for _ in range(3):
            ppo_advantages(**{**call, "values": values}, backend=BACKEND)
            rlhf_scan.gae(values, values, backend=BACKEND)
    with pytest.raises(InputError, match="values must be"):
        ppo_advantages(**{**call, "values": odd}, backend=BACKEND)
    with pytest.raises(InputError, match="rewards must be"):
        rlhf_scan.gae(odd, call["values"], backend=BACKEND)


def test_a_report_has_no_memory_of_the_outputs_and_can_be_sent() -> None:
    call = rows()
    for _ in range(3):
        block = ppo_advantages(**call, backend=BACKEND)
    assert is_replayed()
    memory = {getattr(block, name).untyped_storage().data_ptr() for name in OUTPUTS}
    assert len(memory) == len(OUTPUTS)
    sent = pickle.loads(pickle.dumps(block.report))
    assert repr(sent) == repr(block.report)
    assert block.report.nonfinite_sequences.untyped_storage().data_ptr() not in memory


def policy(actions: int = 3) -> tuple[Arguments, Tensor]:
    """A call of `retrace_from_policy`, and the probabilities at all states, to be looked at as those here and those that follow."""
    generator = torch.Generator().manual_seed(2)
    shape = (4, 7)
    call: Arguments = {name: torch.randn(shape, generator=generator) for name in ("rewards", "q_values")}
    call |= {"next_q": torch.randn(*shape, actions, generator=generator), "behavior_logprobs": -torch.rand(shape, generator=generator)}
    call |= {"actions": torch.randint(0, actions, shape, generator=generator), "mask": torch.rand(shape, generator=generator) < 0.8}
    probs = torch.rand(4, 8, actions, generator=generator).softmax(-1)
    return {name: value.to(device_of(BACKEND)) for name, value in call.items()}, probs.to(device_of(BACKEND))


def retraced(call: Arguments, here: Tensor, following: Tensor, **rates: Any) -> Tensor:
    rates = {"gamma": 0.9, "lam": 0.8, **rates}
    return rlhf_scan.retrace_from_policy(**call, target_probs=following, policy_probs=here, **rates, backend=BACKEND).targets


def test_views_that_share_memory_and_ones_that_do_not() -> None:
    call, probs = policy()
    views = probs[:, :-1], probs[:, 1:]
    copies = tuple(view.contiguous() for view in views)
    want = retraced(call, *views)
    forget()
    for _ in range(3):
        assert torch.equal(retraced(call, *views), want)
    assert is_replayed()
    for _ in range(3):
        assert torch.equal(retraced(call, *copies), want)
    for here, following in (views, copies, (views[0], views[1].clone()), (probs.clone()[:, :-1], probs.clone()[:, 1:])):
        assert torch.equal(retraced(call, here, following), want)
    backward = probs.flip(1)
    assert torch.equal(retraced(call, backward[:, 1:].flip(1), backward[:, :-1].flip(1)), want)


def test_the_same_memory_in_other_places() -> None:
    """The two views were recorded one step apart; a call on the same state for both runs in full."""
    call, probs = policy()
    for _ in range(3):
        retraced(call, probs[:, :-1], probs[:, 1:])
    assert is_replayed()
    got = retraced(call, probs[:, :-1], probs[:, :-1])
    forget()
    assert torch.equal(got, retraced(call, probs[:, :-1], probs[:, :-1]))


def test_numbers_that_a_recording_did_not_have() -> None:
    call, probs = policy()
    for _ in range(3):
        retraced(call, probs[:, :-1], probs[:, 1:])
    got = [retraced(call, probs[:, :-1], probs[:, 1:], gamma=gamma) for gamma in (0.5, 1, 1.0, 0.5, 0.5, 0.5)]
    forget()
    for gamma, targets in zip((0.5, 1, 1.0, 0.5, 0.5, 0.5), got, strict=True):
        assert torch.equal(targets, retraced(call, probs[:, :-1], probs[:, 1:], gamma=gamma))
    with pytest.raises(InputError, match="gamma must lie in"):
        retraced(call, probs[:, :-1], probs[:, 1:], gamma=1.5)


class Operators(TorchDispatchMode):
    """The names of torch's operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(op._schema.name)
        return op(*args, **(kwargs or {}))


def test_who_watches_sees_the_call_in_full() -> None:
    call, probs = policy()
    for _ in range(3):
        want = retraced(call, probs[:, :-1], probs[:, 1:])
    assert is_replayed()
    with Operators() as seen:
        assert torch.equal(retraced(call, probs[:, :-1], probs[:, 1:]), want)
    assert "rlhf_scan::estimate" in seen.names


def test_what_computes_by_other_means_is_not_replayed() -> None:
    """Where torch computes or the device is read, a call runs in full: nothing of an earlier one may be taken."""
    call = rows()
    assert assert_replays_agree({**call, "terminated": call["scores"] > 0}, {"masked": "zero"}) is False
    forget()
    for seed in range(3):
        ppo_advantages(**other_numbers(call, seed), backend=BACKEND, step_rewards=[(0, 1, 0.5)])
        ppo_advantages(**other_numbers(call, seed), backend=BACKEND, nonfinite="raise")
    assert not is_replayed()


def test_inference_mode() -> None:
    call = rows()
    want = ppo_advantages(**call, backend=BACKEND)
    forget()
    for _ in range(3):
        with torch.inference_mode():
            inferred = ppo_advantages(**call, backend=BACKEND)
        assert_same(inferred, want)
        assert_same(ppo_advantages(**call, backend=BACKEND), want)
    assert inferred.advantages.is_inference()
    assert not want.advantages.is_inference()
