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
    from flashgen.calls.exported import load_export as load_export
    from flashgen.calls.ops import Layout as Layout
    from flashgen.calls.ops import append_kv as append_kv
    from flashgen.calls.ops import attention as attention
    from flashgen.calls.runtime.page_tables import page_table as page_table
    from flashgen.frontends.flex import flex_attention as flex_attention
    from flashgen.kernels.pipeline import build as build
    from flashgen.kernels.pipeline import emit as emit
    from flashgen.kernels.visits.layout_path import plan as plan
    from flashgen.shared.aux_results import AuxOutput as AuxOutput
    from flashgen.shared.aux_results import AuxRequest as AuxRequest
    from flashgen.shared.config import batch_invariant_mode as batch_invariant_mode
    from flashgen.shared.config import debug as debug
    from flashgen.shared.config import set_batch_invariant_mode as set_batch_invariant_mode
    from flashgen.shared.errors import CertificateError as CertificateError
    from flashgen.shared.errors import CompileError as CompileError
    from flashgen.shared.errors import EmulatorError as EmulatorError
    from flashgen.shared.errors import ExportError as ExportError
    from flashgen.shared.errors import FlashgenError as FlashgenError
    from flashgen.shared.errors import InputError as InputError
    from flashgen.shared.errors import LaunchError as LaunchError
    from flashgen.shared.errors import PlanError as PlanError
    from flashgen.shared.errors import RenderError as RenderError
    from flashgen.shared.errors import SpecError as SpecError
    from flashgen.spec.language.block_layout import BlockSparse as BlockSparse
    from flashgen.spec.language.mod_functions import abs as abs
    from flashgen.spec.language.mod_functions import atan as atan
    from flashgen.spec.language.mod_functions import atan2 as atan2
    from flashgen.spec.language.mod_functions import clamp as clamp
    from flashgen.spec.language.mod_functions import cos as cos
    from flashgen.spec.language.mod_functions import erf as erf
    from flashgen.spec.language.mod_functions import erfc as erfc
    from flashgen.spec.language.mod_functions import exp as exp
    from flashgen.spec.language.mod_functions import exp2 as exp2
    from flashgen.spec.language.mod_functions import expm1 as expm1
    from flashgen.spec.language.mod_functions import floor as floor
    from flashgen.spec.language.mod_functions import isfinite as isfinite
    from flashgen.spec.language.mod_functions import log as log
    from flashgen.spec.language.mod_functions import log1p as log1p
    from flashgen.spec.language.mod_functions import log2 as log2
    from flashgen.spec.language.mod_functions import maximum as maximum
    from flashgen.spec.language.mod_functions import minimum as minimum
    from flashgen.spec.language.mod_functions import popcount as popcount
    from flashgen.spec.language.mod_functions import rand as rand
    from flashgen.spec.language.mod_functions import round as round
    from flashgen.spec.language.mod_functions import rsqrt as rsqrt
    from flashgen.spec.language.mod_functions import sigmoid as sigmoid
    from flashgen.spec.language.mod_functions import sign as sign
    from flashgen.spec.language.mod_functions import sin as sin
    from flashgen.spec.language.mod_functions import sqrt as sqrt
    from flashgen.spec.language.mod_functions import tanh as tanh
    from flashgen.spec.language.mod_functions import where as where
    from flashgen.spec.language.scalar import Scalar as Scalar
    from flashgen.spec.language.scalar import batch as batch
    from flashgen.spec.language.scalar import heads as heads
    from flashgen.spec.language.scalar import seq_k as seq_k
    from flashgen.spec.language.scalar import seq_q as seq_q
    from flashgen.spec.language.spec import AttentionSpec as AttentionSpec
    from flashgen.spec.language.spec_file import load as load
    from flashgen.spec.language.statistics import max_over_keys as max_over_keys
    from flashgen.spec.language.statistics import sum_over_keys as sum_over_keys
    from flashgen.spec.language.statistics import sum_over_queries as sum_over_queries
    from flashgen.spec.language.tensor import Tensor as Tensor
    from flashgen.tools.views.visualize import visualize as visualize

# The public names by the module that defines them, or by "" where they are packages themselves. The
# imports above are the same, for type checkers.
_NAMES = {
    "": "distributed emulator",
    "shared.aux_results": "AuxOutput AuxRequest",
    "shared.config": "batch_invariant_mode debug set_batch_invariant_mode",
    "shared.errors": "CertificateError CompileError EmulatorError ExportError FlashgenError "
    "InputError LaunchError PlanError RenderError SpecError",
    "calls.exported": "load_export",
    "frontends.flex": "flex_attention",
    "spec.language.block_layout": "BlockSparse",
    "spec.language.mod_functions": "abs atan atan2 clamp cos erf erfc exp exp2 expm1 floor "
    "isfinite log log1p log2 maximum minimum popcount rand round rsqrt sigmoid sign sin sqrt tanh "
    "where",
    "spec.language.scalar": "Scalar batch heads seq_k seq_q",
    "spec.language.spec": "AttentionSpec",
    "spec.language.spec_file": "load",
    "spec.language.statistics": "max_over_keys sum_over_keys sum_over_queries",
    "spec.language.tensor": "Tensor",
    "calls.ops": "Layout append_kv attention",
    "tools.views.visualize": "visualize",
    "kernels.pipeline": "build emit",
    "kernels.visits.layout_path": "plan",
    "calls.runtime.page_tables": "page_table",
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
