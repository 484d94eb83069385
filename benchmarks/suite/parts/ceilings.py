"""The two ceilings of the device: how fast it copies, and how fast it multiplies matrices."""

from __future__ import annotations

import torch

from benchmarks.suite.context import Context
from benchmarks.suite.timing import Call, measure

COPY_BYTES = 4 << 30
MATMUL = 8192
ITEMSIZE = 4  # of the copied elements


def run(context: Context) -> None:
    with context.journal.step("copy"):
        copy(context)
    for dtype in ("bfloat16", "float16"):
        with context.journal.step(f"matmul {dtype}"):
            matmul(context, dtype)


def copy(context: Context) -> None:
    """GB/s, each byte counted once as read and once as written."""
    size = 1 << 16 if context.tiny else COPY_BYTES
    source = torch.randn(size // ITEMSIZE, device=context.device.torch)
    target = torch.empty_like(source)
    rate = 2 * size / _ms(context, lambda _: target.copy_(source)) / 1e6
    note = "bytes read plus written"
    context.writer.measure("copy", "rate", rate, "GB/s", f"bytes={size}", note)


def matmul(context: Context, dtype: str) -> None:
    """TFLOP/s of a square product of normal numbers: on zeros it would run faster."""
    side = 128 if context.tiny else MATMUL
    shape, device = (side, side), context.device.torch
    a, b = (torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    rate = 2 * side**3 / _ms(context, lambda _: torch.mm(a, b, out=out)) / 1e9
    context.writer.measure(
        f"matmul {dtype}", "rate", rate, "TFLOP/s", f"m=n=k={side}", "random data"
    )


def _ms(context: Context, call: Call) -> float:
    seconds = min(2.0, context.budget.left / 4)
    rounds = (1, 2) if context.tiny else (10, 200)
    times = measure(context.device, {"it": call}, 1, seconds, rounds=rounds)
    context.device.free()
    return times["it"].timing.p50
