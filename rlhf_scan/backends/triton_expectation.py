"""Expected values under a policy, for the Triton backend."""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens", "actions"])
def sum_of_products(values, weights, sums, tokens, actions, ROWS: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """sums[t] = sum over a of values[t, a] * weights[t, a], WIDTH actions at a time; a weight of 0 adds 0, whatever the value."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], DTYPE)
    for first in tl.range(0, actions, WIDTH):
        action = first + tl.arange(0, WIDTH)
        there = (token < tokens)[:, None] & (action < actions)[None, :]
        places = token[:, None] * actions + action[None, :]
        weight = tl.load(weights + places, mask=there, other=0).to(DTYPE)
        value = tl.load(values + places, mask=there, other=0).to(DTYPE)
        total += tl.sum(tl.where(weight == 0, 0.0, weight * value), 1)
    tl.store(sums + token, total, mask=token < tokens)
