"""The cost of a call of the operator in Python, with the launch but without the driver.

A call does all that it does on a GPU: checks, choice of a kernel, results, tensor maps, packed
parameters, launch. Only the driver is a stub that answers at once, and the tensors are on the CPU,
so that no GPU is needed and no call waits. Times are those of the processor, which other programs
change little. One table has a row for each code path and kind of call::

    no gradients    inputs that require no gradients
    forward         inputs that require gradients, forward only
    both            forward and backward; most of the time is torch's autograd, and torch's
                    operations on the CPU (zeros, the rounding of sums)

with a column for a call of the operator and one for a call through torch's dispatcher, and beside
them::

    results         two calls of torch.empty, which all rows above include
    launcher        calls.launch.Launch alone, which all rows above include
    custom op       a torch.library.custom_op with a backward pass, which returns empty results
    sdpa            torch's scaled_dot_product_attention of one query and one key on the CPU, whose
                    kernel has next to nothing to compute
    flash operator  torch's operator of its flash kernels, which flashgen.integrations.torch
                    replaces: what scaled_dot_product_attention calls on a GPU

A second table has calls of fg.flex_attention with a score_mod of ten operations, without gradients,
beside fg.attention with the same expression, and what the mod adds to the latter::

    proved          the mod is proved to read numbers and tensors only
    recorded        an object whose operations are recorded at each call
    another number  the same object with another number at each call
    cold            the first call with a mod; its kernels have been compiled
    torch           flex_attention of torch on CPU tensors of the same shape, which computes it
    compiled        the same by torch.compile: of torch's flex_attention on flashgen's operator, by
                    register_flex, and of torch's own kernel for the CPU

A third table has calls without Python (`flashgen build-native`), with a driver in C that does
nothing; the rows are those of the first table. "engine" is what torch takes for torch.autograd.grad
of a sum of two tensors, most of which is also in "both". The table is left out where the native
part is not built.

A fourth table has calls of DTensors on a mesh of one rank, divided by heads, and what DTensor adds
to the same calls of ordinary tensors: of fg.attention, and of torch's flash operator, whose
sharding torch finds itself. "of torch" is the ratio of their calls of DTensors; all are made by
turns, because machines change their speed.

Fails when a limit is exceeded: those of `LIMITS` and `NATIVE` and, for what is added, of `ADDED`
and `OF_TORCH`.

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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import torch  # noqa: E402
from cuda.bindings import driver as bindings  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import flashgen as fg  # noqa: E402
from flashgen.calls import launch  # noqa: E402
from flashgen.calls.ops import run_forward  # noqa: E402
from flashgen.calls.runtime import backends, bound_kernel, kernel_arguments  # noqa: E402
from flashgen.calls.trust import Decision  # noqa: E402
from flashgen.frontends.flex import known_mods  # noqa: E402
from flashgen.frontends.flex.traced_mods import CallSizes  # noqa: E402
from flashgen.integrations.torch import register, register_flex  # noqa: E402
from flashgen.shared import arch  # noqa: E402
from flashgen.shared.tensormap import MAP_BYTES  # noqa: E402

PATHS = ("sm_80", "sm_90a")
LIMITS = {
    ("sm_80", "no gradients"): 7.6,
    ("sm_80", "forward"): 11.7,
    ("sm_90a", "no gradients"): 10.0,
    ("sm_90a", "forward"): 15.0,
}  # us
NATIVE = {"no gradients": 4.0, "forward": 6.0, "both": 30.0}  # us
OF_TORCH = 2.5  # a call of DTensors over one of torch's operator
ADDED = {"proved": 30.0, "recorded": 150.0}  # us


def median_us(
    call: Callable[[], Any],
    calls: int,
    rounds: int,
    summarize: Callable[[list[float]], float] = statistics.median,
) -> float:
    """Median over rounds of the mean CPU time of some calls, in microseconds."""
    for _ in range(calls):
        call()
    means = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            call()
        means.append((time.process_time() - start) / calls)
    return summarize(means) * 1e6


def idle_driver() -> Any:
    """Answers every call that a launch makes, at once and with success."""
    done = (0,)
    context = 1
    kept_names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
    return SimpleNamespace(
        **{name: getattr(bindings, name) for name in kept_names},
        cuDriverGetVersion=lambda: (0, 13000),
        cuCtxGetCurrent=lambda: (0, context),
        cuLaunchKernel=lambda *arguments: done,
        cuLaunchKernelEx=lambda *arguments: done,
        cuFuncSetAttribute=lambda *arguments: done,
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
    )


def idle_kernel(binary: Any, device: int = 0, *, stream: int = 0) -> launch.Kernel:
    """A kernel loaded on a device of its own architecture, whose driver does nothing."""
    properties = launch.device.Device(
        index=0,
        context=1,
        capability=(8, 0) if binary.arch == "sm_80" else (9, 0),
        max_threads=1024,
        max_smem_bytes=arch.facts(binary.arch).smem_per_block,
        registers=65_536,
    )
    return launch.Kernel(binary, properties, idle_driver(), None, None)


def pretend_a_gpu(path: str) -> None:
    """CPU tensors take the place of tensors of a GPU that takes a code path, and calls are made in
    Python."""
    os.environ["FLASHGEN_NATIVE"] = "0"
    backends.TAKES["gpu"] = "cpu"
    backends.DEFAULTS["cpu"] = "gpu"
    backends.index_of = lambda device: 0
    backends.Target.sms = 132  # type: ignore[misc,assignment]
    backends.device_memory = lambda index: None
    bound_kernel.current_stream = lambda index: 0
    kernel_arguments.encode = lambda spec, address, device: bytes(MAP_BYTES)
    backends.decide = lambda index, capturing: Decision(path, "a stub")
    launch.load = idle_kernel


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
    traced, call_record = known_mods.read(None, proved, sizes)
    op = traced.operator(operands[0].shape[3], operands[2].shape[3], "float16")
    captures = traced.captures(call_record, operands[0].device)
    numbers = itertools.count(6)

    def another() -> Any:
        scored.width = next(numbers) % 1000 + 6
        return fg.flex_attention(*operands, scored)

    def recorded() -> Any:
        scored.width = 5
        return fg.flex_attention(*operands, scored)

    def cold() -> Any:
        for cache in (known_mods._variants_of_keys, known_mods._proved, known_mods._stable_records):
            cache.clear()
        return fg.flex_attention(*operands, proved)

    def compiled() -> Callable[[], Any]:
        torch._dynamo.reset()
        compiled_function = torch.compile(flex_attention, fullgraph=True)
        compiled_function(*operands, score_mod=proved)
        return lambda: compiled_function(*operands, score_mod=proved)

    compiled_torch = compiled()
    register_flex()
    compiled_flashgen = compiled()
    return lambda: op(*operands, return_lse=True, **captures), {
        "compiled, register_flex": compiled_flashgen,
        "compiled, torch": compiled_torch,
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
        few = name in ("cold", "torch", "compiled, torch")
        sizes = (max(calls // 100, 1), max(rounds // 10, 1)) if few else (calls, rounds)
        took = median_us(call, *sizes)
        limit = ADDED.get(name)
        added = "" if "torch" in name else f"{took - base:.1f}"
        table.add_row(name, f"{took:.1f}", added, f"{limit:.0f}" if limit else "")
        if limit is not None and took - base > limit:
            broken.append(f"{name}: {took - base:.1f} us, at most {limit:.0f}")
    Console().print(table)
    return broken


def rows_of(
    op: Callable[..., torch.Tensor], plain: list[torch.Tensor]
) -> dict[str, Callable[[], Any]]:
    """The kinds of calls of an operator."""
    learnt = [tensor.clone().requires_grad_() for tensor in plain]
    dout = torch.zeros_like(plain[0])
    return {
        "no gradients": partial(op, *plain),
        "forward": partial(op, *learnt),
        "both": lambda: torch.autograd.grad(op(*learnt), learnt, dout),
    }


def operator_table(plain: list[torch.Tensor], calls: int, rounds: int) -> list[str]:
    """Prints the first table, and returns the limits that are exceeded."""
    table = Table(title="overhead of a call, us (median)")
    for column in ("", "op", "torch.ops", "limit"):
        table.add_column(column, justify="left" if not column else "right")
    broken = []
    for path in PATHS:
        pretend_a_gpu(path)
        spec = fg.AttentionSpec(mask_mod=lambda b, h, q, k: q >= k, name=f"overhead_{path}")
        op = fg.attention(spec)
        overload = getattr(torch.ops.flashgen, op.name)
        dispatched = rows_of(lambda *operands, f=overload: f(*operands)[0], plain)
        for name, direct in rows_of(op, plain).items():
            took = median_us(direct, calls, rounds)
            through = median_us(dispatched[name], calls, rounds)
            limit = LIMITS.get((path, name))
            limit_text = f"{limit:.1f}" if limit else ""
            table.add_row(f"{path}, {name}", f"{took:.1f}", f"{through:.1f}", limit_text)
            if limit is not None and took > limit:
                broken.append(f"{path}, {name}: {took:.1f} us, at most {limit:.1f}")
    for name, call in {**parts_of_calls(spec, plain), **calls_of_torch(plain)}.items():
        table.add_row(name, f"{median_us(call, calls, rounds):.1f}", "", "")
    Console().print(table)
    return broken


def parts_of_calls(
    spec: fg.AttentionSpec, plain: list[torch.Tensor]
) -> dict[str, Callable[[], Any]]:
    """What each call of the first table includes."""
    run = run_forward(spec, *plain)
    kernel = idle_kernel(run.binary)
    packed = bytes(kernel.binary.resources.param_bytes)
    launched = launch.Launch(kernel, (1, 2, 1), (run.plan.threads, 1, 1), run.plan.smem_bytes)

    def allocated() -> None:
        torch.empty(1, 2, 32, 64, dtype=torch.float16)
        torch.empty(1, 2, 32, dtype=torch.float32)

    return {"results": allocated, "launcher": partial(launched, packed)}


def calls_of_torch(plain: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """Calls of torch's own ways to an operator, whose kernels do next to nothing."""

    @torch.library.custom_op("flashgen_overhead::attention", mutates_args=())
    def custom(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(q)

    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))

    def keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    custom.register_autograd(backward, setup_context=keep)
    tiny = [torch.zeros(1, 1, 1, 16) for _ in range(3)]
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)

    calls = {}
    flash = flash_operator()
    ways = (("custom op", custom, plain), ("sdpa", sdpa, tiny), ("flash operator", flash, plain))
    for name, op, operands in ways:
        rows = rows_of(op, operands)
        calls |= {f"{name}, {kind}": rows[kind] for kind in ("no gradients", "both")}
    return calls


def flash_operator() -> Callable[..., torch.Tensor]:
    """torch's operator of its flash kernels, computed by flashgen."""
    register("CPU")
    torch.nn.attention.activate_flash_attention_impl("flashgen")

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        operator = torch.ops.aten._scaled_dot_product_flash_attention
        out: torch.Tensor = operator(q, k, v, 0.0, True, False, scale=0.125)[0]
        return out

    return flash


def dtensor_table(plain: list[torch.Tensor], calls: int, rounds: int) -> list[str]:
    """Prints the fourth table, and returns the limits that are exceeded."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    pretend_a_gpu("sm_80")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    spread = [distribute_tensor(x, mesh, [Shard(1)]) for x in plain]
    op = fg.attention(fg.AttentionSpec(mask_mod=lambda b, h, q, k: q >= k, name="overhead_spread"))
    table = Table(title="a call of DTensors, us (median)")
    for column in ("", "tensors", "DTensors", "added", "of torch", "limit"):
        table.add_column(column, justify="left" if not column else "right")
    ways = {"flash operator": flash_operator(), "fg.attention": op}
    rows_by_call = [
        rows_of(call, operands) for call in ways.values() for operands in (plain, spread)
    ]
    broken = []
    for kind in rows_by_call[0]:
        every = [rows[kind] for rows in rows_by_call]
        rounds_of = [[median_us(call, calls, 1) for call in every] for _ in range(rounds)]
        took = [statistics.median(times) for times in zip(*rounds_of, strict=True)]
        ratio = took[3] / took[1]
        for name, (before, after) in zip(ways, (took[:2], took[2:]), strict=True):
            times = (f"{before:.1f}", f"{after:.1f}", f"{after - before:.1f}")
            shown = (f"{ratio:.2f}", f"{OF_TORCH:.1f}") if name == "fg.attention" else ()
            table.add_row(f"{name}, {kind}", *times, *shown)
        if ratio > OF_TORCH:
            broken.append(f"DTensors, {kind}: {ratio:.2f} of torch, at most {OF_TORCH:.1f}")
    Console().print(table)
    dist.destroy_process_group()
    return broken


def native_rows(plain: list[torch.Tensor]) -> dict[str, Callable[[], Any]]:
    """The calls of the third table, made a few times, after which they need no Python."""
    spec = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=64, name="overhead_native")
    op = fg.attention(spec)
    pair = [tensor.clone().requires_grad_() for tensor in plain[:2]]
    total, gradient = pair[0] + pair[1], torch.zeros_like(plain[0])
    rows = rows_of(op, plain)
    rows["engine"] = lambda: torch.autograd.grad(total, pair, gradient, retain_graph=True)
    for _ in range(5):
        before = op.native_calls
        for call in rows.values():
            call()
    assert op.native_calls != before, f"made in Python: {before}"
    return rows


def native_table(plain: list[torch.Tensor], calls: int, rounds: int) -> list[str]:
    """Prints the third table, and returns the limits that are exceeded."""
    from flashgen.calls.native import build

    library = build.load()
    if library is None:
        print(f"no calls without Python: {build.missing()}")
        return []
    from tests.support.native_driver import native_gpu

    table = Table(title="overhead of a call without Python, us (least)")
    for column in ("", *PATHS, "limit"):
        table.add_column(column, justify="left" if not column else "right")
    rows: dict[str, list[float]] = {}
    for path in PATHS:
        with native_gpu(path, library=library) as driver:
            driver.set("fake_keeps", 0)
            for name, call in native_rows(plain).items():
                rows.setdefault(name, []).append(median_us(call, calls, rounds, min))
    broken = []
    for name, times in rows.items():
        limit = NATIVE.get(name)
        table.add_row(name, *(f"{took:.1f}" for took in times), f"{limit:.0f}" if limit else "")
        if limit is not None and max(times) > limit:
            broken.append(f"{name} without Python: {max(times):.1f} us, at most {limit:.0f}")
    Console().print(table)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()

    plain = [torch.zeros(1, 2, 32, 64, dtype=torch.float16) for _ in range(3)]
    broken = native_table(plain, options.calls, options.rounds)
    broken += operator_table(plain, options.calls, options.rounds)
    broken += flex_table(plain, options.calls, options.rounds)
    broken += dtensor_table(plain, options.calls, options.rounds)
    for promise in broken:
        print(f"over the limit: {promise}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
