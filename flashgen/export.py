"""Compilation ahead of time: the public names of `flashgen.calls.export`."""

from flashgen.calls.export import ExportRequest, export

__all__ = ["ExportRequest", "export"]
