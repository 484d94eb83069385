"""The version of flashgen, the one place that says it."""

__version__ = "0.2.0"
