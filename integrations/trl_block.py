"""The advantage block of TRL's `PPOTrainer.train`: found in its source, and rewritten so that a callback does the recursion, or all of it.

The block has one syntax tree in all releases that `SUPPORTED` names. Its first six statements are GAE; the whitening and masking after
them stay TRL's, unless what comes before the block, which makes the rewards, is handed over too.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from rlhf_scan.errors import InputError

SUPPORTED = "trl 0.15.2 to 1.12.0"

# From TRL, copyright The HuggingFace Team, Apache-2.0.
BLOCK = ast.parse(
    """
lastgaelam = 0
advantages_reversed = []
gen_length = responses.shape[1]
for t in reversed(range(gen_length)):
    nextvalues = values[:, t + 1] if t < gen_length - 1 else 0.0
    delta = rewards[:, t] + args.gamma * nextvalues - values[:, t]
    lastgaelam = delta + args.gamma * args.lam * lastgaelam
    advantages_reversed.append(lastgaelam)
advantages = torch.stack(advantages_reversed[::-1], axis=1)
returns = advantages + values
advantages = masked_whiten(advantages, ~padding_mask)
advantages = torch.masked_fill(advantages, padding_mask, 0)
"""
).body
RECURSION = 6
_SHOWN = 4  # the statement whose line a traceback shows for the engine's call

# What makes the rewards, in front of the block. From TRL as well: in 0.16, from 0.17 and from 0.25 on.
_REWARDS = """
{kl}
non_score_reward = -args.kl_coef * kl
rewards = non_score_reward.clone()
actual_start = torch.arange(rewards.size(0), device=rewards.device)
actual_end = torch.where(sequence_lengths_p1 < rewards.size(1), sequence_lengths_p1, sequence_lengths)
rewards[{place}] += scores
if args.whiten_rewards:
    rewards = masked_whiten(rewards, mask=~padding_mask_p1, shift_mean=False)
    rewards = torch.masked_fill(rewards, padding_mask_p1, 0)
"""
_K1 = "kl = logprobs - ref_logprobs"
_K1_OR_K3 = """logr = ref_logprobs - logprobs
kl = -logr if args.kl_estimator == "k1" else (logr.exp() - 1) - logr"""
REWARDS = [
    ast.parse(_REWARDS.format(kl=kl, place=place)).body
    for kl, place in (
        (_K1_OR_K3, "actual_start, actual_end"),
        (_K1_OR_K3, "[actual_start, actual_end]"),
        (_K1, "[actual_start, actual_end]"),
    )
]
_LOGGED = "non_score_reward"  # up to the statement that sets it, what TRL logs is made: that stays
SCOPES = ("advantages", "rewards")

# padding_mask_p1 is TRL's: False on the response and on the one step after it, whose value is read and whose return is written too.
# TRL deletes actual_start and actual_end in the end.
_REPLACEMENTS = {
    "advantages": """
if _credit.takes_over():
    advantages, returns = _credit.advantages_and_returns(rewards, values, ~padding_mask_p1, args.gamma, args.lam)
else:
    pass
""",
    "rewards": """
if _credit.takes_over():
    rewards, advantages, returns = _credit.whole_block(logprobs, ref_logprobs, values, scores, ~padding_mask, args)
    actual_start = actual_end = None
else:
    pass
""",
}

_ALONE = """
def recursion(rewards, values, args):
    responses = rewards
    return advantages, returns
"""


def train_with_credit(trainer_class: type, credit: object, scope: str = "advantages") -> FunctionType:
    """The class's `train`, but with `credit` in place of the block's recursion, or of all of it, while ``credit.takes_over()``.

    It calls ``credit.advantages_and_returns`` for the recursion; with the scope "rewards" ``credit.whole_block`` for the block and what makes
    the rewards before it.

    It shares globals and closure with the original, and its lines are those of the source file, so that tracebacks show TRL's own.

    Raises:
        InputError: `train` does not hold the block exactly as expected, or is no plain function with readable source.
    """
    function, wrapped = _function(trainer_class)
    tree, definition = _parse(trainer_class, function)
    body, start = find_block(trainer_class, definition)
    if wrapped:
        raise _refusal(trainer_class, "has a `train` that a decorator or a patch wraps (undo it, or apply it after making the callback)")
    replaced = slice(start, start + RECURSION)
    if scope == "rewards":
        replaced = slice(start - _rewards_before(trainer_class, body, start), start + len(BLOCK))
    (replacement,) = cast(list[ast.If], ast.parse(_REPLACEMENTS[scope]).body)
    for node in ast.walk(replacement):
        ast.copy_location(node, body[start + _SHOWN])
    replacement.orelse = body[replaced]
    body[replaced] = [replacement]
    _enclose(definition)
    code = _compiled(tree, function)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)) | {"_credit": CellType(credit)}
    closure = tuple(cells[name] for name in code.co_freevars)
    rewritten = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    rewritten.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(rewritten, function)
    return rewritten


def _function(trainer_class: type) -> tuple[FunctionType, bool]:
    """The function that is the class's `train`, and whether something wraps it."""
    train = getattr(trainer_class, "train", None)
    function = inspect.unwrap(train) if callable(train) else None
    if not isinstance(function, FunctionType):
        raise _refusal(trainer_class, "has no `train` written in Python")
    return function, function is not train


def find_block(trainer_class: type, definition: ast.FunctionDef) -> tuple[list[ast.stmt], int]:
    """The list of statements that holds the block, and where it starts there; InputError unless there is exactly the expected one."""
    places = list(_starts(definition))
    if len(places) != 1:
        raise _refusal(trainer_class, f"has a `train` with {len(places)} advantage blocks (`lastgaelam = 0` and what follows), not one")
    ((body, start),) = places
    found = body[start : start + len(BLOCK)]
    for offset, expected in enumerate(BLOCK):
        if offset == len(found) or not _same(found[offset], expected):
            line = found[min(offset, len(found) - 1)].lineno
            raise _refusal(trainer_class, f"has another advantage block: at line {line} there must be `{ast.unparse(expected)}`")
    stored = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if "padding_mask_p1" not in stored:
        raise _refusal(trainer_class, "has a `train` that sets no `padding_mask_p1`")
    return body, start


def _rewards_before(trainer_class: type, body: list[ast.stmt], start: int) -> int:
    """How many statements in front of the block make the rewards from what is logged; InputError unless they are those of a release."""
    for known in REWARDS:
        found = body[max(start - len(known), 0) : start]
        if len(found) == len(known) and all(_same(statement, expected) for statement, expected in zip(found, known, strict=True)):
            return len(known) - 1 - next(i for i, statement in enumerate(known) if ast.unparse(statement).startswith(_LOGGED))
    raise _refusal(
        trainer_class,
        f'makes its rewards in another way before line {body[start].lineno} (scope="advantages" leaves them to it)',
    )


def recursion() -> tuple[Callable[..., tuple[Tensor, Tensor]], str]:
    """The block's recursion by itself, as ``(rewards, values, args) -> (advantages, returns)`` over rows [B, T], and where it is from.

    It is taken from the source of the installed TRL, which is not imported; where there is none, from `BLOCK`.
    """
    (function,) = cast(list[ast.FunctionDef], ast.parse(_ALONE).body)
    installed = _installed_recursion()
    function.body[1:1] = installed or BLOCK[:RECURSION]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([function], []), "<the advantage block of TRL>", "exec"), names)
    return names["recursion"], f"the source of trl {metadata.version('trl')}" if installed else f"a copy of that of {SUPPORTED}"


def _installed_recursion() -> list[ast.stmt] | None:
    found = importlib.util.find_spec("trl")
    for root in (found.submodule_search_locations or []) if found else []:
        for path in ("experimental/ppo/ppo_trainer.py", "trainer/ppo_trainer.py"):
            file = Path(root) / path
            places = list(_starts(ast.parse(file.read_text(encoding="utf-8")))) if file.is_file() else []
            if len(places) == 1:
                ((body, start),) = places
                return body[start : start + RECURSION]
    return None


def _starts(tree: ast.AST) -> Iterator[tuple[list[ast.stmt], int]]:
    """Lists of statements, and where in them a block begins."""
    for node in ast.walk(tree):
        for _, body in ast.iter_fields(node):
            if isinstance(body, list):
                yield from ((body, i) for i, part in enumerate(body) if isinstance(part, ast.stmt) and _same(part, BLOCK[0]))


def _parse(trainer_class: type, function: FunctionType) -> tuple[ast.Module, ast.FunctionDef]:
    """The whole file that `function` is in (so that names mean there what they meant), and the function's definition in it."""
    try:
        tree = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, SyntaxError) as error:
        raise _refusal(trainer_class, f"has a `train` whose source cannot be read ({error})") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function.__code__.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == function.__code__.co_firstlineno:
                return tree, node
    raise _refusal(trainer_class, "has a `train` whose source changed since it was imported (start the process anew)")


def _same(statement: ast.stmt, expected: ast.stmt) -> bool:
    return ast.dump(statement) == ast.dump(expected)


def _enclose(definition: ast.FunctionDef) -> None:
    """Turn the definition, in place, into ``def _with_credit(_credit): <it>``, which makes `_credit` a closure variable of it."""
    inner = copy.copy(definition)
    inner.decorator_list = []
    (outer,) = cast(list[ast.FunctionDef], ast.parse("def _with_credit(_credit): pass").body)
    outer.body = [inner]
    for name in outer._fields:
        setattr(definition, name, getattr(outer, name))


def _compiled(tree: ast.Module, function: FunctionType) -> CodeType:
    enclosing = _nested(compile(tree, function.__code__.co_filename, "exec", dont_inherit=True), "_with_credit")
    code = enclosing and _nested(enclosing, function.__code__.co_name)
    if code is None:
        raise RuntimeError("the rewritten definition was compiled away")
    return code


def _nested(code: CodeType, name: str) -> CodeType | None:
    """The first code object of that name inside `code`, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found = constant if constant.co_name == name else _nested(constant, name)
            if found is not None:
                return found
    return None


def _refusal(trainer_class: type, why: str) -> InputError:
    try:
        installed = f"trl {metadata.version('trl')}"
    except metadata.PackageNotFoundError:
        installed = "no trl"
    return InputError(
        f"AdvantageCallback: trainer must be a PPOTrainer of {SUPPORTED}, got {trainer_class.__module__}.{trainer_class.__qualname__} "
        f"({installed} is installed), which {why}; pass such a trainer, or call rlhf_scan.gae in your own loop"
    )
