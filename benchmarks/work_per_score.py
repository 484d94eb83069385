"""Work per score of the Hopper kernels against FlashAttention-3 and 4, counted, not timed.

    python benchmarks/work_per_score.py
    python benchmarks/work_per_score.py --weights

Compiles each variant at each head dim for sm_90a in bfloat16, counts the instructions of the
consumers' main loop by class (benchmarks/instructions.py) and writes
benchmarks/results/work_per_score.json. Exits 1 when a target is missed, a kernel spills or the
compiler printed a warning.

The rivals' figures are counts of the same kind, of the main loops of their compiled kernels:
FlashAttention-3 (hopper/, assembled by ptxas 13.0) and FlashAttention-4 (its CuTe DSL kernels for
sm_90, ptxas 13.4). Their forward kernels rescale O in every tile, which their figures include;
flashgen's kernels rescale only where a row maximum exceeds the threshold, which has a column of its
own. Their backward kernels compare each key with the length, and all but one have no separate loop
for unmasked tiles.

With --weights it counts kernels of other weights than the softmax's instead, on both code paths, in
the tiles of a softmax, and writes benchmarks/results/work_of_weights.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import flashgen as fg  # noqa: E402
from benchmarks.instructions import Work, work_of  # noqa: E402
from flashgen.kernels.compile.nvrtc import version  # noqa: E402
from flashgen.kernels.pipeline import Build, build, build_backward  # noqa: E402
from flashgen.kernels.planner import Tile  # noqa: E402
from flashgen.kernels.planner.models.spec_terms import score_instructions  # noqa: E402

ARCH, DTYPE = "sm_90a", "bfloat16"
HEAD_DIMS = (64, 96, 128, 192, 256)
RECORD = ROOT / "benchmarks" / "results" / "work_per_score.json"


@dataclass(frozen=True)
class Rival:
    """Thread-instructions per score element of its main loops."""

    name: str
    head_dim: int
    full: float  # without a mask
    unmasked: float | None  # causal, tiles below the diagonal
    mixed: float  # causal, tiles on it
    backward: bool = False


RIVALS = (
    Rival("FlashAttention-3", 64, 6.44, 6.52, 8.80),
    Rival("FlashAttention-4", 64, 6.58, 6.70, 8.25),
    Rival("FlashAttention-3", 128, 6.59, 7.11, 9.41),
    Rival("FlashAttention-4", 128, 7.03, 7.31, 8.72),
    Rival("FlashAttention-3", 64, 11.02, 10.45, 12.12, backward=True),
    Rival("FlashAttention-4", 64, 10.11, None, 11.17, backward=True),
    Rival("FlashAttention-3", 128, 12.65, None, 15.06, backward=True),
    Rival("FlashAttention-4", 128, 11.47, None, 13.62, backward=True),
)


def best_rival(head_dim: int, loop: str, *, backward: bool = False) -> float | None:
    """The least work of a rival: ``loop`` is "full", "unmasked" or "mixed"."""
    alike = [r for r in RIVALS if (r.head_dim, r.backward) == (head_dim, backward)]
    works = [getattr(rival, loop) for rival in alike]
    return min((work for work in works if work is not None), default=None)


@dataclass(frozen=True)
class Variant:
    name: str
    spec: str  # a file of specs/
    mask: str | None = None  # another, whose mask it takes
    dropout: bool = False
    backward: bool = False
    tile: Tile | None = None  # instead of the plan's
    head_dims: tuple[int, ...] = HEAD_DIMS

    def built(self, head_dim: int) -> Build:
        """The forward kernel, or the kernel that computes dK and dV (and dQ where it is fused)."""
        spec = _loaded(self.spec).replace(head_dim=head_dim, head_dim_v=head_dim, dtype=DTYPE)
        if self.mask is not None:
            spec = spec.replace(mask_mod=_loaded(self.mask).mask_mod)
        spec = spec.replace(dropout=self.dropout)
        if not self.backward:
            return build(spec, ARCH, tile=self.tile)
        tiles = {} if self.tile is None else {"fused": self.tile}
        kernels = build_backward(spec, ARCH, tiles=tiles)
        (built,) = (kernel for kernel in kernels if kernel.plan.kernel in ("dkdv", "fused"))
        return built


def _loaded(name: str) -> fg.AttentionSpec:
    return fg.load(ROOT / "specs" / f"{name}.py")


# At head dim 128 the tile of the plan has steps of 80 keys, and of 64 queries in the backward pass:
# fewer scores share the instructions of a step. The code is compared with the rivals' in the tiles
# that these have: FlashAttention-3's 128 x 176, and 80 x 128 of both.
SAME_TILE, SAME_TILE_BACKWARD = ", 128 x 176", ", 80 x 128"
_OF_RIVALS: dict[str, Any] = {"tile": Tile(176, 8, 1, 1), "head_dims": (128,)}
_OF_RIVALS_BACKWARD = _OF_RIVALS | {"tile": Tile(80, 8, 1, 1), "backward": True}

VARIANTS = (
    Variant("full", "full"),
    Variant(f"full{SAME_TILE}", "full", **_OF_RIVALS),
    Variant("causal", "causal"),
    Variant(f"causal{SAME_TILE}", "causal", **_OF_RIVALS),
    Variant("softcap, causal", "softcap", "causal"),
    Variant("ALiBi, causal", "alibi", "causal"),
    Variant("dropout", "full", dropout=True),
    Variant("dropout, causal", "causal", dropout=True),
    Variant("sliding window", "sliding_window"),
    Variant("documents", "document"),
    Variant("backward, full", "full", backward=True),
    Variant(f"backward, full{SAME_TILE_BACKWARD}", "full", **_OF_RIVALS_BACKWARD),
    Variant("backward, causal", "causal", backward=True),
    Variant(f"backward, causal{SAME_TILE_BACKWARD}", "causal", **_OF_RIVALS_BACKWARD),
    Variant("backward, softcap, causal", "softcap", "causal", backward=True),
    Variant("backward, ALiBi, causal", "alibi", "causal", backward=True),
    Variant("backward, dropout, causal", "causal", dropout=True, backward=True),
)


def record_of(variant: Variant, head_dim: int, built: Build, work: Work) -> dict[str, Any]:
    """One kernel's entry: instructions per score, and the resources of the kernel."""
    plan, used = built.plan, built.binary.resources

    def rounded(kinds: dict[str, float]) -> dict[str, float]:
        return {kind: round(count, 3) for kind, count in kinds.items()}

    return {
        "variant": variant.name,
        "head_dim": head_dim,
        "kernel": plan.kernel,
        "tile": [plan.block_q, plan.block_k],
        "warps": plan.warps,
        "registers": {"launch": used.registers, "consumer": plan.registers},
        "smem_bytes": plan.smem_bytes,
        "spilled_bytes": used.spill_store_bytes + used.spill_load_bytes + used.stack_bytes,
        "warnings": list(built.binary.warnings),
        "unmasked": round(work.per_score(work.full), 3),
        "mixed": round(work.per_score(work.full, work.mask), 3),
        "rescale": round(work.per_score(work.rescale), 3),
        "search": round(work.per_score(work.search), 3),
        "unmasked_by_class": rounded(work.by_kind(work.full)),
        "mask_by_class": rounded(work.by_kind(work.mask)),
    }


def failures(entry: dict[str, Any]) -> Iterator[str]:
    """The targets that the entry of a kernel misses, in words."""
    subject = f"{entry['variant']}, d {entry['head_dim']}"
    if entry["spilled_bytes"] or entry["warnings"]:
        yield f"{subject}: {entry['spilled_bytes']} B spilled, warnings {entry['warnings']}"
    backward = entry["kernel"] != "forward"
    name = entry["variant"].removeprefix("backward, ")
    mask = name.removesuffix(SAME_TILE_BACKWARD if backward else SAME_TILE)
    loops = {"full": ("full",), "causal": ("unmasked", "mixed")}.get(mask, ())
    if name == mask and entry["head_dim"] == 128:
        return
    for loop in loops:
        least = best_rival(entry["head_dim"], loop, backward=backward)
        got = entry["unmasked" if loop == "full" else loop]
        if least is not None and got > least:
            yield f"{subject}: {got} instructions per score in {loop} tiles, the best rival {least}"


def table_of(entries: list[dict[str, Any]]) -> Table:
    table = Table(title=f"thread-instructions per score, {ARCH}, {DTYPE}")
    for column in ("variant", "d", "kernel", "tile", "unmasked", "mixed", "+ rescale", "+ search"):
        table.add_column(column, justify="left" if column in ("variant", "kernel") else "right")
    for entry in entries:
        table.add_row(
            entry["variant"],
            str(entry["head_dim"]),
            entry["kernel"],
            "{} x {}".format(*entry["tile"]),
            *(f"{entry[part]:.2f}" for part in ("unmasked", "mixed", "rescale", "search")),
        )
    return table


# ---- weights that are no exponentials ------------------------------------------------------------

WEIGHTS = ("hstu", "sigmoid", "relu_squared", "power", "retention")
RECORD_OF_WEIGHTS = RECORD.with_name("work_of_weights.json")
TILES_OF_WEIGHTS = {
    "sm_80": {"forward": Tile(80, 4, 2, 2), "backward": Tile(96, 8, 2, 1, 2, 2)},
    "sm_90a": {"forward": Tile(96, 12, 1, 1), "backward": Tile(80, 8, 1, 1)},
}
# Of a softmax's instructions per score: the maximum, the multiply-add and the exponential, in place
# of which a weight function stands. What is left are products, roundings, the sum, the difference
# from delta and the product with dP.
OF_SOFTMAX = {"forward": 3, "backward": 2}


@dataclass(frozen=True)
class WorkOfWeight:
    """Instructions per score of a tile without a mask, causal, head dim 64, bfloat16.

    Attributes:
        function: those of the weight function, and in the backward pass of its slope, with its
            share of what a row shares, as the planner counts them.
        target: instructions of the softmax's kernel with this function in place of its exponential.
        special: the instructions of special-function units among `counted`.
    """

    weight: str
    arch: str
    kernel: str
    counted: float
    special: float
    function: int
    target: float


def works_of_weights() -> Iterator[WorkOfWeight]:
    softmax = _loaded("causal")
    for arch, tiles in TILES_OF_WEIGHTS.items():
        for kernel, tile in tiles.items():
            left = 0.0
            for name in ("causal", *WEIGHTS):
                spec = _loaded(name).replace(mask_mod=softmax.mask_mod, dtype=DTYPE)
                if kernel == "forward":
                    built = build(spec, arch, tile=tile)
                else:
                    kernels = build_backward(spec, arch, tiles={"fused": tile})
                    (built,) = (
                        candidate for candidate in kernels if candidate.plan.kernel == "fused"
                    )
                work = work_of(built)
                counted = work.per_score(work.full)
                special = sum(i.base == "MUFU" for i in work.full) / work.scores
                function = score_instructions(spec, built.plan.kernel)
                if spec.is_softmax:
                    left = counted - OF_SOFTMAX[kernel]
                    function = OF_SOFTMAX[kernel]
                numbers = (round(number, 2) for number in (counted, special))
                yield WorkOfWeight(
                    "softmax" if spec.is_softmax else name,
                    arch,
                    built.plan.kernel,
                    *numbers,
                    function,
                    round(left + function, 2),
                )


def count_weights(output: Path) -> int:
    works = list(works_of_weights())
    record = {"dtype": DTYPE, "compiler": version(), "kernels": [asdict(work) for work in works]}
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    table = Table(title=f"thread-instructions per score, causal, d 64, {DTYPE}, unmasked tiles")
    for column in ("path", "kernel", "weight", "counted", "special", "function", "at most"):
        table.add_column(column)
    for work in works:
        numbers = f"{work.counted:.2f}", f"{work.special:.2f}", str(work.function)
        table.add_row(work.arch, work.kernel, work.weight, *numbers, f"{work.target:.2f}")
    Console(width=100).print(table)
    missed = [work for work in works if work.counted > work.target]
    for work in missed:
        print(f"{work.weight}, {work.kernel}, {work.arch}: more than {work.target:.2f}")
    if not missed:
        print("every target is met")
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--weights", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.weights:
        return count_weights(options.output or RECORD_OF_WEIGHTS)
    entries = []
    for variant in VARIANTS:
        if variant.name not in options.variants:
            continue
        for head_dim in (dim for dim in options.head_dims if dim in variant.head_dims):
            built = variant.built(head_dim)
            entries.append(record_of(variant, head_dim, built, work_of(built)))
    record = {
        "what": "thread-instructions per score element in the main loop, static machine code",
        "arch": ARCH,
        "dtype": DTYPE,
        "compiler": version(),
        "kernels": entries,
        "rivals": [asdict(rival) for rival in RIVALS],
    }
    (options.output or RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console(width=100).print(table_of(entries))
    missed = [line for entry in entries for line in failures(entry)]
    print("\n".join(missed) if missed else "every target is met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
