"""Which tensors are the output of a whitening, so that whitening them again is seen. Holds no memory of theirs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import InputError

# Storage -> a weak reference, which also keeps its address from being used again, and the version of what was written to it.
_KNOWN: dict[int, tuple[StorageWeakRef, int]] = {}
_forget_at = 64  # so many are looked through for those that are gone; then twice as many as are left, so that each is looked at about once


def remember(tensor: Tensor) -> None:
    """`tensor` is whitened, until it is changed in place."""
    global _forget_at
    if not _can_be_told(tensor):
        return
    if len(_KNOWN) >= _forget_at:
        for storage in [storage for storage, (reference, _) in list(_KNOWN.items()) if reference.expired()]:
            _KNOWN.pop(storage, None)
        _forget_at = max(64, 2 * len(_KNOWN))
    reference = StorageWeakRef(tensor.untyped_storage())
    _KNOWN[reference.cdata] = reference, tensor._version


def refuse(op: str, name: str, tensor: Tensor, remedy: str = "") -> None:
    """Raise InputError, which speaks for `op`, if `tensor`, or what it is a view of, is whitened. `remedy`: what can be done beside."""
    if not _can_be_told(tensor):
        return
    reference, version = _KNOWN.get(tensor.untyped_storage()._cdata, (None, 0))
    if reference is not None and version == tensor._version:
        raise InputError(f"{op}: {name} must not be whitened yet, got the output of an earlier whitening; drop one of the two{remedy}")


def _can_be_told(tensor: Tensor) -> bool:
    """Not while a compiler traces, nor for a tensor that keeps no version (inference mode) or no storage (a wrapper of another)."""
    return not torch.compiler.is_compiling() and type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_inference()
