"""Operations of ATen as simpler ones, where torch has no decomposition that consists of rules.

A rule takes the operands as traced tensors, and applies operations of torch to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The products of matrices, of which a kernel computes the elements that a mod reads."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def _variance(x: Tensor, dims: list[int], correction: float) -> Tensor:
    count = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, keepdim=True) / count
    squares: Tensor = (x - mean).square()
    return squares.sum(dims) / max(count - correction, 0)


def _deviation(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    """The root of the variance; as in torch, its derivative at 0 is 0."""
    variance = torch.var(x, dim, correction=correction, keepdim=keepdim)
    return torch.where(variance == 0, 0.0, torch.sqrt(variance))


def _norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    """The norm of vectors; as in torch, its derivative at 0 is 0, where a root has none."""
    x = x if dtype is None else x.to(dtype)
    axes = list(dim or range(x.dim()))
    size, of_zero = x.abs(), 0.0 if ord > 0 else math.inf
    if ord == 0:
        return (x != 0).sum(axes, keepdim=keepdim).to(x.dtype)
    if math.isinf(ord):
        return size.amax(axes, keepdim) if ord > 0 else size.amin(axes, keepdim)
    if ord == 1 or all(x.shape[axis] == 1 for axis in axes):
        return size.sum(axes, keepdim=keepdim)
    power = x * x if ord == 2 else torch.pow(size, ord)
    if ord < 1:
        power = torch.where(x == 0, of_zero, power)
    total = power.sum(axes, keepdim=keepdim)
    root = torch.sqrt(total) if ord == 2 else torch.pow(total, 1 / ord)
    return torch.where(total == 0, of_zero, root)


def _times_log(log: Callable[[Tensor], Tensor], pole: int) -> Callable[..., Tensor]:
    """x log(y), which is 0 where x is and log(y) is infinite or NaN, unless y is NaN."""

    def rule(x: Tensor, y: Tensor) -> Tensor:
        return torch.where((x == 0) & ((y <= pole) | (y == math.inf)), 0.0, x * log(y))

    return rule


def _index_of_extremum(name: str) -> Callable[..., Tensor]:
    """The index of the first element that is the extremum, or NaN."""

    def rule(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None or not x.shape:
            shape = [1] * x.dim() if keepdim else []
            return rule(x.reshape(-1), 0).reshape(shape)
        shape = [1] * x.dim()
        shape[dim] = length = x.shape[dim]
        indices = x.tracer.constant(torch.arange(length, device=x.device).reshape(shape))
        is_extremum = (x == getattr(x, name)(dim, keepdim=True)) | (x != x)
        return torch.where(is_extremum, indices, length).amin(dim, keepdim)

    return rule


def _extremum(name: str) -> Callable[..., Any]:
    def rule(x: Tensor, *axis: Any, **named: Any) -> Any:
        values = getattr(x, f"a{name}")(*axis, **named)
        return (values, getattr(x, f"arg{name}")(*axis, **named)) if axis or named else values

    return rule


def _padded(x: Tensor, pad: list[int], value: float = 0) -> Tensor:
    """The tensor between constants, from the last dimension on; a negative width takes away."""
    for first in range(0, len(pad), 2):
        dim, widths = x.dim() - 1 - first // 2, pad[first : first + 2]
        cut = [max(-width, 0) for width in widths]
        x = x.narrow(dim, cut[0], x.shape[dim] - sum(cut))
        shape = list(x.shape)
        ends = [x.new_full([*shape[:dim], max(w, 0), *shape[dim + 1 :]], value) for w in widths]
        x = torch.cat([ends[0], x, ends[1]], dim)
    return x


def _sorted(x: Any, dim: int = -1, descending: bool = False, **_: Any) -> tuple[Tensor, Tensor]:
    """The rank of an element is the number of elements before it; NaN comes last."""
    if not x.shape:
        return x, torch.zeros_like(x, dtype=torch.int64)
    dim %= x.dim()
    length = x.shape[dim]
    shape = [length if d == dim else 1 for d in range(x.dim() + 1)]
    positions = x.tracer.constant(torch.arange(length, device=x.device).reshape(shape))
    other_positions = positions.transpose(dim, dim + 1)
    a, b = x.unsqueeze(dim + 1), x.unsqueeze(dim)
    less, greater = ~(b >= a) & (b == b), ~(b <= a) & (a == a)
    first, last = (greater, less) if descending else (less, greater)
    ranks = torch.where(other_positions < positions, ~last, first).sum(dim + 1, keepdim=True)
    order = torch.where(ranks == other_positions, positions, 0).sum(dim)
    return x.gather(dim, order), order


def _largest(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, ...]:
    in_order = _sorted(x, dim, largest)
    return tuple(part.narrow(dim, 0, k) if x.shape else part for part in in_order)


def _element_of_rank(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, ...]:
    elements = [part.narrow(dim, k - 1, 1) if x.shape else part for part in _sorted(x, dim)]
    return tuple(part if keepdim or not x.shape else part.squeeze(dim) for part in elements)


def _median(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower one of two in the middle; of elements with NaN among them the first NaN."""
    if dim is None:
        return _median(x.reshape(-1), 0)[0]
    length = x.shape[dim] if x.shape else 1
    value, index = _element_of_rank(x, (length + 1) // 2, dim, keepdim)
    if not x.dtype.is_floating_point:
        return value, index
    unknown = (x != x).any(dim, keepdim)
    first = _index_of_extremum("amax")(x, dim, keepdim)
    return torch.where(unknown, math.nan, value), torch.where(unknown, first, index)


def _up_to(x: Any, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of all elements along a further dimension, their positions, and which a row contains."""
    shape = [x.shape[dim] if d == dim else 1 for d in range(x.dim() + 1)]
    ends = x.tracer.constant(torch.arange(x.shape[dim], device=x.device).reshape(shape))
    positions = ends.transpose(dim, dim + 1)
    return x.unsqueeze(dim), positions, positions <= ends


def _running(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The extremum of the elements up to each, and its last index or that of the last NaN."""

    def rule(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        if not x.shape:
            return x, torch.zeros_like(x, dtype=torch.int64)
        dim %= x.dim()
        rows, positions, contained = _up_to(x, dim)
        first = rows.narrow(dim + 1, 0, 1)
        extremum = getattr(torch.where(contained, rows, first), name)(dim + 1, keepdim=True)
        is_extremum = contained & ((rows == extremum) | (rows != rows))
        indices = torch.where(is_extremum, positions, 0).amax(dim + 1)
        return x.gather(dim, indices), indices

    return rule


def _running_log_sum(x: Tensor, dim: int) -> Tensor:
    if not x.shape:
        return x
    dim %= x.dim()
    rows, _, contained = _up_to(x, dim)
    return torch.where(contained, rows, -math.inf).logsumexp(dim + 1)


def _log_gamma(x: Tensor) -> Tensor:
    """Stirling's series of a large number, to which a product of the steps up to it leads."""
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    small = y < 8
    steps = math.prod((y + step for step in range(1, 7)), start=y)
    z = torch.where(small, y + 7, y)
    square = z * z
    series = (1 / 12 - (1 / 360 - 1 / (1260 * square)) / square) / z + math.log(2 * math.pi) / 2
    result = (z - 0.5) * torch.log(z) - z + series - torch.log(torch.where(small, steps, 1.0))
    result = torch.where(y == math.inf, y, result)
    distance = (x - torch.round(x)).abs()  # sin(pi x) of a large x would lose its digits
    other = math.log(math.pi) - torch.log(torch.sin(math.pi * distance)) - result
    return torch.where(reflected, torch.where(x == -math.inf, math.inf, other), result)


def _digamma(x: Tensor) -> Tensor:
    """The asymptotic series of a large number, to which a sum of the steps up to it leads."""
    reflected = x < 0.5
    y = torch.where(reflected, 1 - x, x)
    small = y < 8
    steps = sum((1 / (y + step) for step in range(1, 7)), start=1 / y)
    z = torch.where(small, y + 7, y)
    square = 1 / (z * z)
    series = torch.log(z) - 0.5 / z - square * (1 / 12 - square * (1 / 120 - square / 252))
    result = series - torch.where(small, steps, 0.0)
    distance = x - torch.round(x)  # tan(pi x) of a large x would lose its digits
    angle = math.pi * torch.where((distance == 0) & (x < 0), math.nan, distance)
    return torch.where(reflected, result - math.pi * torch.cos(angle) / torch.sin(angle), result)


def _inverse_error(x: Tensor) -> Tensor:
    """M. Giles, "Approximating the erfinv function", GPU Computing Gems, 2011: single precision."""
    w = -torch.log((1 - x) * (1 + x))

    def polynomial(w: Tensor, *factors: float) -> Tensor:
        value = torch.full_like(w, factors[0])
        for factor in factors[1:]:
            value = value * w + factor
        return value

    central = polynomial(w - 2.5, *_ERFINV_CENTRAL)
    tail = polynomial(torch.sqrt(w) - 3, *_ERFINV_TAIL)
    return torch.where(w == math.inf, x * w, torch.where(w < 5, central, tail) * x)


_ERFINV_CENTRAL = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_ERFINV_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)

RULES: dict[str, Callable[..., Any]] = {
    "aten::dot": lambda a, b: (a * b).sum(),
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::take": lambda x, index: torch.ops.aten.index.Tensor(x.reshape(-1), [index]),
    "aten::argmax": _index_of_extremum("amax"),
    "aten::argmin": _index_of_extremum("amin"),
    "aten::max": _extremum("max"),
    "aten::min": _extremum("min"),
    "aten::linalg_vector_norm": _norm,
    "aten::std": _deviation,
    "aten::std_mean": lambda x, dim=None, **how: (
        _deviation(x, dim, **how),
        torch.mean(x, dim, how.get("keepdim", False)),
    ),
    "aten::xlogy": _times_log(torch.log, 0),
    "aten::special_xlog1py": _times_log(torch.log1p, -1),
    "aten::constant_pad_nd": _padded,
    "aten::sort": _sorted,
    "aten::topk": _largest,
    "aten::kthvalue": _element_of_rank,
    "aten::median": _median,
    "aten::cummax": _running("amax"),
    "aten::cummin": _running("amin"),
    "aten::logcumsumexp": _running_log_sum,
    "aten::lgamma": _log_gamma,
    "aten::digamma": _digamma,
    "aten::erfinv": _inverse_error,
    "prims::erf_inv": _inverse_error,
    "prims::var": _variance,
}
"""The rule of each operation by its whole name; torch has checked the operands."""
