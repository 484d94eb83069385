"""How long a new variant takes to its first result: run in a process of its own.

    python -m benchmarks.suite.first_call --device gpu --contender flex --spec softcap

Prints one line of JSON: seconds for the first call of forward and of backward, and for the second.
Importing packages and starting the GPU are not counted, for any contender alike.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.suite.cases import Case, make
from benchmarks.suite.check import make_inputs
from benchmarks.suite.contenders import Contender, contenders
from benchmarks.suite.device import KINDS, Device, open_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=KINDS, required=True)
    parser.add_argument("--contender", required=True)
    parser.add_argument("--spec", required=True)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--head-dim", type=int, default=64)
    options = parser.parse_args()
    if options.device == "emulator":
        torch.set_num_threads(1)  # several processes share few cores
    device = open_device(options.device)
    case = make(
        "compile", options.spec, *(1, 2, 2, options.seq, options.seq, options.head_dim), key=True
    )
    (contender,) = (c for c in contenders(device) if c.name == options.contender)
    print(json.dumps(timed(contender, case, device)))


def timed(contender: Contender, case: Case, device: Device) -> dict[str, float]:
    """Seconds of first_forward, first_backward, second_forward and second_backward."""
    inputs = make_inputs(case, device.torch, seed=0)
    torch.matmul(inputs.q.detach(), inputs.k.detach().mT)  # starts the device and its libraries
    device.synchronize()
    start = time.perf_counter()
    prepared = contender.prepare(case, device)
    seconds = {}
    for turn in ("first", "second"):
        out = prepared.attend(*inputs.learnt)
        device.synchronize()
        seconds[f"{turn}_forward"] = time.perf_counter() - start
        start = time.perf_counter()
        if "backward" in prepared.passes:
            torch.autograd.grad(out, inputs.learnt, inputs.dout)
            device.synchronize()
            seconds[f"{turn}_backward"] = time.perf_counter() - start
        start = time.perf_counter()
    return seconds


if __name__ == "__main__":
    main()
