"""flashgen: a compiler for attention kernels.

An attention variant written as a few lines of Python becomes a readable, verified CUDA kernel::

    import flashgen as fg

    def mask_mod(b, h, q, k):
        return k <= q

    spec = fg.AttentionSpec(mask_mod=mask_mod, head_dim=64)
    print(fg.plan(spec, arch="sm_80"))
    out = fg.attention(spec)(q, k, v)

Importing the package does nothing: each name is loaded when it is first used, so that neither torch
nor CUDA is loaded before something needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashgen.version import __version__

if TYPE_CHECKING:
    from flashgen.config import debug
    from flashgen.errors import (
        CertificateError,
        CompileError,
        EmulatorError,
        FlashgenError,
        InputError,
        LaunchError,
        PlanError,
        RenderError,
        SpecError,
    )
    from flashgen.expr import (
        Scalar,
        Tensor,
        batch,
        cos,
        exp,
        floor,
        heads,
        log,
        log2,
        maximum,
        minimum,
        seq_k,
        seq_q,
        sigmoid,
        sin,
        sqrt,
        tanh,
        where,
    )
    from flashgen.expr import absolute as abs
    from flashgen.flex import flex_attention
    from flashgen.ops import Layout, attention
    from flashgen.pipeline import build, emit
    from flashgen.plan import plan
    from flashgen.sparse import BlockSparse
    from flashgen.spec import AttentionSpec, load

__all__ = [
    "AttentionSpec",
    "BlockSparse",
    "CertificateError",
    "CompileError",
    "EmulatorError",
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
    "attention",
    "batch",
    "build",
    "cos",
    "debug",
    "emit",
    "exp",
    "flex_attention",
    "floor",
    "heads",
    "load",
    "log",
    "log2",
    "maximum",
    "minimum",
    "plan",
    "seq_k",
    "seq_q",
    "sigmoid",
    "sin",
    "sqrt",
    "tanh",
    "where",
]

# Where a name is defined, as module or module:name; all others are in expr.
_HOME = {
    "AttentionSpec": "spec",
    "BlockSparse": "sparse",
    "Layout": "ops",
    "abs": "expr:absolute",
    "attention": "ops",
    "build": "pipeline",
    "debug": "config",
    "emit": "pipeline",
    "flex_attention": "flex",
    "load": "spec",
    "plan": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    home = _HOME.get(name, "errors" if name.endswith("Error") else "expr")
    module, _, attribute = home.partition(":")
    value = getattr(importlib.import_module(f"flashgen.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
