"""Compilation ahead of time: the kernels of a spec as files, for Python and for C."""

from flashgen.calls.export.collect import ExportRequest
from flashgen.calls.export.write import export

__all__ = ["ExportRequest", "export"]
