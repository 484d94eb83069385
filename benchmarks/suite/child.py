"""The process of one part: python -m benchmarks.suite.child, started by the supervisor only."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch

from benchmarks.suite import parts
from benchmarks.suite.context import Context, Unusable
from benchmarks.suite.device import KINDS, open_device, versions
from benchmarks.suite.journal import Journal
from benchmarks.suite.records import Stamp, Writer
from benchmarks.suite.supervisor import RESTART, Budget, journal_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", required=True)
    parser.add_argument("--device", choices=KINDS, required=True)
    parser.add_argument("--deadline", type=float, required=True, help="seconds since the epoch")
    for folder in ("--out", "--work"):
        parser.add_argument(folder, type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.device == "emulator":
        torch.set_num_threads(1)  # several processes share few cores
    journal = Journal(journal_of(options.work, options.part))
    try:
        device = open_device(options.device)
        stamp = Stamp(
            run=options.run,
            commit=options.commit,
            device=device.kind,
            gpu=device.name,
            driver=device.driver,
            versions=versions(),
        )
        context = Context(
            device=device,
            writer=Writer(options.out, stamp, options.part),
            journal=journal,
            budget=Budget(options.deadline),
            out=options.out,
            work=options.work,
            run=options.run,
            tiny=options.tiny,
        )
        parts.load(parts.named(options.part))(context)
    except Unusable as reason:
        print(f"the device answers no more: {reason}", flush=True)
        # Without the destructors of tensors on a device that is gone.
        sys.stdout.flush()
        os._exit(RESTART)
    except Exception as error:
        traceback.print_exc()
        journal.failed(f"{options.part}: {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
