"""Large outputs of the CPU backend lie where earlier ones lay that nobody holds any more: fresh pages take longer than all the arithmetic."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..locks import Lock

# Smaller ones come from a heap whose pages are there; of larger ones fewer than two could be kept.
SMALLEST_BYTES, KEPT_BYTES = 1 << 20, 1 << 26

_kept: list[npt.NDArray[np.uint8]] = []  # the least recently used first
_choosing = Lock()


def _references(arrays: list[Any], i: int) -> int:
    return sys.getrefcount(arrays[i])


_UNUSED = _references([object()], 0)  # of an array that is in the list alone


def empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As `torch.empty_like`. As long as a tensor shares its memory, through whatever views, no other one gets it."""
    size = tensor.numel() * dtype.itemsize
    if not SMALLEST_BYTES <= size <= KEPT_BYTES // 2:
        return torch.empty_like(tensor, dtype=dtype)
    with _choosing:
        found = [i for i in range(len(_kept)) if _kept[i].nbytes == size and _references(_kept, i) == _UNUSED]
        array = _kept.pop(found[-1]) if found else np.empty(size, dtype=np.uint8)
        _kept.append(array)
        while sum(each.nbytes for each in _kept) > KEPT_BYTES:
            del _kept[0]
        return torch.from_numpy(array).view(dtype).view(tensor.shape)
