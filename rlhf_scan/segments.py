"""Where the segments of a pack lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import InputError

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class Segments:
    """Boundaries of the segments of a pack: segment s holds tokens ``cu_seqlens[s]`` up to, not including, ``cu_seqlens[s + 1]``.

    Credit never leaves a segment. Make one with `from_cu_seqlens` (the flash-attention convention), `from_lengths`, `from_position_ids` or
    `from_segment_ids`; all four describe the same thing. A segment may be empty. The boundaries may lie on the CPU or the GPU; they are
    brought to the tokens' device once and kept. Use one object for all calls on a batch.

    Attributes:
        cu_seqlens: int64 tensor [S + 1], from 0 to the number of tokens N.
        count: S, segments, empty ones included.
    """

    def __init__(self, cu_seqlens: Tensor) -> None:
        self.cu_seqlens = cu_seqlens
        self.count = cu_seqlens.numel() - 1
        self.total: int | None = int(cu_seqlens[-1]) if _is_readable(cu_seqlens) else None
        self._on_device = {cu_seqlens.device: cu_seqlens}

    def __repr__(self) -> str:
        return f"Segments(count={self.count}, total={self.total}, device={str(self.cu_seqlens.device)!r})"

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor | Sequence[int]) -> Segments:
        """Cumulative sequence lengths [S + 1]: 0, then the end of each segment, non-decreasing, the last one being N.

        Contents on the CPU are checked here, or by the call where torch.compile traces this; contents on a GPU when a call asks for
        ``validate="full"``.
        """
        boundaries = _integers("from_cu_seqlens", "cu_seqlens", cu_seqlens)
        if boundaries.dim() != 1 or boundaries.numel() == 0:
            raise InputError(
                f"Segments.from_cu_seqlens: cu_seqlens must be 1-D with S + 1 >= 1 entries, got shape {list(boundaries.shape)}; "
                "pass 0 followed by the end of each segment"
            )
        if not _is_readable(boundaries):
            return cls(boundaries.detach().to(torch.int64).contiguous())
        # A copy: what was checked must not change afterwards.
        segments = cls(boundaries.detach().to(torch.int64, copy=True).contiguous())
        segments.check("Segments.from_cu_seqlens")
        return segments

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int]) -> Segments:
        """Length of each segment, [S], each >= 0."""
        sizes = _integers("from_lengths", "lengths", lengths)
        if sizes.dim() != 1:
            raise InputError(f"Segments.from_lengths: lengths must be 1-D, got shape {list(sizes.shape)}; pass one length per segment")
        if _is_readable(sizes) and sizes.numel() and int(sizes.min()) < 0:
            raise InputError(f"Segments.from_lengths: lengths must be >= 0, got {int(sizes.min())}; drop or mend that entry")
        return cls(torch.nn.functional.pad(sizes.detach().to(torch.int64).cumsum(0), (1, 0)))

    @classmethod
    def from_position_ids(cls, position_ids: Tensor | Sequence[int]) -> Segments:
        """Position of each token in its segment, [N] or [B, T] (rows end segments): a segment starts where the count does not go up by one.

        Reads a GPU once (how many segments there are).
        """
        ids = _integers("from_position_ids", "position_ids", position_ids)
        return _from_starts(ids, "from_position_ids", "position_ids", lambda left, right: right != left + 1)

    @classmethod
    def from_segment_ids(cls, segment_ids: Tensor | Sequence[int]) -> Segments:
        """Id of each token's segment, [N] or [B, T] (rows end segments): a segment starts where the id changes.

        Reads a GPU once (how many segments there are).
        """
        ids = _integers("from_segment_ids", "segment_ids", segment_ids)
        return _from_starts(ids, "from_segment_ids", "segment_ids", lambda left, right: right != left)

    def on(self, device: torch.device) -> Tensor:
        """The boundaries on `device`, copied there at most once."""
        if device not in self._on_device:
            self._on_device[device] = self.cu_seqlens.to(device, non_blocking=True)
        return self._on_device[device]

    def lengths(self) -> Tensor:
        """Length of each segment, [S]."""
        return self.cu_seqlens.diff()

    def check(self, op: str) -> None:
        """Raise InputError, which speaks for `op`, unless the boundaries start at 0 and never decrease. Reads a GPU."""
        boundaries = self.cu_seqlens.cpu()
        if int(boundaries[0]) != 0:
            raise InputError(f"{op}: cu_seqlens must start at 0, got {int(boundaries[0])}; put a 0 before the end of the first segment")
        falls = (boundaries[1:] < boundaries[:-1]).nonzero()  # a difference could overflow
        if falls.numel():
            at = int(falls[0])
            raise InputError(
                f"{op}: cu_seqlens must not decrease, got {int(boundaries[at])} then {int(boundaries[at + 1])} at index {at}; "
                "pass the running sum of the lengths"
            )


def _is_readable(tensor: Tensor) -> bool:
    """Whether its contents are known here and now: not on a GPU without waiting for it, nor where torch.compile or torch.export traces."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _integers(constructor: str, name: str, values: Tensor | Sequence[int]) -> Tensor:
    """`values` as an integer tensor."""
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
        if tensor.numel() == 0 and not isinstance(values, Tensor):
            tensor = tensor.to(torch.int64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Segments.{constructor}: {name} must be integers, got {values!r:.80}; pass a 1-D list or tensor") from error
    if tensor.dtype not in _INTEGERS:
        remedy = "pass boundaries or ids, not a mask" if tensor.dtype == torch.bool else "convert it with .long()"
        raise InputError(f"Segments.{constructor}: {name} must be an integer tensor, got {tensor.dtype}; {remedy}")
    if not torch.compiler.is_compiling() and tensor.layout is not torch.strided:
        raise InputError(f"Segments.{constructor}: {name} must be dense, got {tensor.layout}; convert it with .to_dense()")
    return tensor


def _from_starts(ids: Tensor, constructor: str, name: str, starts_between: Callable[[Tensor, Tensor], Tensor]) -> Segments:
    """Segments that start at each row's first token and wherever ``starts_between(left, right)`` is True."""
    if ids.dim() not in (1, 2):
        raise InputError(f"Segments.{constructor}: {name} must be [N] or [B, T], got shape {list(ids.shape)}; reshape it")
    rows = ids.detach().reshape(1, -1) if ids.dim() == 1 else ids.detach()
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[:, 1:] = starts_between(rows[:, :-1].long(), rows[:, 1:].long())
    first = starts.flatten().nonzero().flatten()
    return Segments(torch.cat([first, first.new_tensor([ids.numel()])]))
