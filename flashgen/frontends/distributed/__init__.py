"""Context parallelism: attention of a sequence whose positions lie on several ranks.

::

    out = flashgen.distributed.attention(op, q, k, v, method="ring", shard="head_tail")

Each rank of a torch.distributed group has the rows of its positions. Every spec works that reads
positions, because a call on a part sees global positions. Only chunks that the mask reaches travel.
"""

from __future__ import annotations

from flashgen.frontends.distributed.api import attention
from flashgen.frontends.distributed.balance import Assignment, balance
from flashgen.frontends.distributed.exchange import DistributedError
from flashgen.frontends.distributed.forecast import Forecast, forecast

__all__ = ["Assignment", "DistributedError", "Forecast", "attention", "balance", "forecast"]
