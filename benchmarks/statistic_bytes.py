"""Bytes of memory that results beside the output move, against eager attention, by formula.

    python benchmarks/statistic_bytes.py

A row for each result: a call with that request alone, for one head of 8,192 queries and keys with
64 dimensions. The kernels' bytes are those of `Traffic.compulsory`, each operand and result once,
with the rows that kernels of statistics read besides; K and V of a head stay in L2. Those of eager
attention are a lower bound: the scores are written once and read once, in the dtype of q.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flashgen as fg  # noqa: E402
from flashgen.kernels.planner.traffic import forward_traffic  # noqa: E402
from flashgen.shared.signature import ROWS  # noqa: E402
from flashgen.spec.language.signature import returning_maxima, with_columns  # noqa: E402
from flashgen.spec.language.statistic_specs import statistic_spec  # noqa: E402

LENGTH, HEAD_DIM, ARCH = 8_192, 64, "sm_90a"
BLOCK = 64
ROW_BYTES = 4


class StatisticBytes(NamedTuple):
    """The bytes of a call with one result beside the output."""

    name: str
    kernels: int
    bytes: int
    eager: int

    @property
    def share(self) -> float:
        return self.bytes / self.eager


def statistic_bytes() -> Iterator[StatisticBytes]:
    """Each result's bytes, by the plans of the kernels of its call."""
    spec = fg.AttentionSpec(head_dim=HEAD_DIM, dtype="bfloat16", name="full")
    columns = LENGTH // BLOCK
    calls = {
        "lse": (spec,),
        "max_scores": (returning_maxima(spec),),
        "entropy": (spec, statistic_spec(spec, "entropy")),
        "key_mass": (spec, statistic_spec(spec, "key_mass")),
        "block_mass": (spec, with_columns(statistic_spec(spec, "block_mass"), columns)),
    }
    eager = 2 * LENGTH * LENGTH * 2
    # V of block_mass is made for the call.
    copied = {"block_mass": LENGTH * columns * 2}
    for name, specs in calls.items():
        total = sum(map(_bytes, specs)) + copied.get(name, 0)
        yield StatisticBytes(name, len(specs), total, eager)


def _bytes(spec: fg.AttentionSpec) -> int:
    traffic = forward_traffic(fg.plan(spec, ARCH), 1, 1, 1, LENGTH, LENGTH).compulsory
    return traffic + ROW_BYTES * LENGTH * sum(tensor.name in ROWS for tensor in spec.tensors)


def main() -> None:
    print(f"| result | kernels | bytes | eager: {LENGTH:,} x {LENGTH:,} scores | share |")
    print("| --- | --- | --- | --- | --- |")
    for statistic in statistic_bytes():
        share = f"{100 * statistic.share:.1f} %"
        print(
            f"| `{statistic.name}` | {statistic.kernels} | {statistic.bytes:,} | "
            f"{statistic.eager:,} | {share} |"
        )


if __name__ == "__main__":
    main()
