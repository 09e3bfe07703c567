"""What there is once per sequence, each formula written once: torch runs it on tensors [S] as it stands, Triton compiles it.

Tokens are counted from the first of the pack, and -1 is none. A formula may call the functions below and others of this module; Triton puts its
own in place of `select`, `smaller` and `within`.
"""

# mypy: ignore-errors
# pyright: basic

import torch

from .shaping import FAULTS

FAULT_KINDS = len(FAULTS)


def select(condition, x, y):
    """`x` where the condition holds, else `y`."""
    return torch.where(condition, x, y)


def smaller(x, y):
    """Of two integers."""
    return torch.minimum(x, y)


def within(x, low, high):
    """`x`, but no less than `low` and no more than `high`; NaN stays."""
    return x.clamp(low, high)


def score_paid(score, bias, scale, low, high):
    """score' = clip((score + bias) * scale)."""
    return within((score + bias) * scale, low, high)


def slot_after(last, end, start, stop):
    """The token after the end that is one more step, if the sequence has room for it. An empty response ends before its first token."""
    after = select(last < 0, start, end + 1)
    return select(after < stop, after, -1)


def token_of_score(last, end, slot, trailing):
    """The token that gets the score, where `trailing` says what becomes of a sequence that ends with no trainable one."""
    if trailing == "drop":
        token = select(end > last, -1, last)
    elif trailing == "stay":
        token = end
    else:
        token = last
    return select(slot >= 0, slot, token)


def lacks_eos(has_eos, last, slot):
    """Whether the sequence pays for a missing end; one without a token to pay at does not."""
    return (has_eos == 0) & ((last >= 0) | (slot >= 0))


def with_fault(fault, bad, token, start, which):
    """The first fault, as `Shaped.fault`, if the number that is read at `token` is `bad`, too."""
    return select(bad & (token >= 0), smaller(fault, (token - start) * FAULT_KINDS + which), fault)
