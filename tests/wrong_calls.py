"""Calls with wrong arguments, for the tests of what the library says to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rlhf_scan
from rlhf_scan import InputError, RlhfScanError
from rlhf_scan.estimators import estimator


def public(op: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(rlhf_scan, op)
    return function


def inputs_of(op: str, shape: tuple[int, ...], actions: int = 2) -> dict[str, Tensor]:
    """The tensors that `op` takes, of zeros."""
    entry = estimator(op)
    return {name: torch.zeros(*shape, *((actions,) if name in (entry.expectation or ()) else ())) for name in entry.arguments}


def error_of(call: Callable[[], Any], kind: type[RlhfScanError] = InputError) -> str:
    """The message of the error that `call` raises."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, RlhfScanError)
    assert isinstance(caught.value, ValueError) == (kind is InputError)
    return str(caught.value)
