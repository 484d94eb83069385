"""Attention of a sequence that lies on several ranks: the public names of
`flashgen.frontends.distributed`.
"""

from flashgen.frontends.distributed import (
    Assignment,
    DistributedError,
    Forecast,
    attention,
    balance,
    forecast,
)

__all__ = ["Assignment", "DistributedError", "Forecast", "attention", "balance", "forecast"]
