"""What a policy makes of its actions, for the CPU backend."""

# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false
# pyright: basic

from __future__ import annotations

from .cpu_compile import compiled_once


@compiled_once()
def sum_of_products(values, weights, sums):
    """sums[t] = sum over a of values[t, a] * weights[t, a]; a weight of 0 adds 0, whatever the value."""
    for t in range(len(sums)):
        total = sums.dtype.type(0)
        for action in range(values.shape[1]):
            if weights[t, action] != 0:
                total += values[t, action] * weights[t, action]
        sums[t] = total
