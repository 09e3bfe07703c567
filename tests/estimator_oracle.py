"""The third loop for the estimators beside GAE and returns: from the meanings alone, token by token in float64, sharing nothing with the library.

Each token asks what follows it (or, for forward scans, what came before it) and whether credit is cut in between. `Number` counts roundings,
so that the tolerance of every comparison comes from arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from oracle import ZERO, Number, exact, rounded

Array = NDArray[np.float64]
Rate = float | Array

LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Case:
    """The arguments of one call over packed tokens. Arrays are [N]; those that `per_segment` names [S]; those per action [N, A]."""

    lengths: list[int]
    inputs: dict[str, Array]
    rates: dict[str, Rate]
    mask: Array | None = None
    masked: str = "skip"
    terminated: Array | None = None
    truncated: Array | None = None
    end: Array | None = None  # the bootstrap, or the initial x
    boundary: str = "ends_at"
    per_segment: frozenset[str] = frozenset()

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def owner(self) -> list[int]:
        return [segment for segment, length in enumerate(self.lengths) for _ in range(length)]

    def first(self, token: int) -> bool:
        return token == 0 or self.owner[token - 1] != self.owner[token]

    def last(self, token: int) -> bool:
        return token + 1 == self.tokens or self.owner[token + 1] != self.owner[token]

    def live(self, token: int) -> bool:
        return self.mask is None or bool(self.mask[token])

    def steps_at(self, token: int) -> bool:
        return self.masked != "skip" or self.live(token)

    def flagged(self, name: str, token: int) -> bool:
        flags: Array | None = getattr(self, name)
        if flags is None:
            return False
        if name in self.per_segment:
            return self.last(token) and bool(flags[self.owner[token]])
        return bool(flags[token])

    def rate(self, name: str, token: int) -> Number:
        rate = self.rates[name]
        if isinstance(rate, float):
            return rounded(rate)
        return exact(float(rate[self.owner[token] if name in self.per_segment else token]))

    def at(self, name: str, token: int) -> Number:
        """An input as a step sees it: 0 at a masked token, unless the recursion ignores the mask."""
        return exact(float(self.inputs[name][token])) if self.masked == "keep" or self.live(token) else ZERO

    def cut_after(self, token: int) -> str | None:
        """Whether credit ends after this token: "terminated", "truncated" (the end of a segment too) or not."""
        if self.flagged("terminated", token):
            return "terminated"
        return "truncated" if self.flagged("truncated", token) or self.last(token) else None

    def follows(self, token: int) -> tuple[str | None, int]:
        """(None, the token of the next step), or (how credit is cut before it, the token where)."""
        while True:
            cut = self.cut_after(token)
            if cut is not None:
                return cut, token
            token += 1
            if self.steps_at(token):
                return None, token

    def bootstrap(self, token: int) -> Number:
        """The value after this token, where credit is cut but does not terminate."""
        if self.end is None:
            return ZERO
        if "end" in self.per_segment:
            return exact(float(self.end[self.owner[token]])) if self.last(token) else ZERO
        return exact(float(self.end[token]))

    def backward(self) -> Iterable[int]:
        return (token for token in reversed(range(self.tokens)) if self.steps_at(token))

    def shown(self, found: dict[int, Number]) -> list[Number]:
        return [found[token] if self.live(token) else ZERO for token in range(self.tokens)]


def ratio(case: Case, token: int, limit: Number) -> Number:
    """min(limit, pi / mu). In arithmetic of roundoff u, exp of a difference d that is off by u * |d| is off by that much, relatively."""
    target, made = target_logprob(case, token)
    if target == -math.inf:
        return ZERO
    difference = target - case.at("behavior_logprobs", token).value
    found = math.exp(min(LARGEST_LOG_RATIO, difference))
    return limit if limit.value <= found else Number(found, found, (4 + 2 * abs(difference) + made) * found)


def target_logprob(case: Case, token: int) -> tuple[float, float]:
    """log pi(a_t | s_t), and by how many roundings it is off: as given, or from the probability of the action taken."""
    if "policy_probs" not in case.inputs:
        return case.at("target_logprobs", token).value, 0.0
    if case.masked != "keep" and not case.live(token):
        return 0.0, 0.0
    probability = float(case.inputs["policy_probs"][token, int(case.inputs["actions"][token])])
    found = math.log(probability) if probability > 0 else -math.inf
    return found, 2 + 2 * abs(found)


def lambda_returns(case: Case) -> list[list[Number]]:
    """G_t = r_t + gamma * ((1 - lam) * V_next + lam * G_next)."""
    found: dict[int, Number] = {}
    for token in case.backward():
        cut, source = case.follows(token)
        if cut is None:
            next_value, next_return = case.at("values", source), found[source]
        else:
            next_value = next_return = ZERO if cut == "terminated" else case.bootstrap(source)
        lam = case.rate("lam", token)
        mixed = (exact(1.0) - lam) * next_value + lam * next_return
        found[token] = case.at("rewards", token) + case.rate("gamma", token) * mixed
    return [case.shown(found)]


def vtrace(case: Case) -> list[list[Number]]:
    """Espeholt 2018, (1) and the advantage of section 4.2; the bootstrap is value and target after a cut."""
    targets: dict[int, Number] = {}
    advantages: dict[int, Number] = {}
    for token in case.backward():
        cut, source = case.follows(token)
        if cut is None:
            next_value, next_target = case.at("values", source), targets[source]
        else:
            next_value = next_target = ZERO if cut == "terminated" else case.bootstrap(source)
        gamma, reward, value = case.rate("gamma", token), case.at("rewards", token), case.at("values", token)
        rho, c = ratio(case, token, case.rate("rho_bar", token)), ratio(case, token, case.rate("c_bar", token))
        delta = rho * (reward + gamma * next_value - value)
        targets[token] = value + delta + gamma * case.rate("lam", token) * c * (next_target - next_value)
        advantages[token] = rho * (reward + gamma * next_target - value)
    return [case.shown(targets), case.shown(advantages)]


def retrace(case: Case) -> list[list[Number]]:
    """Munos 2016, (3)-(4): target_t = r_t + gamma * (E_t + lam * c_next * (target_next - Q_next)); E_t follows a cut.

    A bar bounds the ratio of its own token: c_next takes the next one's.
    """
    targets: dict[int, Number] = {}
    advantages: dict[int, Number] = {}
    for token in case.backward():
        cut, source = case.follows(token)
        expected = ZERO if cut == "terminated" else expected_next(case, token)
        next_target, correction = expected, ZERO
        if cut is None:
            next_target = targets[source]
            correction = (
                case.rate("lam", token) * ratio(case, source, case.rate("c_bar", source)) * (next_target - case.at("q_values", source))
            )
        gamma, reward = case.rate("gamma", token), case.at("rewards", token)
        # A scan may carry target - Q, so that Q is rounded too.
        value = case.at("q_values", token)
        targets[token] = value + (reward + gamma * (expected + correction) - value)
        advantages[token] = ratio(case, token, case.rate("rho_bar", token)) * (reward + gamma * next_target - case.at("q_values", token))
    return [case.shown(targets), case.shown(advantages)]


def expected_next(case: Case, token: int) -> Number:
    """E_t as given, or from each action's value and probability; an action of probability 0 has no say."""
    if "expected_next_q" in case.inputs:
        return case.at("expected_next_q", token)
    if case.masked != "keep" and not case.live(token):
        return ZERO
    total = ZERO
    for value, probability in zip(case.inputs["next_q"][token], case.inputs["target_probs"][token], strict=True):
        if probability != 0:
            total += exact(float(value)) * exact(float(probability))
    return total


def eligibility_traces(case: Case) -> list[list[Number]]:
    """e_t = x_t + gamma * lam * e_before."""
    return _forward(case, lambda token: case.rate("gamma", token) * case.rate("lam", token))


def episodic_cumsum(case: Case) -> list[list[Number]]:
    """s_t = x_t + s_before, from 0 in each episode."""
    return _forward(case, lambda token: exact(1.0))


def _forward(case: Case, decay: Callable[[int], Number]) -> list[list[Number]]:
    found: dict[int, Number] = {}
    for token in range(case.tokens):
        if case.steps_at(token):
            found[token] = case.at("inputs", token) + decay(token) * _before(case, token, found)
    return [case.shown(found)]


def _before(case: Case, token: int, found: dict[int, Number]) -> Number:
    """x of the step before this token; 0 where an episode ended or started in between, `initial` where there is none in the segment."""
    while True:
        if case.boundary == "starts_at" and _marked(case, token):
            return ZERO
        if case.first(token):
            return ZERO if case.end is None else exact(float(case.end[case.owner[token]]))
        token -= 1
        if case.boundary == "ends_at" and _marked(case, token):
            return ZERO
        if case.steps_at(token):
            return found[token]


def _marked(case: Case, token: int) -> bool:
    return case.flagged("terminated", token) or case.flagged("truncated", token)


ORACLES: dict[str, Callable[[Case], list[list[Number]]]] = {
    "lambda_returns": lambda_returns,
    "vtrace": vtrace,
    "retrace": retrace,
    "retrace_from_policy": retrace,
    "eligibility_traces": eligibility_traces,
    "episodic_cumsum": episodic_cumsum,
}
