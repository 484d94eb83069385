"""The sink's part of emitted kernels: where its logit is read and where its gradient goes."""

from __future__ import annotations

from flashgen.codegen.source import Param
from flashgen.language import Tensor
from flashgen.language.spec import AttentionSpec


def logit_of(sink: Tensor | None, head: str = "h") -> str | None:
    """C++ of the sink's logit for a head; None without a sink."""
    if sink is None:
        return None
    return f"read_{sink.name}(p, {head})" if sink.dims else f"read_{sink.name}(p)"


def empty_row(spec: AttentionSpec) -> tuple[str, str]:
    """C++ of the condition by which the delta kernel detects a row without keys, and its comment.

    With a sink, the LSE of such a row is the sink's logit. Its masked scores lie below the logit,
    so that exp(S - LSE) is 0. With a logit as low as the masked scores, such as the lowest float,
    exp(S - LSE) would be infinite or NaN.
    """
    if spec.sink is None:
        why = "A fully masked row has LSE = -inf. With +inf instead, exp(S - LSE) is 0 in the row."
        return "lse == __int_as_float(0xff800000)", why
    why = "LSE below every score: no key is kept. With +inf instead, exp(S - LSE) is 0."
    return "lse < -1e30f", why


def sums_of_sink() -> Param:
    """The field for the buffer to which each warp of the delta kernel writes its sink gradient."""
    what = "[batch, heads_q, row tiles, WARPS]: sums over the rows of a warp"
    return Param("sink_sums", "pointer", "float* sink_sums;", what)
