"""The kernel that merges partial results: the output and LSE of rows over several sets of keys."""

from __future__ import annotations

from flashgen.codegen.kernel import kernel
from flashgen.codegen.source import Source
from flashgen.language.spec import AttentionSpec
from flashgen.planner import Plan


def merge(spec: AttentionSpec, plan: Plan) -> Source:
    """The source of the merge kernel.

    Args:
        spec: only its head_dim_v and its dtype, that of the merged output, are read.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    lanes, loads = (int(plan.quantities[name]) for name in ("lanes", "loads"))
    vectors = plan.head_dim_v // 4
    return kernel(
        "common/merge.cu.j2",
        spec,
        plan,
        None,
        lanes=lanes,
        groups=plan.lane_groups,
        parts_at_once=loads // -(-vectors // lanes),
        uneven=vectors % lanes != 0,
    )
