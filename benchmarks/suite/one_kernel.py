"""Each kernel of one family once, for tools that look into a process.

    python -m benchmarks.suite.one_kernel --device gpu --family fused --spec causal --seq 256

A family is "forward", "fused" (gradients with atomics) or "split" (gradients in a fixed order), or
"unaligned": a forward kernel for tensors that do not start at a multiple of 16 bytes, or "peer":
both passes of FlashAttention-4. Prints the names of flashgen's kernels and, in the emulator, their
counters, as JSON; with --keep their texts, and their machine code where there is a disassembler,
are written to a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch

import flashgen as fg
from benchmarks import sass
from benchmarks.suite.cases import make
from benchmarks.suite.check import make_inputs
from benchmarks.suite.contenders.flash_attention import FlashAttention
from benchmarks.suite.contenders.ours import spec_of
from benchmarks.suite.device import KINDS, open_device
from flashgen.kernels.pipeline import Build
from flashgen.shared.errors import CompileError

FAMILIES = ("forward", "fused", "split", "unaligned", "peer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=KINDS, required=True)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--spec", nargs="+", default=["causal"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--keep", type=Path, help="folder for texts and machine code")
    options = parser.parse_args()
    if options.device == "emulator":
        torch.set_num_threads(1)  # several processes share few cores
    every = itertools.product(options.spec, options.head_dim)
    print(json.dumps([row for problem in every for row in ran(options, *problem)]))


def ran(options: argparse.Namespace, spec_name: str, head_dim: int) -> list[dict[str, Any]]:
    """The name of each kernel of the family and, in the emulator, its counters."""
    device = open_device(options.device)
    heads, seq = options.heads, options.seq
    case = make(
        "one", spec_name, options.batch, heads, heads, seq, seq, head_dim, dtype=options.dtype
    )
    backward = options.family in ("fused", "split", "peer")
    inputs = make_inputs(case, device.torch, seed=0, learnt=backward)
    if options.family == "peer":
        out = FlashAttention().prepare(case, device).attend(*inputs.learnt)
        torch.autograd.grad(out, inputs.learnt, inputs.dout)
        device.synchronize()
        return []
    spec = spec_of(case).replace(dropout=options.dropout > 0)
    op = fg.attention(spec)
    q, k, v = inputs.learnt
    if options.family == "unaligned":
        q, k, v = (off_by_one(tensor) for tensor in (q, k, v))
    scalars: dict[str, Any] = dict(case.scalars)
    if options.dropout:
        scalars["dropout_p"] = options.dropout
        scalars["rng"] = torch.tensor([7, 0], device=device.torch)
    out = op(
        q, k, v, backend=device.backend, arch=device.arch,
        deterministic=options.family == "split", **scalars,
    )  # fmt: skip
    reports = [op.report]
    if backward:
        torch.autograd.grad(out, (q, k, v), inputs.dout)
        reports += op.backward_reports
    device.synchronize()
    launched = [report for report in reports if report is not None and report.kernel is not None]
    if options.keep is not None:
        for report in launched:
            keep(report.kernel, options.keep)
    return [{"kernel": r.kernel.source.name, **counted(r.counters)} for r in launched]


def keep(build: Build, folder: Path) -> None:
    """Writes NAME.cu, and NAME.sass, the machine code with the lines of that text."""
    path = folder / build.source.name
    path.with_suffix(".cu").write_text(build.source.text, encoding="utf-8")
    with contextlib.suppress(CompileError):  # there is no disassembler
        listing = sass.listing_of(build.cubin, build.binary.kernel, build.binary.arch)
        path.with_suffix(".sass").write_text(listing, encoding="utf-8")


def counted(counters: Any) -> dict[str, int]:
    if counters is None:
        return {}
    names = ("warp_instructions", "global_read_sectors", "global_write_sectors")
    more = ("global_read_bytes", "global_write_bytes", "shared_read_bytes", "shared_write_bytes")
    counts = {name: int(getattr(counters, name)) for name in names + more}
    return counts | {"mma": int(counters.classes["mma"])}


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element past where they were."""
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = storage[1:].view(tensor.shape)
    return view.copy_(tensor.detach())


if __name__ == "__main__":
    main()
