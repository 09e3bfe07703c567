"""What is measured: each work is one operation at one shape, with the providers it is measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

PACKED = ((1024, 16384), (256, 65536), (128, 131072))
LONG = ((16, 131072), (1, 1048576))
GRID = (
    *((envs, steps) for envs in (4096, 8192, 16384, 32768) for steps in (8, 16, 32, 64, 128)),
    *((envs, steps) for envs in (128, 512, 2048, 8192) for steps in (128, 512, 1024, 2048, 4096)),
)
ESTIMATORS = (
    "gae",
    "discounted_returns",
    "lambda_returns",
    "vtrace",
    "retrace_from_policy",
    "eligibility_traces",
    "episodic_cumsum",
)
FORWARD = ("eligibility_traces", "episodic_cumsum")
OURS = ("ours", "ours (map kept)")
DISCOUNTED = {"gamma": 0.99, "lam": 0.95}


@dataclass(frozen=True)
class Work:
    """One row of the results.

    Attributes:
        group: the group that `--only` names.
        estimator: name in the registry of estimators, or in that of operations.
        segments, length: so many segments of so many tokens; length 0: `tokens` tokens of log-normal lengths.
        packed: [N] with `Segments`, else [segments, length].
        rates: gamma, lam, ...; those that the estimator does not have are left out.
        preset: of an operation that has presets.
        given: tensors that a call need not have, and these have.
        dtype: of inputs and outputs.
        flags: "" none; "terminated"; "truncated": both kinds, with a bootstrap per token.
        flag_dtype: of the flags. float32 where peers demand it, so that all read the same tensors.
        chance: of a flag at a token.
        mask: with a mask, one token in ten not trainable.
        padded: rows that end with padding, as the mask says: responses of half the length to all of it.
        actions: of `retrace_from_policy`.
        tokens: where length is 0.
        providers: by name, in the order of the table.
        queued: time calls queued behind a delay instead of a CUDA graph, for all, because one of them cannot be captured.
        device: "cuda" or "cpu".
        seed: of its inputs.
    """

    group: str
    estimator: str
    segments: int
    length: int
    providers: tuple[str, ...]
    packed: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    preset: str = ""
    given: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    flags: str = ""
    flag_dtype: torch.dtype = torch.bool
    chance: float = 0.005
    mask: bool = False
    padded: bool = False
    actions: int = 4
    tokens: int = 0
    queued: bool = False
    device: str = "cuda"
    seed: int = 0

    @property
    def shape(self) -> str:
        """As the table shows it."""
        return f"{self.segments} x {self.length}" if self.length else f"log-normal lengths, {self.tokens / 2**20:.0f}M tokens"

    @property
    def name(self) -> str:
        """Unique among the works."""
        parts = [self.estimator, "packed" if self.packed else "rows", self.shape]
        parts += [f"{key} {value:g}" for key, value in self.rates.items() if value != DISCOUNTED.get(key)]
        parts += [str(self.dtype).removeprefix("torch.")] if self.dtype != torch.float32 else []
        parts += [f"preset {self.preset}"] if self.preset else []
        parts += [word for word, on in (("mask", self.mask), ("padding", self.padded)) if on]
        parts += [{"": "", "terminated": "done flags", "truncated": "truncations"}[self.flags]] if self.flags else []
        parts += [self.device] if self.device == "cpu" else []
        return ", ".join(parts)


def _packed() -> Iterator[Work]:
    for segments, length in PACKED:
        for lam in (0.95, 1.0):
            rates = {"gamma": 1.0, "lam": lam}
            yield Work("packed", "gae", segments, length, (*OURS, "rl-triton"), packed=True, rates=rates)


def _ppo() -> Iterator[Work]:
    block = partial(Work, "ppo", "ppo_advantages", given=("ref_logprobs", "scores"))
    for packed in (False, True):
        yield block(1024, 16384, ("ours",), packed=packed)
    yield block(1024, 16384, ("ours",), mask=True, padded=True)
    yield block(1024, 8192, ("ours", "TRL"), preset="trl", padded=True)


def _bf16() -> Iterator[Work]:
    for segments, length in PACKED:
        for lam in (0.95, 1.0):
            yield Work("bf16", "gae", segments, length, OURS, packed=True, rates={"gamma": 1.0, "lam": lam}, dtype=torch.bfloat16)


def _mixed() -> Iterator[Work]:
    rates = {"gamma": 1.0, "lam": 0.95}
    yield Work("mixed", "gae", 0, 0, OURS, packed=True, rates=rates, flags="terminated", mask=True, tokens=16 * 2**20)


def _rows() -> Iterator[Work]:
    yield Work("rows", "gae", 8192, 4096, ("ours", "rl-triton"), rates=DISCOUNTED, flags="terminated")


def _long() -> Iterator[Work]:
    for segments, length in LONG:
        for lam in (0.95, 1.0):
            rates = {"gamma": 1.0, "lam": lam}
            yield Work("long", "gae", segments, length, (*OURS, "rl-triton"), packed=True, rates=rates)


def _returns() -> Iterator[Work]:
    for segments, length in PACKED:
        for gamma in (0.99, 1.0):
            yield Work("returns", "discounted_returns", segments, length, (*OURS, "rl-triton"), packed=True, rates={"gamma": gamma})


def _grid() -> Iterator[Work]:
    """The 40 shapes of rl-triton's comparison with PufferLib, with its rates and its share of done flags."""
    peers = ("rl-triton", "PufferLib")
    settings = {
        "providers": ("ours", *(f"{peer} + returns" for peer in peers), *peers),
        "rates": DISCOUNTED,
        "flags": "terminated",
        "flag_dtype": torch.float32,
        "chance": 0.05,
        "queued": True,
    }
    for segments, length in dict.fromkeys(GRID):
        yield Work("grid", "gae", segments, length, **settings)  # type: ignore[arg-type]
    # 8192 x 128 is in both halves of the 40; the comparison runs it twice, with other inputs the second time.
    yield Work("grid", "gae", 8192, 128, seed=1, **settings)  # type: ignore[arg-type]


def _seven() -> Iterator[Work]:
    for estimator in ESTIMATORS:
        # What looks back has episodes that end, whether or not they were cut: one flag, as their callers have.
        ends = "terminated" if estimator in FORWARD else "truncated"
        for segments, length in ((4096, 128), (512, 4096)):
            for flags in ("", ends):
                # One shape is enough for torch.compile, which takes seconds for each.
                compared = ("ours", "rl-triton", "torchrl") + (("torch.compile",) if length == 128 and not flags else ())
                rates = {"gamma": 0.99} if estimator == "vtrace" else DISCOUNTED  # peers' V-trace has no lambda
                yield Work("seven", estimator, segments, length, compared, rates=rates, flags=flags, flag_dtype=torch.float32)


def _retrace() -> Iterator[Work]:
    for segments, length in ((512, 4096), (512, 8192)):
        for flags in ("", "truncated"):
            compared = ("ours", "rl-triton", "torch.compile")
            yield Work(
                "retrace", "retrace_from_policy", segments, length, compared, rates=DISCOUNTED, flags=flags, flag_dtype=torch.float32
            )


def _host() -> Iterator[Work]:
    yield Work("host", "gae", 64, 512, ("ours", "rl-triton", "torchrl"), rates=DISCOUNTED)
    yield Work("host", "gae", 64, 512, OURS, packed=True, rates=DISCOUNTED)


def _growth() -> Iterator[Work]:
    for millions in (1, 4, 16, 64):
        yield Work("growth", "gae", millions * 128, 8192, OURS, packed=True, rates={"gamma": 1.0, "lam": 0.95})


def _frameworks() -> Iterator[Work]:
    for segments, length in ((64, 512), (1024, 8192)):
        compared = ("ours", "TRL", "verl", "torch loop", "torchrl", "torch.compile", "rl-triton")
        yield Work("frameworks", "gae", segments, length, compared, rates={"gamma": 1.0, "lam": 0.95})


def _linear() -> Iterator[Work]:
    for segments, length in ((4096, 128), (512, 4096), (1024, 16384)):
        yield Work("linear", "linear_scan", segments, length, ("ours", "accelerated-scan", "torch.compile"))


def _cpu() -> Iterator[Work]:
    for estimator in ESTIMATORS:
        compared = ("ours", "TRL", "verl", "torch loop", "torchrl", "torchrl loop")
        rates = {"gamma": 0.99} if estimator == "vtrace" else DISCOUNTED
        yield Work("cpu", estimator, 256, 4096, compared, rates=rates, device="cpu")
    yield Work("cpu", "gae", 256, 4096, ("ours",), rates=DISCOUNTED, packed=True, flags="terminated", mask=True, device="cpu")


GROUPS: dict[str, Callable[[], Iterator[Work]]] = {
    "packed": _packed,
    "ppo": _ppo,
    "bf16": _bf16,
    "mixed": _mixed,
    "rows": _rows,
    "long": _long,
    "returns": _returns,
    "grid": _grid,
    "seven": _seven,
    "retrace": _retrace,
    "host": _host,
    "growth": _growth,
    "frameworks": _frameworks,
    "linear": _linear,
    "cpu": _cpu,
}


def works(groups: Sequence[str]) -> Iterator[Work]:
    """The works of these groups, in order."""
    for group in groups:
        yield from GROUPS[group]()
