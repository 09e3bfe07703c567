"""rlhf_scan itself."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_scan import BackendError, Segments
from rlhf_scan.backend_choice import choose_backend

from ..batches import Batch
from ..check import call_ours
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
    cu_seqlens = batch.segments.cu_seqlens

    def run() -> dict[str, Any]:
        return call_ours(batch, segments=Segments.from_cu_seqlens(cu_seqlens.detach()))

    return Prepared(run, dict)


def same_pack(batch: Batch) -> Prepared:
    """One `Segments` for all calls, as where several estimators run on a batch."""
    return Prepared(lambda: call_ours(batch), dict)


register(Provider("ours", new_pack, absent, about="boundaries new to every call"))
register(
    Provider(
        "ours (map kept)", same_pack, absent, queued=True, about="the same `Segments` in every call: the map of its tiles is there already"
    )
)
