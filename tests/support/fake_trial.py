"""A stand-in for `tools.doctor.child`: the same events, with the behaviour that a test gives.

    python -m tests.support.fake_trial BEHAVIOUR LOG --arch sm_90a --device 0 --problem NAME ...

A behaviour names what happens on each code path, and in which problem:
"sm_90a=hang@packed,sm_90=pass" hangs on sm_90a in the problem with "packed" in its name. LOG gets a
line for each process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time

NAMES = ("boxes", "causal", "packed")


def event(name: str, **more: object) -> None:
    print(json.dumps({"event": name, **more}), flush=True)


def command(behaviour: str, log: object) -> object:
    """A replacement of `flashgen.calls.trust.trial.command`."""

    def words(arch: str, device: int, *options: str) -> list[str]:
        module = [sys.executable, "-m", "tests.support.fake_trial", behaviour, str(log)]
        return [*module, "--arch", arch, "--device", str(device), *options]

    return words


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("behaviour", "log", "--arch", "--device"):
        parser.add_argument(name)
    parser.add_argument("--problem", action="append", default=[])
    for name in ("--trial", "--emulate"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    with open(options.log, "a", encoding="utf-8") as log:
        log.write(f"{options.arch}\n")
    kind, _, place = dict(
        each.split("=") for each in options.behaviour.split(",")
    )[options.arch].partition("@")  # fmt: skip
    if kind == "absent":
        sys.exit("CUDA error: all CUDA-capable devices are busy or unavailable")
    event("ready")
    for name in options.problem or NAMES:
        here = kind if place and place in name else "pass"
        event("building", problem=name)
        if here == "slow":
            time.sleep(600)
        event("running", problem=name)
        if here == "hang":
            time.sleep(600)
        if here == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        event("comparing", problem=name)
        wrong = here == "fail"
        text = "dq FAIL, max 0.3 of 0.01 allowed" if wrong else "out pass, max 0.01 of 0.02 allowed"
        share = 30.0 if wrong else 0.5
        event(
            "result",
            problem=name,
            arch=options.arch,
            ok=not wrong,
            text=text,
            share=share,
            equal=0.97,
            exact=0,
            seconds=0.1,
        )
    event("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
