"""What an estimator is: its formulas, and the names of what goes in and out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .estimator_checks import check_rate


@dataclass(frozen=True)
class Rate:
    """A gamma-like parameter: a number, a tensor per segment or one per token, from 0 to `largest`.

    Attributes:
        default: where it is not given; None: it then plays no part.
        largest: upper end of its range.
        meaning: in a few words, with its unit.
    """

    default: float | None
    largest: float = 1.0
    meaning: str = ""

    def __post_init__(self) -> None:
        """Raise InputError for what no rate can be."""
        check_rate(self)


@dataclass(frozen=True, eq=False)
class Estimator:
    """One credit-assignment estimator: a coefficient builder, a naive loop, and the names of what goes in and out.

    Attributes:
        name: the public name, as in ``rlhf_scan.<name>``, ``POST /v1/<name>`` and ``CreditRequest(op=<name>)``.
        summary: its recurrence in one line.
        inputs: token-level tensors, in the order in which builder and naive loop take them.
        outputs: names of the results, in order.
        channels: for each scan that shares the inputs, the rates its builder takes. A channel with a rate that is None is not run; its
            results are then the first channel's.
        coefficients: the builder, see `rlhf_scan.coefficients`.
        results: turns the solved channels into the outputs.
        naive: the definition, a plain loop over the steps of one segment, see `rlhf_scan.naive`.
        rates: its gamma-like parameters.
        following: the inputs whose value at the next step the builder reads; the value after the end stands in where the segment ends.
        rates_following: the rates that builder and epilogue get as they are at the next step. Where nothing follows they may be any number:
            b is 0 there, so they may enter b alone.
        continuation: an input that is itself the value that follows its step (as E[Q] is), also where the segment ends, unless it
            terminates there; the builder gets it as the last of `following`, 0 where it terminates.
        expectation: (values, probabilities) of each action, [.., A], that the caller gives in place of `continuation`, which is their
            sum of products.
        choices: inputs that are log-probabilities of the action taken -> (probabilities of each action, [.., A], and the action taken, an
            integer) that a caller may give in place of it.
        minus_infinity: the inputs that may be -inf, as the logarithm of 0.
        counts: what a report counts: name -> a function of the arguments by name, choices made, to a bool tensor in their shape.
        end: what `bootstrap` is. "value": it stands in for the inputs in `following`. "carry": it is also the x that follows the last step.
            "initial": the x before the first step, called `initial`, per segment only. "none": none is taken.
        takes: which of mask, terminated, truncated it takes.
        starts: whether `boundary="starts_at"` may say that a flag marks the first token of an episode, not its last.
        reverse: backward in time.
        fades_by_rates: b is the product of the channel's rates, and of nothing else.
        served: whether requests (CLI, HTTP, Ray) may name it.
    """

    name: str
    summary: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    channels: tuple[tuple[str, ...], ...]
    coefficients: Callable[..., Any]
    results: Callable[..., Any]
    naive: Callable[..., Any]
    rates: Mapping[str, Rate] = field(default_factory=dict)
    following: tuple[str, ...] = ()
    rates_following: tuple[str, ...] = ()
    continuation: str | None = None
    expectation: tuple[str, str] | None = None
    choices: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    minus_infinity: tuple[str, ...] = ()
    counts: Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]] = field(default_factory=dict)
    end: str = "value"
    takes: tuple[str, ...] = ("mask", "terminated", "truncated")
    starts: bool = False
    reverse: bool = True
    fades_by_rates: bool = False
    served: bool = True

    @property
    def arguments(self) -> tuple[str, ...]:
        """The token-level tensors as a caller gives them, no choice among them."""
        given: list[str] = []
        for name in self.inputs:
            given += self.expectation if self.expectation is not None and name == self.continuation else (name,)
        return tuple(given)

    @property
    def required(self) -> tuple[str, ...]:
        """Those of them that every call has."""
        return tuple(name for name in self.arguments if name not in self.choices)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The token-level tensors that may stand in place of others."""
        return tuple(name for pair in self.choices.values() for name in pair)

    @property
    def per_action(self) -> tuple[str, ...]:
        """The tensors that have an entry per token and action, [.., A]."""
        return (*(self.expectation or ()), *(probabilities for probabilities, _ in self.choices.values()))

    @property
    def end_name(self) -> str | None:
        """What the value after the end is called among its arguments."""
        return {"value": "bootstrap", "carry": "bootstrap", "initial": "initial"}.get(self.end)
