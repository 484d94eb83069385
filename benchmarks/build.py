"""The time from a spec to a cubin: cold, and from the kernel cache, in one run.

Every spec has a process of its own with an empty cache, so that no spec profits from the one before
it, and then a second process that finds the cache filled::

    imports    Python packages (sympy above all), the same in both processes
    cold       spec file -> analysis -> plan -> CUDA -> cubin, NVRTC's start included
    warm       the same in the second process, which finds the kernel in the cache
    disk       the kernel alone from the cache on disk: find, check, read
    memory     flashgen.build again in the same process

Fails when a limit is exceeded: cold 1.5 s, disk 20 ms.

    python benchmarks/build.py [--arch sm_80] [SPEC ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLD_LIMIT = 1.5  # seconds
DISK_LIMIT = 0.020
STEPS = ("imports", "cold", "warm", "disk", "memory")


def measure(spec_file: str, arch: str) -> dict[str, float | bool]:
    """The seconds of each step for one spec in this process; `from_cache`: the second process."""
    sys.path.insert(0, str(ROOT))
    start = time.perf_counter()
    import flashgen as fg
    from flashgen.kernels.compile import compile, forget
    from flashgen.kernels.pipeline import build

    imported = time.perf_counter()
    spec = fg.load(spec_file)
    first = build(spec, arch)
    built = time.perf_counter()
    build(spec, arch)
    again = time.perf_counter()

    def from_disk() -> float:
        forget()
        source = first.source
        cached = compile(
            source.text,
            filename=source.filename,
            kernel=source.name,
            arch=arch,
            options=source.options,
        )
        assert cached.from_cache
        return cached.seconds

    return {
        "imports": imported - start,
        "whole": built - imported,
        "memory": again - built,
        "disk": sorted(from_disk() for _ in range(5))[2],
        "from_cache": first.binary.from_cache,
    }


def in_a_process(spec: Path, arch: str, cache: str) -> dict[str, float | bool]:
    command = [sys.executable, __file__, "--measure", "--arch", arch, str(spec)]
    environment = {**os.environ, "FLASHGEN_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, float | bool] = json.loads(done.stdout)
    return answer


def row(spec: Path, arch: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as cache:
        first, second = (in_a_process(spec, arch, cache) for _ in range(2))
    if first["from_cache"] or not second["from_cache"]:
        raise SystemExit(f"{spec.name}: the cache did not work: {first} then {second}")
    return {
        "imports": first["imports"],
        "cold": first["whole"],
        "warm": second["whole"],
        "disk": second["disk"],
        "memory": second["memory"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="times spec to cubin, cold and cached")
    parser.add_argument("specs", nargs="*", type=Path, help="spec files; all of specs/ by default")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(str(args.specs[0]), args.arch)))
        return 0
    print(f"{'ms, ' + args.arch:<18}" + "".join(f"{step:>10}" for step in STEPS), flush=True)
    slow = []
    for spec in args.specs or sorted((ROOT / "specs").glob("*.py")):
        times = row(spec, args.arch)
        print(
            f"{spec.stem:<18}" + "".join(f"{times[step] * 1e3:>10.3g}" for step in STEPS),
            flush=True,
        )
        slow += [spec.stem] * (times["cold"] > COLD_LIMIT or times["disk"] > DISK_LIMIT)
    verdict = f"too slow: {', '.join(slow)}" if slow else "all within"
    print(f"{verdict} (cold {COLD_LIMIT} s, disk {DISK_LIMIT * 1e3:.0f} ms)")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
