"""The roofline as a picture; matplotlib draws it, where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from flashgen.errors import InputError
from flashgen.profile.roofline import tensor_rate
from flashgen.profile.value import Profile


def check_plot() -> None:
    """
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
    """Draws the kernels of one call under the roofs of their architecture.

    The slopes are HBM's and L2's rates, the ceiling is the tensor cores'; a kernel has a full mark
    at its intensity by HBM bytes, and an open one by the bytes that it asks of L2, both as high as
    its bound allows.

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
        xlabel="FLOP per byte (full: of HBM, open: asked of L2)",
        ylabel="FLOP/s at best",
        title=f"{arch.product}, {dtype}",
    )
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
