"""The geometry of a page's plots: where each mark lies, for the templates that draw them as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.kernels.planner.duration import Duration, placed
from flashgen.shared.arch import Arch, facts
from flashgen.tools.views.values import ErrorHistogram

if TYPE_CHECKING:
    from flashgen.tools.profile.kernel_profile import Profile

MOST_TILES = 2000
"""Work tiles that a page shows: those of the first SMs where there are more."""

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 12, 44


@dataclass(frozen=True)
class Tick:
    """A place on an axis, and its label."""

    at: float
    label: str


@dataclass(frozen=True)
class RooflinePlot:
    """A roofline in the coordinates of its SVG.

    Attributes:
        slopes: a line from the left end to the ceiling for HBM and L2: name, x0, y0, x1, y1.
        ceiling: the height of the ceiling; peak: its rate in FLOP per second.
        marks: the intensity by HBM bytes and by bytes requested from L2: name, x, y.
    """

    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    slopes: tuple[tuple[str, float, float, float, float], ...]
    ceiling: float
    peak: float
    marks: tuple[tuple[str, float, float], ...]


def roofline_plot(profile: Profile) -> RooflinePlot:
    """The roofline of a launch on logarithmic axes."""
    roofline, arch = profile.roofline, profile.arch
    chip = arch.sms * arch.clock_hz
    peak = 2.0 * arch.tensor_rate(profile.plan.path) * chip
    rates = {"HBM": arch.hbm_bytes_per_s, "L2": arch.l2_bytes_per_clock * chip}
    intensities = {
        "HBM bytes": roofline.intensity,
        "bytes requested from L2": roofline.intensity_l2,
    }
    shown = [*(peak / rate for rate in rates.values()), *filter(None, intensities.values())]
    low, high = math.log10(min(shown) / 8), math.log10(max(shown) * 8)
    top = math.log10(2 * peak)
    bottom = min(math.log10(rates["HBM"]) + low, math.log10(roofline.attainable or peak)) - 0.1

    def x(value: float) -> float:
        return LEFT + (math.log10(value) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        part = (math.log10(value) - bottom) / (top - bottom)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)

    start = 10.0**low
    least = 10.0**bottom
    return RooflinePlot(
        x=tuple(Tick(x(v), f"{v:,g}") for v in _powers(low, high)),
        y=tuple(Tick(y(v), f"{v / 1e12:,g}") for v in _powers(bottom, top)),
        slopes=tuple(
            (
                name,
                x(max(start, least / rate)),
                y(max(rate * start, least)),
                x(peak / rate),
                y(peak),
            )
            for name, rate in rates.items()
        ),
        ceiling=y(peak),
        peak=peak,
        marks=tuple(
            (name, x(value), y(roofline.attainable))
            for name, value in intensities.items()
            if value and roofline.attainable
        ),
    )


def _powers(low: float, high: float) -> list[float]:
    """The powers of ten in a range, and multiples of them where these are few."""
    powers = range(math.floor(low), math.floor(high) + 1)
    factors = (1, 2, 5) if high - low < 2 else (1, 3) if high - low < 3 else (1,)
    candidates = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in candidates if low <= math.log10(value) <= high]


@dataclass(frozen=True)
class Bar:
    """A bar of a histogram: left edge, top edge, width, height, and the count."""

    x: float
    y: float
    width: float
    height: float
    count: int


@dataclass(frozen=True)
class HistogramPlot:
    """Pairs of bars on a logarithmic count axis, and a label below each pair."""

    found: tuple[Bar, ...]
    ordinary: tuple[Bar, ...]
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]


def histogram_plot(errors: ErrorHistogram) -> HistogramPlot:
    """The histogram of a result's errors; the height is the logarithm of the count."""
    most = max(1, *errors.found, *errors.ordinary)
    decades = max(1, math.ceil(math.log10(most + 1)))
    base, room = HEIGHT - BOTTOM, HEIGHT - TOP - BOTTOM
    step = (WIDTH - LEFT - RIGHT) / len(errors.exponents)

    def bars(counts: Sequence[int], shift: float) -> tuple[Bar, ...]:
        drawn = []
        for index, count in enumerate(counts):
            height = room * math.log10(count + 1) / decades
            left = LEFT + step * (index + shift)
            drawn.append(Bar(left, base - height, 0.38 * step, height, count))
        return tuple(drawn)

    labels = [f"1e{exponent}" for exponent in errors.exponents]
    labels[0] = "less"
    return HistogramPlot(
        found=bars(errors.found, 0.1),
        ordinary=bars(errors.ordinary, 0.5),
        x=tuple(Tick(LEFT + step * (i + 0.5), text) for i, text in enumerate(labels)),
        y=tuple(
            Tick(base - room * math.log10(10**power + 1) / decades, f"{10**power:,}")
            for power in range(decades + 1)
            if power < decades or decades == 1
        ),
    )


@dataclass(frozen=True)
class ScheduledTile:
    """A work tile in the coordinates of its SVG, and what it is in words."""

    x: float
    y: float
    width: float
    height: float
    shade: int
    text: str


@dataclass(frozen=True)
class SchedulePlot:
    """Work tiles over SMs (down) and steps (across).

    Attributes:
        total: the number of all work tiles of the launch.
        makespan: steps until the last one ends.
        busy: the SMs that have work.
        shares_sms: whether an SM has several of the blocks that are shown.
    """

    arch: Arch
    height: float
    tiles: tuple[ScheduledTile, ...]
    x: tuple[Tick, ...]
    y: tuple[Tick, ...]
    total: int
    makespan: float
    busy: int
    shares_sms: bool


SHADES = 6
"""The number of colours by which neighbouring heads can be told apart."""


def schedule_plot(duration: Duration) -> SchedulePlot:
    """The schedule on which a predicted duration rests: each free slot runs the next block."""
    arch = facts(duration.plan.arch)
    blocks = list(placed(duration.parts, arch.sms * duration.plan.blocks_per_sm))
    begun = {line.name: line.value for line in duration.lines}.get("begun", 0)
    makespan = max((end for _, _, end, _, _ in blocks), default=0.0)
    shown_blocks, sms = blocks, arch.sms
    while len(shown_blocks) > MOST_TILES and sms > 1:
        sms = max(1, min(sms - 1, sms * MOST_TILES // len(shown_blocks)))
        shown_blocks = [block for block in blocks if block[0] % arch.sms < sms]
    # The SM of a slot, and which of its resident blocks it is: SMs get first blocks first.
    placed_at = [(block[0] % arch.sms, block[0] // arch.sms) for block in shown_blocks[:MOST_TILES]]
    rows = sorted(set(placed_at))
    row_indices = {row: index for index, row in enumerate(rows)}
    row_height = max(3.0, min(14.0, 420 / max(len(rows), 1)))
    gap = 1.0 if row_height >= 5 else 0.0
    scale = (WIDTH - LEFT - RIGHT) / makespan if makespan else 0.0
    tiles = tuple(
        ScheduledTile(
            x=LEFT + start * scale,
            y=TOP + row_height * row_indices[row],
            width=max(0.5, (end - start) * scale - 0.5),
            height=row_height - gap,
            shade=head % SHADES,
            text=f"SM {row[0]}, tile {tile} of head {head}: "
            f"{end - start - begun:,.0f} steps, from {start:,.1f} to {end:,.1f}",
        )
        for row, (_, start, end, tile, head) in zip(placed_at, shown_blocks, strict=False)
    )
    label_step = max(1, math.ceil(14 / row_height))
    return SchedulePlot(
        arch=arch,
        height=TOP + row_height * len(rows) + BOTTOM,
        tiles=tiles,
        x=tuple(Tick(LEFT + value * scale, f"{value:,g}") for value in _round_steps(makespan)),
        y=tuple(
            Tick(
                TOP + row_height * (row_indices[row] + 0.5),
                f"SM {row[0]}" + ("'" if row[1] else ""),
            )
            for row in rows[::label_step]
        ),
        total=len(blocks),
        makespan=makespan,
        busy=len({sm for sm, _ in placed_at}),
        shares_sms=any(further for _, further in rows),
    )


def _round_steps(end: float) -> list[float]:
    """About eight round numbers from 0 to ``end``."""
    if end <= 0:
        return [0.0]
    raw = end / 8
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [step * i for i in range(math.floor(end / step) + 1)]
