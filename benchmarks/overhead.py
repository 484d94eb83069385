"""The cost of a call of the operator in Python, in addition to the launch itself.

A call does all that it does on a GPU: checks, choice of a kernel, results, packed parameters. Only
the launcher is a stub, and the tensors are on the CPU, so that no GPU is needed and no call waits.
Times are those of the processor, which other programs change little.
Rows::

    no gradients    inputs that require no gradients
    forward         inputs that require gradients, forward only
    both            forward and backward; most of the time is torch's autograd, and torch's
                    operations on the CPU (zeros, the rounding of sums)
    torch.ops       a call without gradients through torch's dispatcher
    results         two calls of torch.empty, which all rows above include
    launcher        calls.launch.Launch with a driver that does nothing, which no row includes

A second table has calls of fg.flex_attention with a score_mod of ten operations, without gradients,
beside fg.attention with the same expression, and what the mod adds to the latter::

    proved          the mod is proved to read numbers and tensors only
    recorded        an object whose operations are recorded at each call
    another number  the same object with another number at each call
    cold            the first call with a mod; its kernels have been compiled
    torch           flex_attention of torch on CPU tensors of the same shape, which computes it

A third table has calls without Python (`flashgen build-native`), with a driver in C that does
nothing, and its limits; the rows are those of the first table. "engine" is what torch takes for
torch.autograd.grad of a sum of two tensors, most of which is also in "both". The table is left out
where the native part is not built.

Fails when a limit is exceeded: 10 us without gradients, 20 us forward with gradients; for what a
mod adds, 30 us where it is proved and 150 us where it is recorded.

    python benchmarks/overhead.py [--calls 100] [--rounds 200]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import flashgen as fg  # noqa: E402
from flashgen.calls import launch  # noqa: E402
from flashgen.calls.ops import run_forward  # noqa: E402
from flashgen.calls.runtime import backends, bound_kernel  # noqa: E402
from flashgen.calls.trust import Decision  # noqa: E402
from flashgen.frontends.flex import known_mods  # noqa: E402
from flashgen.frontends.flex.traced_mods import CallSizes  # noqa: E402

LIMITS = {"no gradients": 10.0, "forward": 20.0}  # us
NATIVE = {"no gradients": 4.0, "forward": 6.0, "both": 30.0}  # us
ADDED = {"proved": 30.0, "recorded": 150.0}  # us


def median_us(
    call: Callable[[], Any],
    calls: int,
    rounds: int,
    of_rounds: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Median over rounds of the mean CPU time of some calls, in microseconds."""
    for _ in range(calls):
        call()
    found = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            call()
        found.append((time.process_time() - start) / calls)
    return of_rounds(found) * 1e6


def idle_driver() -> Any:
    """Answers every call that a launch makes, at once and with success."""
    done = (0,)
    context = 1
    return SimpleNamespace(
        cuCtxGetCurrent=lambda: (0, context),
        cuLaunchKernel=lambda *arguments: done,
        cuFuncSetAttribute=lambda *arguments: done,
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
    )


def idle_kernel(binary: Any, device: int = 0, *, stream: int = 0) -> launch.Kernel:
    """A kernel loaded on a device of its own architecture."""
    facts = launch.device.Device(
        index=0,
        context=1,
        capability=(8, 0),
        max_threads=1024,
        max_smem_bytes=166_912,
        registers=65_536,
    )
    return launch.Kernel(binary, facts, idle_driver(), None, None)


def pretend_a_gpu() -> None:
    """CPU tensors take the place of GPU tensors, and a launch does nothing."""
    os.environ["FLASHGEN_NATIVE"] = "0"
    backends.TAKES["gpu"] = "cpu"
    backends.DEFAULTS["cpu"] = "gpu"
    backends.index_of = lambda device: 0
    bound_kernel.current_stream = lambda index: 0
    backends.decide = lambda index, capturing: Decision("sm_80", "a stub")
    launch.load = idle_kernel
    launch.Launch = lambda *arguments: lambda packed, stream: None


class Scored:
    """A score_mod of ten operations."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias
        self.width = 5

    def __call__(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        near = (q >= k) & (q - k < self.width)
        return torch.where(near, 20 * torch.tanh(score / 20) + self.bias[h, k], score)


def proved_mod(bias: torch.Tensor, width: int) -> Callable[..., Any]:
    """The same, as a function of a number and a tensor."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        near = (q >= k) & (q - k < width)
        return torch.where(near, 20 * torch.tanh(score / 20) + bias[h, k], score)

    return score_mod


def flex_calls(
    operands: list[torch.Tensor],
) -> tuple[Callable[[], Any], dict[str, Callable[[], Any]]]:
    """fg.attention with the score_mod's expression, and the calls of the second table."""
    from torch.nn.attention.flex_attention import flex_attention

    bias = torch.zeros(operands[0].shape[1], operands[0].shape[2])
    scored, proved = Scored(bias), proved_mod(bias, 5)
    fg.flex_attention(*operands, proved)
    sizes = CallSizes(*operands[0].shape[:3], operands[1].shape[2], operands[0].device)
    traced, found = known_mods.read(None, proved, sizes)
    op = traced.operator(operands[0].shape[3], operands[2].shape[3], "float16")
    given = traced.captures(found, operands[0].device)
    numbers = itertools.count(6)

    def another() -> Any:
        scored.width = next(numbers) % 1000 + 6
        return fg.flex_attention(*operands, scored)

    def recorded() -> Any:
        scored.width = 5
        return fg.flex_attention(*operands, scored)

    def cold() -> Any:
        for known in (known_mods._kept, known_mods._proved, known_mods._settled_records):
            known.clear()
        return fg.flex_attention(*operands, proved)

    return lambda: op(*operands, return_lse=True, **given), {
        "proved": lambda: fg.flex_attention(*operands, proved),
        "recorded": recorded,
        "another number": another,
        "cold": cold,
        "torch": lambda: flex_attention(*operands, score_mod=proved),
    }


def flex_table(operands: list[torch.Tensor], calls: int, rounds: int) -> list[str]:
    """Prints the second table, and returns the limits that are exceeded."""
    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    plain, others = flex_calls(operands)
    base = median_us(plain, calls, rounds)
    table = Table(title="a call of fg.flex_attention, us (median)")
    for column in ("", "call", "added", "limit"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("fg.attention", f"{base:.1f}", "", "")
    broken = []
    for name, call in others.items():
        few = name in ("cold", "torch")
        sizes = (max(calls // 100, 1), max(rounds // 10, 1)) if few else (calls, rounds)
        took = median_us(call, *sizes)
        limit = ADDED.get(name)
        added = "" if name == "torch" else f"{took - base:.1f}"
        table.add_row(name, f"{took:.1f}", added, f"{limit:.0f}" if limit else "")
        if limit is not None and took - base > limit:
            broken.append(f"{name}: {took - base:.1f} us, at most {limit:.0f}")
    Console().print(table)
    return broken


def native_rows() -> dict[str, Callable[[], Any]]:
    """The calls of the third table, made a few times, after which they need no Python."""
    spec = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=64, name="overhead_native")
    op = fg.attention(spec)
    plain = [torch.zeros(1, 2, 32, 64, dtype=torch.float16) for _ in range(3)]
    learnt = [tensor.clone().requires_grad_() for tensor in plain]
    dout = torch.zeros_like(plain[0])
    total = learnt[0] + learnt[1]
    rows: dict[str, Callable[[], Any]] = {
        "no gradients": lambda: op(*plain),
        "forward": lambda: op(*learnt),
        "both": lambda: torch.autograd.grad(op(*learnt), learnt, dout),
        "engine": lambda: torch.autograd.grad(total, learnt[:2], dout, retain_graph=True),
    }
    for _ in range(5):
        before = op.native_calls
        for call in rows.values():
            call()
    assert op.native_calls != before, f"made in Python: {before}"
    return rows


def native_table(calls: int, rounds: int) -> list[str]:
    """Prints the third table, and returns the limits that are exceeded."""
    from flashgen.calls.native import build

    library = build.load()
    if library is None:
        print(f"no calls without Python: {build.missing()}")
        return []
    from tests.support.native_driver import native_gpu

    table = Table(title="overhead of a call without Python, us (least)")
    for column in ("", "sm_80", "sm_90a", "limit"):
        table.add_column(column, justify="left" if not column else "right")
    rows: dict[str, list[float]] = {}
    for arch in ("sm_80", "sm_90a"):
        with native_gpu(arch, library=library) as driver:
            driver.set("fake_keeps", 0)
            for name, call in native_rows().items():
                rows.setdefault(name, []).append(median_us(call, calls, rounds, min))
    broken = []
    for name, found in rows.items():
        limit = NATIVE.get(name)
        table.add_row(name, *(f"{took:.1f}" for took in found), f"{limit:.0f}" if limit else "")
        if limit is not None and max(found) > limit:
            broken.append(f"{name} without Python: {max(found):.1f} us, at most {limit:.0f}")
    Console().print(table)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()

    broken = native_table(options.calls, options.rounds)
    prepare = launch.Launch
    pretend_a_gpu()
    spec = fg.AttentionSpec(mask_mod=lambda b, h, q, k: q >= k, head_dim=64, name="overhead")
    op = fg.attention(spec)
    overload = getattr(torch.ops.flashgen, op.name)
    plain = [torch.zeros(1, 2, 32, 64, dtype=torch.float16) for _ in range(3)]
    learnt = [tensor.clone().requires_grad_() for tensor in plain]
    dout = torch.zeros_like(plain[0])

    def both(call: Callable[..., Any]) -> None:
        torch.autograd.grad(call(*learnt), learnt, dout)

    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "no gradients": (lambda: op(*plain), lambda: overload(*plain)),
        "forward": (lambda: op(*learnt), lambda: overload(*learnt)),
        "both": (lambda: both(op), lambda: both(lambda *t: overload(*t)[0])),
    }
    table = Table(title="overhead of a call, us (median)")
    for column in ("", "op", "torch.ops", "limit"):
        table.add_column(column, justify="left" if not column else "right")
    for name, (direct, dispatched) in calls.items():
        took = median_us(direct, options.calls, options.rounds)
        through = median_us(dispatched, options.calls, options.rounds)
        limit = LIMITS.get(name)
        table.add_row(name, f"{took:.1f}", f"{through:.1f}", f"{limit:.0f}" if limit else "")
        if limit is not None and took > limit:
            broken.append(f"{name}: {took:.1f} us, at most {limit:.0f}")

    run = run_forward(spec, *plain)
    kernel = idle_kernel(run.binary)
    packed = bytes(kernel.binary.resources.param_bytes)
    threads = (run.plan.threads, 1, 1)
    smem = run.plan.smem_bytes

    launched_once = prepare(kernel, (1, 2, 1), threads, smem)

    def launched() -> None:
        launched_once(packed, 0)

    def allocated() -> None:
        torch.empty(1, 2, 32, 64, dtype=torch.float16)
        torch.empty(1, 2, 32, dtype=torch.float32)

    for name, body in (("results", allocated), ("launcher", launched)):
        took = median_us(body, options.calls, options.rounds)
        table.add_row(name, f"{took:.1f}", "", "")
    Console().print(table)
    broken += flex_table(plain, options.calls, options.rounds)
    for promise in broken:
        print(f"over the limit: {promise}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
