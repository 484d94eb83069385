"""The child process that runs problems on one code path: python -m flashgen.tools.doctor.child.

    --arch ARCH --device N              run every problem
    --trial                             only those by which a code path is trusted
    --problem NAME                      only this one; repeatable
    --emulate                           compare with the emulator's bits, too

Each step is a line of JSON on stdout (`calls.trust.trial`). A device of -1 is the emulator.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO

import torch

from flashgen.calls.trust.trial import SECONDS
from flashgen.shared.errors import FlashgenError
from flashgen.tools.doctor import check
from flashgen.tools.doctor.problems import PROBLEMS, Problem, named

Runner = Callable[[Problem, check.Step], check.ProblemResult]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True)
    parser.add_argument("--device", type=int, required=True)
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--problem", action="append", default=[])
    parser.add_argument("--emulate", action="store_true")
    options = parser.parse_args(arguments)
    problems = [named(name) for name in options.problem] or PROBLEMS
    if options.trial:
        problems = [problem for problem in problems if problem.trial]
        # Where the parent process is lost, this one still ends.
        faulthandler.dump_traceback_later(2 * SECONDS, exit=True)
    # Only events go to stdout: whatever a library prints goes to stderr.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as events:
        os.dup2(2, 1)
        device = torch.device("cpu") if options.device < 0 else _opened(options.device)

        def runner(problem: Problem, step: check.Step) -> check.ProblemResult:
            return check.run(problem, options.arch, device, emulate=options.emulate, step=step)

        report(problems, options.arch, runner, events)
    return 0


def _opened(index: int) -> torch.device:
    """The device, after a first use of it."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device).add_(1).item()
    return device


def report(problems: Sequence[Problem], arch: str, runner: Runner, events: IO[str]) -> None:
    """Runs problems one after another, with an event for each step.

    An error while kernels are compiled ends the process, because it says nothing about the code
    path. So does one on the device, after its result: the device may be unusable behind it.
    """

    def write(event: str, **fields: object) -> None:
        print(json.dumps({"event": event, **fields}), file=events, flush=True)

    write("ready")
    for problem in problems:
        steps: list[str] = []

        def step(name: str, problem: Problem = problem, steps: list[str] = steps) -> None:
            steps.append(name)
            write(name, problem=problem.name)

        try:
            result = runner(problem, step)
        except (FlashgenError, RuntimeError) as error:
            if "running" not in steps or isinstance(error, torch.OutOfMemoryError):
                raise
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
            write("result", **asdict(check.ProblemResult(problem.name, arch, False, text)))
            return
        write("result", **asdict(result))
    write("end")


if __name__ == "__main__":
    sys.exit(main())
