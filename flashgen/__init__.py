"""flashgen: a compiler for attention kernels.

It compiles an attention variant, written as a few lines of Python, to readable CUDA kernels, which
are compared with a float64 reference, and makes it a PyTorch operator::

    import flashgen as fg

    def mask_mod(b, h, q, k):
        return k <= q

    spec = fg.AttentionSpec(mask_mod=mask_mod, head_dim=64)
    print(fg.plan(spec, arch="sm_80"))
    out = fg.attention(spec)(q, k, v)

Importing the package loads neither PyTorch nor CUDA and reads no file: each name is imported when
it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashgen.version import __version__

if TYPE_CHECKING:
    from flashgen import distributed, emulator
    from flashgen.config import debug
    from flashgen.errors import (
        CertificateError,
        CompileError,
        EmulatorError,
        ExportError,
        FlashgenError,
        InputError,
        LaunchError,
        PlanError,
        RenderError,
        SpecError,
    )
    from flashgen.exported import load_export
    from flashgen.flex import flex_attention
    from flashgen.language.block_layout import BlockSparse
    from flashgen.language.mod_functions import absolute as abs
    from flashgen.language.mod_functions import (
        atan,
        atan2,
        clamp,
        cos,
        erf,
        erfc,
        exp,
        exp2,
        expm1,
        floor,
        isfinite,
        log,
        log1p,
        log2,
        maximum,
        minimum,
        popcount,
        round,
        rsqrt,
        sigmoid,
        sign,
        sin,
        sqrt,
        tanh,
        where,
    )
    from flashgen.language.scalar import Scalar, batch, heads, seq_k, seq_q
    from flashgen.language.spec import AttentionSpec
    from flashgen.language.spec_file import load
    from flashgen.language.tensor import Tensor
    from flashgen.ops import Layout, append_kv, attention
    from flashgen.pictures import visualize
    from flashgen.pipeline import build, emit
    from flashgen.planner import plan
    from flashgen.runtime.page_tables import page_table

__all__ = [
    "AttentionSpec",
    "BlockSparse",
    "CertificateError",
    "CompileError",
    "EmulatorError",
    "ExportError",
    "FlashgenError",
    "InputError",
    "LaunchError",
    "Layout",
    "PlanError",
    "RenderError",
    "Scalar",
    "SpecError",
    "Tensor",
    "__version__",
    "abs",
    "append_kv",
    "atan",
    "atan2",
    "attention",
    "batch",
    "build",
    "clamp",
    "cos",
    "debug",
    "distributed",
    "emit",
    "emulator",
    "erf",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "flex_attention",
    "floor",
    "heads",
    "isfinite",
    "load",
    "load_export",
    "log",
    "log1p",
    "log2",
    "maximum",
    "minimum",
    "page_table",
    "plan",
    "popcount",
    "round",
    "rsqrt",
    "seq_k",
    "seq_q",
    "sigmoid",
    "sign",
    "sin",
    "sqrt",
    "tanh",
    "visualize",
    "where",
]

# Where a name is defined, as module or module:name; all others are functions for mods.
_HOME = {
    "AttentionSpec": "language.spec",
    "BlockSparse": "language.block_layout",
    "Layout": "ops",
    "Scalar": "language.scalar",
    "Tensor": "language.tensor",
    "abs": "language.mod_functions:absolute",
    "append_kv": "ops",
    "attention": "ops",
    "batch": "language.scalar",
    "build": "pipeline",
    "debug": "config",
    "emit": "pipeline",
    "flex_attention": "flex",
    "heads": "language.scalar",
    "load": "language.spec_file",
    "load_export": "exported",
    "page_table": "runtime.page_tables",
    "plan": "planner",
    "seq_k": "language.scalar",
    "seq_q": "language.scalar",
    "visualize": "pictures",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    if name in ("distributed", "emulator"):  # the packages that are public names
        return importlib.import_module(f"flashgen.{name}")
    home = _HOME.get(name, "errors" if name.endswith("Error") else "language.mod_functions")
    module, _, attribute = home.partition(":")
    value = getattr(importlib.import_module(f"flashgen.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
