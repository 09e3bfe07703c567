"""The map of a pack's tiles, whatever the boundaries on a GPU say, which nobody reads unless asked to."""

from __future__ import annotations

import random
from itertools import accumulate

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


def expected_slots(lengths: list[int]) -> tuple[list[tuple[int, ...]], ...]:
    """Slots of tiles, of medium and of short segments, in order."""
    found: tuple[list[tuple[int, ...]], ...] = ([], [], [])
    starts, tiled = [0, *accumulate(lengths)], [-(-length // tiles.WIDTH) if length > tiles.MEDIUM else 0 for length in lengths]
    firsts = [0, *accumulate(tiled)]
    for turn in range(max(tiled, default=0)):
        found[0].extend((s, turn, starts[s], length, firsts[s]) for s, length in enumerate(lengths) if tiled[s] > turn)
    for s, length in enumerate(lengths):
        if 0 < length <= tiles.MEDIUM:
            found[1 if length > tiles.SHORT else 2].append((s, 0, starts[s], length, 0))
    return found


@pytest.mark.parametrize("mixed", ["all kinds", "long", "one very long"])
@pytest.mark.parametrize("count", [1, 64, 65, 130, 400])
def test_every_tile_has_its_slot(count: int, mixed: str) -> None:
    """In the interpreter a block has 64 to 128 segments, and there are two parts at most."""
    count *= triton_map._BLOCKS[0] // 64
    chosen = random.Random(count)
    longest = {"all kinds": [tiles.SHORT, tiles.MEDIUM, 4 * tiles.WIDTH], "long": [3 * tiles.WIDTH], "one very long": [tiles.SHORT]}[mixed]
    lengths = [chosen.randint(0 if mixed == "all kinds" else 1, chosen.choice(longest)) for _ in range(count)]
    if mixed == "one very long":
        lengths[count // 2] = 9 * tiles.WIDTH + 1
    boundaries = torch.tensor([0, *accumulate(lengths)], device=device_of("triton"))
    tokens, carries = sum(lengths), torch.zeros(3000, dtype=torch.int32, device=boundaries.device)
    slots = triton_map.slots_of(boundaries, tokens, carries)
    assert bool((carries == -1).all())
    for found, wanted in zip(slots.split(triton_map.bounds_of(tokens, count)), expected_slots(lengths), strict=True):
        rows = found[: len(wanted), :5].tolist()
        assert [tuple(row) for row in rows] == wanted
        assert not found[len(wanted) :, 3].any()
