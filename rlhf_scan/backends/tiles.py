"""How tokens are cut into tiles for the Triton backend. Bits depend on WIDTH alone, never on how many rows share a program."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# Tokens of a tile. A tile starts at a multiple of it from its segment's start, so a segment's bits do not depend on where it lies.
WIDTH = 64 if INTERPRETED else 2048
# Packed segments up to this long share a program, several rows of it.
SHORT = 16 if INTERPRETED else 128
# Tiles whose carries form one chain; the chains of a long segment run side by side, then groups pass one carry on.
GROUP = 4 if INTERPRETED else 32
# Tokens of a program whose rows are shorter than a tile.
PROGRAM = 64 if INTERPRETED else 1024


@dataclass(frozen=True)
class TileMap:
    """Which tile of which segment each slot of a launch over a pack holds; -1 in `segment`: none.

    Attributes:
        width: of the tiles.
        rows: slots a program holds.
        segment: int32 [slots].
        tile: int32 [slots], index in its segment; consecutive tiles of a segment have consecutive slots.
    """

    width: int
    rows: int
    segment: Tensor
    tile: Tensor


def tile_maps(cu_seqlens: Tensor, tokens: int) -> tuple[TileMap, ...]:
    """The launches that cover a pack: its long segments, then its short ones. Made on the device, without reading it; kept per batch."""
    capturing = cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or cu_seqlens.is_inference():
        return _make_maps(cu_seqlens, tokens)
    state = cu_seqlens._version, tokens
    kept: tuple[tuple[int, int], tuple[TileMap, ...]] | None = _MAPS.get(cu_seqlens)
    if kept is None or kept[0] != state:
        kept = state, _make_maps(cu_seqlens, tokens)
        _MAPS[cu_seqlens] = kept
    return kept[1]


# A captured graph neither reads nor fills this: its boundaries may change between replays, and its memory is its own.
_MAPS = WeakTensorKeyDictionary()


def _make_maps(cu_seqlens: Tensor, tokens: int) -> tuple[TileMap, ...]:
    segments = cu_seqlens.numel() - 1
    lengths = cu_seqlens.diff()
    tiles = torch.where(lengths > SHORT, (lengths + WIDTH - 1) // WIDTH, 0)
    long = _slots(tiles, tokens // WIDTH + min(segments, tokens // (SHORT + 1)))
    short = _slots(((lengths > 0) & (lengths <= SHORT)).to(torch.int64), min(segments, tokens))
    return TileMap(WIDTH, 1, *long), TileMap(SHORT, PROGRAM // SHORT, *short)


def _slots(tiles: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """(segment, tile) of each of `bound` slots, given how many tiles each segment has."""
    ends = tiles.cumsum(0)
    slot = torch.arange(bound, device=tiles.device)
    segment = torch.searchsorted(ends, slot, right=True)
    known = segment.clamp(max=tiles.numel() - 1)
    tile = slot - (ends - tiles)[known]
    return torch.where(segment < tiles.numel(), segment, -1).to(torch.int32), tile.to(torch.int32)
