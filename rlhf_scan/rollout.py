"""The rollout file: safetensors bytes that hold one request or one result. The CLI reads and writes them, HTTP sends them.

A request is its tensors under the argument names, with op and parameters as strings in the metadata. A result is its output tensors,
with the report as JSON under ``report`` in the metadata. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .errors import InputError
from .operations import operations, option_text
from .requests import LAYOUTS, CreditRequest, CreditResult, parse_params, tensor_names

# What a body that is not safetensors starts with, and what it then is.
_OTHER_FORMATS = (
    (b"\x80", "a pickle (pickle.dump)"),
    (b"PK", "a zip archive (torch.save or numpy.savez)"),
    (b"\x93NUMPY", "a numpy array (numpy.save)"),
    (b"{", "JSON"),
)
_HEADER_SIZE = 8

_log = logging.getLogger(__name__)


def request_to_bytes(request: CreditRequest) -> bytes:
    """`request` as a rollout file.

    Raises:
        InputError: a tensor or parameter cannot be written.
    """
    rates = {name: value for name, value in request.params.items() if isinstance(value, Tensor)}
    known = next((entry.options for entry in operations() if entry.name == request.op), {})
    texts = {name: option_text(name, value, known.get(name)) for name, value in request.params.items() if name not in rates}
    return _to_bytes({**request.tensors, **rates}, {"op": request.op, **texts})


def request_from_bytes(data: bytes, *, op: str | None = None, params: Mapping[str, str] | None = None) -> CreditRequest:
    """The request that a rollout file holds, on the CPU.

    Args:
        data: the file's bytes.
        op: the estimator to run instead of the file's. What the file holds for its own and this one does not take is left out, and a
            warning logged that names it.
        params: more parameters, as text; these win over the file's.

    Raises:
        InputError: the bytes are no safetensors file, name no op, or hold an unknown parameter.
    """
    tensors, metadata = contents(data)
    written = metadata.pop("op", None)
    op = op or written
    if op is None:
        raise InputError(
            'rollout: the metadata must hold "op", got none; name the estimator there, such as op="gae", or pass it beside the file'
        )
    spare = _spare(op, written, [*tensors, *metadata])
    if spare:
        _log.warning("rollout: %s takes no %s, which the file holds for %s: left out", op, ", ".join(spare), written)
    kept = {name: tensor for name, tensor in tensors.items() if name not in spare}
    texts = {name: text for name, text in metadata.items() if name not in spare}
    return CreditRequest(op, kept, parse_params(op, {**texts, **(params or {})}))


def result_to_bytes(result: CreditResult) -> bytes:
    """`result` as a rollout file."""
    return _to_bytes(result.tensors, {"report": json.dumps(dict(result.report))})


def result_from_bytes(data: bytes) -> CreditResult:
    """The result that a rollout file holds, on the CPU.

    Raises:
        InputError: the bytes are no safetensors file, or hold no result.
    """
    tensors, metadata = contents(data)
    try:
        report = json.loads(metadata["report"])
    except (KeyError, ValueError) as error:
        raise InputError(
            "rollout: the metadata of a result must hold its report as JSON, got none; was this file made by `rlhf-scan compute`?"
        ) from error
    return CreditResult(tensors, report)


def contents(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; InputError says what else it is."""
    try:
        tensors = load(data)
        # Only now, since `load` has checked the header's length and that it is JSON.
        header = json.loads(data[_HEADER_SIZE : _HEADER_SIZE + int.from_bytes(data[:_HEADER_SIZE], "little")])
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise InputError(f"rollout: the bytes must be a safetensors file, got {_what_it_is(data, error)}") from error
    for name, tensor in tensors.items():
        if max(tensor.shape, default=0) > len(data):  # an empty tensor may claim any number of rows, and each would cost memory
            raise InputError(f"rollout: {name} must have a shape that its bytes can hold, got {list(tensor.shape)}; write the file again")
    return tensors, dict(header.get("__metadata__") or {})


def read_request(path: str | os.PathLike[str], *, op: str | None = None, params: Mapping[str, str] | None = None) -> CreditRequest:
    """The request in the file at `path`; see `request_from_bytes`."""
    return request_from_bytes(_read(path), op=op, params=params)


def write_request(request: CreditRequest, path: str | os.PathLike[str]) -> None:
    """Write `request` to `path`: all of it, or nothing."""
    _write(path, request_to_bytes(request))


def read_result(path: str | os.PathLike[str]) -> CreditResult:
    """The result in the file at `path`; see `result_from_bytes`."""
    return result_from_bytes(_read(path))


def write_result(result: CreditResult, path: str | os.PathLike[str]) -> None:
    """Write `result` to `path`: all of it, or nothing."""
    _write(path, result_to_bytes(result))


def device_for(backend: str) -> torch.device:
    """Where tensors that came as bytes go: to the GPU for "triton" where there is one (its interpreter takes the CPU's), else they stay."""
    return torch.device("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")


def on_device(request: CreditRequest, device: torch.device) -> CreditRequest:
    """`request` with its token tensors on `device`. Boundaries stay where they are: a call copies what it needs of them."""
    tensors = {name: tensor if name in LAYOUTS else tensor.to(device) for name, tensor in request.tensors.items()}
    return replace(request, tensors=tensors)


def _spare(op: str, written: str | None, names: Sequence[str]) -> list[str]:
    """Those of a file's `names` that the op written there takes, and `op` does not. What neither takes is a mistake."""
    taken = {entry.name: {*tensor_names(entry), *entry.options} for entry in operations()}
    own = taken.get(written or "", set())
    return [name for name in names if name in own and name not in taken.get(op, own)]


def _to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    storages: set[int] = set()
    dense: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"rollout: {name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with torch.as_tensor")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise InputError(
                f"rollout: {name} must be dense and hold numbers, got {tensor.layout} on {tensor.device}; convert it with .to_dense()"
            )
        dense[name] = tensor.detach().cpu().contiguous()
        storage = dense[name].untyped_storage().data_ptr()
        if storage in storages:  # safetensors refuses tensors that share memory
            dense[name] = dense[name].clone()
        storages.add(storage)
    try:
        return save(dense, metadata=dict(metadata))
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise InputError(f"rollout: tensors and metadata must fit into a safetensors file, got {error}; mend that entry") from error


def _what_it_is(data: bytes, error: Exception) -> str:
    if not data:
        return "no bytes at all; send or name a file with content"
    for start, name in _OTHER_FORMATS:
        if data.startswith(start):
            return f"{name}; nothing is unpickled here: write it with rlhf_scan.rollout.write_request or safetensors.torch.save_file"
    if isinstance(error, KeyError):
        return f"a tensor of dtype {error}; write it in a dtype that torch has, such as float32"
    return f"{len(data)} bytes that are torn or another format ({error}); write the file again with rlhf_scan.rollout.write_request"


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"rollout: {os.fspath(path)} must be a readable file, got {error.strerror}; check the path") from error


def _write(path: str | os.PathLike[str], data: bytes) -> None:
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise InputError(f"rollout: {os.fspath(path)} must be a file, got a directory or device; name a file in it")
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except OSError as error:
        raise InputError(
            f"rollout: {os.fspath(path)} must be writable, got {error.strerror}; check the directory and the free space"
        ) from error
    finally:
        beside.unlink(missing_ok=True)
