"""What a policy makes of its actions, for the Triton backend: expected values, and the log-probability of the one taken.

Tensors of actions, [.., A], are read where they lie: `length` tokens a row; strides from row to row, token to token, action to action.
"""

# mypy: ignore-errors
# pyright: basic

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import INTERPRETED
from .triton_launch import await_previous

PRODUCTS = 64 if INTERPRETED else 1024  # of a program
# Not specialised, so that neither shapes nor strides change the order of a sum or the number of compiled kernels.
_SIZES = ["tokens", "actions", "length", "row", "step", "by", "weight_row", "weight_step", "weight_by"]


@triton.jit(do_not_specialize=_SIZES)
def sum_of_products(
    values,
    weights,
    sums,
    tokens,
    actions,
    length,
    row,  # strides of `values`
    step,
    by,
    weight_row,
    weight_step,
    weight_by,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """sums[t] = sum over a of values[t, a] * weights[t, a], WIDTH actions at a time; a weight of 0 adds 0, whatever the value."""
    await_previous()
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_value = (token // length * row + token % length * step)[:, None]
    first_weight = (token // length * weight_row + token % length * weight_step)[:, None]
    total = tl.zeros([ROWS], DTYPE)
    for first in tl.range(0, actions, WIDTH):
        action = (first + tl.arange(0, WIDTH)[None, :]).to(tl.int64)
        there = (token < tokens)[:, None] & (action < actions)
        weight = tl.load(weights + first_weight + action * weight_by, mask=there, other=0).to(DTYPE)
        value = tl.load(values + first_value + action * by, mask=there, other=0).to(DTYPE)
        total += tl.sum(tl.where(weight == 0, 0.0, weight * value), 1)
    tl.store(sums + token, total, mask=token < tokens)


@triton.jit(do_not_specialize=["tokens", "actions", "length", "row", "step", "by"])
def logarithm_of_chosen(weights, chosen, logarithms, tokens, actions, length, row, step, by, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """logarithms[t] = log weights[t, chosen[t]]; NaN, and nothing is read, where that is none of the actions."""
    await_previous()
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    action = tl.load(chosen + token, mask=token < tokens, other=0).to(tl.int64)
    within = (token < tokens) & (action >= 0) & (action < actions)
    weight = tl.load(weights + (token // length * row + token % length * step + action * by), mask=within, other=1).to(DTYPE)
    tl.store(logarithms + token, tl.where(within, tl.log(weight), float("nan")), mask=token < tokens)
