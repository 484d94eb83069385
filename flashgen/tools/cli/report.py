"""``flashgen report``: one page about the kernels of a call, or a comparison of two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.kernels.pipeline import plan_backward_of_call
from flashgen.kernels.planner import Tile, feasible
from flashgen.kernels.planner.duration import cost_of_parts
from flashgen.kernels.planner.traffic import LaunchSizes
from flashgen.shared.errors import InputError, PlanError
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.spec_file import file_and_variable
from flashgen.tools.cli.arguments import ReportArguments
from flashgen.tools.cli.call import operand_elements, random_call
from flashgen.tools.cli.console import busy, plural, print_rows
from flashgen.tools.cli.decoding import sizes_of
from flashgen.tools.cli.inputs import (
    OWN_TILE,
    Shape,
    arch_of,
    changed_spec,
    check_file,
    parse_shape,
    parse_tile,
)
from flashgen.tools.cli.profiled import call_of, profiled_call
from flashgen.tools.cli.progress import expected_work
from flashgen.tools.cli.rows import decoding_rows, input_rows

if TYPE_CHECKING:
    from flashgen.tools.views.values import Side

MOST_WORK = 5e10
"""Multiply-adds of the largest call that is executed: tens of minutes in the emulator."""

MOST_OPERANDS = 2e8
"""Elements of the operands and the result of such a call."""


def report(arguments: ReportArguments) -> None:
    """Executes a call, or two, and writes the page."""
    check_file(arguments.output, "--output")
    by_side = _sides(arguments)
    specs = [changed_spec(options.path, options) for options in by_side]
    sizes = sizes_of(arguments, arguments.shape, *specs)
    if arguments.predict is not None:
        parse_shape(arguments.predict, "--predict")
    with busy("loading torch"):
        from flashgen.tools.views.render import html_of
        from flashgen.tools.views.values import Page
    sides = [_side(spec, options, sizes) for spec, options in zip(specs, by_side, strict=True)]
    title = " and ".join(dict.fromkeys(side.title for side in sides))
    with busy("writing the page"):
        text = html_of(Page(f"flashgen report: {title}", tuple(sides)))
    arguments.output.write_text(text, encoding="utf-8")
    kernels = sum(len(side.kernels) for side in sides)
    print_rows(
        [
            ("report", f"{arguments.output.as_posix()}, {len(text.encode()):,} B"),
            ("shows", f"{title}: {plural(kernels, 'launch', 'launches')} of {sizes}"),
            *_verdicts(sides),
        ]
    )


def _verdicts(sides: Sequence[Side]) -> Iterator[tuple[str, str]]:
    for side in sides:
        wrong = [errors.name for errors in side.errors if not errors.verdict.ok]
        right = f"{plural(len(side.errors), 'result')} within the error rule"
        right = right if side.errors else "no result was compared with the oracle"
        yield "errors", f"{', '.join(wrong)} of {side.title}: FAIL" if wrong else right


# ---- the sides -----------------------------------------------------------------------------------


def _sides(arguments: ReportArguments) -> list[ReportArguments]:
    """The arguments of the one or two sides that the specs, architectures and tiles name.

    Raises:
        InputError: there are more than two of one of them.
    """
    specs = [arguments.path, *([arguments.other] if arguments.other else [])]
    archs = [arch_of(arch) for arch in _listed(arguments.arch, "--arch") or (None,)]
    tiles = _listed(arguments.tile, "--tile") or [OWN_TILE]
    for tile in tiles:
        parse_tile(tile)
    # A value that is given once holds for both sides.
    is_comparison = 2 in (len(specs), len(archs), len(tiles))
    return [
        replace(arguments, path=specs[end], arch=archs[end], tile=tiles[end])
        for end in ((0, -1) if is_comparison else (0,))
    ]


def _listed(text: str | None, option: str) -> list[str]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if len(parts) > 2:
        raise InputError(
            "a report compares two calls",
            where=f"option {option}",
            numbers=f"given {text!r}: {len(parts)} values",
            way_out=f"{option} {','.join(parts[:2])}",
        )
    return parts


def _given_tile(
    spec: AttentionSpec, arch: str, sizes: tuple[int, int] | None, sram: int | None
) -> dict[str, Tile]:
    """The cheapest tile of the given sizes for the forward kernel; {} for the plan's own.

    Raises:
        PlanError: no tile of these sizes fits.
    """
    if sizes is None:
        return {}
    plans = feasible(spec, arch, sram=sram)
    fitting = [plan for plan in plans if (plan.block_q, plan.block_k) == sizes]
    if fitting:
        return {"forward": fitting[0].tile}
    rows, keys = sizes
    near = sorted({(p.block_q, p.block_k) for p in plans}, key=lambda t: _distance(t, sizes))
    raise PlanError(
        "the forward kernel cannot have this tile",
        where=f"option --tile, {spec.name} on {arch}",
        numbers=f"given {rows}x{keys}; {plural(len(near), 'other size fits', 'other sizes fit')}",
        way_out="--tile " + ", ".join(f"{q}x{k}" for q, k in near[:6]) + ", or leave it out",
    )


def _distance(tile: tuple[int, int], sizes: tuple[int, int]) -> float:
    return sum(max(a, b) / max(1, min(a, b)) for a, b in zip(tile, sizes, strict=True))


def _side(spec: AttentionSpec, arguments: ReportArguments, sizes: Shape) -> Side:
    from flashgen.tools.views.collect import CallResults, side_of
    from flashgen.tools.views.python_lines import file_text

    arch, tile = arch_of(arguments.arch), parse_tile(arguments.tile or OWN_TILE)
    tiles = _given_tile(spec, arch, tile, arguments.sram)
    _check_work(operand_elements(spec, sizes), MOST_OPERANDS, "elements of q, k, v and out", sizes)
    call = call_of(spec, arguments, sizes)
    work = expected_work(spec, call, arguments)
    _check_work(work, MOST_WORK, "multiply-adds", sizes)
    profiled = profiled_call(spec, arguments, sizes, call, tiles)
    file = file_and_variable(arguments.path)[0]
    text = file_text(spec.file or Path(file).name, Path(file).read_text(encoding="utf-8"))
    rows = [
        ("spec", f"{spec.name}, {spec.file or Path(file).name}"),
        *input_rows(spec, call, sizes),
        *decoding_rows(arguments, profiled.served.pages, profiled.run.report),
        ("architecture", profiled.run.arch),
        ("executed", "in the emulator, every instruction counted, on random operands"),
    ]
    title = f"{spec.name}, {arch}"
    if tile is not None:
        rows.append(("tile", f"{tile[0]} x {tile[1]}, given for the forward kernel"))
        title += f", tile {tile[0]} x {tile[1]}"
    with busy(f"{spec.name}: computing the oracle in float64"):
        runs = profiled.run, profiled.gradients, profiled.tangents
        results = CallResults(spec, profiled.served.contiguous, profiled.profiles, *runs)
        side = side_of(results, title, rows, text)
    if arguments.predict is None:
        return side
    with busy(f"{spec.name}: predicting {arguments.predict}"):
        return _predicted(side, spec, arguments, arguments.predict)


def _predicted(side: Side, spec: AttentionSpec, arguments: ReportArguments, shape: str) -> Side:
    """The side with durations and schedules for another shape, which no kernel executes.

    Raises:
        InputError: its heads cannot share tiles as those of the executed call do.
    """
    from flashgen.tools.cli.tune import known_call
    from flashgen.tools.tune.rank import predicted
    from flashgen.tools.views.kernel import with_duration

    sizes = parse_shape(shape, "--predict")
    panes = [pane for pane in side.kernels if pane.duration is not None]
    shared = max((pane.plan.heads_per_tile for pane in panes), default=1)
    if (sizes.heads_q // max(1, sizes.heads_kv)) % shared:
        raise InputError(
            "the heads of this shape cannot share tiles as those of the executed call do",
            where="option --predict",
            numbers=f"{sizes}; the kernel has {shared} query heads per tile",
            way_out="as many query heads per key head as in --shape",
        )
    known = known_call(spec, random_call(spec, arguments, sizes))
    plans, cost = [pane.plan for pane in panes], ""
    if any(planned.kernel == "fused" and planned.divides_groups for planned in plans):
        plans_of_call = plan_backward_of_call(spec, plans[0].arch, astuple(sizes)).kernels
        cost = cost_of_parts(predicted(known, plans_of_call), LaunchSizes(*astuple(sizes)))
        plans = [replace(x, in_parts=bool(cost)) if x.kernel == "fused" else x for x in plans]
    durations = predicted(known, plans)
    new_panes = {
        pane.title: with_duration(pane, duration, f"{sizes}", cost * (pane.plan.kernel == "fused"))
        for pane, duration in zip(panes, durations, strict=False)
    }
    return replace(side, kernels=tuple(new_panes.get(pane.title, pane) for pane in side.kernels))


def _check_work(work: float, most: float, unit: str, sizes: Shape) -> None:
    """Refuses a call that the emulator would execute for hours.

    Raises:
        InputError: it has more than ``most``.
    """
    if work > most:
        raise InputError(
            "this shape is too large for the emulator, which counts every instruction",
            where="option --shape",
            numbers=f"{sizes}: {work:.3g} {unit}; at most {most:.3g}",
            way_out="a smaller --shape, as 1,4,256; flashgen plan --shape predicts large ones",
        )
