"""Each kernel of one family once, for tools that look into a process.

    python -m benchmarks.suite.one_kernel --device gpu --family fused --spec causal --seq 256

A family is "forward", "fused" (gradients with atomics) or "split" (gradients in a fixed order), or
"unaligned": a forward kernel for tensors that do not start at a multiple of 16 bytes. Prints the
names of the kernels and, in the emulator, their counters, as JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

import flashgen as fg
from benchmarks.suite.cases import make
from benchmarks.suite.check import make_inputs
from benchmarks.suite.contenders.ours import spec_of
from benchmarks.suite.device import KINDS, open_device, own_threads

FAMILIES = ("forward", "fused", "split", "unaligned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=KINDS, required=True)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    parser.add_argument("--spec", default="causal")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dropout", type=float, default=0.0)
    options = parser.parse_args()
    if options.device == "emulator":
        own_threads(1)
    print(json.dumps(ran(options)))


def ran(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each kernel of the family is called and, in the emulator, what it counted."""
    device = open_device(options.device)
    heads, seq = options.heads, options.seq
    case = make(
        "one", options.spec, options.batch, heads, heads, seq, seq, options.head_dim,
        dtype=options.dtype,
    )  # fmt: skip
    inputs = make_inputs(case, device.torch, seed=0, learnt=options.family in ("fused", "split"))
    spec = spec_of(case).replace(dropout=options.dropout > 0)
    op = fg.attention(spec)
    q, k, v = inputs.learnt
    if options.family == "unaligned":
        q, k, v = (off_by_one(tensor) for tensor in (q, k, v))
    given: dict[str, Any] = dict(case.scalars)
    if options.dropout:
        given["dropout_p"] = options.dropout
        given["rng"] = torch.tensor([7, 0], device=device.torch)
    out = op(
        q, k, v, backend=device.backend, arch=device.arch,
        deterministic=options.family == "split", **given,
    )  # fmt: skip
    reports = [op.report]
    if options.family in ("fused", "split"):
        torch.autograd.grad(out, (q, k, v), inputs.dout)
        reports = list(op.backward_reports)
    device.synchronize()
    return [
        {"kernel": report.kernel.source.name, **counted(report.counters)}
        for report in reports
        if report is not None and report.kernel is not None
    ]


def counted(counters: Any) -> dict[str, int]:
    if counters is None:
        return {}
    names = ("warp_instructions", "global_read_sectors", "global_write_sectors")
    more = ("global_read_bytes", "global_write_bytes", "shared_read_bytes", "shared_write_bytes")
    found = {name: int(getattr(counters, name)) for name in names + more}
    return found | {"mma": int(counters.classes["mma"])}


def off_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, one element past where they were."""
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = storage[1:].view(tensor.shape)
    return view.copy_(tensor.detach())


if __name__ == "__main__":
    main()
