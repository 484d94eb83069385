"""A stand-in for flashgen.doctor.child: the same events, with the behaviour that a test gives.

    python -m tests.support.fake_trial BEHAVIOUR LOG --arch sm_90a --device 0 --problem NAME ...

A behaviour names what happens on each code path, and at which problem: "sm_90a=hang@2,sm_90=pass"
hangs on the device at the third problem of sm_90a. LOG gets a line for each process.
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
    """A replacement of `flashgen.trust.trial.command`."""

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
    names = options.problem or list(NAMES)
    bad = int(place or 0)
    for number, name in enumerate(names):
        event("building", problem=name)
        if kind == "slow" and number == bad:
            time.sleep(600)
        event("running", problem=name)
        if kind == "hang" and number == bad:
            time.sleep(600)
        if kind == "crash" and number == bad:
            os.kill(os.getpid(), signal.SIGSEGV)
        wrong = kind == "fail" and number == bad
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
