"""flashgen's forward kernels beside those that FlexAttention compiles, counted, not timed.

    python benchmarks/flex_kernels.py [--arch sm_80 sm_90] [--output FILE] [VARIANT ...]

For each variant, in float16 at head dim 64: bytes of machine code, registers, instructions that
access local memory (spills), and instructions per score in the loop over full blocks and in the one
over partial (mixed) blocks: the instructions of a thread in one step, times the threads, divided by
the elements of the tile. No GPU is needed: FlexAttention's kernels are made by Inductor and Triton
(benchmarks/flex_inductor.py), which `pip install 'flashgen[flex]'` installs.

"spec" is the kernel of the file in specs/, whose scalars and lengths are run-time arguments.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import flashgen as fg  # noqa: E402
from benchmarks.flex_mods import BATCH, HEAD_DIM, HEADS, LENGTH, MODS  # noqa: E402
from benchmarks.instructions import work_of  # noqa: E402
from benchmarks.sass import Loop, instructions, listing_of, product_loops  # noqa: E402
from flashgen.frontends.flex.known_mods import read  # noqa: E402
from flashgen.frontends.flex.traced_mods import CallSizes  # noqa: E402
from flashgen.kernels.compile import cubin  # noqa: E402
from flashgen.kernels.compile.nvrtc import version  # noqa: E402
from flashgen.kernels.pipeline import Build  # noqa: E402
from flashgen.shared.errors import CompileError, FlashgenError  # noqa: E402

PATHS = {"sm_80": "sm_80", "sm_90": "sm_90a"}
"""flashgen's code path beside FlexAttention's kernel for an architecture."""
DTYPE = "float16"
RECORD = ROOT / "benchmarks" / "results" / "flex_kernels.json"
LOOPS = "acc, l_i, m_i = forward_inner("  # of Inductor's source: partial blocks, then full ones

Entry = dict[str, Any]


def specs(name: str) -> Iterator[tuple[str, fg.AttentionSpec]]:
    """flashgen's specs of a variant, each with a title."""
    file = ROOT / "specs" / f"{name}.py"
    if file.exists():
        changes: dict[str, Any] = {"head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM, "dtype": DTYPE}
        yield "spec", fg.load(file).replace(**changes)
    mask_mod, score_mod = MODS[name](lambda name, shape, dtype: torch.zeros(shape, dtype=dtype))
    traced, _ = read(
        mask_mod, score_mod, CallSizes(BATCH, HEADS, LENGTH, LENGTH, torch.device("cpu"))
    )
    yield "flex_attention", traced.operator(HEAD_DIM, HEAD_DIM, DTYPE).spec


def entry_of(name: str, arch: str, title: str, built: Build) -> Entry:
    """flashgen's kernel. The registers are those of the warps that compute scores."""
    plan, listing = built.plan, listing_of(built.cubin, built.binary.kernel, arch)
    work, used = work_of(built, listing), built.binary.resources
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
        "mixed": round(work.per_score(work.full, work.mask), 2),
        "rescale": round(work.per_score(work.rescale), 2),
        "search": round(work.per_score(work.search), 2),
    }


def flex_entries(arch: str, names: Sequence[str]) -> Iterator[Entry]:
    """FlexAttention's kernels, in the order of ``names``.

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
            yield flex_entry(name, arch, code, path.with_suffix(".py").read_text(), facts)


def flex_entry(name: str, arch: str, code: bytes, source: str, facts: Entry) -> Entry:
    (kernel,) = cubin.kernels(code)
    listing = listing_of(code, kernel, arch)
    used = cubin.facts(code, kernel)
    block_m, block_n = facts["tile"]
    scores = block_m * block_n / (32 * facts["warps"])
    loops = flex_loops(listing, source)
    per_score = {kind: round(_length(loop) / scores, 2) for kind, loop in loops.items()}
    return {
        "variant": name,
        "arch": arch,
        "kernel": "FlexAttention",
        **facts,
        "code_bytes": used.code_bytes,
        "registers": used.registers,
        "stack_bytes": used.stack_bytes,
        "local_accesses": _local_accesses(listing),
        "full": per_score["full"],
        "mixed": per_score.get("mixed"),
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
    titles = (*left, "tile", "warps", "stages", "code B", "regs", "spills", "full", "mixed")
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
                    entries.append(entry_of(name, arch, title, fg.build(spec, PATHS[arch])))
                entries += [entry for entry in rivals if entry["variant"] == name]
    except FlashgenError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if options.output:
        record = {
            "what": "forward kernels: static machine code, thread-instructions per score element",
            "dtype": DTYPE,
            "head_dim": HEAD_DIM,
            "flex_sizes": {"batch": BATCH, "heads": HEADS, "seq_q": LENGTH, "seq_k": LENGTH},
            "compiler": version(),
            "torch": torch.__version__,
            "kernels": entries,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    Console(width=130).print(table_of(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
