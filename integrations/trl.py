"""TRL: the advantages of one `PPOTrainer` through an engine, by ``trainer.add_callback(AdvantageCallback(trainer))``."""

from __future__ import annotations

import warnings
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(f"rlhf_scan.integrations.trl needs TRL ({error}); pip install 'rlhf-scan[trl]'") from error

from rlhf_scan.checks import check_option
from rlhf_scan.engine import Engine, LocalEngine
from rlhf_scan.errors import EngineError, InputError
from rlhf_scan.requests import CreditRequest, CreditResult

from .trl_block import SCOPES, train_with_credit


class AdvantageCallback(TrainerCallback):
    """Runs a trainer's GAE through an engine, for this one trainer: neither its class nor any other trainer changes.

    With ``scope="advantages"`` only the recursion and the returns move; whitening, masking and all that is logged stay TRL's code. The engine
    gets one "gae" request an update: `rewards` and `values` [B, T] as TRL has them (0 at padding), and as `mask` the response and the one
    step after it, which TRL counts too (``masked="keep"``: like TRL's loop, the recursion runs through the padding).

    With ``scope="rewards"`` all of TRL's steps 4 to 6 move: KL, rewards, their whitening, the recursion, and the advantages' whitening. The
    engine gets one "ppo_advantages" request an update, with TRL's preset and the trainer's arguments; scores come with TRL's penalty for a
    missing end of sequence in them. The KL that is logged stays TRL's own, bit for bit.

    An engine's error stops the training with the engine's message. It works while it is among the trainer's callbacks; removing it gives the
    trainer its own `train` back. To add it again, make a new one.

    Args:
        trainer: a PPOTrainer of trl 0.15.2 to 1.12.0.
        engine: where the work is done; None: `LocalEngine()`.
        scope: what moves, "advantages" or "rewards".

    Raises:
        InputError: the trainer is of another class, its advantage block is not the expected one, or its `train` has been replaced already.
    """

    def __init__(self, trainer: Any, engine: Engine | None = None, scope: str = "advantages") -> None:
        check_option("AdvantageCallback", "scope", scope, SCOPES)
        rewritten = train_with_credit(type(trainer), self, scope)
        if "train" in vars(trainer):
            raise InputError(
                f"AdvantageCallback: trainer must have the `train` of its class, got one set on the instance ({vars(trainer)['train']}); "
                "if it has an AdvantageCallback already, use that one, or call its restore() first"
            )
        self._trainer = trainer
        self._engine: Engine = LocalEngine() if engine is None else engine
        self._removers = {name: getattr(trainer, name) for name in ("remove_callback", "pop_callback")}
        self._set = {"train": MethodType(rewritten, trainer), **{name: partial(self._remove, name) for name in self._removers}}
        self._before = {name: vars(trainer)[name] for name in self._set if name in vars(trainer)}
        vars(trainer).update(self._set)

    def restore(self) -> None:
        """Give the trainer its own `train` back and leave its callbacks. Removing the callback does this too."""
        handler = self._trainer.callback_handler
        handler.callbacks[:] = [callback for callback in handler.callbacks if callback is not self]
        if self._is_installed():
            for name in self._set:
                delattr(self._trainer, name)
            vars(self._trainer).update(self._before)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to be idle without a word."""
        if state is not self._trainer.state:
            raise InputError("AdvantageCallback: trainer must be the one it is added to, got another; make a callback for each trainer")
        if not self._is_installed():
            raise InputError("AdvantageCallback: once removed it cannot be added again; make a new one with AdvantageCallback(trainer)")

    def takes_over(self) -> bool:
        """Whether the engine does the work now: whether this is among the trainer's callbacks."""
        added = self._is_added()
        if not added and self._is_installed():
            warnings.warn(
                "AdvantageCallback was made for this trainer but is not among its callbacks, so TRL's own advantage block runs; "
                "call trainer.add_callback(callback), or callback.restore() if that is what you want",
                stacklevel=2,
            )
        return added

    def advantages_and_returns(self, rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
        """What the block's recursion computes, by the engine: two tensors [B, T] on the device of `values`."""
        tensors = {"rewards": rewards, "values": values, "mask": mask}
        result = self._engine.run(CreditRequest("gae", tensors, {"gamma": gamma, "lam": lam, "masked": "keep"}))
        return _output(result, "advantages", values), _output(result, "returns", values)

    def whole_block(
        self, logprobs: Tensor, ref_logprobs: Tensor, values: Tensor, scores: Tensor, mask: Tensor, args: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What TRL's steps 4 to 6 compute, by the engine: rewards, advantages and returns, three tensors [B, T] on the device of `values`.

        `mask` is the response, without the step after it; `args` the trainer's.
        """
        tensors = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "values": values, "scores": scores, "mask": mask}
        params = {name: getattr(args, name) for name in ("kl_coef", "gamma", "lam", "whiten_rewards")}
        kl = getattr(args, "kl_estimator", "k1")  # until TRL 0.16 there was no other
        result = self._engine.run(CreditRequest("ppo_advantages", tensors, {"preset": "trl", "kl": kl, **params}))
        rewards, advantages, returns = (_output(result, name, values) for name in ("rewards", "advantages", "returns"))
        return rewards, advantages, returns

    def _is_added(self) -> bool:
        return any(callback is self for callback in self._trainer.callback_handler.callbacks)

    def _is_installed(self) -> bool:
        return vars(self._trainer).get("train") is self._set["train"]

    def _remove(self, name: str, callback: Any) -> Any:
        """The trainer's own method of that name, followed by `restore` where it removed this callback."""
        added = self._is_added()
        removed = self._removers[name](callback)
        if added and not self._is_added():
            self.restore()
        return removed


def _output(result: CreditResult, name: str, like: Tensor) -> Tensor:
    tensor = result.tensors.get(name)
    if tensor is None or tensor.shape != like.shape:
        got = "none" if tensor is None else f"shape {list(tensor.shape)}"
        raise EngineError(f"AdvantageCallback: the engine must return {name} of shape {list(like.shape)}, got {got}; mend the engine")
    return tensor.to(like.device)
