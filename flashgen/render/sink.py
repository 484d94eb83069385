"""The sink's part of emitted kernels: where its logit is read and where its gradient goes."""

from __future__ import annotations

from flashgen.expr import Tensor
from flashgen.render.source import Param
from flashgen.spec import AttentionSpec


def logit_of(sink: Tensor | None, head: str = "h") -> str | None:
    """C++ of the sink of a head; None without a sink."""
    if sink is None:
        return None
    return f"read_{sink.name}(p, {head})" if sink.dims else f"read_{sink.name}(p)"


def empty_row(spec: AttentionSpec) -> tuple[str, str]:
    """How the delta kernel tells a row without keys by its LSE, and why it has to.

    With a sink LSE of such a row is the sink, below which its scores lie: exp(S - LSE) is 0 there.
    But beside a sink below every score, as the lowest float is, it is infinite or NaN.
    """
    if spec.sink is None:
        why = (
            "A fully masked row has LSE = -inf. With +inf instead, exp(S - LSE) is 0 in all of it."
        )
        return "lse == __int_as_float(0xff800000)", why
    why = "LSE below every score: no key is kept. With +inf instead, exp(S - LSE) is 0."
    return "lse < -1e30f", why


def sums_of_sink() -> Param:
    """Where the delta kernel writes what each warp's rows give to the sink's gradient."""
    what = "[batch, heads_q, row tiles, WARPS]: sums over the rows of a warp"
    return Param("sink_sums", "pointer", "float* sink_sums;", what)
