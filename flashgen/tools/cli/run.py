"""``flashgen run``: the whole pipeline on random operands, compared with the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from flashgen.shared import config
from flashgen.shared.errors import InputError
from flashgen.spec.language.python_printer import python_text
from flashgen.tools.cli.arguments import RunArguments
from flashgen.tools.cli.call import choose_backend, random_call
from flashgen.tools.cli.console import busy, plural, print_rows, seconds
from flashgen.tools.cli.decoding import capacity_of, served_call, sizes_of
from flashgen.tools.cli.ending import MISMATCH
from flashgen.tools.cli.inputs import changed_spec
from flashgen.tools.cli.progress import emulated, expected_work
from flashgen.tools.cli.rows import decoding_rows, input_rows

if TYPE_CHECKING:
    from flashgen.calls.ops import BackwardRun, ForwardRun
    from flashgen.calls.runtime.reports import TangentRun
    from flashgen.kernels.pipeline import Build
    from flashgen.reference import Verdict
    from ptx_emulator import Counters

    Derivatives = BackwardRun | TangentRun

Row = tuple[str, str]


def run(arguments: RunArguments) -> None:
    """Executes one spec on random operands, compares it with the oracle and prints a table."""
    spec = changed_spec(arguments.path, arguments)
    sizes = sizes_of(arguments, arguments.shape, spec)
    with busy("loading torch"):
        from flashgen.calls.ops import run_forward
        from flashgen.tools.tune.measure import derivative_of, judge_of, on_gpu
    backend, why = choose_backend(arguments.backend)
    orders = _orders(arguments, backend)
    in_emulator = backend.startswith("emulator")
    where = "in the emulator" if in_emulator else "on the GPU" if backend == "gpu" else "on the CPU"
    call = random_call(
        spec,
        arguments,
        sizes,
        device="cuda" if backend == "gpu" else "cpu",
        q_offset=sizes.seq_k - sizes.seq_q if arguments.decode else arguments.q_offset,
        k_offset=arguments.k_offset,
        capacity=capacity_of(arguments, sizes),
    )
    served = served_call(spec, call, arguments)
    call = served.contiguous
    run_options: dict[str, Any] = {
        "backend": backend,
        "arch": arguments.arch,
        "sram": arguments.sram,
        "check_memory": arguments.checkers,
    }

    def forward() -> ForwardRun:
        return run_forward(served.spec, *served.operands, **served.options | run_options)

    results_of_orders: list[tuple[ForwardRun, list[Derivatives]]] = []
    verdicts: dict[str, Verdict] = {}
    more_rows: list[Row] = []
    elapsed = 0.0
    for order in orders:
        run_options["order_seed"] = order
        suffix = f", order {order}" if len(orders) > 1 else ""
        message = f"{spec.name}: compiling, then running {sizes} {where}{suffix}"
        with emulated(message, partial(expected_work, spec, call, arguments)):
            result = forward()
            if not results_of_orders:
                elapsed = on_gpu(forward) if backend == "gpu" else result.report.run_seconds
        order_verdicts: dict[str, Verdict] = {}
        if arguments.check:
            with busy(f"{spec.name}: computing the oracle in float64"):
                order_verdicts |= judge_of(spec, call, "forward")(result)
        derivatives: list[Derivatives] = []
        for pass_name in _more_passes(arguments):
            message = f"{spec.name}: compiling, then running the {pass_name} pass {where}{suffix}"
            derivative = derivative_of(spec, call, result, pass_name, **run_options)
            with emulated(message, partial(expected_work, spec, call, arguments, pass_name)):
                derivatives.append(derivative())
                total = on_gpu(derivative) if backend == "gpu" and not results_of_orders else None
            if not results_of_orders:
                more_rows += _rows_of(pass_name, derivatives[-1], total)
            if arguments.check:
                with busy(f"{spec.name}: computing the {pass_name} pass in float64"):
                    order_verdicts |= judge_of(spec, call, pass_name)(derivatives[-1])
        verdicts |= {name + suffix: verdict for name, verdict in order_verdicts.items()}
        results_of_orders.append((result, derivatives))
    result = results_of_orders[0][0]

    arch = result.arch
    if arguments.sram is not None:
        arch += f", planned for {arguments.sram:,} B of shared memory per block"
    print_rows(
        [
            ("spec", f"{spec.name}, {arguments.path}"),
            ("score_mod", python_text(spec.score) if spec.score_line else "none"),
            ("mask_mod", python_text(spec.mask) if spec.mask_line else "none"),
            *input_rows(spec, call, sizes),
            *decoding_rows(arguments, served.pages, result.report),
            ("backend", f"{result.backend}, {why}"),
            ("arch", arch),
            *_kernel_rows(result, elapsed, arguments.checkers),
            *more_rows,
            *_order_rows(orders, results_of_orders),
            *((name, str(verdict)) for name, verdict in verdicts.items()),
            ("result", _result(verdicts)),
        ]
    )
    if not all(verdicts.values()):
        raise typer.Exit(MISMATCH)


def _orders(arguments: RunArguments, backend: str) -> tuple[int | None, ...]:
    """The order_seed of each run; (None,) where none is given.

    Raises:
        InputError: the backend draws no order.
    """
    if not arguments.order_seed:
        return (None,)
    if not backend.startswith("emulator"):
        raise InputError(
            "only the emulator draws an order of blocks and warps",
            where="option --order-seed",
            numbers=f"backend {backend!r}",
            way_out="--backend emulator, or leave the option out",
        )
    return tuple(dict.fromkeys(arguments.order_seed))


def _order_rows(
    orders: tuple[int | None, ...],
    results_of_orders: Sequence[tuple[ForwardRun, Sequence[Derivatives]]],
) -> Iterator[Row]:
    """The orders of the emulator, and whether the results of all have the same bits."""
    if orders == (None,):
        return
    text = ", ".join(map(str, orders))
    if len(results_of_orders) > 1:
        first, *others = [_results(*results) for results in results_of_orders]
        differ = [name for name, bits in first.items() if any(o[name] != bits for o in others)]
        text += f": {', '.join(differ)} differ in bits" if differ else ": the same bits in all"
    yield "orders", text


def _more_passes(arguments: RunArguments) -> Iterator[str]:
    """The passes after the forward one, by the names of `derivative_of`."""
    if arguments.backward:
        fixed = arguments.deterministic or config.batch_invariant()
        yield "deterministic" if fixed else "backward"
    if arguments.tangent:
        yield "tangent"


def _results(forward: ForwardRun, derivatives: Sequence[Derivatives]) -> dict[str, bytes]:
    """The bytes of all results by name."""
    from flashgen.calls.runtime.bound_kernel import span
    from flashgen.calls.runtime.reports import TangentRun

    results = {"out": forward.out, "lse": forward.lse}
    for run in derivatives:
        if isinstance(run, TangentRun):
            results |= {"out's tangent": run.out, "lse's tangent": run.lse}
        else:
            results |= {"dq": run.dq, "dk": run.dk, "dv": run.dv}
    return {name: span(tensor.contiguous()).tobytes() for name, tensor in results.items()}


def _rows_of(pass_name: str, run: Derivatives, total: float | None) -> Iterator[Row]:
    """A line for each kernel of a pass after the forward one: its tile, registers and time.

    Args:
        total: on a GPU, the seconds that all of them take together.
    """
    name = "tangent" if pass_name == "tangent" else "backward"
    for text in run.copies:
        yield "copied", text
    for report in run.reports:
        if report.kernel is None:
            yield name, report.access_reason
            continue
        time = "" if total is not None else f", {seconds(report.run_seconds)}"
        yield name, _launched(report.kernel) + time
    if total is not None:
        yield name, f"{seconds(total)} together"


def _launched(kernel: Build) -> str:
    """A line with a kernel, its tile and its registers."""
    plan, used = kernel.plan, kernel.binary.resources
    spills = "" if used.clean or kernel.source.outlined else f", {used.local_memory}"
    parts = [plan.tile_text] if plan.tile_text else []
    parts += [plural(plan.warps, "warp"), f"{used.registers} registers{spills}"]
    return f"{kernel.source.name}: {', '.join(parts)}"


def _kernel_rows(result: ForwardRun, elapsed: float, checkers: bool) -> Iterator[Row]:
    report, kernel = result.report, result.report.kernel
    if kernel is None:
        yield "kernel", report.access_reason
        return
    plan, binary, used = kernel.plan, kernel.binary, kernel.binary.resources
    for table in report.tables:
        if table.kernel is not None:
            yield "table", _launched(table.kernel)
    yield "kernel", f"{kernel.source.name}, {kernel.source.filename}"
    if report.others:
        columns = ", ".join(str(part.columns) for part in (report, *report.others))
        yield (
            "parts",
            f"{1 + len(report.others)} launches, of {columns} columns of v; this is the first",
        )
    yield "tile", f"block_q {plan.block_q} x block_k {plan.block_k}, {plural(plan.warps, 'warp')}"
    if report.heads_reason:
        yield "heads", f"{plan.heads_per_tile} per tile, {report.heads_reason}"
    blocks = report.blocks
    if blocks is not None:
        yield "blocks", f"{blocks.count:,} for {blocks.work_tiles:,} tiles: {blocks.reason}"
    yield "access", f"{report.access_bytes} B at once: {report.access_reason}"
    yield "shared", f"{plan.smem_bytes + used.static_smem_bytes:,} B a block"
    clean = used.local_memory
    if kernel.source.outlined:
        yield "calls", kernel.source.calls
        clean = f"{used.stack_bytes:,} B of stack, for these calls"
    yield "registers", f"{used.registers} a thread, {clean}"
    counted = report.counters
    if counted is None:
        yield "bytes", "not counted on a GPU"
    else:
        yield "bytes", _bytes(counted)
    if report.merge is not None and report.merge.kernel is not None:
        merged = report.merge.counters
        traffic = "" if merged is None else f", {_bytes(merged)}"
        yield "merge", _launched(report.merge.kernel) + traffic
    built = "from the cache" if binary.from_cache else "compiled"
    yield "build", f"{seconds(report.build_seconds)}, {built}"
    with_checkers = f", memory and race checkers {'on' if checkers else 'off'}"
    yield "run", seconds(elapsed) + (with_checkers if result.backend == "emulator" else "")


def _bytes(counted: Counters) -> str:
    read, written = counted.global_read_bytes, counted.global_write_bytes
    return f"{read:,} B read, {written:,} B written"


def _result(verdicts: dict[str, Verdict]) -> Text:
    if not verdicts:
        return Text("not compared with the oracle", style="yellow")
    if all(verdicts.values()):
        return Text("pass", style="bold green")
    return Text("FAIL", style="bold red")
