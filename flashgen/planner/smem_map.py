"""The map of a kernel's dynamic shared memory: what lies at which offset."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.planner.kernel_plan import Plan

_TITLES = {
    "smem_q": "Q",
    "smem_k": "K",
    "smem_v": "V",
    "smem_do": "dO",
    "smem_rows": "LSE and delta",
    "smem_p": "P",
    "smem_ds": "dS",
    "smem_windows": "sums of learned elements",
}


@dataclass(frozen=True)
class SmemRegion:
    """A range of dynamic shared memory.

    Attributes:
        title: what it holds, as a person names it: "K", "dS", "mbarriers".
        offset, size: bytes.
    """

    title: str
    offset: int
    size: int


def smem_map(plan: Plan) -> tuple[SmemRegion, ...]:
    """The regions of a block's dynamic shared memory, in the order of their offsets.

    They cover all of `Plan.smem_bytes`; () for a kernel that has none. When its main loop is done,
    the forward kernel of the path sm_80 stages O over Q, K and V.
    """
    found, end = [], 0
    only = "a tile of dQ" if plan.kernel == "convert_dq" else "other"
    for name, size in plan.smem_parts or ((only, plan.smem_bytes),):
        title = _TITLES.get(name, name)
        if plan.kernel == "forward" and plan.stages > 1 and name in ("smem_k", "smem_v"):
            title += f" ({plan.stages} buffers)"
        if size:
            found.append(SmemRegion(title, end, size))
        end += size
    return tuple(found)
