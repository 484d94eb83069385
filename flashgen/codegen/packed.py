"""Packed sequences: how a kernel restricts its parameters to one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.codegen.source import Param

# Rows along q and along k, by the names of the tensors' fields in C++.
_ALONG_Q = ("q", "o", "dout", "dq")
_ALONG_K = ("k", "v", "dk", "dv")
# Fields with contiguous rows along q, and the floats of each row.
_PER_ROW = {"lse": 1, "rows": 2}


@dataclass(frozen=True)
class Packed:
    """The template fields of packed sequences.

    Attributes:
        axis, block: the axis whose tiles the blocks own, and the constant with a tile's length.
        views: C++ statements that move the pointers in ``p`` to the first rows of a sequence.
    """

    axis: str
    block: str
    views: tuple[str, ...]

    @staticmethod
    def of(params: Iterable[Param], *, owns_keys: bool) -> Packed:
        fields = {param.field for param in params}
        views = []
        for axis, names in (("q", _ALONG_Q), ("k", _ALONG_K)):
            for name in (name for name in names if name in fields):
                views.append(f"p.{name} += first_{axis} * p.{name}_stride_n;")
                views.append(f"p.{name}_stride_b = 0;")
        for name, count in _PER_ROW.items():
            if name in fields:
                views.append(
                    f"p.{name} += {count} * first_q;" if count > 1 else f"p.{name} += first_q;"
                )
        return Packed(*(("k", "BLOCK_K") if owns_keys else ("q", "BLOCK_Q")), tuple(views))


@dataclass(frozen=True)
class Whose:
    """How a TMA copy function addresses the rows of a batch entry or of a packed sequence.

    Attributes:
        what: the noun that comments use for the owner of the rows.
        parameter: the C++ parameter of the function.
        row, last: the second and the last coordinate of the tensor map.
    """

    what: str
    parameter: str
    row: str
    last: str


def of_tma(packed: bool) -> dict[str, object]:
    """Template fields for TMA copies: the arguments that select a batch entry or a sequence."""
    fields: dict[str, object] = {f"of_{axis}": f"{axis}s" if packed else "b" for axis in "qk"}
    stretch = Whose("sequence", "const Stretch& of", "of.first + row", "of.end")
    return fields | {"whose": stretch if packed else Whose("tensor", "int b", "row", "b")}


def first_row(packed: bool, head: str) -> str:
    """C++ of the first row of a head in the contiguous tensors LSE and (LSE, delta)."""
    if packed:
        return f"(long long){head} * packed.seq_q"
    return f"((long long)b * p.heads_q + {head}) * p.seq_q"
