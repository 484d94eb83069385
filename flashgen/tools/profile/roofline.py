"""The time for which the counted work keeps each resource busy: the cost, the roofline, its figure.

The figure is drawn by matplotlib where it is installed.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path

from flashgen.kernels.planner.models.fitted_time import CONSTANTS
from flashgen.shared.arch import SCHEDULERS, SPECIAL_PER_CLOCK, Arch
from flashgen.shared.errors import InputError
from flashgen.shared.paths import PATHS
from flashgen.tools.profile.kernel_profile import Profile, Roofline, RooflineBound
from ptx_emulator import Totals
from ptx_emulator.counters.l2 import L2Traffic
from ptx_emulator.counters.recorder import SECTOR_BYTES

_RESOURCES = {
    "tensor": "tensor cores",
    "shared": "shared memory",
    "l2": "L2",
    "atomics": "atomic additions in L2",
    "special": "special functions",
    "issue": "instruction issue",
}
"""The resources of the terms of a plan's cost."""


def clocks(arch: Arch, totals: Totals, added_bytes: int, path: str) -> dict[str, float]:
    """Clocks of one SM for all of a kernel's work, by the names of the terms of a plan's cost.

    A wavefront of shared memory is a clock, a PTX instruction an issue slot. The assembler
    translates PTX to other instructions, which `flashgen inspect --sass` counts.

    Args:
        added_bytes: bytes added to global memory by atomics; they are not part of "l2".
    """
    plain = totals.sectors * SECTOR_BYTES - added_bytes
    return {
        "tensor": totals.tensor_multiply_adds / arch.tensor_rate(path),
        "shared": float(totals.wavefronts),
        "l2": plain / arch.l2_bytes_per_clock,
        "atomics": added_bytes
        / (CONSTANTS[PATHS[path].constants]["atomic_share"] * arch.l2_bytes_per_clock),
        "special": totals.lanes.get("special", 0) / SPECIAL_PER_CLOCK,
        "issue": totals.warp_instructions / SCHEDULERS,
    }


def roofline(
    arch: Arch,
    totals: Totals,
    added_bytes: int,
    l2: L2Traffic,
    path: str,
) -> Roofline:
    """The roofline of a kernel, if every SM has an equal share of the work."""
    flops = 2.0 * totals.tensor_multiply_adds
    chip = arch.sms * arch.clock_hz
    clocks_by_term = clocks(arch, totals, added_bytes, path)
    requested = totals.sectors * SECTOR_BYTES
    fma_clocks = totals.lanes.get("float", 0) / arch.fp32_per_clock
    bounds = [
        RooflineBound("HBM", l2.hbm / arch.hbm_bytes_per_s),
        RooflineBound("FMA pipe", fma_clocks / chip),
        *(
            RooflineBound(name, clocks_by_term[term] / chip)
            for term, name in _RESOURCES.items()
            if clocks_by_term[term]
        ),
    ]
    return Roofline(
        flops=flops,
        intensity=flops / l2.hbm if l2.hbm else 0.0,
        intensity_l2=flops / requested if requested else 0.0,
        ridge=2.0 * arch.tensor_rate(path) * chip / arch.hbm_bytes_per_s,
        bounds=tuple(sorted(bounds, key=lambda bound: -bound.seconds)),
    )


def check_plot(path: Path, option: str = "--plot") -> None:
    """Checks that matplotlib is installed and that the file is a PNG.

    Raises:
        InputError: it is not, or another file is given.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "the picture is drawn by matplotlib, which is not installed",
            where=f"option {option}",
            numbers="no module named matplotlib",
            way_out=f"pip install matplotlib, or leave {option} out: the table has all numbers",
        )
    if path.suffix.lower() != ".png":
        raise InputError(
            "the picture is a PNG file",
            where=f"option {option}",
            numbers=f"given {path.name!r}",
            way_out=f"{option} {path.with_suffix('.png').name if path.name else 'picture.png'}",
        )


def plot(profiles: Sequence[Profile], path: Path) -> None:
    """Draws the kernels of one call in the roofline of their architecture.

    The slopes are the rates of HBM and L2, the ceiling is the rate of the tensor cores. Each kernel
    has a full mark at its intensity by HBM bytes and an open mark at its intensity by bytes
    requested from L2, both at the rate that its bound allows.

    Raises:
        InputError: as `check_plot`.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [profile for profile in profiles if profile.roofline.flops]
    arch = profiles[0].arch
    chip = arch.sms * arch.clock_hz
    peak = 2.0 * max(arch.tensor_rate(p.plan.path) for p in profiles) * chip
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    marks = [p.roofline.intensity for p in shown] + [p.roofline.intensity_l2 for p in shown]
    rates = {"HBM": arch.hbm_bytes_per_s, "L2": arch.l2_bytes_per_clock * chip}
    corners = [peak / rate for rate in rates.values()]
    span = [min([*corners, *marks]) / 8, 8 * max([*corners, *marks])]
    for (name, rate), corner in zip(rates.items(), corners, strict=True):
        label = f"{name} {rate / 1e9:,.0f} GB/s"
        axes.plot([span[0], corner], [rate * span[0], peak], label=label)
    axes.axhline(peak, color="black", label=f"tensor cores {peak / 1e12:,.0f} TFLOP/s")
    for profile in shown:
        line = profile.roofline
        label = f"{profile.kernel}: {line.bound.name}"
        (full,) = axes.plot(line.intensity, line.attainable, "o", label=label)
        axes.plot(line.intensity_l2, line.attainable, "o", mfc="none", color=full.get_color())
    axes.set(
        xscale="log",
        yscale="log",
        xlim=span,
        xlabel="FLOP per byte (full: of HBM, open: requested from L2)",
        ylabel="attainable FLOP/s",
        title=f"{arch.product}, {profiles[0].plan.dtype}",
    )
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150, metadata={"Software": None})
    pyplot.close(figure)
    path.write_bytes(drawn.getvalue())
