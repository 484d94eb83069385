"""The map of a kernel's dynamic shared memory: what lies at which offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.planner.kernel_plan import Plan
from flashgen.planner.plan_of_tile import sizes_of_tiles

_TITLES = {
    "smem_q": "Q",
    "smem_k": "K",
    "smem_v": "V",
    "smem_do": "dO",
    "smem_rows": "LSE and delta",
    "smem_p": "P",
    "smem_ds": "dS",
    "smem_windows": "sums of learned elements",
    "sums": "sums of dQ",
    "barriers": "mbarriers",
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
    for title, size in _sizes(plan):
        if size > 0:
            found.append(SmemRegion(title, end, size))
        end += size
    if end < plan.smem_bytes:
        found.append(SmemRegion("other", end, plan.smem_bytes - end))
    return tuple(found)


def _sizes(plan: Plan) -> Iterator[tuple[str, int]]:
    if plan.streams:
        yield ("a tile of dQ" if plan.kernel == "convert_dq" else "other"), plan.smem_bytes
        return
    if plan.kernel != "forward":
        for name, size in sizes_of_tiles(plan.path, plan.kernel, plan.quantities).items():
            yield _TITLES[name], size
        return
    depth = "depth" if plan.path == "sm_90a" else "d_qk"
    depth_v = "depth_v" if plan.path == "sm_90a" else "d_v"
    at, buffers = plan.quantities, f" ({plan.stages} buffers)" if plan.stages > 1 else ""
    of_q = int(at["e"] * plan.block_q * at[depth])
    of_v = int(plan.stages * at["e"] * plan.block_k * at[depth_v])
    yield "Q", of_q
    yield "O's end", plan.smem_k - of_q
    yield f"K{buffers}", plan.smem_v - plan.smem_k
    yield f"V{buffers}", of_v
    yield "mbarriers and work tiles", plan.smem_bytes - plan.smem_v - of_v
