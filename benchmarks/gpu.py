"""Checks, measures and records everything on a GPU, within minutes: the command of `make gpu`.

    python benchmarks/gpu.py [--part NAME ...] [--minutes 9] [--out DIR]

Parts run in order of importance, each in a process of its own with a share of the time; those that
measure no time run side by side. The parts that were left out are listed. Without --out the records
are appended to benchmarks/results/.

    python benchmarks/gpu.py --part suite --work DIR

keeps the journals in DIR; the same command again goes on behind what they say was done.

    python benchmarks/gpu.py --part dry

runs all parts without a GPU, on the emulator and the smallest problems, through the same code.
Its records go to a temporary folder. `--dry --part NAME` does so for one part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.suite import device, figures, records, summary  # noqa: E402
from benchmarks.suite.parts import PARTS, Part, named  # noqa: E402
from benchmarks.suite.supervisor import Settings, run_all  # noqa: E402

MINUTES = 9.0
DRY_MINUTES = 2.9
DRY = "dry"
DRY_SECONDS = {
    "doctor": 30, "boxes": 12, "paths": 14, "packed": 12, "stalls": 12, "ceilings": 5, "forms": 12,
    "suite": 36, "overhead": 10, "models": 25, "compile": 20, "memory": 8, "sparsity": 10,
    "roofline": 6, "sanitizer": 8, "correctness": 40,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    dry = options.dry or options.part == [DRY]
    if not dry and (reason := device.missing_gpu()) is not None:
        print(f"no GPU to measure on: {reason}")
        print("python benchmarks/gpu.py --part dry runs the same code on the emulator")
        return 2
    with tempfile.TemporaryDirectory(prefix="flashgen-gpu-") as scratch:
        work = options.work or Path(scratch)
        out = (options.out or (work / "results" if dry else records.RESULTS)).resolve()
        if dry and records.folder_is_of_the_repository(out):
            print("a dry run measures nothing: its records do not belong in benchmarks/results/")
            return 2
        out.mkdir(parents=True, exist_ok=True)
        for name in records.FILES:  # before the time is spent, not after
            records.read(out / name)
            records.append(out / name, [])  # parts that run side by side find the first line there
        settings = Settings(
            minutes=options.minutes or (DRY_MINUTES if dry else MINUTES),
            out=out,
            work=work,
            device="emulator" if dry else "gpu",
            run=run_of(work),
            commit=options.commit or records.commit(),
            tiny=dry,
        )
        print(f"run {settings.run}, {settings.minutes:g} minutes, records in {out}", flush=True)
        parts: Sequence[Part] = dry_parts() if dry else PARTS
        if options.part not in ([], [DRY]):
            parts = chosen_parts(options.part)
        outcomes = run_all(parts, settings, tell=_tell)
        text = summary.text(settings.run, outcomes, out)
        if dry:
            figures.draw(out, work / "figures", device="emulator")
        (out / f"summary-{settings.run}.txt").write_text(text, encoding="utf-8")
        short = summary.digest(settings.run, outcomes, out)
        keep_logs(work, out / f"logs-{settings.run}.txt")
    print(text, short, sep="\n", flush=True)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="parts: " + "; ".join(f"{part.name} ({part.description})" for part in PARTS),
    )
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--part", choices=[*names, DRY], nargs="+", default=[], help="these parts, or all dry"
    )
    parser.add_argument("--dry", action="store_true", help="the emulator for a device")
    parser.add_argument("--minutes", type=float, help=f"{MINUTES:g} by default")
    parser.add_argument("--out", type=Path, help="benchmarks/results by default")
    parser.add_argument("--work", type=Path, help="logs; with those of a run, it is continued")
    parser.add_argument("--commit", help="for the records, where there is no git")
    return parser.parse_args(arguments)


def run_of(work: Path) -> str:
    """The run whose journals are in a folder; a new one, named after the time, in an empty one."""
    work.mkdir(parents=True, exist_ok=True)
    name = work / "run"
    if not name.exists():
        name.write_text(datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ"), encoding="utf-8")
    return name.read_text(encoding="utf-8")


def chosen_parts(names: Sequence[str]) -> list[Part]:
    """The parts of these names and the parts whose results they need, in order of importance."""
    wanted = {*names, *(need for name in names for need in named(name).needs)} - {DRY}
    return [part for part in PARTS if part.name in wanted]


def dry_parts() -> list[Part]:
    """All parts, with shares for the emulator's speed. The tests are last: pytest runs them too."""
    tests = named("correctness")

    def dry(part: Part) -> Part:
        weight = DRY_SECONDS[part.name]
        least = min(part.share.least, weight / 2)
        return replace(part, share=replace(part.share, weight=weight, least=least))

    return [*(dry(part) for part in PARTS if part is not tests), dry(tests)]


def _tell(line: str) -> None:
    print(line, flush=True)


def keep_logs(work: Path, target: Path) -> None:
    """All logs of a run in one file, because the folder with the logs is removed."""
    with target.open("w", encoding="utf-8") as file:
        for log in sorted([*work.glob("*.log"), *work.glob("*.jsonl"), *work.glob("*-raw.csv")]):
            file.write(f"==== {log.name}\n")
            file.write(log.read_text(encoding="utf-8", errors="replace")[-1_000_000:])


if __name__ == "__main__":
    raise SystemExit(main())
