"""``flashgen profile``: the counted work of kernels, beside the predictions of their plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashgen.kernels.planner.models.fitted_time import STATED_ERROR
from flashgen.tools.cli.arguments import ProfileArguments
from flashgen.tools.cli.console import busy, listing, plural, print_rows, say, seconds
from flashgen.tools.cli.decoding import decoding_plan, sizes_of
from flashgen.tools.cli.inputs import changed_spec, check_folder
from flashgen.tools.cli.profiled import call_of, profiled_call

if TYPE_CHECKING:
    from flashgen.tools.profile.decoding import DecodingPlan
    from flashgen.tools.profile.kernel_profile import Profile, Quantity

_SECTOR = 32  # bytes


def profile(arguments: ProfileArguments) -> None:
    """Executes one spec in the emulator and prints the profile of each kernel."""
    spec = changed_spec(arguments.path, arguments)
    sizes = sizes_of(arguments, arguments.shape, spec)
    with busy("loading torch"):
        from flashgen.tools.profile.roofline import check_plot, plot
    if arguments.plot is not None:
        check_folder(arguments.plot.parent, "--plot")
        check_plot(arguments.plot)
    call = call_of(spec, arguments, sizes)
    profiled = profiled_call(spec, arguments, sizes, call)
    run, profiles = profiled.run, profiled.profiles
    dropout = f", dropout p {arguments.dropout}" if arguments.dropout else ""
    description = f"{spec.name}, {arguments.path}: {sizes}, {spec.dtype}{dropout}"
    say(f"{description}, {run.arch}, counted in the emulator")
    if not profiles:
        say("no kernel was launched: a size is 0")
        return
    for kernel_profile in profiles:
        say()
        show(kernel_profile, arguments.lines)
    if arguments.decode:
        planned = decoding_plan(spec, arguments, sizes, call.options, run.arch)
        say()
        print_rows([("call", _decoding(profiles, planned))])
    if arguments.plot is not None:
        plot(profiles, arguments.plot)
        say(f"\nroofline written to {arguments.plot.as_posix()}")


def _decoding(profiles: Sequence[Profile], planned: DecodingPlan) -> str:
    """The bytes of all launches, counted and predicted, against the HBM bound."""
    counted = sum(kernel_profile.issued.counted for kernel_profile in profiles)
    text = f"{counted:,.0f} B in all launches"
    predicted = planned.predicted
    if predicted is None:
        return text
    bound = predicted.traffic.quantities["bound_bytes"]
    return (
        f"{text}, {predicted.traffic.bytes:,} predicted: {counted / bound:.3f} times the "
        f"{bound:,} B of the HBM bound; {seconds(predicted.seconds)}, a prediction, against "
        f"{seconds(planned.bound_seconds)}"
    )


def show(profile: Profile, lines: int) -> None:
    """Prints the profile of a kernel, with the ``lines`` of its source that execute most."""
    plan = profile.plan
    tile = f"{plan.block_q} x {plan.block_k}" if plan.block_k else f"{plan.block_q} rows"
    if plan.heads_per_tile > 1:
        tile += f" with {plan.heads_per_tile} heads"
    print_rows(
        [
            ("kernel", profile.kernel),
            (
                "launch",
                f"{plural(profile.blocks, 'block')} of {plural(plan.warps, 'warp')}, tile {tile}",
            ),
            *_memory(profile),
            *_roofline(profile),
        ]
    )
    say()
    _tensors(profile)
    say()
    titles = ("work (clk: clocks of one SM)", "counted", "prediction", "counted / prediction")
    listing(titles, [_compared(quantity) for quantity in profile.work], titles[1:])
    say()
    _classes(profile)
    say()
    _phases(profile)
    if lines > 0:
        say()
        _lines(profile, lines)


def _memory(profile: Profile) -> list[tuple[str, str]]:
    totals, l2, excess = profile.totals, profile.l2, profile.sectors_in_excess
    coalesced = f"{totals.sectors:,} sectors of {_SECTOR} B, "
    coalesced += f"{excess:,} more than the minimum" if excess else "the minimum for these bytes"
    wavefronts = f"{totals.wavefronts:,} wavefronts for {totals.shared_bytes:,} B, "
    blocks = totals.barriers / (profile.blocks * profile.plan.warps)
    return [
        ("global", coalesced),
        (
            "HBM",
            f"{l2.from_hbm:,} B read, {l2.to_hbm:,} B written: model of an L2 of "
            f"{l2.capacity >> 20} MiB, LRU, {l2.resident:,} resident blocks",
        ),
        ("shared", wavefronts + f"{totals.bank_conflicts:,} bank conflicts"),
        ("barriers", f"{blocks:,.1f} per block"),
    ]


def _roofline(profile: Profile) -> list[tuple[str, str]]:
    roofline, arch = profile.roofline, profile.arch
    busy_for = ", ".join(f"{bound.name} {seconds(bound.seconds)}" for bound in roofline.bounds)
    rows = [("bound", f"{roofline.bound.name}, by the rates of {arch.product}: {busy_for}")]
    if roofline.flops:
        rows.append(
            (
                "roofline",
                f"{roofline.intensity:,.1f} FLOP per byte of HBM (ridge {roofline.ridge:,.1f}), "
                f"{roofline.intensity_l2:,.1f} per byte requested from L2; at best "
                f"{roofline.attainable / 1e12:,.0f} TFLOP/s",
            )
        )
    duration = profile.duration
    if duration is not None:
        turns = f"wave quantisation: {duration.quantisation:.3f} times as long"
        rows.append(
            (
                "time",
                f"{seconds(duration.seconds)}, a prediction, bound by {duration.bound}; {turns}; "
                f"{STATED_ERROR}",
            )
        )
    return rows


def _tensors(profile: Profile) -> None:
    compared = ("tensor", "issued B", "prediction", "counted / prediction")
    titles = (*compared, "distinct B", "sectors", "minimum")
    rows = [
        [*_compared(tensor.issued), *_counts(tensor.distinct, tensor.sectors, tensor.sectors_least)]
        for tensor in profile.tensors
    ]
    totals = profile.totals
    counts = _counts(profile.distinct.counted, totals.sectors, totals.sectors_least)
    rows.append(["all", *_compared(profile.issued)[1:], *counts])
    listing(titles, rows, titles[1:])


def _compared(quantity: Quantity) -> tuple[str, str, str, str]:
    predicted, ratio = quantity.predicted, quantity.ratio
    name = f"{quantity.name}, {quantity.unit}" if quantity.unit == "clk" else quantity.name
    return (
        name,
        f"{quantity.counted:,.0f}",
        "-" if predicted is None else f"{predicted:,.0f}",
        "-" if ratio is None else f"{ratio:.3f}",
    )


def _classes(profile: Profile) -> None:
    totals = profile.totals
    titles = ("class", "warp instructions", "lanes", "share")
    ranked = sorted(totals.warps.items(), key=lambda item: -item[1])
    rows = [
        (name, f"{count:,}", f"{totals.lanes[name]:,}", _share(count, totals.warp_instructions))
        for name, count in ranked
    ]
    listing(titles, rows, titles[1:])


def _phases(profile: Profile) -> None:
    work = ("warp instructions", "share", "multiply-adds", "global B", "wavefronts")
    titles = ("step", *work, "conflicts", "barriers", "what it is")
    rows: list[Sequence[str]] = []
    for phase in profile.phases:
        totals = phase.totals
        share = _share(totals.warp_instructions, profile.totals.warp_instructions)
        traffic = _counts(totals.tensor_multiply_adds, totals.global_bytes, totals.wavefronts)
        waits = _counts(totals.bank_conflicts, totals.barriers)
        first = (phase.number or "-", *_counts(totals.warp_instructions), share)
        rows.append((*first, *traffic, *waits, phase.title))
    listing(titles, rows, titles[1:-1])


def _lines(profile: Profile, count: int) -> None:
    titles = ("line", "warp instructions", "share", "source")
    rows = [
        (
            f"{line.line}",
            f"{line.totals.warp_instructions:,}",
            _share(line.totals.warp_instructions, profile.totals.warp_instructions),
            line.text,
        )
        for line in profile.lines[:count]
    ]
    listing(titles, rows, titles[:-1])


def _counts(*values: float) -> list[str]:
    return [f"{value:,.0f}" for value in values]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
