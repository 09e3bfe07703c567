"""How many launches a call of `ppo_advantages` costs on a GPU, counted where Triton's interpreter and torch's CPU operators stand for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rlhf_scan import Segments, ppo_advantages
from rlhf_scan.backends import triton_launch

pytestmark = pytest.mark.skipif(not triton_launch.INTERPRETED, reason="the interpreter's launches are in one place")

# Operators of torch that launch nothing: they allocate, look at memory in another way, or are ours, which launch inside.
FREE = (
    "empty",
    "empty_like",
    "view",
    "_unsafe_view",
    "reshape",
    "detach",
    "alias",
    "slice",
    "select",
    "unbind",
    "split",
    "split_with_sizes",
)
FREE += ("unsqueeze", "squeeze", "expand", "as_strided", "t", "promote_types", "is_same_size", "lift_fresh")


class Operators(TorchDispatchMode):
    """Those that launch something."""

    def __init__(self, launched: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched = launched

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name().split("::")[1].split(".")[0]
        if op.namespace != "rlhf_scan" and name not in FREE:
            self.launched.append(f"torch's {name}")
        return op(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that run."""
    from triton.runtime import interpreter  # type: ignore[import-untyped]

    names: list[str] = []
    launch = interpreter.GridExecutor.__call__

    def recorded(executor: Any, *given: Any, **options: Any) -> Any:
        names.append(executor.fn.__name__)
        with _disable_current_modes():  # the interpreter copies what a kernel takes
            return launch(executor, *given, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", recorded)
    return names


MASK = torch.ones(3, 40, dtype=torch.bool)
ENDS = {"stop_reasons": ["stop", "length", "stop"], "bootstrap": torch.zeros(3), "missing_eos_penalty": 1.0}
MOST: dict[str, tuple[dict[str, Any], int]] = {
    "the default": ({}, 6),
    "no whitening": ({"whiten_advantages": False}, 3),
    "a mask": ({"mask": MASK}, 7),
    "a mask, and how sequences end": ({"mask": MASK, "attention_mask": MASK, **ENDS}, 8),
    "trl": ({"mask": MASK, "preset": "trl"}, 8),
    "verl": ({"mask": MASK, "preset": "verl"}, 7),
    "nemo-rl": ({"mask": MASK, "preset": "nemo-rl"}, 7),
    "areal": ({"mask": MASK, "preset": "areal"}, 4),
    "openrlhf": ({"mask": MASK, "preset": "openrlhf"}, 11),  # padding is cut off: as a pack, whose tiles are mapped
    "slime": ({"mask": MASK, "preset": "slime"}, 8),
    "rewards whitened": ({"mask": MASK, "whiten_rewards": True}, 13),
}


@pytest.mark.parametrize("case", MOST)
def test_launches_of_a_call(launched: list[str], case: str) -> None:
    options, most = MOST[case]
    call: list[Tensor] = [torch.zeros(3, 40) for _ in range(3)]
    scores = torch.zeros(3)
    with Operators(launched):
        ppo_advantages(*call, scores, backend="triton", **options)
    assert "_place" in launched
    assert ("_locate" in launched) == ("mask" in options), "nothing is read to find where whole rows end"
    assert len(launched) <= most, launched


def test_launches_of_a_pack(launched: list[str]) -> None:
    """The map of its tiles is made once."""
    call, scores, pack = [torch.zeros(120) for _ in range(3)], torch.zeros(3), Segments.from_lengths([40, 10, 70])
    for most in (11, 10):
        launched.clear()
        with Operators(launched):
            ppo_advantages(*call, scores, mask=MASK.flatten(), segments=pack, backend="triton")
        assert len(launched) <= most, launched
