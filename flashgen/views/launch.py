"""The pane of a launch: what its compiled file says, what was counted, and what is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from flashgen.planner.duration import Duration
from flashgen.profile import Profile, steps_of
from flashgen.views.kernel import pane_of
from flashgen.views.python_lines import PythonText
from flashgen.views.schedule import schedule_of
from flashgen.views.values import Figure, KernelPane, RooflineFacts, Step, TensorBytes

QUANTISATION = "times as long as if all SMs were busy"


def pane_of_profile(profile: Profile, title: str, spec_file: PythonText | None) -> KernelPane:
    """The pane of a launch that the emulator executed.

    Args:
        title: as `KernelPane.title`.
        spec_file: the file of the spec; None for a spec that was made in Python.
    """
    pane = pane_of(profile.build, title, profile.ptx, spec_file)
    duration = profile.duration
    notes = []
    if duration is None:
        notes.append(
            "No duration is predicted for this launch: it makes min/max tables, adds gradients of "
            "learned tensors, or has packed sequences, whose tiles depend on where they begin."
        )
    return replace(
        pane,
        facts=(("launch", _launch(profile)), *pane.facts),
        figures=(*pane.figures, *_counted(profile)),
        steps=tuple(_steps(profile)),
        tensors=tuple(
            TensorBytes(
                each.name,
                each.issued.counted,
                each.issued.predicted,
                each.distinct,
                each.sectors,
                each.sectors_least,
            )
            for each in profile.tensors
        ),
        roofline=_roofline(profile) if profile.roofline.flops else None,
        schedule=None if duration is None else schedule_of(duration),
        notes=tuple(notes),
    )


def with_duration(pane: KernelPane, duration: Duration, shape: str) -> KernelPane:
    """The pane with the predicted duration and schedule of a launch of another shape."""
    figures = tuple(each for each in pane.figures if each.name not in ("duration", QUANTISATION))
    return replace(
        pane,
        figures=(*figures, *_of_duration(duration, shape)),
        schedule=schedule_of(duration, shape),
    )


def _of_duration(duration: Duration, shape: str = "") -> Iterator[Figure]:
    of = f" for {shape}" if shape else ""
    yield Figure(f"duration{of}", duration.seconds, "s", "predicted")
    yield Figure(f"{QUANTISATION}{of}", duration.quantisation, "", "predicted")


def _launch(profile: Profile) -> str:
    return f"{profile.blocks:,} blocks of {profile.plan.warps} computing warps"


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
    yield Figure("cost per score element", profile.plan.cost, "clk", "predicted")
    if profile.duration is not None:
        yield from _of_duration(profile.duration)


def _steps(profile: Profile) -> Iterator[Step]:
    lines = {(step.number, step.title): step.line for step in steps_of(profile.build.source.text)}
    whole = profile.totals.warp_instructions
    for phase in profile.phases:
        each = phase.totals
        yield Step(
            number=phase.number,
            title=phase.title,
            line=lines.get((phase.number, phase.title), 0),
            warps=each.warp_instructions,
            share=each.warp_instructions / whole if whole else 0.0,
            multiply_adds=each.tensor_multiply_adds,
            global_bytes=each.global_bytes,
            wavefronts=each.wavefronts,
            conflicts=each.bank_conflicts,
            barriers=each.barriers,
        )


def _roofline(profile: Profile) -> RooflineFacts:
    found, arch = profile.roofline, profile.arch
    chip = arch.sms * arch.clock_hz
    return RooflineFacts(
        product=arch.product,
        flops=found.flops,
        hbm=arch.hbm_bytes_per_s,
        l2=arch.l2_bytes_per_clock * chip,
        peak=2.0 * arch.tensor_rate(profile.plan.path) * chip,
        intensity=found.intensity,
        intensity_l2=found.intensity_l2,
        attainable=found.attainable,
        bounds=tuple((bound.name, bound.seconds) for bound in found.bounds),
    )
