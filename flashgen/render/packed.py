"""Packed sequences: what a kernel does first to work for one of them as if it were alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.render.source import Param

# Rows along q and along k, by the names of the tensors' fields in C++.
_ALONG_Q = ("q", "o", "dout", "dq")
_ALONG_K = ("k", "v", "dk", "dv")
# Contiguous rows along q, with so many numbers each.
_PER_ROW = {"lse": 1, "rows": 2}


@dataclass(frozen=True)
class Packed:
    """What the templates say of packed sequences.

    Attributes:
        axis, block: which axis' tiles blocks own, and the constant with a tile's length.
        views: C++ that moves the fields of ``p`` to a sequence's first rows.
    """

    axis: str
    block: str
    views: tuple[str, ...]

    @staticmethod
    def of(params: Iterable[Param], *, owns_keys: bool) -> Packed:
        fields = {param.declaration.rpartition(" ")[2].removesuffix(";") for param in params}
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
    """How a function that copies by TMA knows whose rows: a batch entry's, or a sequence's.

    Attributes:
        what: has the rows, in words.
        parameter: of the function.
        row, last: coordinates of the map, its second and its last.
    """

    what: str
    parameter: str
    row: str
    last: str


def of_tma(packed: bool) -> dict[str, object]:
    """C++ of what says whose queries and keys TMA copies."""
    fields: dict[str, object] = {f"of_{axis}": f"{axis}s" if packed else "b" for axis in "qk"}
    stretch = Whose("sequence", "const Stretch& of", "of.first + row", "of.end")
    return fields | {"whose": stretch if packed else Whose("tensor", "int b", "row", "b")}


def first_row(packed: bool, head: str) -> str:
    """C++ of where a head's rows begin in what has contiguous rows: LSE, and (LSE, delta)."""
    if packed:
        return f"(long long){head} * packed.seq_q"
    return f"((long long)b * p.heads_q + {head}) * p.seq_q"
