"""The program ``flashgen``."""

from flashgen.cli.program import app, main

__all__ = ["app", "main"]
