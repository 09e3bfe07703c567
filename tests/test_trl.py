"""The TRL door, with real PPOTrainers that generate, score and learn; only their weights are tiny and random."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import textwrap
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
from tiny_ppo import LogKeeper, tiny_tokenizer, tiny_trainer
from transformers import TrainerCallback
from trl.experimental.ppo import PPOTrainer, ppo_trainer

from rlhf_scan import CreditRequest, CreditResult, EngineError, InputError, LocalEngine, Segments, gae
from rlhf_scan.integrations.trl import AdvantageCallback
from rlhf_scan.integrations.trl_block import BLOCK, REWARDS, SCOPES, recursion

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:trl", "ignore:var():UserWarning"),
]
UPDATES = 3
ALL_OPTIONS = {"gamma": 0.97, "lam": 0.9, "whiten_rewards": True, "kl_estimator": "k3", "missing_eos_penalty": 1.0}


class Witness:
    """An engine that passes requests on and keeps them, with what came back."""

    def __init__(self, engine: Any = None) -> None:
        self.engine = engine or LocalEngine()
        self.requests: list[CreditRequest] = []
        self.results: list[CreditResult] = []

    def run(self, request: CreditRequest) -> CreditResult:
        self.requests.append(request)
        self.results.append(self.engine.run(request))
        return self.results[-1]


def built(output_dir: Path, **options: Any) -> Any:
    """A tiny trainer with a LogKeeper as `kept`."""
    trainer = tiny_trainer(output_dir, **{"updates": UPDATES, "num_ppo_epochs": 2} | options)
    trainer.kept = LogKeeper()
    trainer.add_callback(trainer.kept)
    return trainer


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """`built`, with a place to write to."""
    return partial(built, tmp_path)


def logged(trainer: Any, engine: Any = None, scope: str = "advantages") -> list[dict[str, float]]:
    """What the trainer logs, trained through `engine` where one is given."""
    if engine is not None:
        trainer.add_callback(AdvantageCallback(trainer, engine, scope))
    trainer.train()
    assert len(trainer.kept.logs) == trainer.args.num_total_batches
    return [{name: value for name, value in logs.items() if not math.isnan(value)} for logs in trainer.kept.logs]


@pytest.fixture(scope="module")
def trl_alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What TRL logs by itself, by the options of tiny_trainer."""
    known: dict[str, list[dict[str, float]]] = {}

    def baseline(**options: Any) -> list[dict[str, float]]:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = logged(built(tmp_path_factory.mktemp("alone"), **options))
        return known[key]

    return baseline


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
def test_logs_the_same_numbers(
    make: Any, trl_alone: Any, request: pytest.FixtureRequest, engine: str, options: dict[str, Any], scope: str
) -> None:
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
def test_logs_the_same_numbers_in_float32(make: Any, trl_alone: Any, request: pytest.FixtureRequest, engine: str, scope: str) -> None:
    """Here a last bit of a gradient reaches the weights through Adam, which divides it by its own size; TRL prints four digits."""
    for ours, theirs in zip(logged(make(), request.getfixturevalue(engine), scope), trl_alone(), strict=True):
        assert ours == pytest.approx(theirs, rel=5e-4, abs=1e-6)


def test_other_advantages_log_other_numbers(make: Any, trl_alone: Any) -> None:
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


def test_block_is_the_installed_one() -> None:
    source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(PPOTrainer.train))))
    for statement in [*REWARDS[0], *BLOCK]:
        assert textwrap.indent(ast.unparse(statement), "            ") in source


@pytest.mark.parametrize(
    "remove",
    [
        lambda trainer, callback: trainer.remove_callback(callback),
        lambda trainer, callback: trainer.remove_callback(AdvantageCallback),
        lambda trainer, callback: trainer.pop_callback(callback),
        lambda trainer, callback: callback.restore(),
    ],
    ids=["remove", "remove class", "pop", "restore"],
)
def test_removal_restores(make: Any, trl_alone: Any, remove: Any) -> None:
    engine, trainer = Witness(), make(updates=1)
    before = dict(vars(trainer))
    callback = AdvantageCallback(trainer, engine)
    trainer.add_callback(callback)
    assert trainer.train.__func__ is not PPOTrainer.train
    remove(trainer, callback)
    assert vars(trainer) == before
    assert trainer.train.__func__ is PPOTrainer.train
    assert callback not in trainer.callback_handler.callbacks
    assert logged(trainer) == trl_alone(updates=1)
    assert not engine.requests


def test_removing_another_callback_restores_nothing(make: Any) -> None:
    engine, trainer = Witness(), make(updates=1)
    callback = AdvantageCallback(trainer, engine)
    trainer.remove_callback(type(trainer.callback_handler.callbacks[-2]))
    trainer.add_callback(callback)
    trainer.train()
    assert len(engine.requests) == 1


def test_removal_during_training(make: Any, trl_alone: Any) -> None:
    class Remover(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.remove_callback(AdvantageCallback)

    engine, trainer = Witness(), make(updates=2, dtype=torch.float64)
    trainer.add_callback(Remover())
    assert logged(trainer, engine) == trl_alone(updates=2, dtype=torch.float64)
    assert len(engine.requests) == 1
    assert trainer.train.__func__ is PPOTrainer.train


def test_another_trainer_is_unaffected(make: Any) -> None:
    original = PPOTrainer.train
    engine, trainer, other = Witness(), make(updates=1), make(updates=1)
    trainer.add_callback(AdvantageCallback(trainer, engine))
    assert PPOTrainer.train is original
    assert other.train.__func__ is original
    other.train()
    assert not engine.requests
    assert make(updates=1).train.__func__ is original
    assert "_credit" not in vars(ppo_trainer)


def test_never_added_says_so(make: Any) -> None:
    engine, trainer = Witness(), make(updates=1)
    AdvantageCallback(trainer, engine)
    with pytest.warns(UserWarning, match="not among its callbacks"):
        trainer.train()
    assert not engine.requests


def test_added_twice_is_added_once(make: Any) -> None:
    engine, trainer = Witness(), make(updates=1)
    callback = AdvantageCallback(trainer, engine)
    trainer.add_callback(callback)
    trainer.add_callback(callback)
    logged(trainer)
    assert len(engine.requests) == 1
    trainer.remove_callback(callback)
    assert trainer.train.__func__ is not PPOTrainer.train
    trainer.remove_callback(callback)
    assert trainer.train.__func__ is PPOTrainer.train


def test_two_callbacks_on_one_trainer(make: Any) -> None:
    trainer = make()
    first = AdvantageCallback(trainer)
    with pytest.raises(InputError, match="has an AdvantageCallback already"):
        AdvantageCallback(trainer)
    first.restore()
    trainer.add_callback(AdvantageCallback(trainer))


def test_a_callback_belongs_to_one_trainer(make: Any) -> None:
    trainer, other = make(), make()
    callback = AdvantageCallback(trainer)
    other.add_callback(callback)
    with pytest.raises(InputError, match="trainer must be the one it is added to"):
        other.train()


def test_added_again_after_removal(make: Any) -> None:
    trainer = make()
    callback = AdvantageCallback(trainer)
    trainer.add_callback(callback)
    trainer.add_callback(trainer.pop_callback(callback))
    with pytest.raises(InputError, match="make a new one"):
        trainer.train()


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


def test_another_class_is_refused(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    config = LlamaConfig(vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(str(tmp_path), bf16=False, use_cpu=True, report_to=[]),
        train_dataset=Dataset.from_list([{"input_ids": [2, 3, 4]}]),
        processing_class=tiny_tokenizer(),
    )
    for wrong in (trainer, None, object()):
        with pytest.raises(InputError, match=r"trainer must be a PPOTrainer of trl 0\.15\.2 to 1\.12\.0, got"):
            AdvantageCallback(wrong)
    assert "train" not in vars(trainer)


def module_from(path: Path, source: str) -> Any:
    """A module beside TRL's own, so that its relative imports work."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"trl.experimental.ppo.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("delta + args.gamma * args.lam * lastgaelam", "delta + args.lam * lastgaelam", "at line .* there must be `for t in"),
        ("returns = advantages + values\n", "returns = advantages + values.clone()\n", "there must be `returns = advantages"),
        ("advantages = masked_whiten(advantages, ~padding_mask)\n", "pass\n", "there must be `advantages = masked_whiten"),
        ("gen_length = responses.shape[1]\n", "gen_length = responses.shape[1]; print()\n", "there must be `for t in"),
        ("lastgaelam = 0\n", "lastgaelam = 0.0\n", "with 0 advantage blocks"),
        ("padding_mask_p1", "padding_mask_plus_1", "sets no `padding_mask_p1`"),
        ("    def train(self):\n", "    @torch.no_grad()\n    def train(self):\n", "a decorator or a patch wraps"),
    ],
)
def test_an_altered_block_is_refused(make: Any, tmp_path: Path, old: str, new: str, message: str) -> None:
    source = Path(ppo_trainer.__file__).read_text()
    assert old in source
    altered = module_from(tmp_path / "altered.py", source.replace(old, new))
    trainer = make(trainer_class=altered.PPOTrainer)
    with pytest.raises(InputError, match=f"PPOTrainer of trl 0.15.2 to 1.12.0, got .*{message}"):
        AdvantageCallback(trainer)
    assert trainer.train.__func__ is altered.PPOTrainer.train


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("non_score_reward = -args.kl_coef * kl\n", "non_score_reward = -2 * args.kl_coef * kl\n"),
        ("mask=~padding_mask_p1, shift_mean=False)", "mask=~padding_mask_p1)"),
    ],
)
def test_other_rewards_are_left_to_the_trainer(make: Any, tmp_path: Path, old: str, new: str, scope: str) -> None:
    source = Path(ppo_trainer.__file__).read_text()
    assert old in source
    trainer = make(trainer_class=module_from(tmp_path / "altered.py", source.replace(old, new)).PPOTrainer)
    if scope == "rewards":
        with pytest.raises(
            InputError, match=r"makes its rewards in another way before line \d+ \(scope=\"advantages\" leaves them to it\)"
        ):
            AdvantageCallback(trainer, scope=scope)
    else:
        AdvantageCallback(trainer, scope=scope)


@pytest.mark.parametrize("known", REWARDS, ids=["0.25", "0.17", "0.16"])
def test_rewards_of_every_release_are_found(make: Any, tmp_path: Path, known: list[ast.stmt]) -> None:
    lines = [textwrap.indent(ast.unparse(statement), " " * 16) for statement in known]
    source = Path(ppo_trainer.__file__).read_text()
    start, stop = source.index("                # 4. compute rewards"), source.index("                # 6. compute advantages")
    altered = module_from(tmp_path / "release.py", source[:start] + "\n".join(lines) + "\n" + source[stop:])
    engine = Witness()
    logged(make(updates=1, trainer_class=altered.PPOTrainer), engine, "rewards")
    assert [request.op for request in engine.requests] == ["ppo_advantages"]


def test_an_unknown_scope(make: Any) -> None:
    with pytest.raises(InputError, match=r"AdvantageCallback: scope must be one of \['advantages', 'rewards'\], got 'everything'"):
        AdvantageCallback(make(), scope="everything")


def test_train_keeps_its_closure_super_and_private_names(make: Any, trl_alone: Any, tmp_path: Path) -> None:
    train = inspect.getsource(PPOTrainer.train).replace(
        "        args = self.args\n",
        "        args = self.args\n        self.__own = super().is_world_process_zero()\n        seen.append(self.__own)\n",
        1,
    )
    source = f"""
from trl.experimental.ppo import ppo_trainer
globals().update({{name: value for name, value in vars(ppo_trainer).items() if not name.startswith("__")}})

def child(seen):
    class Child(PPOTrainer):
{textwrap.indent(train, "    ")}
    return Child
"""
    seen: list[bool] = []
    child = module_from(tmp_path / "child.py", source).child(seen)
    engine, trainer = Witness(), make(updates=2, trainer_class=child, dtype=torch.float64)
    assert logged(trainer, engine) == trl_alone(updates=2, dtype=torch.float64)
    assert len(engine.requests) == 2
    assert seen == [True]
    assert trainer._Child__own is True
    assert trainer.train.__func__.__qualname__ == child.train.__qualname__


def test_a_subclass_that_keeps_train(make: Any) -> None:
    class Mine(PPOTrainer):
        pass

    engine = Witness()
    logged(make(updates=1, trainer_class=Mine), engine)
    assert len(engine.requests) == 1
