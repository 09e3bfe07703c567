"""Who is measured: a registry of providers, each translating our arguments into its own. One that is absent says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..batches import Batch
from ..works import Work


def unchanged(name: str, output: Tensor) -> Tensor:
    """All of an output can be compared."""
    return output


@dataclass(frozen=True)
class Prepared:
    """One call, ready to be made as often as wanted.

    Attributes:
        run: makes it; what it does is what is timed.
        outputs: what `run` returned, by the names of our outputs: those that the provider has.
        comparable: the part of an output, ours or theirs, where the conventions agree.
    """

    run: Callable[[], Any]
    outputs: Callable[[Any], Mapping[str, Tensor]]
    comparable: Callable[[str, Tensor], Tensor] = unchanged


@dataclass(frozen=True)
class Provider:
    """Something that computes estimators.

    Attributes:
        name: in tables and in `Work.providers`.
        estimators: which of ours it computes; None: all.
        prepare: a call for a batch.
        absent: why it is not there, given the device's type; None if it is. Asked once for each.
        refuses: why it does not take this work; None if it does.
        loop: a loop over tokens on the host, thousands of launches a call: timed by the clock on the wall, a few times.
        queued: timed in queued calls even where a CUDA graph could hold them.
        build: makes what takes a compiler minutes, once on a machine; it is called in another process, before the first `prepare`.
        about: a sentence for the report.
    """

    name: str
    prepare: Callable[[Batch], Prepared]
    absent: Callable[[str], str | None]
    estimators: frozenset[str] | None = None
    refuses: Callable[[Work], str | None] = lambda work: None
    loop: bool = False
    queued: bool = False
    build: Callable[[], Any] | None = None
    about: str = ""

    def computes(self, estimator: str) -> bool:
        """Whether it has that estimator."""
        return self.estimators is None or estimator in self.estimators

    def why_not(self, work: Work) -> str | None:
        """Why it is not measured on this work, whose estimator it has; None if it is."""
        return self.refuses(work) or _LEFT_OUT.get(self.name) or self.absent(work.device)


_REGISTRY: dict[str, Provider] = {}
_LEFT_OUT: dict[str, str] = {}


def register(provider: Provider) -> None:
    """Make a provider known by its name."""
    if provider.name in _REGISTRY:
        raise ValueError(f"register: a provider named {provider.name!r} exists; choose another name")
    _REGISTRY[provider.name] = provider


def provider(name: str) -> Provider:
    """The provider of that name."""
    return _REGISTRY[name]


def leave_out(name: str, reason: str) -> None:
    """Count the provider of that name as absent."""
    _LEFT_OUT[name] = reason


def all_providers() -> list[Provider]:
    """In the order in which they were registered."""
    return list(_REGISTRY.values())


from . import accelerated, frameworks, ours, pufferlib, rl_triton, torch_scans, torchrl  # noqa: E402, F401  (they register themselves)
