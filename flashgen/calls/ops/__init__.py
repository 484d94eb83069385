"""Attention as operators of PyTorch: `attention` makes one from a spec.

`append_kv` is an operator that writes to a paged cache. `run_forward` and `run_backward` run one
pass without autograd and report how it ran.
"""

from flashgen.calls.ops.api import Attention, attention
from flashgen.calls.ops.append import append_kv
from flashgen.calls.runtime.arguments.options import scalar_value
from flashgen.calls.runtime.block_layouts import Layout
from flashgen.calls.runtime.calls import check, run_backward, run_forward
from flashgen.calls.runtime.reports import BackwardRun, ForwardRun, Report

__all__ = [
    "Attention",
    "BackwardRun",
    "ForwardRun",
    "Layout",
    "Report",
    "append_kv",
    "attention",
    "check",
    "run_backward",
    "run_forward",
    "scalar_value",
]
