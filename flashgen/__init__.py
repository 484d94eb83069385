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

from flashgen.version import __version__ as __version__

if TYPE_CHECKING:
    from flashgen import distributed as distributed
    from flashgen import emulator as emulator
    from flashgen.config import debug as debug
    from flashgen.errors import CertificateError as CertificateError
    from flashgen.errors import CompileError as CompileError
    from flashgen.errors import EmulatorError as EmulatorError
    from flashgen.errors import ExportError as ExportError
    from flashgen.errors import FlashgenError as FlashgenError
    from flashgen.errors import InputError as InputError
    from flashgen.errors import LaunchError as LaunchError
    from flashgen.errors import PlanError as PlanError
    from flashgen.errors import RenderError as RenderError
    from flashgen.errors import SpecError as SpecError
    from flashgen.exported import load_export as load_export
    from flashgen.flex import flex_attention as flex_attention
    from flashgen.language.block_layout import BlockSparse as BlockSparse
    from flashgen.language.mod_functions import abs as abs
    from flashgen.language.mod_functions import atan as atan
    from flashgen.language.mod_functions import atan2 as atan2
    from flashgen.language.mod_functions import clamp as clamp
    from flashgen.language.mod_functions import cos as cos
    from flashgen.language.mod_functions import erf as erf
    from flashgen.language.mod_functions import erfc as erfc
    from flashgen.language.mod_functions import exp as exp
    from flashgen.language.mod_functions import exp2 as exp2
    from flashgen.language.mod_functions import expm1 as expm1
    from flashgen.language.mod_functions import floor as floor
    from flashgen.language.mod_functions import isfinite as isfinite
    from flashgen.language.mod_functions import log as log
    from flashgen.language.mod_functions import log1p as log1p
    from flashgen.language.mod_functions import log2 as log2
    from flashgen.language.mod_functions import maximum as maximum
    from flashgen.language.mod_functions import minimum as minimum
    from flashgen.language.mod_functions import popcount as popcount
    from flashgen.language.mod_functions import round as round
    from flashgen.language.mod_functions import rsqrt as rsqrt
    from flashgen.language.mod_functions import sigmoid as sigmoid
    from flashgen.language.mod_functions import sign as sign
    from flashgen.language.mod_functions import sin as sin
    from flashgen.language.mod_functions import sqrt as sqrt
    from flashgen.language.mod_functions import tanh as tanh
    from flashgen.language.mod_functions import where as where
    from flashgen.language.scalar import Scalar as Scalar
    from flashgen.language.scalar import batch as batch
    from flashgen.language.scalar import heads as heads
    from flashgen.language.scalar import seq_k as seq_k
    from flashgen.language.scalar import seq_q as seq_q
    from flashgen.language.spec import AttentionSpec as AttentionSpec
    from flashgen.language.spec_file import load as load
    from flashgen.language.tensor import Tensor as Tensor
    from flashgen.ops import Layout as Layout
    from flashgen.ops import append_kv as append_kv
    from flashgen.ops import attention as attention
    from flashgen.pipeline import build as build
    from flashgen.pipeline import emit as emit
    from flashgen.planner import plan as plan
    from flashgen.runtime.page_tables import page_table as page_table
    from flashgen.views.visualize import visualize as visualize

# The public names by the module that defines them, or by "" where they are packages themselves. The
# imports above are the same, for type checkers.
_NAMES = {
    "": "distributed emulator",
    "config": "debug",
    "errors": "CertificateError CompileError EmulatorError ExportError FlashgenError InputError "
    "LaunchError PlanError RenderError SpecError",
    "exported": "load_export",
    "flex": "flex_attention",
    "language.block_layout": "BlockSparse",
    "language.mod_functions": "abs atan atan2 clamp cos erf erfc exp exp2 expm1 floor isfinite "
    "log log1p log2 maximum minimum popcount round rsqrt sigmoid sign sin sqrt tanh where",
    "language.scalar": "Scalar batch heads seq_k seq_q",
    "language.spec": "AttentionSpec",
    "language.spec_file": "load",
    "language.tensor": "Tensor",
    "ops": "Layout append_kv attention",
    "views.visualize": "visualize",
    "pipeline": "build emit",
    "planner": "plan",
    "runtime.page_tables": "page_table",
    "version": "__version__",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'flashgen' has no attribute {name!r}")
    module = _HOME[name]
    if not module:
        return importlib.import_module(f"flashgen.{name}")
    value = getattr(importlib.import_module(f"flashgen.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
