"""Figures from the records: python benchmarks/report.py --figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.suite.records import latest, read

Row = dict[str, str]
Lines = dict[str, list[tuple[float, float]]]


def draw(results: Path, folder: Path, device: str = "gpu") -> list[Path]:
    """Writes all figures that the newest run on ``device`` has numbers for; their paths."""
    import matplotlib

    matplotlib.use("Agg")
    # The same numbers give the same bytes.
    matplotlib.rcParams["svg.hashsalt"] = "flashgen"
    speed = [row for row in latest(read(results / "speed.csv"), device) if row["ms_p50"]]
    measures = [row for row in latest(read(results / "measures.csv"), device) if row["value"]]
    written = []
    for name, (title, x, y, scale, lines) in _figures(speed, measures).items():
        if lines:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}.svg"
            _plot(path, title, x, y, scale, lines, caption=_caption(speed or measures))
            written.append(path)
    return written


def _figures(speed: list[Row], measures: list[Row]) -> dict[str, tuple[str, str, str, str, Lines]]:
    figures: dict[str, tuple[str, str, str, str, Lines]] = {}
    shapes = {(r["group"], r["spec"], r["head_dim"], r["pass"]) for r in speed}
    for group, spec, head_dim, pass_ in sorted(shapes):
        if group not in ("grid", "llama", "decode"):
            continue
        rows = [
            r
            for r in speed
            if (r["group"], r["spec"], r["head_dim"], r["pass"]) == (group, spec, head_dim, pass_)
        ]
        decode = group == "decode"
        figures[f"{group}_{spec}_d{head_dim}_{pass_}"] = (
            f"{group}, {spec}, d {head_dim}, {pass_}",
            "keys" if decode else "tokens",
            "ms" if decode else "TFLOP/s",
            "loglog" if decode else "semilogx",
            _lines(rows, "contender", lambda r: r["seq_k"], "ms_p50" if decode else "tflops"),
        )
    windows = [r for r in speed if r["part"] == "sparsity"]
    figures["sparsity"] = (
        "windows of several densities, forward",
        "live share of S",
        "ms",
        "plot",
        _lines(windows, "contender", lambda r: r["live"], "ms_p50"),
    )
    memory = [r for r in measures if r["part"] == "memory"]
    for row in memory:
        row["line"] = f"{row['subject']}, {row['metric']}"
    figures["memory"] = (
        "peak memory beyond the inputs",
        "tokens",
        "bytes",
        "loglog",
        _lines(memory, "line", _length, "value"),
    )
    return figures


def _length(row: Row) -> str:
    return dict(word.split("=", 1) for word in row["setting"].split() if "=" in word)["seq"]


def _lines(rows: Iterable[Row], line: str, x: Callable[[Row], str], y: str) -> Lines:
    points_by_line: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        point = float(x(row)), float(row[y])
        if min(point) > 0:  # the axes are logarithmic
            points_by_line[row[line]].append(point)
    return {name: sorted(points) for name, points in sorted(points_by_line.items())}


def _caption(rows: list[Row]) -> str:
    row = rows[0]
    return f"{row['gpu']}, {row['date'][:10]}, commit {row['commit']}"


def _plot(
    path: Path, title: str, x: str, y: str, scale: str, lines: Lines, *, caption: str
) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.5))
    draw: Any = getattr(axes, scale)
    for name, points in lines.items():
        ours = name.startswith("flashgen")
        draw(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if ours else 1.2)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
    figure.text(0.99, 0.01, caption, ha="right", fontsize="xx-small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
