"""The plot of the training examples: losses side by side, and how far the first two are apart."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

# The second curve covers the first: a wide pale line stays visible below a thin one.
STYLES = (
    {"color": "#f4b266", "linewidth": 5.0},
    {"color": "#12355b", "linewidth": 1.2},
    {"color": "#2a9d6f", "linewidth": 1.2, "linestyle": (0, (2, 1))},
)


def check(parser: argparse.ArgumentParser, file: Path, *packages: str) -> None:
    """Ends the program before a training at whose end something would be missing.

    Args:
        file: the plot, whose folder is made.
        packages: the packages that the example imports besides matplotlib.
    """
    for name in ("matplotlib", *packages):
        try:
            importlib.import_module(name)
        except ImportError as error:
            parser.error(f"{error}: pip install {name}")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:] not in formats:
        parser.error(f"--plot {file}: the suffix is one of {', '.join(sorted(formats))}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab"):
            pass
    except OSError as error:
        parser.error(f"--plot {file}: {error.strerror or error}")


def plot(
    file: Path,
    title: str,
    losses: Mapping[str, Sequence[float]],
    apart: Sequence[float],
    allowed: float,
    difference: str = "relative difference",
) -> None:
    """Draws the losses of each training by its name; the suffix of the file sets the format.

    Args:
        losses: nats per character at each step.
        apart: the difference of the first two at each step, and ``allowed`` the largest one.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(apart) + 1)
    marker = "o" if len(apart) == 1 else None
    figure, (above, below) = pyplot.subplots(
        2, sharex=True, figsize=(8, 6.5), height_ratios=(3, 1), layout="constrained"
    )
    for (name, values), style in zip(losses.items(), STYLES, strict=False):
        above.plot(steps, values, label=name, marker=marker, **style)
    above.set_title(title)
    above.set_ylabel("training loss (nats per character)")
    above.legend(frameon=False)

    below.plot(steps, apart, color="#12355b", linewidth=1.0, marker=marker)
    below.axhline(allowed, color="#c0392b", linewidth=1.0, linestyle="--")
    below.annotate("allowed", (1, allowed), (0, -12), textcoords="offset points", color="#c0392b")
    below.set_yscale("symlog", linthresh=1e-7)  # the difference of equal losses is 0
    finite = (2 * value for value in apart if math.isfinite(value))
    below.set_ylim(0, max(10 * allowed, *finite))
    below.set_yticks([0, 1e-6, 1e-4, 1e-2])
    below.set_xlabel("step")
    below.set_ylabel(difference)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
