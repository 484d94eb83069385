"""The pane of a kernel: what its compiled file says, what was counted, and what is predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flashgen.kernels.pipeline import Build
from flashgen.kernels.planner.duration import Duration
from flashgen.tools.views.code import KernelTexts, code_of
from flashgen.tools.views.python_lines import PythonText
from flashgen.tools.views.values import Figure, KernelPane, Row
from ptx_emulator.counters.ptx_lines import PtxLine

if TYPE_CHECKING:
    from flashgen.tools.profile.kernel_profile import Profile

QUANTISATION = "times as long as if all SMs were busy"


def pane_of(
    build: Build,
    title: str,
    counted: Sequence[PtxLine] | None,
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
        build=build,
        code=code,
        facts=_fact_rows(build),
        figures=tuple(_static_figures(build, code)),
    )


def _fact_rows(build: Build) -> tuple[Row, ...]:
    plan, binary = build.plan, build.binary
    tile = plan.tile_text or "none"
    if plan.heads_per_tile > 1:
        tile += f", shared by {plan.heads_per_tile} query heads"
    instructions = "" if plan.streams else f": {plan.code_path.instructions}"
    return (
        ("file", binary.filename),
        ("architecture", f"{binary.arch}, code path {plan.path}{instructions}"),
        ("tile", tile),
        ("block", f"{plan.threads} threads, {plan.blocks_per_sm} resident per SM"),
        ("compiler", "; ".join(binary.warnings) or "no warnings"),
        ("calls", build.source.calls or "none: all functions are inlined"),
    )


def _static_figures(build: Build, code: KernelTexts) -> list[Figure]:
    used, plan = build.binary.resources, build.plan
    figures = [
        Figure("registers per thread, at launch", used.registers, "", "static"),
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


def pane_of_profile(profile: Profile, title: str, spec_file: PythonText | None) -> KernelPane:
    """The pane of a launch that the emulator executed.

    Args:
        title: as `KernelPane.title`.
        spec_file: the file of the spec; None for a spec that was made in Python.
    """
    pane = pane_of(profile.build, title, profile.ptx, spec_file)
    duration, notes = profile.duration, []
    launch = f"blocks: {profile.blocks:,}; computing warps of each: {profile.plan.warps}"
    if duration is None:
        notes.append(
            "No duration is predicted for this launch: it makes min/max tables, adds gradients of "
            "learned tensors, or has packed sequences, whose tiles depend on where they begin."
        )
    return replace(
        pane,
        facts=(("launch", launch), *pane.facts),
        figures=(*pane.figures, *_counted(profile)),
        profile=profile,
        duration=duration,
        notes=tuple(notes),
    )


def with_duration(pane: KernelPane, duration: Duration, shape: str, note: str) -> KernelPane:
    """The pane with the predicted duration and schedule of a launch of another shape, and with a
    note on it."""
    figures = tuple(
        figure for figure in pane.figures if figure.name not in ("duration", QUANTISATION)
    )
    figures += tuple(_duration_figures(duration, shape))
    notes = (*pane.notes, note) if note else pane.notes
    return replace(pane, figures=figures, duration=duration, shape=shape, notes=notes)


def _duration_figures(duration: Duration, shape: str = "") -> Iterator[Figure]:
    suffix = f" for {shape}" if shape else ""
    yield Figure(f"duration{suffix}", duration.seconds, "s", "predicted")
    yield Figure(f"{QUANTISATION}{suffix}", duration.quantisation, "", "predicted")


def _counted(profile: Profile) -> Iterator[Figure]:
    totals = profile.totals
    yield Figure("warp instructions", totals.warp_instructions)
    yield Figure("multiply-adds", totals.tensor_multiply_adds)
    yield Figure("bytes issued", profile.issued.counted, "B")
    yield Figure("distinct bytes", profile.distinct.counted, "B")
    yield Figure("HBM bytes (model of L2)", profile.l2.hbm, "B")
    yield Figure("sectors of 32 B", totals.sectors)
    yield Figure("sectors in excess", profile.sectors_in_excess)
    yield Figure("shared-memory wavefronts", totals.wavefronts)
    yield Figure("bank conflicts", totals.bank_conflicts)
    yield Figure("barriers, of all warps", totals.barriers)
    if profile.plan.cost:
        unit = "row" if profile.plan.streams else "score element"
        yield Figure(f"cost per {unit}", profile.plan.cost, "clk", "predicted")
    if profile.duration is not None:
        yield from _duration_figures(profile.duration)
