"""The part of a kernel's pane that its compiled file and its plan give, without a run."""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.emulator.counters.ptx_lines import PtxLine
from flashgen.page.code import KernelCode, code_of
from flashgen.page.python_lines import PythonText
from flashgen.page.values import Figure, KernelPane, Row
from flashgen.pipeline import Build


def pane_of(
    build: Build,
    title: str,
    counted: Sequence[PtxLine] | None = None,
    spec_file: PythonText | None = None,
) -> KernelPane:
    """A kernel's texts, plan, shared memory and registers.

    Args:
        title: as `KernelPane.title`.
        counted, spec_file: as in `code_of`.
    """
    code = code_of(build, counted, spec_file)
    return KernelPane(
        title=title,
        name=build.source.name,
        plan=build.plan,
        resources=build.binary.resources,
        code=code,
        facts=_facts(build),
        figures=tuple(_static_figures(build, code)),
        smem=build.plan.smem_map,
    )


def _facts(build: Build) -> tuple[Row, ...]:
    plan, binary = build.plan, build.binary
    tile = f"{plan.block_q} x {plan.block_k}" if plan.block_k else f"{plan.block_q} rows"
    if plan.heads_per_tile > 1:
        tile += f", shared by {plan.heads_per_tile} query heads"
    path = "mma.sync, ldmatrix, cp.async" if plan.path == "sm_80" else "wgmma, TMA, mbarriers"
    return (
        ("file", binary.filename),
        ("architecture", f"{binary.arch}, code path {plan.path}" + _path_of(plan.streams, path)),
        ("tile", tile if plan.block_q else "none"),
        ("block", f"{plan.threads} threads, {plan.blocks_per_sm} resident per SM"),
        ("compiler", "; ".join(binary.warnings) or "no warnings"),
        ("calls", build.source.calls or "none: all functions are inlined"),
    )


def _path_of(streams: bool, path: str) -> str:
    return "" if streams else f": {path}"


def _static_figures(build: Build, code: KernelCode) -> list[Figure]:
    used, plan = build.binary.resources, build.plan
    figures = [
        Figure("registers per thread", used.registers, "", "static"),
        Figure("spills", used.spill_store_bytes + used.spill_load_bytes, "B", "static"),
        Figure("stack", used.stack_bytes, "B", "static"),
        Figure("shared memory", plan.smem_bytes + used.static_smem_bytes, "B", "static"),
        Figure("code", used.code_bytes, "B", "static"),
        Figure("lines of CUDA", len(code.cuda.lines), "", "static"),
    ]
    if code.opcodes:
        count = sum(number for _, number in code.opcodes)
        figures.append(Figure("machine instructions", count, "", "static"))
    return figures
