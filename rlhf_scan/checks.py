"""Every check of a caller's arguments, and their normal form. The one place that knows which shapes mean what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import InputError
from .estimators import Estimator
from .segments import Segments

RATE_REMEDY = "pass a value in that range"
UNSPLIT = "without segments= all tokens are one sequence: pass Segments (in a request cu_seqlens), which say where each of a pack lies"
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FLAGS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS)


@dataclass(frozen=True)
class Layout:
    """How the caller's tokens lie: `shape` as given, S `segments`, each `length` long or at `boundaries`."""

    op: str
    shape: torch.Size
    device: torch.device
    segments: int
    length: int | None
    boundaries: Segments | None
    estimator: Estimator

    @property
    def like(self) -> str:
        """The input whose shape it is."""
        return self.estimator.inputs[0]

    @property
    def unsplit(self) -> bool:
        """Whether it is [N] that nobody said to be a pack: one sequence."""
        return self.boundaries is None and len(self.shape) == 1


def check_option(op: str, name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise unless `value` is one of `allowed`."""
    if value not in allowed:
        raise InputError(f"{op}: {name} must be one of {list(allowed)}, got {value!r}; choose one of these")


def check_dtype(op: str, dtype: torch.dtype | None) -> None:
    """Raise unless outputs can have `dtype`."""
    if dtype is not None and dtype not in FLOATS:
        raise InputError(
            f"{op}: dtype must be one of {[str(d) for d in FLOATS]} or None, got {dtype!r}; leave it out for the inputs' dtype"
        )


def check_switch(op: str, name: str, value: object) -> None:
    """Raise unless `value` is True or False: a word such as "false" would count as True."""
    if not isinstance(value, bool):
        raise InputError(f"{op}: {name} must be True or False, got {value!r:.80}; pass one of these")


def number_of(op: str, name: str, value: object, what: str = "a number", like: float = 0.99) -> float:
    """`value` as a float; raise unless it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{op}: {name} must be {what}, got {type(value).__name__}; pass a float such as {like}")
    try:
        return float(value)
    except OverflowError as error:
        got = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
        raise InputError(f"{op}: {name} must be {what} below 1e308, got {got}; pass a float such as {like}") from error


def check_eps(op: str, eps: object) -> None:
    """Raise unless `eps` can be added to a variance or a standard deviation."""
    if not 0.0 <= number_of(op, "eps", eps, "a number from 0 on", 1e-8) < math.inf:
        raise InputError(f"{op}: eps must be a number from 0 on, got {eps!r}; pass one such as 1e-8")


def resolve_layout(op: str, entry: Estimator, tensor: object, segments: Segments | None) -> Layout:
    """The layout that the first input of `entry` and `segments` describe."""
    like = entry.inputs[0]
    first = check_floats(op, like, tensor)
    if segments is not None and not isinstance(segments, Segments):
        raise InputError(
            f"{op}: segments must be a Segments, got {type(segments).__name__}; build one with Segments.from_cu_seqlens, "
            "from_lengths, from_position_ids or from_segment_ids"
        )
    if first.dim() not in (1, 2):
        remedy = "drop or merge the other dimensions" if first.dim() else "pass one entry per token"
        raise InputError(f"{op}: {like} must be [B, T] or packed [N], got shape {list(first.shape)}; {remedy}")
    if segments is not None:
        check_total(op, like, segments, first.numel())
        return Layout(op, first.shape, first.device, segments.count, None, segments, entry)
    rows, length = (1, first.shape[0]) if first.dim() == 1 else (first.shape[0], first.shape[1])
    return Layout(op, first.shape, first.device, rows, length, None, entry)


def check_total(op: str, like: str, segments: Segments, tokens: int) -> None:
    """Raise unless the segments, if that is known, cover the `tokens` of `like`."""
    if segments.total is not None and segments.total != tokens:
        raise InputError(
            f"{op}: segments must cover the {tokens} tokens of {like}, got {segments.total} tokens; "
            "cu_seqlens must end at N and lengths must add up to N"
        )


def check_dense(op: str, name: str, tensor: object) -> Tensor:
    """Raise unless `tensor` is a tensor whose entries lie in memory."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{op}: {name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with torch.as_tensor")
    if not torch.compiler.is_compiling():  # a compiler may not trace that
        if tensor.is_nested:
            raise InputError(f"{op}: {name} must be dense, got a nested tensor; pass its .values() with segments=, or pad it")
        if tensor.layout is not torch.strided:
            raise InputError(f"{op}: {name} must be dense, got {tensor.layout}; convert it with .to_dense()")
    return tensor


def check_floats(op: str, name: str, tensor: object) -> Tensor:
    """Raise unless `tensor` is a floating-point tensor."""
    tensor = check_dense(op, name, tensor)
    if tensor.dtype not in FLOATS:
        raise InputError(f"{op}: {name} must be float32, float64, bfloat16 or float16, got {tensor.dtype}; convert it with .float()")
    return tensor


def per_token(layout: Layout, name: str, tensor: object) -> Tensor:
    """A floating-point tensor with the layout's shape, flat and contiguous."""
    checked = check_floats(layout.op, name, tensor)
    if checked.shape != layout.shape:
        raise InputError(
            f"{layout.op}: {name} must have shape {list(layout.shape)} to match {layout.like}, got {list(checked.shape)}; "
            + _shape_remedy(layout, name, checked)
        )
    _check_device(layout, name, checked)
    return _flat(checked)


def per_action(layout: Layout, names: Sequence[str], tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Floating-point tensors with the layout's shape and one more dimension, of equally many actions; strided as they came."""
    found: dict[str, Tensor] = {}
    for name in names:
        tensor = check_floats(layout.op, name, tensors[name])
        actions = found[names[0]].shape[-1] if found else (tensor.shape[-1] if tensor.dim() == len(layout.shape) + 1 else 0)
        expected = [*layout.shape, actions or "A"]
        if list(tensor.shape) != expected:
            raise InputError(
                f"{layout.op}: {name} must have shape [{', '.join(map(str, expected))}] to match {layout.like}{f' and {names[0]}' if found else ''}, "
                f"got {list(tensor.shape)}; pass one entry per token and action"
            )
        _check_device(layout, name, tensor)
        found[name] = tensor.detach()
    return found


def per_token_action(layout: Layout, name: str, actions: object) -> Tensor:
    """An integer per token, flat and contiguous."""
    actions = check_dense(layout.op, name, actions)
    if actions.is_floating_point() or actions.is_complex() or actions.dtype == torch.bool:
        raise InputError(f"{layout.op}: {name} must be an integer dtype, got {actions.dtype}; convert it with .long()")
    if actions.shape != layout.shape:
        raise InputError(
            f"{layout.op}: {name} must have shape {list(layout.shape)} to match {layout.like}, got {list(actions.shape)}; "
            + _shape_remedy(layout, name, actions)
        )
    _check_device(layout, name, actions)
    return _flat(actions)


def check_choices(op: str, entry: Estimator, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `tensors` that are given, after checking that each input with two ways is given in one of them."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None or name in entry.required}
    for name, pair in entry.choices.items():
        both, parts = " and ".join(pair), [part for part in pair if part in given]
        if name in given and parts:
            raise InputError(f"{op}: {name} must be given as such or as {both}, got {' and '.join(parts)} beside it; drop one or the other")
        if name not in given and not parts:
            raise InputError(f"{op}: {name} must be given, or {both} in place of it, got neither; add one or the other")
        if name not in given and len(parts) == 1:
            missing = pair[1 - pair.index(parts[0])]
            raise InputError(f"{op}: {both} must be given together, got no {missing}; add it, or pass {name} in place of both")
    return given


def per_token_or_segment(layout: Layout, name: str, tensor: Tensor) -> Tensor:
    """[N] for the layout's full shape, [S, 1] for one entry per segment (which wins where S = N)."""
    _check_device(layout, name, tensor)
    if tensor.shape == (layout.segments,):
        return tensor.detach().contiguous().reshape(-1, 1)
    if tensor.shape == layout.shape:
        return _flat(tensor)
    raise InputError(
        f"{layout.op}: {name} must have shape [{layout.segments}] (one per segment) or {list(layout.shape)} (one per token), "
        f"got {list(tensor.shape)}; " + (UNSPLIT if _is_per_sequence(layout, tensor) else _shape_remedy(layout, name, tensor))
    )


def check_flag(op: str, name: str, flag: object) -> Tensor:
    """Raise unless `flag` is a tensor whose entries are zero or not."""
    flag = check_dense(op, name, flag)
    if flag.dtype not in _FLAGS:
        raise InputError(f"{op}: {name} must be bool, an integer or a float dtype, got {flag.dtype}; convert it with .bool()")
    return flag


def check_mask(op: str, name: str, mask: object, like: str, tensor: Tensor) -> Tensor:
    """Raise unless `mask` is a flag with the shape and on the device of `tensor`, which is called `like`."""
    flag = check_flag(op, name, mask)
    if flag.shape != tensor.shape:
        raise InputError(
            f"{op}: {name} must have shape {list(tensor.shape)} to match {like}, got {list(flag.shape)}; pass one entry for each of {like}"
        )
    if flag.device != tensor.device:
        raise InputError(
            f"{op}: {name} must be on {tensor.device} like {like}, got {flag.device}; move it with .to({str(tensor.device)!r})"
        )
    return flag


def resolve_flag(layout: Layout, name: str, flag: object, *, segment_form: bool) -> Tensor | None:
    """A mask or end flag of any dtype; `segment_form` also takes one entry per segment, for its last token."""
    if flag is None:
        return None
    flag = check_flag(layout.op, name, flag)
    if segment_form:
        return per_token_or_segment(layout, name, flag)
    if flag.shape != layout.shape:
        raise InputError(
            f"{layout.op}: {name} must have shape {list(layout.shape)} to match {layout.like}, got {list(flag.shape)}; "
            + _shape_remedy(layout, name, flag)
        )
    _check_device(layout, name, flag)
    return _flat(flag)


def resolve_end(layout: Layout, entry: Estimator, end: object) -> Tensor | None:
    """The value after the end, as `Estimator.end` has it: None, [S, 1] or [N]."""
    if end is None:
        return None
    name = entry.end_name
    if name is None:
        raise InputError(f"{layout.op}: bootstrap must be None, got a tensor; this estimator takes the value that follows from its inputs")
    checked = check_floats(layout.op, name, end)
    if entry.end == "initial" and checked.shape != (layout.segments,):
        remedy = "pass one entry per segment" + (f"; {UNSPLIT}" if _is_per_sequence(layout, checked) else "")
        raise InputError(f"{layout.op}: {name} must have shape [{layout.segments}], got {list(checked.shape)}; {remedy}")
    return per_token_or_segment(layout, name, checked)


def resolve_rate(layout: Layout, name: str, rate: object, largest: float = 1.0) -> float | Tensor:
    """A gamma-like parameter: a number from 0 to `largest`, [S, 1] or [N]."""
    if isinstance(rate, Tensor):
        checked = check_floats(layout.op, name, rate)
        return per_token_or_segment(layout, name, checked.expand(layout.segments) if checked.dim() == 0 else checked)
    number = number_of(layout.op, name, rate, "a number or a tensor")
    if not 0.0 <= number <= largest:
        raise InputError(f"{layout.op}: {name} must lie in {interval(largest)}, got {rate}; {RATE_REMEDY}")
    return number


def interval(largest: float) -> str:
    """The range of a rate, as messages write it."""
    return f"[0, {largest:g}]"


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1)


def _check_device(layout: Layout, name: str, tensor: Tensor) -> None:
    if tensor.device != layout.device:
        raise InputError(
            f"{layout.op}: {name} must be on {layout.device} like {layout.like}, got {tensor.device}; move it with .to({str(layout.device)!r})"
        )


def _is_per_sequence(layout: Layout, tensor: Tensor) -> bool:
    """Whether it looks like one entry per sequence of a pack that nobody said to be one."""
    return layout.unsplit and tensor.dim() == 1 and 1 < tensor.numel() < layout.shape.numel()


def _shape_remedy(layout: Layout, name: str, tensor: Tensor) -> str:
    """What most likely went wrong."""
    shape, got = layout.shape, tensor.shape
    bootstraps = name in layout.estimator.following and layout.estimator.end_name == "bootstrap"
    if bootstraps and len(got) == len(shape) and got[:-1] == shape[:-1] and got[-1] == shape[-1] + 1:
        return "pass V(s_T) as bootstrap= instead of appending it"
    if len(got) == len(shape) and got == shape[::-1]:
        return "transpose it: the layout is [B, T]"
    if tensor.numel() == shape.numel():
        return f"reshape it to {list(shape)}"
    return "pass one entry per token" + ("" if layout.boundaries is None else ", in the order of the pack")
