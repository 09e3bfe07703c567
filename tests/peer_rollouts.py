"""Rollouts for the trainers' blocks: every kind of row that they treat differently."""

from __future__ import annotations

import numpy as np
from peer_blocks import Rollout

WIDTH = 9

# Length, ends with EOS, tool tokens from (inclusive) to (exclusive).
ROWS: list[tuple[int, bool, tuple[int, int]]] = [
    (WIDTH, True, (0, 0)),  # fills the row
    (WIDTH, False, (0, 0)),  # fills the row and was cut
    (4, True, (0, 0)),  # early EOS
    (5, False, (0, 0)),  # was cut early, by a limit of its own
    (WIDTH - 1, True, (0, 0)),  # one slot of padding
    (1, True, (0, 0)),
    (0, False, (0, 0)),  # empty
    (8, True, (3, 6)),  # a tool answers in the middle
    (WIDTH, True, (2, 5)),
    (7, True, (4, 7)),  # a tool has the last word
    (WIDTH, False, (6, WIDTH)),
    (3, False, (0, 3)),  # tool tokens only
]


def rollout(seed: int, *, tools: bool = True, empty: bool = True, spread: float = 0.3, size: float = 1.0) -> Rollout:
    """Rows as in ROWS in a random order. Every number is one of float32. `spread` is that of the log-ratios, `size` that of values and scores."""
    random = np.random.default_rng(seed)
    rows = [row for row in ROWS if (tools or row[2] == (0, 0)) and (empty or row[0] > 0)]
    rows = [rows[i] for i in random.permutation(len(rows))]
    shape = (len(rows), WIDTH)
    t = np.arange(WIDTH)
    lengths = np.array([length for length, _, _ in rows])
    mask = np.array([(t < length) & ~((t >= start) & (t < stop)) for length, _, (start, stop) in rows])

    def floats(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float32).astype(np.float64)

    logprobs = floats(-random.exponential(1.0, shape))
    return Rollout(
        logprobs=logprobs,
        ref_logprobs=floats(logprobs + spread * random.standard_normal(shape)),
        values=floats(size * random.standard_normal(shape)),
        scores=floats(3.0 * size * random.standard_normal(len(rows))),
        mask=mask,
        lengths=lengths,
        has_eos=np.array([eos for _, eos, _ in rows]),
        bootstrap=floats(size * random.standard_normal(len(rows))),
    )
