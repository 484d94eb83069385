"""Size and work of kernels whose mask or score is costly, counted from machine code.

    python benchmarks/costly.py [--arch sm_80] [--output results/costly.json] [NAME ...]

For each variant, code path and kernel: bytes of the emitted file and of the cubin, and instructions
per score in full and in mixed tiles (benchmarks/instructions.py). It needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flashgen as fg  # noqa: E402
from benchmarks.instructions import work_of  # noqa: E402
from flashgen.cli.generated import ARCHS  # noqa: E402
from flashgen.launch_facts import STREAMING_KERNELS  # noqa: E402
from flashgen.pipeline import Build, build, build_backward  # noqa: E402

SPECS = ("natten_2d", "block_diffusion", "document", "t5_bias", "relative_bias")


def fire(hidden: int = 8, **options: Any) -> fg.AttentionSpec:
    """FIRE: a learned network of one hidden layer, of the relative position.

    Source: Li et al., "Functional Interpolation for Relative Positions Improves Long Context
    Transformers", 2024.
    """
    slope, threshold = (fg.Tensor(n, (), "float32", grad=True) for n in ("slope", "threshold"))
    weight, bias = (fg.Tensor(n, (hidden,), "float32", grad=True) for n in ("weight", "bias"))
    output = fg.Tensor("output", ("heads", hidden), "float32", grad=True)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        longest = fg.maximum(q, fg.abs(threshold))
        place = fg.log(fg.abs(slope * (q - k)) + 1) / fg.log(fg.abs(slope * longest) + 1)
        layer = (fg.maximum(weight[i] * place + bias[i], 0) for i in range(hidden))
        return score + sum(output[h, i] * x for i, x in enumerate(layer))

    return fg.AttentionSpec(lambda b, h, q, k: k <= q, score_mod, name="fire", **options)


def spec_of(name: str, **changes: Any) -> fg.AttentionSpec:
    """A spec of specs/, or FIRE."""
    if name == "fire":
        return fire().replace(**changes)
    return fg.load(ROOT / "specs" / f"{name}.py").replace(**changes)


def kernels(spec: fg.AttentionSpec, arch: str) -> Iterator[Build]:
    """The kernels that compute scores, forward and backward."""
    yield build(spec, arch)
    for built in build_backward(spec, arch):
        if built.plan.kernel not in STREAMING_KERNELS:
            yield built


def entry_of(name: str, arch: str, built: Build) -> dict[str, Any]:
    work, used = work_of(built), built.binary.resources
    return {
        "variant": name,
        "arch": arch,
        "kernel": built.plan.kernel,
        "tile": [built.plan.block_q, built.plan.block_k],
        "source_bytes": len(built.source.text.encode()),
        "cubin_bytes": len(built.cubin),
        "full": round(work.per_score(work.full), 2),
        "mixed": round(work.per_score(work.full, work.mask), 2),
        "spilled_bytes": used.spill_store_bytes + used.spill_load_bytes + used.stack_bytes,
    }


def table_of(entries: list[dict[str, Any]]) -> Table:
    table = Table(title="kernels with costly masks and scores")
    for column in ("variant", "path", "kernel", "tile", ".cu B", "cubin B", "full", "mixed"):
        left = column in ("variant", "path", "kernel")
        table.add_column(column, justify="left" if left else "right")
    for entry in entries:
        table.add_row(
            entry["variant"],
            entry["arch"],
            entry["kernel"],
            "{} x {}".format(*entry["tile"]),
            f"{entry['source_bytes']:,}",
            f"{entry['cubin_bytes']:,}",
            f"{entry['full']:.2f}",
            f"{entry['mixed']:.2f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", metavar="NAME", help=f"{', '.join(SPECS)}, fire")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="both by default")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--output", type=Path, help="also write the entries as JSON")
    options = parser.parse_args()
    size = {"head_dim": options.head_dim, "head_dim_v": options.head_dim}
    entries = [
        entry_of(name, arch, built)
        for name in options.variants or (*SPECS, "fire")
        for arch in options.arch or ARCHS
        for built in kernels(spec_of(name, **size), arch)
    ]
    if options.output:
        options.output.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    Console(width=100).print(table_of(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
