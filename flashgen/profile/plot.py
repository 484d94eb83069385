"""The roofline as a figure, drawn by matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from flashgen.errors import InputError
from flashgen.profile.kernel_profile import Profile
from flashgen.profile.roofline import tensor_rate


def check_plot() -> None:
    """Imports matplotlib.

    Raises:
        InputError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "the roofline is drawn by matplotlib, which is not installed",
            where="option --plot",
            numbers="no module named matplotlib",
            way_out="pip install matplotlib, or leave --plot out: the table has all numbers",
        )


def plot(profiles: Sequence[Profile], path: Path) -> None:
    """Draws the kernels of one call in the roofline of their architecture.

    The slopes are the rates of HBM and L2, the ceiling is the rate of the tensor cores. Each kernel
    has a full mark at its intensity by HBM bytes and an open mark at its intensity by bytes
    requested from L2, both at the rate that its bound allows.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_plot()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [profile for profile in profiles if profile.roofline.flops]
    arch, dtype = profiles[0].arch, profiles[0].plan.dtype
    chip = arch.sms * arch.clock_hz
    peak = 2.0 * max(tensor_rate(arch, dtype, p.plan.path) for p in profiles) * chip
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
        title=f"{arch.product}, {dtype}",
    )
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
