"""How tokens are cut into tiles for the Triton backend. Bits depend on WIDTH alone, never on how many rows share a program."""

from __future__ import annotations

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# Tokens of a tile. A tile starts at a multiple of it from its segment's start, so a segment's bits do not depend on where it lies.
WIDTH = 64 if INTERPRETED else 2048
# Packed segments up to this long share a program, several rows of it: as many as have WIDTH tokens.
MEDIUM = 32 if INTERPRETED else 512
SHORT = 16 if INTERPRETED else 128
# Tiles whose carries are composed at one look, and groups of tiles likewise.
GROUP = 4 if INTERPRETED else 32
# Tokens of a program that takes several rows of a batch of rows: a warp's. On an H200 GAE with done flags took 4.2 us at 4096 x 128 (5.4 with 512,
# 6.4 with 1024), 22.1 at 32768 x 128 (22.0, 24.4), 2.2 at 32768 x 8 (2.3, 2.3).
PROGRAM = 64 if INTERPRETED else 256
