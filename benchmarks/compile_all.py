"""Compiles every spec with the NVRTC at hand, for both code paths, forward and backward.

It needs neither a GPU nor torch, so that a virtual environment per release of NVRTC is small;
``make versions`` runs it in one for each supported release. A kernel fails if the compiler reports
a warning (such as serialised wgmma), spills registers after the plans with smaller tiles, or has
more than some exponentials behind the wait for dP, which they could overlap with.

With ``--digests FILE`` it writes a digest of each kernel's instructions: two trees whose files are
equal emit the same PTX, however their sources and line numbers differ.

    python benchmarks/compile_all.py [--arch sm_90a] [--dtype float32] [--head-dim 128]
        [--head-dim-v 128] [--dropout] [--digests FILE] [SPEC ...]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import flashgen as fg  # noqa: E402
from benchmarks.sass import waiting_exponentials  # noqa: E402
from flashgen.kernels.compile import nvrtc  # noqa: E402
from flashgen.kernels.pipeline import Build, build, build_backward, build_minmax_tables  # noqa: E402
from flashgen.kernels.planner import columns_of_launch  # noqa: E402
from flashgen.shared.errors import FlashgenError  # noqa: E402
from flashgen.spec.language.signature import with_columns  # noqa: E402
from flashgen.tools.cli.generated import ARCHS  # noqa: E402


def kernels(spec_file: Path, arch: str, **changes: object) -> Iterator[Build]:
    """All kernels of one spec, compiled; the backward kernels with free and fixed order of sums."""
    spec = fg.load(str(spec_file)).replace(**changes)
    yield from build_minmax_tables(spec, arch)
    yield build(spec_of_launch(spec, arch, "forward"), arch)
    free = build_backward(spec_of_launch(spec, arch, "backward"), arch)
    yield from free
    names = {kernel.source.filename for kernel in free}
    fixed = build_backward(spec_of_launch(spec, arch, "deterministic"), arch, deterministic=True)
    yield from (kernel for kernel in fixed if kernel.source.filename not in names)


def spec_of_launch(spec: fg.AttentionSpec, arch: str, which: str) -> fg.AttentionSpec:
    """The spec whose kernels compute a pass: the spec of a part where no tile holds all of V."""
    columns = columns_of_launch(spec, arch, which).columns
    return with_columns(spec, columns) if columns not in (0, spec.head_dim_v) else spec


def instructions(ptx: str) -> str:
    """The PTX of a kernel without source lines: no .loc, no names of files, no debug sections."""
    code = ptx.partition("\n\t.file")[0].partition("\n.section")[0]
    return re.sub(r"^\s*(\.loc|\.file|//).*\n", "", code, flags=re.MULTILINE)


def faults(
    spec_file: Path, arch: str, digests: dict[str, str], **changes: object
) -> tuple[int, list[str]]:
    """The number of kernels of a spec with these changes, and a line for each fault.

    ``digests`` gets the digests of the kernels, by their file names.
    """
    faults_found, count = [], 0
    try:
        for kernel in kernels(spec_file, arch, **changes):
            count += 1
            name, resources = kernel.source.filename, kernel.binary.resources
            code = instructions(kernel.binary.ptx).encode()
            digests[name] = hashlib.sha256(code).hexdigest()[:16]
            faults_found += [f"{name}: {warning}" for warning in kernel.binary.warnings]
            if waiting_exponentials(kernel):
                faults_found.append(f"{name}: exponentials behind the wait for dP")
            if not resources.clean:
                spilled = f"{resources.spill_store_bytes} B spilled"
                faults_found.append(f"{name}: {spilled}, {resources.stack_bytes} B of stack")
    except FlashgenError as error:
        faults_found.append(f"{spec_file.stem}, {arch}: {error}")
    return count, faults_found


def main() -> int:
    parser = argparse.ArgumentParser(description="compiles every spec with the NVRTC at hand")
    parser.add_argument("specs", nargs="*", type=Path, help="spec files; all of specs/ by default")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="both by default")
    parser.add_argument("--dtype", help="float16, bfloat16 or float32 instead of the spec's")
    parser.add_argument("--head-dim", type=int, help="head dim instead of the spec's")
    parser.add_argument("--head-dim-v", type=int, help="that of v, where it is another one")
    parser.add_argument("--dropout", action="store_true", help="kernels of calls that drop weights")
    parser.add_argument("--digests", type=Path, help="a file for the digests of the PTX")
    args = parser.parse_args()
    options = {
        "dtype": args.dtype,
        "head_dim": args.head_dim,
        "head_dim_v": args.head_dim_v or args.head_dim,
        "dropout": args.dropout or None,
    }
    changes = {name: value for name, value in options.items() if value is not None}
    specs = args.specs or sorted((ROOT / "specs").glob("*.py"))
    tasks = [(spec, arch) for spec in specs for arch in args.arch or ARCHS]
    start, digests = time.perf_counter(), dict[str, str]()
    os.environ["FLASHGEN_CACHE_DIR"] = "off"
    with ThreadPoolExecutor(2) as pool:  # NVRTC releases the GIL
        results = list(pool.map(lambda task: faults(*task, digests, **changes), tasks))
    if args.digests:
        lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
        args.digests.write_text("".join(lines))
    print(f"{'spec':<18}{'path':<8}{'kernels':>8}{'faults':>8}")
    for (spec, arch), (number, faults_found) in zip(tasks, results, strict=True):
        print(f"{spec.stem:<18}{arch:<8}{number:>8}{len(faults_found):>8}")
    lines = [line for _, faults_found in results for line in faults_found]
    print(*lines, sep="\n", end="\n" if lines else "")
    count = sum(number for number, _ in results)
    print(
        f"NVRTC {nvrtc.version()}: {count} kernels of {len(specs)} specs in "
        f"{time.perf_counter() - start:.0f} s, {len(lines)} faults"
    )
    return 1 if lines or not count else 0


if __name__ == "__main__":
    raise SystemExit(main())
