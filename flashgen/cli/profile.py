"""``flashgen profile``: what kernels did in the emulator, beside what their plans predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.cli.captures import tensor_values
from flashgen.cli.console import busy, facts, listing, say, seconds
from flashgen.cli.inputs import load_spec, parse_shape, scalar_values

if TYPE_CHECKING:
    from flashgen.profile import Profile, Quantity

_SECTOR = 32  # bytes


@dataclass(frozen=True)
class Request:
    """The options of one ``flashgen profile``; their meanings are in the command's help."""

    path: str
    shape: str
    dtype: str | None = None
    head_dim: int | None = None
    head_dim_v: int | None = None
    arch: str | None = None
    sram: int | None = None
    scalars: tuple[str, ...] = ()
    backward: bool = False
    dropout: float = 0.0
    deterministic: bool = False
    seed: int = 0
    lines: int = 8
    plot: Path | None = None


def profile(request: Request) -> None:
    """Runs one spec in the emulator and prints the profile of each kernel.

    Raises:
        FlashgenError: a stage refused, or there is nothing to draw with.
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
        from flashgen.cli.run import random_tensors
        from flashgen.profile import check_plot, plot, profile_backward, profile_forward
    if request.plot is not None:
        check_plot()
    values, _ = scalar_values(spec, request.path, request.scalars)
    operands, (dout, dlse, rng) = random_tensors(spec, sizes, request.seed, "emulator")
    captured, _ = tensor_values(spec, request.path, sizes, seed=request.seed)
    options: dict[str, Any] = {"scalars": values, "tensors": captured}
    options |= {"arch": request.arch, "sram": request.sram}
    if request.dropout:
        options |= {"dropout_p": request.dropout, "rng": rng}
    with busy(f"{spec.name}: compiling, then counting {sizes} in the emulator"):
        run, profiles = profile_forward(spec, *operands, **options)
    if request.backward:
        with busy(f"{spec.name}: the same of the backward kernels"):
            _, more = profile_backward(
                spec,
                *(*operands, run.out, run.lse, dout, dlse),
                deterministic=request.deterministic,
                **options,
            )
        profiles += more
    drops = f", dropout p {request.dropout}" if request.dropout else ""
    what = f"{spec.name}, {request.path}: {sizes}, {spec.dtype}{drops}"
    say(f"{what}, {run.arch}, counted in the emulator")
    if not profiles:
        say("nothing was launched: a size is 0")
        return
    for each in profiles:
        say()
        show(each, request.lines)
    if request.plot is not None:
        plot(profiles, request.plot)
        say(f"\nroofline written to {request.plot.as_posix()}")


def show(profile: Profile, lines: int) -> None:
    """All of one kernel's profile; ``lines`` of the source with the most instructions."""
    plan = profile.plan
    tile = f"{plan.block_q} x {plan.block_k}" if plan.block_k else f"{plan.block_q} rows"
    if plan.heads_per_tile > 1:
        tile += f" with {plan.heads_per_tile} heads"
    facts(
        [
            ("kernel", profile.kernel),
            ("launch", f"{profile.blocks:,} blocks of {plan.warps} warps, tile {tile}"),
            *_memory(profile),
            *_roofline(profile),
        ]
    )
    say()
    _tensors(profile)
    say()
    titles = ("work (clk: clocks of one SM)", "counted", "prediction", "counted / prediction")
    listing(titles, [_compared(each) for each in profile.work], titles[1:])
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
    coalesced += f"{excess:,} beyond the fewest" if excess else "the fewest that these bytes take"
    moved = f"{totals.wavefronts:,} wavefronts for {totals.shared_bytes:,} B, "
    blocks = totals.barriers / (profile.blocks * profile.plan.warps)
    return [
        ("global", coalesced),
        (
            "HBM",
            f"{l2.from_hbm:,} B read, {l2.to_hbm:,} B written: model of an L2 of "
            f"{l2.capacity >> 20} MiB, LRU, {l2.resident:,} blocks in turns",
        ),
        ("shared", moved + f"{totals.bank_conflicts:,} bank conflicts"),
        ("barriers", f"{blocks:,.1f} per block"),
    ]


def _roofline(profile: Profile) -> list[tuple[str, str]]:
    roofline, arch = profile.roofline, profile.arch
    busy_for = ", ".join(f"{each.name} {seconds(each.seconds)}" for each in roofline.bounds)
    rows = [("bound", f"{roofline.bound.name}, by the rates of {arch.product}: {busy_for}")]
    if roofline.flops:
        rows.append(
            (
                "roofline",
                f"{roofline.intensity:,.1f} FLOP per byte of HBM (ridge {roofline.ridge:,.1f}), "
                f"{roofline.intensity_l2:,.1f} per byte asked of L2; at best "
                f"{roofline.attainable / 1e12:,.0f} TFLOP/s",
            )
        )
    found = profile.duration
    if found is not None:
        turns = f"blocks in turns: {found.quantisation:.3f} times as long"
        rows.append(
            ("time", f"{seconds(found.seconds)}, a prediction, bound by {found.bound}; {turns}")
        )
    return rows


def _tensors(profile: Profile) -> None:
    compared = ("tensor", "issued B", "prediction", "counted / prediction")
    titles = (*compared, "distinct B", "sectors", "fewest")
    rows = [
        (
            *_compared(each.issued),
            f"{each.distinct:,}",
            f"{each.sectors:,}",
            f"{each.sectors_least:,}",
        )
        for each in profile.tensors
    ]
    totals = profile.totals
    rows.append(
        (
            *("all", *_compared(profile.issued)[1:]),
            f"{profile.distinct.counted:,.0f}",
            f"{totals.sectors:,}",
            f"{totals.sectors_least:,}",
        )
    )
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
        each = phase.totals
        rows.append(
            (
                phase.number or "-",
                f"{each.warp_instructions:,}",
                _share(each.warp_instructions, profile.totals.warp_instructions),
                f"{each.tensor_multiply_adds:,}",
                f"{each.global_bytes:,}",
                f"{each.wavefronts:,}",
                f"{each.bank_conflicts:,}",
                f"{each.barriers:,}",
                phase.title,
            )
        )
    listing(titles, rows, titles[1:-1])


def _lines(profile: Profile, count: int) -> None:
    titles = ("line", "warp instructions", "share", "source")
    rows = [
        (
            f"{each.line}",
            f"{each.totals.warp_instructions:,}",
            _share(each.totals.warp_instructions, profile.totals.warp_instructions),
            each.text,
        )
        for each in profile.lines[:count]
    ]
    listing(titles, rows, titles[:-1])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
