"""Reports from the records: a table, the figures, and the speed table of docs/gpu.md.

    python benchmarks/report.py                   the newest run, flashgen's slowest cases first
    python benchmarks/report.py --figures [DIR]   figures, in benchmarks/results/figures
    python benchmarks/report.py --speed-table [--check]
    python benchmarks/report.py --speed-chart [--check]     the chart of docs/index.md
    python benchmarks/report.py --status [--check]      which GPUs ran the kernels, for three pages
    python benchmarks/report.py --proven [--check]      the code paths that need no trial
    python benchmarks/report.py --merge DIR       adds the runs of another folder to the records
    python benchmarks/report.py --predictions    predicted times beside those of the fastest peers
    python benchmarks/report.py --model-errors   predicted over measured times, for docs/planner.md

With --check nothing is written, and the exit code is 1 where a page, a picture or, with --proven,
flashgen/calls/trust/proven.json differs from the records.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.suite import (  # noqa: E402
    figures,
    model_errors,
    predictions,
    proven,
    records,
    speed_chart,
    speed_table,
    status,
    summary,
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=records.RESULTS)
    parser.add_argument("--merge", type=Path, metavar="DIR")
    parser.add_argument("--figures", type=Path, nargs="?", const=Path(), metavar="DIR")
    parser.add_argument("--speed-table", action="store_true")
    parser.add_argument("--speed-chart", action="store_true")
    parser.add_argument("--status", action="store_true")
    parser.add_argument("--proven", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--predictions", action="store_true")
    parser.add_argument("--model-errors", action="store_true")
    options = parser.parse_args(arguments)
    if options.merge:
        print(f"{records.merge(options.merge, options.results)} rows added")
    if options.figures is not None:
        folder = options.figures if options.figures != Path() else options.results / "figures"
        for path in figures.draw(options.results, folder):
            print(path)
    if options.speed_table:
        text = speed_table.block(options.results)
        return write(speed_table.PAGE, text, speed_table.BEGIN, speed_table.END, options.check)
    if options.speed_chart:
        return speed_chart.write(options.results, check=options.check)
    if options.status:
        text = status.block(options.results)
        pages = status.PAGES
        return max(write(p, text, status.BEGIN, status.END, options.check) for p in pages)
    if options.proven:
        same = proven.write(options.results, check=options.check)
        print(f"flashgen/calls/trust/proven.json {'is as before' if same else 'differs'}")
        return int(options.check and not same)
    if options.model_errors:
        print(model_errors.table(options.results))
        return 0
    if options.predictions:
        print(predictions.table(options.results))
    elif not options.merge and options.figures is None:
        show(options.results)
    return 0


def write(page: Path, inside: str, begin: str, end: str, check: bool) -> int:
    """Writes the part of a page between the markers, or only compares it; 1 where it differs."""
    before = page.read_text(encoding="utf-8")
    after = speed_table.updated(before, inside, begin, end)
    if before == after:
        print(f"{page.name} says what the records say")
        return 0
    if check:
        print(f"{page.name} differs from the records: the same command without --check writes it")
        return 1
    page.write_text(after, encoding="utf-8")
    print(f"{page.name} is written")
    return 0


def show(results: Path) -> None:
    rows = records.latest(records.read(results / "speed.csv"))
    if not rows:
        print(speed_table.NONE)
        return
    print(summary.text(rows[0]["run"], [], results))


if __name__ == "__main__":
    raise SystemExit(main())
