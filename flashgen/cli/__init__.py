"""The program ``flashgen``."""

from .program import app, main

__all__ = ["app", "main"]
