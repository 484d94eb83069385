"""flashgen: a compiler for attention kernels.

An attention variant written as a few lines of Python becomes a readable, verified CUDA kernel::

    import flashgen as fg

    def mask_mod(b, h, q, k):
        return k <= q

    spec = fg.AttentionSpec(mask_mod=mask_mod, head_dim=64)
    print(fg.plan(spec, arch="sm_80"))
    out = fg.attention(spec)(q, k, v)

Importing the package does nothing: each name is loaded when it is first used, so that neither torch nor
CUDA is needed before something needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashgen.version import __version__

if TYPE_CHECKING:
    from flashgen.expr import Scalar, batch, cos, exp, floor, heads, log, log2, maximum, minimum
    from flashgen.expr import absolute as abs
    from flashgen.expr import seq_k, seq_q, sigmoid, sin, sqrt, tanh, where
    from flashgen.ops import attention
    from flashgen.pipeline import build, emit
    from flashgen.plan import plan
    from flashgen.spec import AttentionSpec, load

_HOME = {
    "AttentionSpec": "spec",
    "load": "spec",
    "Scalar": "expr",
    "abs": "expr:absolute",
    **dict.fromkeys(
        "batch heads seq_q seq_k where minimum maximum exp log log2 sqrt tanh sigmoid sin cos "
        "floor".split(),
        "expr",
    ),
    "plan": "plan",
    "emit": "pipeline",
    "build": "pipeline",
    "attention": "ops",
    "FlashgenError": "errors",
    "SpecError": "errors",
    "PlanError": "errors",
    "RenderError": "errors",
    "CompileError": "errors",
    "LaunchError": "errors",
    "InputError": "errors",
    "EmulatorError": "errors",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    value = getattr(importlib.import_module(f"flashgen.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
