"""Kernels that were compiled ahead of time: the operator of an exported spec."""

from flashgen.calls.exported.program import ExportedAttention, load_export

__all__ = ["ExportedAttention", "load_export"]
