"""What requests may name: every served estimator, and other public functions. The CLI, HTTP and Ray read what one takes from here alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from .call import BOUNDARIES, MASK_MODES
from .checks import FLOATS
from .errors import InputError
from .estimators import Estimator, served

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
PER_TOKEN = "[B, T], or packed [N]"
EITHER = "[B, T] or packed [N], or one per sequence"
PER_SEQUENCE = "[S], one per sequence"
PER_ACTION = "[B, T, A], or packed [N, A]"


@dataclass(frozen=True)
class Argument:
    """A tensor of a request.

    Attributes:
        shape: PER_TOKEN, EITHER, PER_SEQUENCE or another, in words.
        kind: "number", "flag" (numbers or booleans, nonzero is True) or "integer".
        meaning: in a few words.
        required: whether every request has it.
    """

    shape: str = PER_TOKEN
    kind: str = "number"
    meaning: str = ""
    required: bool = False


@dataclass(frozen=True)
class Option:
    """A parameter of a request.

    Attributes:
        kind: "number", "word", "words" (a list of them), "switch" (true or false), "word or switch", "range" (a number or [lowest, highest])
            or "dtype".
        default: where it is not given; None: what the function then does.
        words: those it may be; none for any.
        least, largest: of a number.
        meaning: in a few words.
    """

    kind: str = "number"
    default: Any = None
    words: tuple[str, ...] = ()
    least: float = 0.0
    largest: float = math.inf
    meaning: str = ""


@dataclass(frozen=True, eq=False)
class Operation:
    """Something that requests may name.

    Attributes:
        name: as in ``POST /v1/<name>`` and ``CreditRequest(op=<name>)``.
        summary: what it does, in a line.
        tensors: by name, without those that describe a pack.
        options: by name.
        outputs: names of the tensors of a result.
        flags: those of them that are bool.
        packs: whether a tensor may describe a pack, whose sequences then are `segments`.
        run: the public function; None for an estimator, whose requests may share a launch.
        takes_backend: whether `run` takes `backend` and `validate`.
        report: what of `run`'s result goes into the report.
        choices: tensors -> the pair that may stand in their place.
    """

    name: str
    summary: str
    tensors: Mapping[str, Argument]
    options: Mapping[str, Option]
    outputs: tuple[str, ...]
    packs: bool = True
    run: Callable[..., Any] | None = None
    takes_backend: bool = True
    report: Callable[[Any], Mapping[str, Any]] | None = None
    choices: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """The tensors that every request has."""
        return tuple(name for name, argument in self.tensors.items() if argument.required)


MASK = Argument(PER_TOKEN, "flag", "nonzero at trainable tokens")
TERMINATED = Argument(EITHER, "flag", "nonzero where the episode ends; per sequence: at its last token")
TRUNCATED = Argument(EITHER, "flag", "nonzero where the episode is cut; per sequence: at its last token")
BOOTSTRAP = Argument(EITHER, meaning="the value that follows; per token it is read at truncated and last tokens")
DTYPE = Option("dtype", words=tuple(DTYPES), meaning="of the outputs; without it, that of the inputs")
MASKED = Option("word", MASK_MODES[0], MASK_MODES, meaning="what a masked token does to the recursion")
BOUNDARY = Option("word", BOUNDARIES[0], BOUNDARIES, meaning="whether `terminated` marks the last token of an episode or the first")
_TAKEN = {"mask": MASK, "terminated": TERMINATED, "truncated": TRUNCATED}
_ENDS = {"bootstrap": BOOTSTRAP, "initial": Argument(PER_SEQUENCE, meaning="the value before the first step")}

_REGISTRY: dict[str, Operation] = {}


def register_operation(operation: Operation) -> None:
    """Make a function known to every engine and door."""
    if operation.name in {known.name for known in operations()}:
        raise InputError(f"register_operation: one named {operation.name!r} exists; choose another name")
    _REGISTRY[operation.name] = operation


def unregister_operation(name: str) -> None:
    """Forget it (for tests of new ones)."""
    _REGISTRY.pop(name, None)


def operations() -> Iterator[Operation]:
    """All that requests may name."""
    yield from (of_estimator(entry) for entry in served())
    yield from _REGISTRY.values()


def operation(name: object) -> Operation:
    """The one of that name; InputError lists the known ones."""
    for known in operations():
        if known.name == name:
            return known
    raise InputError(f"CreditRequest: op must be one of {sorted(known.name for known in operations())}, got {name!r}; choose one of these")


@lru_cache(maxsize=256)
def of_estimator(entry: Estimator) -> Operation:
    """What requests for an estimator may hold."""
    replaced = {pair[1]: f"which action was taken; with {pair[0]} in place of {name}" for name, pair in entry.choices.items()}
    tensors: dict[str, Argument] = {}
    for name in (*entry.arguments, *entry.chosen):
        if name in entry.per_action:
            tensors[name] = Argument(PER_ACTION, meaning="one entry per action", required=name in entry.required)
        elif name in replaced:
            tensors[name] = Argument(PER_TOKEN, "integer", replaced[name])
        else:
            tensors[name] = Argument(PER_TOKEN, required=name in entry.required)
    tensors |= {name: _TAKEN[name] for name in entry.takes}
    if entry.end_name is not None:
        tensors[entry.end_name] = _ENDS[entry.end_name]
    tensors |= {name: Argument(EITHER, meaning=f"{rate.meaning}, instead of the parameter") for name, rate in entry.rates.items()}
    options = {name: Option("number", rate.default, largest=rate.largest, meaning=rate.meaning) for name, rate in entry.rates.items()}
    options |= {"masked": MASKED} if "mask" in entry.takes else {}
    options |= {"boundary": BOUNDARY} if entry.starts else {}
    return Operation(entry.name, entry.summary, tensors, {**options, "dtype": DTYPE}, entry.outputs, choices=entry.choices)


def parse_option(op: str, name: str, option: Option, text: str) -> Any:
    """An option written as text (a file's metadata, a command line) -> typed; InputError names the bad one."""
    if option.kind == "words":
        return [word for word in text.split(",") if word]
    if "switch" in option.kind and text in ("true", "false"):
        return text == "true"
    if option.kind == "switch":
        raise InputError(f"{op}: {name} must be true or false, got {text!r}; pass one of these")
    if option.kind == "range" and "," in text:
        return [_number(op, name, part) for part in text.split(",")]
    if option.kind in ("number", "range"):
        return _number(op, name, text)
    return None if text == "none" and option.default is None and option.kind != "dtype" else text


def option_text(name: str, value: Any, option: Option | None) -> str:
    """A value of `option` (None: an unknown one) as text, such that `parse_option` gets it back bit for bit."""
    kind = "" if option is None else option.kind
    if isinstance(value, list | tuple) and kind in ("words", "range"):
        return ",".join(option_text(name, part, None) for part in value)
    if isinstance(value, bool) and "switch" in kind:
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None:
        return "none"
    if isinstance(value, float):
        return float.__repr__(value)  # numpy's own repr is not a number
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise InputError(f"rollout: {name} must be a number, a string or a tensor, got {type(value).__name__}; convert it")


def _number(op: str, name: str, text: str) -> float | None:
    if text.lower() == "none":
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise InputError(f"{op}: {name} must be a number, got {text!r}; pass a value such as 0.99")
    return number
