"""The forms of wgmma that a kernel uses, and the panels of their operands in shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flashgen.planner import Plan
from flashgen.planner.models.panels_sm90 import panels_of_kernel


class Product(NamedTuple):
    """One form of wgmma, on accumulators ``float d[columns / 8][4]``.

    Attributes:
        name: the name of the function.
        columns: the columns of the product, the instruction's n.
        from_registers: whether A is in four registers instead of shared memory.
    """

    name: str
    columns: int
    from_registers: bool


def products_of(plan: Plan, shapes: Iterable[tuple[str, int]]) -> list[Product]:
    """The products of a kernel: one for each name and number of columns in ``shapes``."""
    return [
        Product(name, columns, name == "multiply_columns" and plan.column_warps == 1)
        for name, columns in sorted(set(shapes))
    ]


def panels_of_plan(plan: Plan) -> dict[str, int]:
    """Template fields: the width of the shared-memory panels of each of the kernel's tiles."""
    sizes = (plan.head_dim, plan.head_dim_v, plan.column_warps)
    (panel, panels), (panel_v, panels_v) = panels_of_kernel(plan.kernel, *sizes)
    return {"panel": panel, "panels": panels, "panel_v": panel_v, "panels_v": panels_v}
