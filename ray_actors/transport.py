"""How tensors travel: as NumPy arrays, which Ray hands over without a copy, and read-only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf_scan import CreditRequest, CreditResult

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class PackedTensor:
    """A tensor's bits: an array of its dtype or, where NumPy has none such (bfloat16), of integers as wide."""

    array: npt.NDArray[Any]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> PackedTensor:
        """`tensor`, without a copy where it is contiguous and on the CPU."""
        plain = tensor.detach().cpu().contiguous()
        try:
            return cls(plain.numpy(force=True), tensor.dtype)
        except TypeError:
            return cls(plain.view(_INTEGERS[plain.element_size()]).numpy(), tensor.dtype)

    def tensor(self) -> Tensor:
        """A CPU tensor over the array's memory, for reading only."""
        return tensor_over(self.array).view(self.dtype)


class _Writable:
    """The array that torch asks for: one that says it can be written to. Nothing here does write to it."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def tensor_over(array: npt.NDArray[Any]) -> Tensor:
    """A CPU tensor over the memory of `array` (a copy of it where it is not contiguous), for reading only."""
    contiguous = np.asarray(array, order="C")
    return torch.from_numpy(contiguous if contiguous.flags.writeable else np.asarray(_Writable(contiguous)))


def packed_request(request: CreditRequest) -> CreditRequest:
    """`request` with PackedTensor in place of every tensor."""
    return CreditRequest(request.op, _packed(request.tensors), _packed(request.params))


def packed_result(result: CreditResult) -> CreditResult:
    """`result` with PackedTensor in place of every tensor."""
    return CreditResult(_packed(result.tensors), result.report)


def unpacked_result(result: CreditResult, device: torch.device) -> CreditResult:
    """The result that was packed, in memory of its own on `device`."""
    tensors: Mapping[str, Any] = result.tensors
    return CreditResult({name: packed.tensor().to(device, copy=True) for name, packed in tensors.items()}, result.report)


def _packed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: PackedTensor.of(value) if isinstance(value, Tensor) else value for name, value in values.items()}
