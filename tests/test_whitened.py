"""Whitening what is whitened, wrong arguments, and torch's compilers."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import device_of
from torch import Tensor
from whitening_textbook import case

from rlhf_scan import InputError, whiten
from rlhf_scan.whitened import _KNOWN
from rlhf_scan.whitening import statistics

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "reshaped": lambda y: y.reshape(3, 4),
    "a view": lambda y: y.view(2, 6),
    "transposed": lambda y: y.view(3, 4).T,
    "detached": lambda y: y.detach(),
    "a part": lambda y: y[2:7],
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("view", VIEWS)
def test_whitening_twice_raises(backend: str, view: str) -> None:
    y = whiten(torch.randn(12, device=device_of(backend)), backend=backend)
    again = VIEWS[view](y)
    with pytest.raises(InputError, match=r"whiten: x must not be whitened yet, .* allow_whitened=True"):
        whiten(again, backend=backend)
    assert whiten(again, backend=backend, allow_whitened=True).shape == again.shape


def test_what_may_be_whitened_after_a_whitening() -> None:
    y = whiten(torch.randn(12))
    whiten(y.clone())
    whiten(y * 2)
    whiten(whiten(torch.randn(12), scale=False))
    y.mul_(3)
    whiten(y)


def test_knowing_what_is_whitened_holds_no_memory() -> None:
    gc.collect()
    whiten(torch.randn(4))
    before = len(_KNOWN)
    for _ in range(300):
        whiten(torch.randn(4))
    assert len(_KNOWN) <= max(64, 2 * before) + 1


def test_inference_mode_keeps_no_version_so_it_is_not_told() -> None:
    with torch.inference_mode():
        y = whiten(torch.randn(12))
        whiten(y)


def test_compiled_without_a_break() -> None:
    compiled = torch.compile(whiten, fullgraph=True, backend="aot_eager")
    for n in (50, 70):
        x, mask = case("cpu", n)
        assert torch.equal(compiled(x, mask, shift_mean=False), whiten(x, mask, shift_mean=False))
        assert torch.equal(compiled(x, mask, eps_at="floor"), whiten(x, mask, eps_at="floor"))


def test_ops_keep_torchs_rules() -> None:
    x, mask = case("cpu")
    torch.library.opcheck(torch.ops.rlhf_scan.statistics.default, (x, mask, "cpu"))
    torch.library.opcheck(torch.ops.rlhf_scan.merge_statistics.default, (torch.ones(4, 3, dtype=torch.float64), "cpu"))
    arguments = (x, mask, statistics(x, mask), True, True, True, 1e-8, "inside", torch.float32, "cpu")
    torch.library.opcheck(torch.ops.rlhf_scan.whiten.default, arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": [1.0]}, r"whiten: x must be a torch.Tensor, got list"),
        ({"x": torch.ones(3, dtype=torch.int64)}, r"whiten: x must be float32.*got torch.int64"),
        ({"mask": torch.ones(4)}, r"whiten: mask must have shape \[3\] to match x, got \[4\]"),
        ({"mask": [1, 1, 1]}, r"whiten: mask must be a torch.Tensor, got list"),
        ({"mask": torch.ones(3, dtype=torch.complex64)}, r"whiten: mask must be bool, an integer or a float dtype"),
        ({"eps": -1e-8}, r"whiten: eps must be a number from 0 on, got -1e-08"),
        ({"eps": math.nan}, r"whiten: eps must be a number from 0 on, got nan"),
        ({"eps": True}, r"whiten: eps must be a number"),
        ({"eps_at": "within"}, r"whiten: eps_at must be one of .*got 'within'"),
        ({"shift_mean": False, "scale": False}, r"whiten: shift_mean and scale must not both be False"),
        ({"backend": "tpu"}, r"whiten: backend must be one of"),
        ({"validate": "all"}, r"whiten: validate must be one of"),
        ({"dtype": torch.int32}, r"whiten: dtype must be one of"),
        ({"process_group": "world"}, r"whiten: process_group must be None while torch.distributed is not initialized"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        whiten(**{"x": torch.tensor([1.0, 2.0, 4.0]), **arguments})
