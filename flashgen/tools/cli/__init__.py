"""The program ``flashgen``."""

from flashgen.tools.cli.program import app, main

__all__ = ["app", "main"]
