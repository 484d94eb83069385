"""Plan + template -> Source: the emitted CUDA files.

Every decision is made here or earlier; the templates only arrange the result. The same inputs give
the same bytes: no timestamp, no path of a machine, everything in a fixed order.
"""

from __future__ import annotations

from flashgen.kernels.codegen.integer_ranges import beyond_int32
from flashgen.kernels.codegen.passes import emitted, walk_of_kernel
from flashgen.kernels.codegen.source import Param, Source
from flashgen.kernels.codegen.streaming import (
    add_rows,
    append_codes,
    append_kv,
    merge,
    minmax_table,
)

__all__ = [
    "Param",
    "Source",
    "add_rows",
    "append_codes",
    "append_kv",
    "beyond_int32",
    "emitted",
    "merge",
    "minmax_table",
    "walk_of_kernel",
]
