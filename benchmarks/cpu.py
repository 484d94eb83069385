"""Times of the CPU path as multiples of torch's scaled_dot_product_attention.

All contenders run alternately in one process and on one thread; a ratio is the median over rounds
of the ratio within a round, in CPU seconds, so that other processes on the machine disturb it
little. Columns: forward, forward and backward, and a forward call on tiny tensors. The last rows
compare masks with no mask, where fewer tiles are visited.

    python benchmarks/cpu.py [--length 2048] [--heads 8] [--dtype float32] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import flashgen as fg  # noqa: E402

HEAD_DIM = 64
WINDOW = 256
MASKS: dict[str, Callable[..., Any] | None] = {
    "full": None,
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
}
BESIDE = {"full": "torch", "causal": "torch causal", "window": "torch causal"}

Call = Callable[..., Any]
Times = dict[str, list[float]]  # seconds of each round by contender


def seconds(call: Call, *tensors: torch.Tensor) -> float:
    start = time.process_time()
    call(*tensors)
    return time.process_time() - start


def alternately(contenders: dict[str, Call], rounds: int, *tensors: torch.Tensor) -> Times:
    """The times of all contenders in each round, after a round that is not counted."""
    times: Times = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, call in contenders.items():
            elapsed = seconds(call, *tensors)
            if number:
                times[name].append(elapsed)
    return times


def ratio(times: Times, name: str, other: str) -> float:
    pairs = zip(times[name], times[other], strict=True)
    return statistics.median(one / two for one, two in pairs)


def both(call: Call, *tensors: torch.Tensor) -> None:
    learnt = [tensor.detach().requires_grad_() for tensor in tensors]
    out = call(*learnt)
    out.backward(torch.ones_like(out))


def repeated(call: Call, times: int, *tensors: torch.Tensor) -> None:
    for _ in range(times):
        call(*tensors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200, help="tiny calls in a round")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    contenders: dict[str, Call] = {"torch": sdpa, "torch causal": partial(sdpa, is_causal=True)}
    for name, mask in MASKS.items():
        contenders[name] = fg.attention(fg.AttentionSpec(mask, dtype=options.dtype, name=name))
    dtype = getattr(torch, options.dtype)
    shape = 1, options.heads, options.length, HEAD_DIM
    large = [torch.randn(shape).to(dtype) for _ in range(3)]
    tiny = [torch.randn(1, 2, 8, HEAD_DIM).to(dtype) for _ in range(3)]
    training = {name: partial(both, call) for name, call in contenders.items()}
    many = {name: partial(repeated, call, options.calls) for name, call in contenders.items()}
    measured = [
        alternately(contenders, options.rounds, *large),
        alternately(training, options.rounds, *large),
        alternately(many, options.rounds, *tiny),
    ]

    title = f"{options.heads} heads x {options.length:,} x {HEAD_DIM}, {options.dtype}, one thread"
    table = Table("contender", "beside", "forward", "both", "tiny call, us", title=title)
    for name in contenders:
        other = BESIDE.get(name, name)
        ratios = (f"{ratio(times, name, other):.2f}" for times in measured[:2])
        overhead = statistics.median(measured[2][name]) / options.calls * 1e6
        table.add_row(name, other, *ratios, f"{overhead:.0f}")
    for name in ("causal", "window"):
        ratios = (f"{ratio(times, name, 'full'):.2f}" for times in measured[:2])
        table.add_row(name, "full", *ratios, "")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
