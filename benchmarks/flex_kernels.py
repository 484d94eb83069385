"""flashgen's forward kernels beside those that FlexAttention compiles, counted, not timed.

    python benchmarks/flex_kernels.py [--arch sm_80 sm_90] [--output FILE] [VARIANT ...]

For each variant, in float16 at head dim 64: bytes of machine code, registers, instructions that
access local memory (spills), and instructions per score in the loop over full blocks and in the one
over partial (mixed) blocks: the instructions of a thread in one step, times the threads, divided by
the elements of the tile. "mixed" of flashgen's block layouts are tiles with boxes that some rows do
not keep. The instructions of functions that flashgen does not inline ("called") are not counted.
Then the share of all scores that is computed, and of those that are computed in mixed tiles, for
8,192 positions, the suite's: by flashgen's tiles, and by FlexAttention's block mask of 128 x 128.
No GPU is needed: FlexAttention's kernels are made by Inductor and Triton
(benchmarks/flex_inductor.py), which `pip install 'flashgen[flex]'` installs.

"spec" is the kernel of the file in specs/ or of benchmarks/invented.py, whose scalars and lengths
are run-time arguments.
"flex_attention" is the kernel of fg.flex_attention with the same functions as PyTorch's.
FlexAttention's kernel has all lengths as constants, and no code for an end that is not a multiple
of its tile.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import flashgen as fg  # noqa: E402
from benchmarks import invented  # noqa: E402
from benchmarks.flex_mods import (  # noqa: E402
    ALL_FORMS,
    BATCH,
    HEAD_DIM,
    HEADS,
    IN_TENSORS,
    LAYOUTS,
    LENGTH,
    MODS,
)
from benchmarks.instructions import work_of  # noqa: E402
from benchmarks.sass import Loop, instructions, listing_of, product_loops  # noqa: E402
from benchmarks.variants import CAPTURED  # noqa: E402
from flashgen.frontends.flex.known_mods import read  # noqa: E402
from flashgen.frontends.flex.traced_mods import CallSizes  # noqa: E402
from flashgen.kernels.compile import cubin  # noqa: E402
from flashgen.kernels.compile.nvrtc import version  # noqa: E402
from flashgen.kernels.planner import Plan  # noqa: E402
from flashgen.kernels.planner.traffic import StepKind, computed_scores  # noqa: E402
from flashgen.kernels.visits.visited_tiles import KnownCall, walks_of  # noqa: E402
from flashgen.shared.call import CheckedCall  # noqa: E402
from flashgen.shared.errors import CompileError, FlashgenError  # noqa: E402
from flashgen.shared.signature import LAYOUT  # noqa: E402
from flashgen.spec.analysis.intervals import WalkedAxis  # noqa: E402
from flashgen.spec.analysis.mask import analyse_mask  # noqa: E402
from flashgen.spec.language.symbols import K, Q  # noqa: E402

PATHS = {"sm_80": "sm_80", "sm_90": "sm_90a"}
"""flashgen's code path beside FlexAttention's kernel for an architecture."""
DTYPE = "float16"
POSITIONS = 8192
"""Queries and keys of the suite's variants, for which visited scores are counted."""
FLEX_BLOCK = 128
RECORD = ROOT / "benchmarks" / "results" / "flex_kernels.json"
LOOPS = "acc, l_i, m_i = forward_inner("  # of Inductor's source: partial blocks, then full ones

Entry = dict[str, Any]


def specs(name: str) -> Iterator[tuple[str, fg.AttentionSpec]]:
    """flashgen's specs of a variant, each with a title."""
    if name.endswith(IN_TENSORS):
        return
    spec = spec_of(name)
    if spec is not None:
        yield "spec", spec
    if name in LAYOUTS:
        return  # fg.flex_attention takes the blocks of a block mask
    mask_mod, score_mod = MODS[name](lambda name, shape, dtype: torch.zeros(shape, dtype=dtype))
    traced, _ = read(
        mask_mod, score_mod, CallSizes(BATCH, HEADS, LENGTH, LENGTH, torch.device("cpu"))
    )
    yield "flex_attention", traced.operator(HEAD_DIM, HEAD_DIM, DTYPE).spec


def spec_of(name: str) -> fg.AttentionSpec | None:
    """The spec of a variant; None where there is none."""
    file = ROOT / "specs" / f"{name}.py"
    found = fg.load(file) if file.exists() else invented.specs().get(name)
    changes: dict[str, Any] = {"head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM, "dtype": DTYPE}
    return None if found is None else found.replace(**changes)


def shares_of(name: str, spec: fg.AttentionSpec, plan: Plan) -> tuple[float, float]:
    """The shares of all scores that flashgen computes, and computes in mixed tiles."""
    form = ALL_FORMS.get(name)
    numbers = form.scalars(POSITIONS) if form and spec.scalars else {}
    captured: dict[str, Any] = {"ids": _documents()[None]} if name == "document" else {}
    if spec.block_sparse is not None:
        shape = spec.block_sparse.blocks(POSITIONS, POSITIONS)
        live = np.frombuffer(spec.block_sparse.table(1, 1, *shape), dtype=bool)
        captured[LAYOUT] = live.reshape(1, 1, *shape)
    sizes = (1, 1, 1, POSITIONS, POSITIONS)
    call = CheckedCall(*sizes, HEAD_DIM, HEAD_DIM, 0, 0, 1.0, numbers)
    mask = analyse_mask(spec.mask, WalkedAxis(Q if plan.owns_keys else K))
    (walk,) = walks_of(KnownCall(spec, call, captured), mask, plan)
    share = computed_scores(plan, walk) / POSITIONS**2
    steps: Counter[StepKind] = sum(map(Counter, walk.steps or ()), Counter())
    rows = sum(kind.rows * count for kind, count in steps.items())
    mixed = sum(kind.rows * count for kind, count in steps.items() if kind.mask_ops)
    return share, share * mixed / max(1, rows)


def flex_shares(name: str) -> tuple[float, float]:
    """The same of FlexAttention, by a block mask of 128 x 128."""
    if name == "document":
        ids = torch.from_numpy(_documents())
        mask: Any = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
    else:
        form = ALL_FORMS.get(name.removesuffix(IN_TENSORS))
        if form is None:  # its mask, if any, is the same at every length
            mask, _ = MODS[name](lambda name, shape, dtype: torch.zeros(shape, dtype=dtype))
        else:
            mask = form.mods(POSITIONS, POSITIONS, 1, form.scalars(POSITIONS)).mask
        if mask is None:
            return 1.0, 0.0
    k = torch.arange(POSITIONS)[None]
    visited = partial = 0
    for first in range(0, POSITIONS, FLEX_BLOCK):
        q = torch.arange(first, first + FLEX_BLOCK)[:, None]
        zero = torch.tensor(0)
        kept = torch.broadcast_to(mask(zero, zero, q, k), (FLEX_BLOCK, POSITIONS))
        blocks = kept.reshape(FLEX_BLOCK, -1, FLEX_BLOCK)
        some, every = blocks.any(2).any(0), blocks.all(2).all(0)
        visited += int(some.sum())
        partial += int((some & ~every).sum())
    blocks_of_all = (POSITIONS // FLEX_BLOCK) ** 2
    return visited / blocks_of_all, partial / blocks_of_all


def _documents() -> Any:
    """Ids of the documents of the suite's packed sequences."""
    return CAPTURED["packed_causal"].tensors(1, POSITIONS, 1)["ids"][0].numpy()


def entry_of(name: str, arch: str, title: str, spec: fg.AttentionSpec) -> Entry:
    """flashgen's kernel. The registers are those of the warps that compute scores."""
    built = fg.build(spec, PATHS[arch])
    plan, listing = built.plan, listing_of(built.cubin, built.binary.kernel, arch)
    work, used = work_of(built, listing), built.binary.resources
    mixed = work.dead if plan.gathers else work.mask
    shares: tuple[float | None, float | None] = None, None
    if title == "spec":  # the constants of the others are those of shorter sequences
        shares = shares_of(name, spec, plan)
    return {
        "variant": name,
        "arch": arch,
        "kernel": f"flashgen, {title}",
        "tile": [plan.block_q, plan.block_k],
        "warps": plan.warps,
        "stages": plan.stages,
        "code_bytes": used.code_bytes,
        "registers": plan.registers if plan.path == "sm_90a" else used.registers,
        "stack_bytes": used.stack_bytes,
        "local_accesses": _local_accesses(listing),
        "full": round(work.per_score(work.full), 2),
        "mixed": round(work.per_score(work.full, mixed), 2),
        "rescale": round(work.per_score(work.rescale), 2),
        "search": round(work.per_score(work.search), 2),
        "called": [name for name, _ in built.source.outlined],
        "visited": _rounded(shares[0]),
        "visited_mixed": _rounded(shares[1]),
    }


def flex_entries(arch: str, names: Sequence[str]) -> Iterator[tuple[str, Entry]]:
    """FlexAttention's kernels with their names, in the order of ``names``.

    Raises:
        CompileError: Triton is not installed, or Inductor or Triton failed.
    """
    _check_triton()
    with tempfile.TemporaryDirectory() as folder:
        _compile_flex(arch, Path(folder), names)
        for name in names:
            path = Path(folder) / name
            code = path.with_suffix(".cubin").read_bytes()
            facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            yield name, flex_entry(name, arch, code, path.with_suffix(".py").read_text(), facts)


def flex_entry(name: str, arch: str, code: bytes, source: str, facts: Entry) -> Entry:
    (kernel,) = cubin.kernels(code)
    listing = listing_of(code, kernel, arch)
    used = cubin.facts(code, kernel)
    block_m, block_n = facts["tile"]
    scores = block_m * block_n / (32 * facts["warps"])
    loops = flex_loops(listing, source)
    per_score = {kind: round(_length(loop) / scores, 2) for kind, loop in loops.items()}
    visited, in_mixed = flex_shares(name)
    variant, _, numbers = name.partition("+")
    return {
        "variant": variant,
        "arch": arch,
        "kernel": "FlexAttention" + (f", {numbers}" if numbers else ""),
        **facts,
        "code_bytes": used.code_bytes,
        "registers": used.registers,
        "stack_bytes": used.stack_bytes,
        "local_accesses": _local_accesses(listing),
        "full": per_score["full"],
        "mixed": per_score.get("mixed"),
        "visited": round(visited, 4),
        "visited_mixed": round(in_mixed, 4),
    }


def flex_loops(listing: str, source: str) -> dict[str, Loop]:
    """FlexAttention's loops: "full", and "mixed" where there is a mask.

    Which is which is seen from the call of Inductor's source into which its instructions were
    inlined. Without a mask all blocks are in one loop.
    """
    loops = product_loops(listing)
    if len(loops) == 1:
        return {"full": loops[0]}
    lines = source.splitlines()
    partial, full = (n for n, text in enumerate(lines, 1) if text.strip() == LOOPS)
    found: dict[str, Loop] = {}
    for loop in loops:
        of_call = {n: sum(n in i.lines for i in loop.always) for n in (partial, full)}
        kind = "full" if of_call[full] > of_call[partial] else "mixed"
        if kind in found:
            raise ValueError(f"two loops over {kind} blocks: {of_call} instructions by line")
        found[kind] = loop
    return found


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def _length(loop: Loop) -> int:
    return sum(map(len, (loop.always, *loop.conditional, *loop.inner)))


def _local_accesses(listing: str) -> int:
    return sum(i.base in ("LDL", "STL") for i in instructions(listing))


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise CompileError(
            "Triton, which compiles FlexAttention's kernels, is not installed",
            where="import triton",
            numbers=f"Python {sys.executable}, torch {torch.__version__}",
            way_out="pip install 'flashgen[flex]', or --no-flex for flashgen's kernels alone",
        )


def _compile_flex(arch: str, folder: Path, names: Sequence[str]) -> None:
    caches = {f"{name}_CACHE_DIR": str(folder / name) for name in ("TORCHINDUCTOR", "TRITON")}
    environment = {
        **os.environ,
        **caches,
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_DEFAULT_FP_FUSION": "1",  # the default, without a warning
    }
    number = arch.removeprefix("sm_")
    command = [sys.executable, "-m", "benchmarks.flex_inductor", number, str(folder), *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise CompileError(
            "Inductor or Triton failed to compile FlexAttention's kernel",
            where=" ".join(command[1:]),
            numbers=next((line for line in reversed(lines) if "Error" in line), lines[-1]),
            way_out="the versions of torch and Triton in benchmarks/results/flex_kernels.json",
        )


def table_of(entries: Sequence[Entry]) -> Table:
    table = Table(title=f"forward kernels, {DTYPE}, head dim {HEAD_DIM}: instructions per score")
    left = ("variant", "arch", "kernel")
    of_tiles = ("tile", "warps", "stages", "code B", "regs", "spills", "full", "mixed")
    titles = (*left, *of_tiles, "visited", "in mixed")
    for title in titles:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True)
    for entry in entries:
        table.add_row(
            entry["variant"],
            entry["arch"],
            entry["kernel"],
            "{} x {}".format(*entry["tile"]),
            *(str(entry[part]) for part in ("warps", "stages")),
            f"{entry['code_bytes']:,}",
            *(str(entry[part]) for part in ("registers", "local_accesses")),
            *("-" if entry[part] is None else f"{entry[part]:.2f}" for part in ("full", "mixed")),
            *(
                "-" if entry[part] is None else f"{entry[part]:.3f}"
                for part in ("visited", "visited_mixed")
            ),
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=", ".join(MODS))
    parser.add_argument("--arch", nargs="+", default=list(PATHS), choices=PATHS)
    parser.add_argument("--no-flex", action="store_true", help="flashgen's kernels alone")
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    options = parser.parse_args()
    names = options.variants or list(MODS)
    if unknown := sorted(set(names) - set(MODS)):
        parser.error(f"no variant {', '.join(unknown)}; there are {', '.join(MODS)}")
    entries: list[Entry] = []
    try:
        for arch in options.arch:
            rivals = [] if options.no_flex else list(flex_entries(arch, names))
            for name in names:
                for title, spec in specs(name):
                    entries.append(entry_of(name, arch, title, spec))
                entries += [entry for each, entry in rivals if each == name]
    except FlashgenError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if options.output:
        record = {
            "what": "forward kernels: static machine code, thread-instructions per score element",
            "dtype": DTYPE,
            "head_dim": HEAD_DIM,
            "flex_sizes": {"batch": BATCH, "heads": HEADS, "seq_q": LENGTH, "seq_k": LENGTH},
            "positions_of_shares": POSITIONS,
            "compiler": version(),
            "torch": torch.__version__,
            "kernels": entries,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console(width=160).print(table_of(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
