"""``flashgen run``: the whole pipeline on random operands, compared with the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from flashgen.cli.arguments import RunArguments
from flashgen.cli.call import RandomCall, choose_backend, random_call
from flashgen.cli.console import MISMATCH, busy, facts, seconds
from flashgen.cli.inputs import load_spec, parse_shape
from flashgen.language import python_text
from flashgen.language.spec import AttentionSpec
from flashgen.signature import LAYOUT_LISTS

if TYPE_CHECKING:
    from flashgen.ops import BackwardRun, ForwardRun
    from flashgen.pipeline import Build
    from flashgen.planner import Plan
    from flashgen.planner.schedule import LaunchBlocks
    from flashgen.reference import Verdict


def run(arguments: RunArguments) -> None:
    """Executes one spec on random operands, compares it with the oracle and prints a table.

    Raises:
        typer.Exit: with status 1 when the result does not meet the error rule.
        FlashgenError: a stage of the pipeline fails.
    """
    spec = load_spec(arguments)
    sizes = parse_shape(arguments.shape)
    with busy("loading torch"):
        from flashgen.ops import run_forward
        from flashgen.tune import on_gpu
    backend, why = choose_backend(arguments.backend)
    on = {"gpu": "on the GPU", "emulator": "in the emulator"}.get(backend, "on the CPU")
    call = random_call(
        spec,
        arguments,
        sizes,
        device="cuda" if backend == "gpu" else "cpu",
        q_offset=arguments.q_offset,
        k_offset=arguments.k_offset,
    )
    how: dict[str, Any] = {
        "backend": backend,
        "arch": arguments.arch,
        "sram": arguments.sram,
        "check_memory": arguments.checkers,
    }

    def forward() -> ForwardRun:
        return run_forward(spec, *call.operands, **call.options | how)

    with busy(f"{spec.name}: compiling, then running {sizes} {on}"):
        result = forward()
        elapsed = on_gpu(forward) if backend == "gpu" else result.report.run_seconds
    verdicts: dict[str, Verdict] = {}
    if arguments.check:
        with busy(f"{spec.name}: computing the oracle in float64"):
            verdicts = _judge(spec, result, call)
    backward_rows: list[tuple[str, str]] = []
    if arguments.backward:
        how["deterministic"] = arguments.deterministic
        with busy(f"{spec.name}: compiling, then running the backward kernels {on}"):
            gradients, total = _backward(spec, call, result, how)
        backward_rows = _backward_rows(gradients, total)
        if arguments.check:
            with busy(f"{spec.name}: computing the gradients in float64"):
                verdicts |= _judge_gradients(spec, gradients, call)

    arch = result.arch
    if arguments.sram is not None:
        arch += f", planned for {arguments.sram:,} B of shared memory per block"
    facts(
        [
            ("spec", f"{spec.name}, {arguments.path}"),
            ("score_mod", python_text(spec.score) if spec.score_line else "none"),
            ("mask_mod", python_text(spec.mask) if spec.mask_line else "none"),
            *([("layout", spec.block_sparse.described)] if spec.block_sparse else []),
            *_scalar_rows(spec, call),
            *_tensor_rows(spec, call),
            *_dropout_rows(call),
            ("shape", f"{sizes}, {_dims(spec)}, {spec.dtype}"),
            ("backend", f"{result.backend}, {why}"),
            ("arch", arch),
            *_kernel_rows(result, elapsed, arguments.checkers),
            *backward_rows,
            *((name, str(verdict)) for name, verdict in verdicts.items()),
            *_result_rows(verdicts),
        ]
    )
    if not all(verdicts.values()):
        raise typer.Exit(MISMATCH)


def _backward(
    spec: AttentionSpec, call: RandomCall, result: ForwardRun, how: dict[str, Any]
) -> tuple[BackwardRun, float | None]:
    """The gradients, and on a GPU the seconds that all backward kernels take together."""
    from flashgen.ops import run_backward
    from flashgen.tune import on_gpu

    tensors = (*call.operands, result.out, result.lse, *call.gradients)

    def backward() -> BackwardRun:
        return run_backward(spec, *tensors, **call.options | how)

    return backward(), on_gpu(backward) if how["backend"] == "gpu" else None


def _judge(spec: AttentionSpec, result: ForwardRun, call: RandomCall) -> dict[str, Verdict]:
    from flashgen import reference

    exact_out, exact_lse = reference.attention(spec, *call.operands, **call.options)
    same_out, same_lse = reference.same_dtype(spec, *call.operands, **call.options)
    return {
        "out": reference.compare(result.out, exact_out, same_out),
        "lse": reference.compare(result.lse, exact_lse, same_lse),
    }


def _judge_gradients(spec: AttentionSpec, run: BackwardRun, call: RandomCall) -> dict[str, Verdict]:
    from flashgen import reference

    found = (run.dq, run.dk, run.dv, *run.captured)
    tensors = (*call.operands, *call.gradients)
    return reference.judge_gradients(found, spec, *tensors, **call.options)


def _dims(spec: AttentionSpec) -> str:
    if spec.head_dim_v == spec.head_dim:
        return f"head_dim {spec.head_dim}"
    return f"head_dim {spec.head_dim} and {spec.head_dim_v}"


def _scalar_rows(spec: AttentionSpec, call: RandomCall) -> list[tuple[str, str]]:
    values = call.options["scalars"]
    if not values:
        return []
    text = ", ".join(f"{name} = {value}" for name, value in values.items())
    examples = [scalar.name for scalar in spec.scalars if scalar.name in call.examples]
    if examples:
        text += f"  ({', '.join(examples)}: the file's example)"
    return [("scalars", text)]


def _tensor_rows(spec: AttentionSpec, call: RandomCall) -> list[tuple[str, str]]:
    """A line for each captured tensor: its shape, and the origin of its values."""
    rows, values = [], call.options["tensors"]
    own = LAYOUT_LISTS if spec.block_sparse is not None else ()
    for tensor in (tensor for tensor in spec.tensors if tensor.name not in own):
        text = f"{tensor.name} {list(values[tensor.name].shape)}, {tensor.dtype}"
        text += ", learned" if tensor.grad else ""
        text += ", the file's example" if tensor.name in call.examples else ", random"
        rows.append(("captured", text))
    return rows


def _dropout_rows(call: RandomCall) -> list[tuple[str, str]]:
    if "rng" not in call.options:
        return []
    seed, offset = call.options["rng"].tolist()
    return [("dropout", f"p {call.options['dropout_p']}, seed {seed}, offset {offset}")]


def _backward_rows(run: BackwardRun, total: float | None) -> list[tuple[str, str]]:
    """A line for each backward kernel: its tile, registers and time."""
    rows = [("copied", text) for text in run.copies]
    for report in run.reports:
        if report.kernel is None:
            rows.append(("backward", report.access_reason))
            continue
        time = "" if total is not None else f", {seconds(report.run_seconds)}"
        rows.append(("backward", _launched(report.kernel) + time))
    if total is not None:
        rows.append(("backward", f"{seconds(total)} together"))
    return rows


def _launched(kernel: Build) -> str:
    """A line with a kernel, its tile and its registers."""
    plan, used = kernel.plan, kernel.binary.resources
    tile = f"{plan.block_q} x {plan.block_k}" if plan.block_k else f"{plan.block_q} rows"
    spills = "" if used.clean else f", SPILLS {used.spill_store_bytes:,} B"
    parts = [tile] if plan.block_q else []  # the kernel of a min/max table has no tile
    parts += [f"{plan.warps} warps", f"{used.registers} registers{spills}"]
    return f"{kernel.source.name}: {', '.join(parts)}"


def _kernel_rows(result: ForwardRun, elapsed: float, checkers: bool) -> list[tuple[str, str]]:
    plan, binary, counters = result.plan, result.binary, result.counters
    if plan is None or binary is None or result.source is None:
        return [("kernel", result.report.access_reason)]
    used = binary.resources
    spills = used.spill_store_bytes + used.spill_load_bytes
    moved = "not counted on a GPU"
    if counters is not None:
        moved = f"{counters.global_read_bytes:,} B read, {counters.global_write_bytes:,} B written"
    built = "from the cache" if binary.from_cache else "compiled"
    with_checkers = ""
    if result.backend == "emulator":
        with_checkers = f", memory and race checkers {'on' if checkers else 'off'}"
    tables = [report.kernel for report in result.report.tables if report.kernel]
    return [
        *(("table", _launched(kernel)) for kernel in tables),
        ("kernel", f"{result.source.name}, {result.source.filename}"),
        ("tile", f"block_q {plan.block_q} x block_k {plan.block_k}, {plan.warps} warps"),
        *_heads_rows(plan, result.report.heads_reason),
        *_blocks_rows(result.report.blocks),
        ("access", f"{result.report.access_bytes} B at once: {result.report.access_reason}"),
        ("shared", f"{plan.smem_bytes + used.static_smem_bytes:,} B a block"),
        (
            "registers",
            f"{used.registers} a thread, "
            + ("no spills, no stack" if used.clean else f"SPILLS {spills:,} B"),
        ),
        ("bytes", moved),
        ("build", f"{seconds(result.report.build_seconds)}, {built}"),
        ("run", f"{seconds(elapsed)}{with_checkers}"),
    ]


def _heads_rows(plan: Plan, reason: str) -> list[tuple[str, str]]:
    """The number of heads per tile, where several heads could share one."""
    return [("heads", f"{plan.heads_per_tile} per tile, {reason}")] if reason else []


def _blocks_rows(blocks: LaunchBlocks | None) -> list[tuple[str, str]]:
    """The number of blocks of a persistent kernel."""
    if blocks is None:
        return []
    return [("blocks", f"{blocks.count:,} for {blocks.work_tiles:,} tiles: {blocks.reason}")]


def _result_rows(verdicts: dict[str, Verdict]) -> list[tuple[str, Text]]:
    if not verdicts:
        return [("result", Text("not compared with the oracle", style="yellow"))]
    if all(verdicts.values()):
        return [("result", Text("pass", style="bold green"))]
    return [("result", Text("FAIL", style="bold red"))]
