"""The map of a pack's tiles, whatever the boundaries on a GPU say, which nobody reads unless asked to."""

from __future__ import annotations

import pytest
import torch
from conftest import device_of

import rlhf_scan
from rlhf_scan import Segments
from rlhf_scan.backends import tiles, triton_map

WIDE, SHORT = 3 * tiles.WIDTH, tiles.SHORT - 1
BOUNDARIES = {
    "falls": [0, WIDE, 0, WIDE, 0, WIDE],
    "overlaps": [0, 8 * tiles.WIDTH, 100, 9 * tiles.WIDTH, 90, 9 * tiles.WIDTH],
    "medium ones overlap": [0, *[tiles.MEDIUM, 0] * 10, tiles.MEDIUM],
    "short ones overlap": [0, *[SHORT, 0] * 40, SHORT],
    "beyond the tokens": [0, 10**6, -5, WIDE],
    "before the first": [-100, 900],
    "backward": [5, 3, 1],
}


@pytest.mark.parametrize("case", BOUNDARIES)
def test_boundaries_that_are_wrong_write_and_wait_for_nothing_else(case: str, no_hang: None) -> None:
    boundaries = torch.tensor(BOUNDARIES[case], device=device_of("triton"))
    tokens, segments = 3 * tiles.WIDTH + 8, len(boundaries) - 1
    bounds = triton_map.bounds_of(tokens, segments)
    slots = triton_map.slots_of(boundaries, tokens, torch.empty(0, dtype=torch.int32, device=boundaries.device)).split(bounds)
    for found, bound, tiled in zip(slots, bounds, (True, False, False), strict=True):
        rows = [row for row in found.tolist() if row[3] > 0]
        for segment, turn, start, length, first, *_ in rows:
            assert 0 <= segment < segments
            assert 0 <= start <= tokens - length
            if tiled:
                assert 0 <= turn < -(-length // tiles.WIDTH)
                assert 0 <= first <= bound - -(-length // tiles.WIDTH)
        turns = {(row[0], row[1]) for row in rows}
        assert len(turns) == len(rows)
        assert all(turn == 0 or (segment, turn - 1) in turns for segment, turn in turns)
    pack = Segments(boundaries)
    pack.total = None  # as of boundaries on a GPU
    rewards = torch.ones(tokens, device=boundaries.device)
    rlhf_scan.gae(rewards, rewards, segments=pack, backend="triton")
