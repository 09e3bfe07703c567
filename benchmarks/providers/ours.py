"""rlhf_scan itself."""

from __future__ import annotations

from functools import partial

import torch

from rlhf_scan import BackendError, Segments
from rlhf_scan.backend_choice import choose_backend

from .. import check
from ..batches import Batch
from . import Prepared, Provider, register


def absent(device: str) -> str | None:
    """Whether the backend of that device runs."""
    try:
        choose_backend("auto", torch.device(device))
    except BackendError as error:
        return str(error)
    return None


def new_pack(batch: Batch) -> Prepared:
    """Boundaries that were never seen before in every call, so that all that is made of them is made inside it."""
    if batch.segments is None:
        return same_pack(batch)
    call, cu_seqlens = check.ours(batch), batch.segments.cu_seqlens
    return Prepared(lambda: call(segments=Segments.from_cu_seqlens(cu_seqlens.detach())), partial(check.named, batch))


def same_pack(batch: Batch) -> Prepared:
    """One `Segments` for all calls, as where several estimators run on a batch."""
    return Prepared(check.ours(batch), partial(check.named, batch))


register(Provider("ours", new_pack, absent, about="boundaries new to every call"))
register(
    Provider(
        "ours (map kept)", same_pack, absent, queued=True, about="the same `Segments` in every call: the map of its tiles is there already"
    )
)
