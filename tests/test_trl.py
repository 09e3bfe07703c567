"""The TRL door, with real PPOTrainers that generate, score and learn: the numbers of TRL, from the rollout of TRL."""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import trl
from trl.experimental.ppo import ppo_trainer
from trl_runs import ALL_OPTIONS, MARKS, UPDATES, Witness, built, logged, trl_alone

from rlhf_scan import CreditRequest, CreditResult, EngineError, InputError, LocalEngine, Segments, gae
from rlhf_scan.integrations.trl import AdvantageCallback
from rlhf_scan.integrations.trl_block import BLOCK, REWARDS, SCOPES, recursion

pytestmark = MARKS


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """`built`, with a place to write to."""
    return partial(built, tmp_path)


def by_trl(request: CreditRequest) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns by the statements in the installed TRL's own source."""
    function, origin = recursion()
    assert origin == f"the source of trl {trl.__version__}"
    args = SimpleNamespace(gamma=request.params["gamma"], lam=request.params["lam"])
    return function(request.tensors["rewards"], request.tensors["values"], args)


@pytest.fixture(scope="module")
def local_engine() -> LocalEngine:
    return LocalEngine()


@pytest.fixture(scope="module")
def http_engine() -> Iterator[Any]:
    from service import running

    from rlhf_scan.server import HttpEngine, Settings

    with running(Settings(backend="cpu")) as url, HttpEngine(url) as engine:
        yield engine


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    from rlhf_scan.ray_actors import RayEngine

    ray.init(num_cpus=1, object_store_memory=128 << 20, include_dashboard=False, log_to_driver=False)
    with RayEngine(backend="cpu") as engine:
        yield engine
    ray.shutdown()


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("engine", "options"),
    [("local_engine", {}), ("local_engine", ALL_OPTIONS), ("http_engine", {}), ("ray_engine", {})],
    ids=["local", "local, all options", "http", "ray"],
)
def test_logs_the_same_numbers(make: Any, request: pytest.FixtureRequest, engine: str, options: dict[str, Any], scope: str) -> None:
    """In float64 the last bits, which may differ, are far below what TRL logs in float32. Its whitening, though, rounds n / (n - 1) to float32."""
    witness = Witness(request.getfixturevalue(engine))
    ours, theirs = logged(make(dtype=torch.float64, **options), witness, scope), trl_alone(dtype=torch.float64, **options)
    first = [name for name in theirs[0] if name.startswith("objective/")]  # of weights that no update has touched
    assert [ours[0][name] for name in first] == [theirs[0][name] for name in first]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == (other if scope == "advantages" else pytest.approx(other, rel=1e-5, abs=1e-9))
    assert [sent.op for sent in witness.requests] == [{"advantages": "gae", "rewards": "ppo_advantages"}[scope]] * UPDATES


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("engine", ["local_engine", "http_engine", "ray_engine"])
def test_logs_the_same_numbers_in_float32(make: Any, request: pytest.FixtureRequest, engine: str, scope: str) -> None:
    """Here a last bit of a gradient reaches the weights through Adam, which divides it by its own size; TRL prints four digits."""
    for ours, theirs in zip(logged(make(), request.getfixturevalue(engine), scope), trl_alone(), strict=True):
        assert ours == pytest.approx(theirs, rel=5e-4, abs=1e-6)


def test_other_advantages_log_other_numbers(make: Any) -> None:
    """The comparison above can fail."""

    class Other:
        def run(self, request: CreditRequest) -> CreditResult:
            return LocalEngine().run(CreditRequest(request.op, request.tensors, {**request.params, "lam": 0.94}))

    ours, theirs = logged(make(), Other()), trl_alone()
    assert any(ours[-1][name] != pytest.approx(theirs[-1][name], rel=5e-4, abs=1e-6) for name in theirs[-1])


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["defaults", "all options"])
def test_engine_gets_the_rollout(make: Any, options: dict[str, Any]) -> None:
    engine = Witness()
    trainer = make(**options)
    logged(trainer, engine)
    lengths = set()
    for request, result in zip(engine.requests, engine.results, strict=True):
        assert request.op == "gae"
        assert request.params == {"gamma": trainer.args.gamma, "lam": trainer.args.lam, "masked": "keep"}
        rewards, values, mask = (request.tensors[name] for name in ("rewards", "values", "mask"))
        assert rewards.shape == values.shape == mask.shape == (8, 12)
        lengths |= set(mask.sum(1).tolist())
        assert torch.equal(mask, torch.arange(12) < mask.sum(1, keepdim=True))
        assert not rewards[~mask].any()
        assert not values[~mask].any()
        assert rewards[mask].any()
        # Each step rounds at most 4 times, relative to terms no larger than `scale`; no decay is above 1. Twice: TRL rounds too.
        advantages, returns = by_trl(request)
        scale = float(rewards.abs().max() + 2 * values.abs().max() + 2 * advantages.abs().max())
        bound = 2 * 4 * 12 * torch.finfo(torch.float32).eps / 2 * scale
        torch.testing.assert_close(result.tensors["advantages"], advantages, rtol=0, atol=bound)
        torch.testing.assert_close(result.tensors["returns"], returns, rtol=0, atol=bound)
        # The same rollout, packed, gives the same bits.
        packed = gae(
            rewards[mask], values[mask], segments=Segments.from_lengths(mask.sum(1)), gamma=trainer.args.gamma, lam=trainer.args.lam
        )
        assert torch.equal(packed.advantages, result.tensors["advantages"][mask])
        assert torch.equal(packed.returns, result.tensors["returns"][mask])
    assert len(lengths) > 3


def steps_4_to_6(request: CreditRequest) -> dict[str, torch.Tensor]:
    """KL, rewards, advantages and returns by TRL's own statements, from what the request holds."""
    names: dict[str, Any] = {"torch": torch, "masked_whiten": ppo_trainer.masked_whiten, "args": SimpleNamespace(**request.params)}
    names["args"].kl_estimator = request.params["kl"]
    names |= {name: request.tensors[name] for name in ("logprobs", "ref_logprobs", "values", "scores")}
    mask = request.tensors["mask"]
    names |= {"responses": mask, "padding_mask": ~mask, "sequence_lengths": mask.sum(1) - 1, "sequence_lengths_p1": mask.sum(1)}
    names["padding_mask_p1"] = torch.arange(mask.shape[1]) > mask.sum(1)[:, None]
    exec(compile(ast.Module([*REWARDS[0], *BLOCK], []), "<steps 4 to 6 of TRL>", "exec"), names)
    return {name: names[name] for name in ("kl", "rewards", "advantages", "returns")}


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["defaults", "all options"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_engine_gets_steps_4_to_6(make: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    engine = Witness()
    trainer = make(dtype=dtype, **options)
    logged(trainer, engine, "rewards")
    args, lengths = trainer.args, set()
    for request, result in zip(engine.requests, engine.results, strict=True):
        names = {"kl": "kl_estimator", "kl_coef": "kl_coef", "gamma": "gamma", "lam": "lam", "whiten_rewards": "whiten_rewards"}
        assert request.params == {"preset": "trl", **{name: getattr(args, theirs) for name, theirs in names.items()}}
        assert set(request.tensors) == {"logprobs", "ref_logprobs", "values", "scores", "mask"}
        mask = request.tensors["mask"]
        lengths |= set(mask.sum(1).tolist())
        assert torch.equal(mask, torch.arange(12) < mask.sum(1, keepdim=True))
        for name, theirs in steps_4_to_6(request).items():
            bound = 1e2 * torch.finfo(torch.float32 if name == "advantages" else dtype).eps * max(1.0, float(theirs.abs().max()))
            if args.whiten_rewards:  # n / (n - 1) is a float32 in TRL
                bound = max(bound, 1e2 * torch.finfo(torch.float32).eps)
            torch.testing.assert_close(result.tensors[name], theirs, rtol=0, atol=bound)
    assert len(lengths) > 3
    assert 12 in lengths  # a response that fills its row has its score on the last token


def test_an_input_error_stops_training_with_its_message(make: Any) -> None:
    trainer = make(gamma=1.5)
    trainer.add_callback(AdvantageCallback(trainer))
    with pytest.raises(InputError, match=r"gae: gamma must lie in \[0, 1\], got 1.5") as caught:
        trainer.train()
    assert not trainer.kept.logs
    in_trl = next(frame for frame in traceback.extract_tb(caught.tb) if frame.filename == ppo_trainer.__file__)
    assert (in_trl.name, in_trl.line) == ("train", "advantages = torch.stack(advantages_reversed[::-1], axis=1)")


@pytest.mark.parametrize("tensors", [{}, {"advantages": torch.zeros(96), "returns": torch.zeros(96)}], ids=["none", "flat"])
def test_an_engine_that_returns_something_else(make: Any, tensors: dict[str, torch.Tensor]) -> None:
    trainer = make()
    engine = SimpleNamespace(run=lambda request: CreditResult(tensors, {}))
    trainer.add_callback(AdvantageCallback(trainer, engine))
    with pytest.raises(EngineError, match=r"the engine must return advantages of shape \[8, 12\]"):
        trainer.train()


def test_bfloat16_keeps_its_dtype(make: Any) -> None:
    engine, trainer = Witness(), make(updates=1, dtype=torch.bfloat16)
    logged(trainer, engine)
    for request, result in zip(engine.requests, engine.results, strict=True):
        assert [tensor.dtype for tensor in result.tensors.values()] == [tensor.dtype for tensor in by_trl(request)]
