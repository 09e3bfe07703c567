"""Whitening: numbers shifted to mean 0 and scaled to variance 1, over all trainable tokens of a batch or of all ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from . import ops, whitened
from .backend_choice import choose_backend
from .call import BACKENDS
from .checks import check_dtype, check_eps, check_floats, check_mask, check_option, check_switch
from .errors import InputError
from .ranks import check_process_group, gathered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EPS_PLACES = ("inside", "outside", "floor")


@dataclass(frozen=True)
class Whitening:
    """What whitening means, given count, mean and M2 (the sum of squared deviations) of the trainable tokens.

        variance = M2 / (count - 1) if unbiased else M2 / count;   0 for a single token
        deviation = sqrt(variance + eps) | sqrt(variance) + eps | sqrt(max(variance, eps))       eps_at = "inside" | "outside" | "floor"
        y = (x - mean) / deviation;   + mean unless shift_mean;   not divided unless scale

    Where the deviation is 0, which it can be for ``eps=0`` alone, (x - mean) / deviation is 0.
    """

    shift_mean: bool = True
    scale: bool = True
    unbiased: bool = True
    eps: float = 1e-8
    eps_at: str = "inside"

    def check(self, op: str) -> None:
        """Raise InputError, which speaks for `op`, unless it can be used."""
        check_option(op, "eps_at", self.eps_at, EPS_PLACES)
        check_eps(op, self.eps)
        for name in ("shift_mean", "scale", "unbiased"):
            check_switch(op, name, getattr(self, name))
        if not self.shift_mean and not self.scale:
            raise InputError(f"{op}: shift_mean and scale must not both be False, got False and False; one of them is what whitening does")


class WhiteningBackend(Protocol):
    """A module ``rlhf_scan.backends.<name>_whiten``. Statistics are float64 [3]: count, mean, M2; without a token all three are 0."""

    def statistics(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Of the trainable tokens of `x` [N]; no token's place among the others decides more than rounding."""
        ...

    def merge(self, parts: Tensor) -> Tensor:
        """Of all tokens that the statistics `parts` [P, 3] stand for."""
        ...

    def apply(self, x: Tensor, mask: Tensor | None, statistics: Tensor, whitening: Whitening, dtype: torch.dtype) -> Tensor:
        """`x` [N] whitened, 0 at masked tokens."""
        ...


def whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    scale: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
    eps_at: str = "inside",
    process_group: ProcessGroup | None = None,
    allow_whitened: bool = False,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    validate: str = "shapes",
) -> Tensor:
    """Shift to mean 0 and scale to variance 1, over the trainable tokens.

        y = (x - mean) / sqrt(variance + eps)

    Boundaries mean nothing to it: one mean and one variance for all segments. Outputs at masked tokens are 0, and what stands there changes
    nothing. Trainable tokens that are all equal, or a single one, become 0 (their value with ``shift_mean=False``); without any the output is
    all 0. One NaN at a trainable token makes the statistics, and so all trainable outputs, NaN. Statistics are merged in float64 in a fixed
    order: the same bits on each run, the same up to rounding for any layout of the tokens.

    Args:
        x: any shape, float32, float64, bfloat16 or float16.
        mask: nonzero at trainable tokens, any dtype, the shape of `x`; None: all are.
        shift_mean: False adds the mean again after scaling.
        scale: False only subtracts the mean.
        unbiased: divide squared deviations by count - 1, not by count.
        eps: what keeps the divisor from 0, >= 0.
        eps_at: where it enters. "inside": sqrt(variance + eps). "outside": sqrt(variance) + eps. "floor": sqrt(max(variance, eps)).
        process_group: statistics are those of all its ranks (`torch.distributed.group.WORLD`: of all there are). Every rank must call, one
            without tokens too, and each gets the same statistics, bit for bit. None: of this process alone.
        allow_whitened: take an `x` that is the output of an earlier whitening. Otherwise that raises: whitened twice is a mistake. Not
            detected: a copy, or what was changed in place since; nothing under torch.compile.
        dtype: of the output; None: that of `x`. Arithmetic is in float64.
        backend: as in `gae`.
        validate: "shapes", or "full" to also raise where statistics are not finite (reads the device; all ranks raise together).

    Returns:
        The whitened numbers, in the shape of `x`, detached from autograd.

    Raises:
        InputError: an argument is wrong, or `x` was whitened before.
        BackendError: the backend cannot run here.

    Chan, Golub & LeVeque 1979, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances.
    """
    whitening = Whitening(shift_mean, scale, unbiased, eps, eps_at)
    whitening.check("whiten")
    check_switch("whiten", "allow_whitened", allow_whitened)
    check_option("whiten", "validate", validate, ("shapes", "full"))
    check_dtype("whiten", dtype)
    check_floats("whiten", "x", x)
    check_process_group("whiten", process_group)
    if not allow_whitened:
        whitened.refuse("whiten", "x", x, ", or pass allow_whitened=True if twice is what you mean")
    found = statistics(x, mask, process_group=process_group, backend=backend)
    if validate == "full" and not bool(found.isfinite().all()):
        raise InputError(_not_finite(x, mask))
    result = apply(x, mask, found, whitening, dtype=dtype, backend=backend)
    if scale:
        whitened.remember(result)
    return result


def statistics(
    x: Tensor, mask: Tensor | None = None, *, process_group: ProcessGroup | None = None, backend: str = "auto", op: str = "whiten"
) -> Tensor:
    """Count, mean and M2 of the trainable tokens, float64 [3] on the device of `x`, which is not waited for.

    A `process_group` of gloo waits for it; see `rlhf_scan.ranks`. Arguments as in `whiten`; `op` is whom messages speak for.
    """
    chosen = _backend(op, x, backend)
    found = _run("statistics", (_flat(x), _flat_mask(op, x, mask)), chosen)
    return over_ranks(found, process_group, backend=backend)


def over_ranks(found: Tensor, process_group: ProcessGroup | None, *, backend: str = "auto") -> Tensor:
    """The statistics of all ranks, of which each has `found` its own."""
    return found if process_group is None else merge(gathered(found, process_group), backend=backend)


def merge(parts: Tensor, *, backend: str = "auto") -> Tensor:
    """The statistics of all tokens that `parts`, float64 [P, 3], stand for (Chan et al. 1979); in the order of the parts."""
    chosen = choose_backend(backend, parts.device)
    return _run("merge_statistics", (parts,), chosen)


def apply(
    x: Tensor,
    mask: Tensor | None,
    statistics: Tensor,
    whitening: Whitening,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
    op: str = "whiten",
) -> Tensor:
    """`x` whitened with given statistics, in the shape of `x`; 0 at masked tokens."""
    result = _run(
        "whiten",
        (_flat(x), _flat_mask(op, x, mask), statistics),
        whitening.shift_mean,
        whitening.scale,
        whitening.unbiased,
        float(whitening.eps),
        whitening.eps_at,
        dtype or x.dtype,
        _backend(op, x, backend),
    )
    return result.reshape(x.shape)


def _backend(op: str, x: Tensor, backend: str) -> str:
    check_option(op, "backend", backend, BACKENDS)
    return choose_backend(backend, x.device, op)


def _flat(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1)


def _flat_mask(op: str, x: Tensor, mask: Tensor | None) -> Tensor | None:
    return None if mask is None else _flat(check_mask(op, "mask", mask, "x", x))


def _not_finite(x: Tensor, mask: Tensor | None) -> str:
    """Where the first number is that spoils the statistics."""
    bad = ~x.detach().isfinite()
    bad = (bad if mask is None else bad & (mask != 0)).reshape(x.shape)
    at = bad.nonzero()
    if not len(at):
        return "whiten: x must be finite at trainable tokens, got a number that is not, on another rank; mask that token or mend it"
    index = at[0].tolist()
    return f"whiten: x must be finite at trainable tokens, got {float(x[tuple(index)])} at {index}; mask that token or mend it"


@cache
def _module(backend: str) -> WhiteningBackend:
    return cast(WhiteningBackend, importlib.import_module(f".backends.{backend}_whiten", __package__))


def _run(name: str, tensors: tuple[Tensor | None, ...], *options: Any) -> Tensor:
    return ops.op(name, _OPS[name], *tensors)(*tensors, *options)


_library = torch.library.Library("rlhf_scan", "FRAGMENT")
for _schema in (
    "statistics(Tensor x, Tensor? mask, str backend) -> Tensor",
    "merge_statistics(Tensor parts, str backend) -> Tensor",
    "whiten(Tensor x, Tensor? mask, Tensor statistics, bool shift_mean, bool scale, bool unbiased, float eps, str eps_at, ScalarType dtype, "
    "str backend) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _statistics_op(x: Tensor, mask: Tensor | None, backend: str) -> Tensor:
    return _module(backend).statistics(x, mask) if x.numel() else x.new_zeros(3, dtype=torch.float64)


def _merge_op(parts: Tensor, backend: str) -> Tensor:
    return _module(backend).merge(parts) if parts.numel() else parts.new_zeros(3)


def _whiten_op(
    x: Tensor,
    mask: Tensor | None,
    statistics: Tensor,
    shift_mean: bool,
    scale: bool,
    unbiased: bool,
    eps: float,
    eps_at: str,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    if not x.numel():
        return torch.empty_like(x, dtype=dtype)
    return _module(backend).apply(x, mask, statistics, Whitening(shift_mean, scale, unbiased, eps, eps_at), dtype)


_OPS: dict[str, Callable[..., Tensor]] = {"statistics": _statistics_op, "merge_statistics": _merge_op, "whiten": _whiten_op}
for _name, _implementation in _OPS.items():
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
torch.library.register_fake("rlhf_scan::statistics", lambda x, *_: x.new_empty(3, dtype=torch.float64), lib=_library)
torch.library.register_fake("rlhf_scan::merge_statistics", lambda parts, *_: parts.new_empty(3), lib=_library)
torch.library.register_fake("rlhf_scan::whiten", lambda x, *rest: torch.empty_like(x, dtype=rest[-2]), lib=_library)
