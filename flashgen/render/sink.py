"""The sink's part of emitted kernels: where its logit is read and where its gradient goes."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.expr import Tensor
from flashgen.render.source import Param

EMPTY_ROW = {
    "empty": "lse == __int_as_float(0xff800000)",
    "empty_why": "A fully masked row has LSE = -inf. With +inf instead, exp(S - LSE) is 0 in all of it.",
}
"""How the delta kernel tells a row without keys, and why it does."""

# Such a row has the sink for its LSE, below which its scores lie. Of a sink below every score, as
# the lowest finite number is, exp(S - LSE) would be infinite or NaN before it is masked.
EMPTY_ROW_WITH_SINK = {
    "empty": "lse < -1e30f",
    "empty_why": "LSE below every score: no key is kept. With +inf instead, exp(S - LSE) is 0.",
}


@dataclass(frozen=True)
class SinkCode:
    """C++ of a kernel that reads the sink.

    Attributes:
        name: of the tensor.
        logit: that of head h.
    """

    name: str
    logit: str

    @staticmethod
    def of(sink: Tensor) -> SinkCode:
        return SinkCode(sink.name, f"read_{sink.name}({', '.join(['p', *('h' for _ in sink.dims)])})")


def sums_of_sink() -> Param:
    """Where the delta kernel writes what each warp's rows give to the sink's gradient."""
    what = "[batch, heads_q, row tiles, WARPS]: sums over the rows of a warp"
    return Param("sink_sums", "pointer", "float* sink_sums;", what)
