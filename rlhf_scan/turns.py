"""Credit that counts turns, not tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_dense, check_dtype, check_flag, check_floats, check_option, number_of
from .dispatch import estimate
from .errors import InputError
from .segments import Segments

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def turn_returns(
    turn_rewards: Tensor,
    clock: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    segments: Segments | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> Tensor:
    """Give each token the discounted sum of its turn's and the later turns' rewards.

        G_k = r_k + gamma * G_{k+1},   return of token t = G of its turn, clock[t]

    Boundaries: after a sequence's last turn G is 0, and no reward crosses into another sequence. A reward belongs to a turn, whichever of its
    tokens it was made for: it can be lost neither on a masked token nor at a turn's end, and long turns are not discounted more than short ones.

    Args:
        turn_rewards: r_k of each turn of each sequence, [S, K], 0 for turns that a sequence does not have; float32, float64, bfloat16 or
            float16.
        clock: the turn of each token, an integer from 0 to K - 1: [S, T], or with `segments` packed [N]. Negative: in no turn, its return is 0
            (prompt, padding).
        gamma: discount per turn in [0, 1]: a number, [S] per sequence, or [S, K].
        segments: where the sequences of a pack lie.
        mask: nonzero at trainable tokens, the shape of `clock`; returns of others are 0. None: all are.
        dtype: of the returns; None: that of `turn_rewards`. Sums are in float32 (float64 for float64 rewards).
        backend: as in `gae`.
        validate: "shapes", or "full" to check contents too. Where `clock` is on a GPU, only "full" sees that it is K or more; the return there
            is else 0.

    Returns:
        The returns per token, in the shape of `clock`, detached from autograd.

    Raises:
        InputError, BackendError: as in `gae`.

    Sutton & Barto 2018, Reinforcement Learning, section 3.3: the return, whose steps here are turns.
    """
    op = "turn_returns"
    check_option(op, "validate", validate, ("shapes", "full"))
    check_dtype(op, dtype)
    rewards = check_floats(op, "turn_rewards", turn_rewards)
    turns = _integers(op, clock, rewards.device)
    owners, sequences = token_owners(op, turns.shape, segments, rewards.device)
    if rewards.dim() != 2 or len(rewards) != sequences:
        raise InputError(
            f"{op}: turn_rewards must have shape [{sequences}, K], a row for each sequence of clock, got {list(rewards.shape)}; "
            "pad missing turns with 0"
        )
    live = torch.ones_like(turns, dtype=torch.bool) if mask is None else token_mask(op, mask, rewards.device, turns.shape)
    count = rewards.shape[1]
    if validate == "full" or turns.device.type == "cpu":
        _check_turns(op, turns, live, count)
    if validate == "full":
        _check_finite(op, rewards)
    tensors = {"rewards": rewards}
    (returns,) = estimate("discounted_returns", tensors, {"gamma": gamma}, dtype=dtype, backend=backend, validate=validate, op=op)
    if returns.numel() == 0 or turns.numel() == 0:
        return returns.new_zeros(turns.shape)
    found = returns[owners, turns.clamp(0, count - 1)]
    return torch.where(live & (turns >= 0) & (turns < count), found, 0)


def clock_rate(
    rate: float | Tensor, clock: Tensor, *, mask: Tensor | None = None, segments: Segments | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """A gamma or lambda per token that counts only when the clock goes on: `rate` at a turn's last token, 1 inside it.

        rate_t = 1 where clock[next] = clock[t],   else rate;   next is the sequence's next trainable token

    Give it to any estimator: ``gae(rewards, values, gamma=clock_rate(0.9, turns, mask=mask), lam=clock_rate(0.95, turns, mask=mask),
    mask=mask)`` discounts and mixes from turn to turn, not from token to token.

    Args:
        rate: in [0, 1]: a number, or one per sequence, [S] ([B] for rows).
        clock: the turn of each token, integers: [B, T], or packed [N]. The clock goes on where they change.
        mask: what the estimator gets: with it, the next token is the next trainable one, as ``masked="skip"`` takes it.
        segments: where the sequences of a pack lie. A sequence's last token has `rate`, since what follows it is not its turn.
        dtype: of the rates; None: that of a tensor `rate`, else float32.

    Returns:
        The rate per token, in the shape of `clock`.

    Raises:
        InputError: an argument is wrong.
    """
    op = "clock_rate"
    check_dtype(op, dtype)
    turns = _integers(op, clock, clock.device if isinstance(clock, Tensor) else torch.device("cpu"))
    owners, sequences = token_owners(op, turns.shape, segments, turns.device)
    rates = _rates(op, rate, sequences, dtype, turns.device)
    count = turns.numel()
    if not count:
        return rates.new_empty(turns.shape)
    place = torch.arange(count, device=turns.device)
    live = place >= 0 if mask is None else token_mask(op, mask, turns.device, turns.shape).flatten()
    # The first trainable token at or after each place; where none is, `count`.
    first = torch.where(live, place, count).flip(0).cummin(0).values.flip(0)
    following = torch.cat([first[1:], first.new_full((1,), count)])
    there = following.clamp(max=count - 1)
    inside = (following < count) & (turns.flatten() == turns.flatten()[there]) & (owners.flatten() == owners.flatten()[there])
    return torch.where(inside.reshape(turns.shape), 1, rates[owners])


def token_owners(op: str, shape: torch.Size, segments: Segments | None, device: torch.device) -> tuple[Tensor, int]:
    """Which sequence each token is of, in the shape of the tokens, and how many sequences there are."""
    if segments is None:
        if len(shape) != 2:
            raise InputError(f"{op}: tokens must be [B, T] without segments, got shape {list(shape)}; pass segments for a pack")
        return torch.arange(shape[0], device=device).unsqueeze(1).expand(shape), shape[0]
    if not isinstance(segments, Segments):
        raise InputError(f"{op}: segments must be a Segments, got {type(segments).__name__}; build one with Segments.from_cu_seqlens")
    if segments.total is not None and segments.total != shape.numel():
        raise InputError(f"{op}: segments must cover the {shape.numel()} tokens, got {segments.total}; cu_seqlens must end at N")
    ends = segments.on(device)[1:].contiguous()
    owners = torch.searchsorted(ends, torch.arange(shape.numel(), device=device), right=True)
    return owners.clamp(max=max(segments.count - 1, 0)).reshape(shape), segments.count


def token_mask(op: str, mask: Tensor, device: torch.device, shape: torch.Size | None = None) -> Tensor:
    """`mask` as bool, checked."""
    flag = check_flag(op, "mask", mask)
    if shape is not None and flag.shape != shape:
        raise InputError(f"{op}: mask must have shape {list(shape)} to match clock, got {list(flag.shape)}; pass one entry per token")
    if flag.device != device:
        raise InputError(f"{op}: mask must be on {device}, got {flag.device}; move it with .to({str(device)!r})")
    return flag.detach() != 0


def _rates(op: str, rate: object, sequences: int, dtype: torch.dtype | None, device: torch.device) -> Tensor:
    """The rate of each sequence."""
    if isinstance(rate, Tensor):
        found = check_floats(op, "rate", rate).detach()
        found = found.expand(sequences) if found.dim() == 0 else found
        if found.shape != (sequences,):
            raise InputError(f"{op}: rate must be a number or have shape [{sequences}], got {list(found.shape)}; pass one per sequence")
        return found.to(device=device, dtype=dtype or found.dtype)
    number = number_of(op, "rate", rate, "a number or a tensor")
    if not 0.0 <= number <= 1.0:
        raise InputError(f"{op}: rate must lie in [0, 1], got {rate}; pass a value in that range")
    return torch.full((sequences,), number, dtype=dtype or torch.float32, device=device)


def _integers(op: str, clock: object, device: torch.device) -> Tensor:
    if not isinstance(clock, Tensor) or clock.dtype not in _INTEGERS:
        got = clock.dtype if isinstance(clock, Tensor) else type(clock).__name__
        raise InputError(f"{op}: clock must be an integer tensor, got {got}; pass the number of each token's turn")
    check_dense(op, "clock", clock)
    if clock.device != device:
        raise InputError(f"{op}: clock must be on {device}, got {clock.device}; move it with .to({str(device)!r})")
    return clock.detach().long()


def _check_finite(op: str, rewards: Tensor) -> None:
    bad = (~rewards.detach().isfinite()).nonzero()
    if len(bad):
        at = bad[0].tolist()
        raise InputError(
            f"{op}: turn_rewards must be finite, got {float(rewards[tuple(at)])} at {at} ({len(bad)} in all); mend that entry, or put 0 for no reward"
        )


def _check_turns(op: str, turns: Tensor, live: Tensor, count: int) -> None:
    beyond = (live & (turns >= count)).nonzero()
    if len(beyond):
        at = beyond[0].tolist()
        raise InputError(
            f"{op}: clock must be below {count}, the turns that turn_rewards has, got {int(turns[tuple(at)])} at {at}; add the missing turns"
        )
