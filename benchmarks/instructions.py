"""Work per score: SASS instructions of the forward's main loop, per thread and score element.

    python benchmarks/instructions.py [--head-dim 128] [--dtype float16] [specs/causal.py ...]

Static counts times 32 lanes, over the elements of a warp's tile. "full" is what every tile runs,
with the copy of the next K tile; "mixed" adds the mask. The rescaling of O is a rare branch and is
listed by itself. A Triton kernel has 16.9 / 25.2 and FlexAttention's 18.5 / 23.3 at 128 x 64 tiles,
8 warps, d = 128.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from sass import main_loop

import flashgen as fg

ROOT = Path(__file__).resolve().parent.parent


def is_prefetch(ops: Counter[str]) -> bool:
    return ops["LDGSTS"] > 0


def is_rescale(ops: Counter[str]) -> bool:
    return ops["SHFL"] > 0 or ops["FMUL"] > 40


def is_mask(ops: Counter[str]) -> bool:
    return not is_prefetch(ops) and not is_rescale(ops)


def row(path: Path, head_dim: int, dtype: str, arch: str) -> list[str]:
    spec = fg.load(path).replace(head_dim=head_dim, dtype=dtype)
    built = fg.build(spec, arch)
    plan = built.plan
    loop = main_loop(built.cubin)
    per = 32 * plan.warps / (plan.block_q * plan.block_k)
    full = len(loop.always) + loop.matching(is_prefetch)
    mixed = full + loop.matching(is_mask)
    return [
        path.stem,
        f"{plan.block_q} x {plan.block_k}, {plan.warps} warps",
        f"{full * per:.2f}",
        f"{mixed * per:.2f}",
        f"{loop.matching(is_rescale) * per:.2f}",
        str(sum(i.base == "HMMA" for i in loop.always)),
        str(loop.inner_loops),
        str(built.binary.resources.registers),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("specs", nargs="*", type=Path)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--arch", default="sm_80")
    args = parser.parse_args()
    table = Table(title=f"instructions per score, {args.dtype}, d = {args.head_dim}, {args.arch}")
    for column in ("spec", "tile", "full", "mixed", "rescale", "HMMA", "inner loops", "registers"):
        table.add_column(column, justify="left" if column in ("spec", "tile") else "right")
    for path in args.specs or sorted((ROOT / "specs").glob("*.py")):
        table.add_row(*row(path, args.head_dim, args.dtype, args.arch))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
