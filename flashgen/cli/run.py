"""``flashgen run``: the whole pipeline on random operands, judged by the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from flashgen import config, launch
from flashgen.cli.captures import tensor_values
from flashgen.cli.console import MISMATCH, busy, facts, seconds
from flashgen.cli.inputs import Number, Shape, load_spec, parse_shape, scalar_values
from flashgen.errors import InputError, LaunchError
from flashgen.expr import shown
from flashgen.sparse import COMPRESSED
from flashgen.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from flashgen.ops import BackwardRun, ForwardRun
    from flashgen.pipeline import Build
    from flashgen.plan import Plan
    from flashgen.plan.jobs import Blocks
    from flashgen.reference import Verdict


@dataclass(frozen=True)
class Request:
    """The options of one ``flashgen run``; their meanings are in the command's help."""

    path: str
    shape: str
    dtype: str | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    arch: str | None = None
    sram: int | None = None
    scalars: tuple[str, ...] = ()
    q_offset: int = 0
    k_offset: int = 0
    backend: str | None = None
    seed: int = 0
    backward: bool = False
    dropout: float = 0.0
    deterministic: bool = False
    check: bool = True
    checkers: bool = True


def run(request: Request) -> None:
    """Runs one spec and prints what happened.

    Raises:
        typer.Exit: with status 1 when the result does not meet the error rule.
        FlashgenError: a stage refused.
    """
    spec = load_spec(
        request.path,
        dtype=request.dtype,
        head_dim=request.head_dim,
        head_dim_v=request.head_dim_v,
    )
    if request.dropout:
        spec = spec.replace(dropout=True)
    sizes = parse_shape(request.shape)
    with busy("loading torch"):
        from flashgen.ops import run_backward, run_forward
        from flashgen.tune import on_gpu
    values, examples = scalar_values(spec, request.path, request.scalars)
    backend, why = choose_backend(request.backend)
    operands, (dout, dlse, rng) = random_tensors(spec, sizes, request.seed, backend)
    offsets = {"q_offset": request.q_offset, "k_offset": request.k_offset}
    device = "cuda" if backend == "gpu" else "cpu"
    captured, captured_examples = tensor_values(
        spec, request.path, sizes, **offsets, seed=request.seed, device=device
    )
    numbers: dict[str, Any] = {"scalars": values, "tensors": captured, **offsets}
    if request.dropout:
        numbers |= {"dropout_p": request.dropout, "rng": rng}
    q, k, v = operands
    how = {
        "backend": backend,
        "arch": request.arch,
        "sram": request.sram,
        "check_memory": request.checkers,
    }

    def forward() -> ForwardRun:
        return run_forward(spec, q, k, v, **numbers | how)

    def backward() -> BackwardRun:
        return run_backward(
            spec,
            *(q, k, v, result.out, result.lse, dout, dlse),
            deterministic=request.deterministic,
            **numbers | how,
        )

    where = {"gpu": "on the GPU", "emulator": "in the emulator"}.get(backend, "on the CPU")
    with busy(f"{spec.name}: compiling, then running {sizes} {where}"):
        result = forward()
        elapsed = on_gpu(forward) if backend == "gpu" else result.report.run_seconds
    verdicts: dict[str, Verdict] = {}
    if request.check:
        with busy(f"{spec.name}: computing the oracle in float64"):
            verdicts = _judge(spec, result, operands, numbers)
    backward_rows: list[tuple[str, str]] = []
    if request.backward:
        with busy(f"{spec.name}: compiling, then running the backward kernels {where}"):
            gradients = backward()
            total = on_gpu(backward) if backend == "gpu" else None
        backward_rows = _backward_rows(gradients, total)
        if request.check:
            with busy(f"{spec.name}: computing the gradients in float64"):
                verdicts |= _judge_gradients(spec, gradients, (*operands, dout, dlse), numbers)

    facts(
        [
            ("spec", f"{spec.name}, {request.path}"),
            ("score_mod", shown(spec.score) if spec.score_line else "none"),
            ("mask_mod", shown(spec.mask) if spec.mask_line else "none"),
            *([("layout", spec.block_sparse.described)] if spec.block_sparse else []),
            *_scalar_rows(values, examples),
            *_tensor_rows(spec, captured, captured_examples),
            *_dropout_rows(request, rng),
            ("shape", f"{sizes}, {_dims(spec)}, {spec.dtype}"),
            ("backend", f"{result.backend}, {why}"),
            ("arch", result.arch if request.sram is None else f"{result.arch}, {_sram(request)}"),
            *_kernel_rows(result, elapsed, request.checkers),
            *backward_rows,
            *((name, str(verdict)) for name, verdict in verdicts.items()),
            *_result_rows(verdicts),
        ]
    )
    if not all(verdicts.values()):
        raise typer.Exit(MISMATCH)


def _sram(request: Request) -> str:
    return f"planned for {request.sram:,} B of shared memory per block"


def choose_backend(asked: str | None) -> tuple[str, str]:
    """Where to run, and why there: the option, else FLASHGEN_BACKEND, else a GPU if there is one.

    Raises:
        InputError: there is no such backend.
        LaunchError: a GPU is asked for and there is none.
    """
    import torch

    no_gpu = launch.available()
    if no_gpu is None and not torch.cuda.is_available():
        no_gpu = "this torch is built without CUDA"
    name = asked or config.backend()
    if name is None:
        return ("gpu", torch.cuda.get_device_name()) if no_gpu is None else ("emulator", no_gpu)
    if name not in config.BACKENDS:
        raise InputError(
            "there is no such backend",
            where="option --backend",
            numbers=f"given {name!r}; available: {', '.join(config.BACKENDS)}",
            way_out="--backend emulator, or leave it out",
        )
    if name == "gpu" and no_gpu is not None:
        raise LaunchError(
            "there is no GPU to run on",
            where="option --backend" if asked else "environment, FLASHGEN_BACKEND",
            numbers=no_gpu,
            way_out="--backend emulator, which executes the same kernel",
        )
    return name, "as asked" if asked else "as FLASHGEN_BACKEND says"


def random_tensors(
    spec: AttentionSpec, sizes: Shape, seed: int, backend: str
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """q, k and v; the gradients of out and lse, and dropout's seed and offset.

    Standard normal numbers, the same on every machine for the same seed.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    device = "cuda" if backend == "gpu" else "cpu"
    dtype: torch.dtype = getattr(torch, spec.dtype)

    def normal(heads: int, seq: int, dim: int) -> Tensor:
        values = torch.randn(sizes.batch, heads, seq, dim, generator=generator)
        return values.to(dtype).to(device)

    head_dim_v = spec.head_dim_v or spec.head_dim
    operands = (
        normal(sizes.heads_q, sizes.seq_q, spec.head_dim),
        normal(sizes.heads_kv, sizes.seq_k, spec.head_dim),
        normal(sizes.heads_kv, sizes.seq_k, head_dim_v),
    )
    dout = normal(sizes.heads_q, sizes.seq_q, head_dim_v)
    dlse = normal(sizes.heads_q, sizes.seq_q, 1)[..., 0].float()
    return operands, (dout, dlse, torch.tensor([seed, 0], device=device))


def _judge(
    spec: AttentionSpec,
    result: ForwardRun,
    operands: tuple[Tensor, Tensor, Tensor],
    numbers: dict[str, Any],
) -> dict[str, Verdict]:
    from flashgen import reference

    exact_out, exact_lse = reference.attention(spec, *operands, **numbers)
    same_out, same_lse = reference.same_dtype(spec, *operands, **numbers)
    return {
        "out": reference.compare(result.out, exact_out, same_out),
        "lse": reference.compare(result.lse, exact_lse, same_lse),
    }


def _judge_gradients(
    spec: AttentionSpec,
    run: BackwardRun,
    tensors: tuple[Tensor, ...],
    numbers: dict[str, Any],
) -> dict[str, Verdict]:
    from flashgen import reference

    found = (run.dq, run.dk, run.dv, *run.captured)
    return reference.judge_gradients(found, spec, *tensors, **numbers)


def _dims(spec: AttentionSpec) -> str:
    if spec.head_dim_v == spec.head_dim:
        return f"head_dim {spec.head_dim}"
    return f"head_dim {spec.head_dim} and {spec.head_dim_v}"


def _scalar_rows(values: dict[str, Number], examples: list[str]) -> list[tuple[str, str]]:
    if not values:
        return []
    text = ", ".join(f"{name} = {value}" for name, value in values.items())
    if examples:
        text += f"  ({', '.join(examples)}: the file's example)"
    return [("scalars", text)]


def _tensor_rows(
    spec: AttentionSpec, values: dict[str, Tensor], examples: list[str]
) -> list[tuple[str, str]]:
    """A line for each captured tensor: its shape, and where its values are from."""
    rows = []
    own = COMPRESSED if spec.block_sparse is not None else ()
    for tensor in (tensor for tensor in spec.tensors if tensor.name not in own):
        text = f"{tensor.name} {list(values[tensor.name].shape)}, {tensor.dtype}"
        text += ", learned" if tensor.grad else ""
        text += ", the file's example" if tensor.name in examples else ", random"
        rows.append(("captures", text))
    return rows


def _dropout_rows(request: Request, rng: Tensor) -> list[tuple[str, str]]:
    if not request.dropout:
        return []
    seed, offset = rng.tolist()
    return [("dropout", f"p {request.dropout}, seed {seed}, offset {offset}")]


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
    """A kernel, its tile and its registers, in a line."""
    plan, used = kernel.plan, kernel.binary.resources
    tile = f"{plan.block_q} x {plan.block_k}" if plan.block_k else f"{plan.block_q} rows"
    spills = "" if used.clean else f", SPILLS {used.spill_store_bytes:,} B"
    parts = [tile] if plan.block_q else []  # a table of extremes has no tile
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
    """How many heads share a tile, where they could."""
    return [("heads", f"{plan.heads_per_tile} per tile, {reason}")] if reason else []


def _blocks_rows(blocks: Blocks | None) -> list[tuple[str, str]]:
    """How many blocks do the jobs, where they can do several."""
    if blocks is None:
        return []
    return [("blocks", f"{blocks.count:,} for {blocks.jobs:,} tiles: {blocks.reason}")]


def _result_rows(verdicts: dict[str, Verdict]) -> list[tuple[str, Text]]:
    if not verdicts:
        return [("result", Text("not compared with the oracle", style="yellow"))]
    if all(verdicts.values()):
        return [("result", Text("pass", style="bold green"))]
    return [("result", Text("FAIL", style="bold red"))]
