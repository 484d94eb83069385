"""The page of an operator's last call: its kernels, without a run of their own."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import ptx_emulator as emulator
from flashgen.kernels.codegen.environment import template_digest
from flashgen.kernels.compile import nvrtc
from flashgen.shared.errors import CompileError
from flashgen.tools.doctor.machine import version_of
from flashgen.tools.views.kernel import pane_of
from flashgen.tools.views.values import Figure, KernelPane, Page, Side
from flashgen.version import __version__
from ptx_emulator.counters.ptx_lines import ptx_lines

if TYPE_CHECKING:
    from flashgen.calls.runtime.reports import Report

_PACKAGES = ("torch", "numpy", "sympy", "cuda-bindings", "nvidia-cuda-nvdisasm")
_NOT_MADE = (
    "The counts by step, the roofline, the tile map, the schedule and the errors need a run of "
    "their own: flashgen report SPEC."
)
_TILED = (
    "The call ran on the CPU by the tiled algorithms, without a kernel. backend='emulator' "
    "executes the kernels; flashgen report SPEC shows them."
)


def page_of(report: Report) -> Page:
    """The launches of a call, for each part of the columns of V where it is computed in parts: the
    min/max tables, the kernel, and the merge of split keys."""
    launches = [
        launch
        for part in (report, *report.others)
        for launch in (*part.tables, part, *([] if part.merge is None else [part.merge]))
    ]
    panes: list[KernelPane] = []
    for launch in launches:
        panes += _panes(launch, [pane.title for pane in panes])
    name = next((pane.name for pane in panes if pane.title == "forward"), "a call")
    call = [("backend", report.backend), ("architecture", f"{report.arch}: {report.arch_reason}")]
    if report.kernel is None:
        call.append(("kernel", report.access_reason or "none"))
    else:
        call.append(("access", f"{report.access_bytes} B at once: {report.access_reason}"))
    optional = (("heads", report.heads_reason), ("integers", report.integers))
    call += [row for row in optional if row[1]]
    note = _TILED if report.backend == "tiled" else "No result was compared with the oracle here."
    side = Side(f"{name}, {report.arch}", tuple(call), tuple(panes), (), note, versions())
    return Page(f"flashgen report: {side.title}", (side,))


def _panes(report: Report, titles: list[str]) -> Iterator[KernelPane]:
    build, counters = report.kernel, report.counters
    if build is None:
        return
    counted = None
    if counters is not None:
        counted = ptx_lines(emulator.load(build.ptx, build.source.name), counters)
    role = build.plan.kernel
    title = role if role not in titles else f"{role} ({titles.count(role) + 1})"
    pane = pane_of(build, title, counted)
    figures = pane.figures
    if counters is not None:
        figures = (
            *figures,
            Figure("warp instructions", counters.warp_instructions),
            Figure("multiply-adds", counters.multiply_adds),
            Figure("global bytes read", counters.global_read_bytes, "B"),
            Figure("global bytes written", counters.global_write_bytes, "B"),
        )
    yield replace(pane, figures=figures, notes=(_NOT_MADE,), tile_map_note=_NOT_MADE)


# ---- versions ------------------------------------------------------------------------------------


def versions() -> tuple[tuple[str, str], ...]:
    """The names and versions, "missing" for what is not installed; nothing is imported for it."""
    rows = [("flashgen", __version__), ("templates", template_digest())]
    rows.append(("Python", platform.python_version()))
    rows += [(name, version_of(name) or "missing") for name in _PACKAGES]
    try:
        compiler = nvrtc.version()
    except CompileError:
        compiler = "missing"
    return (*rows, ("NVRTC", compiler))
