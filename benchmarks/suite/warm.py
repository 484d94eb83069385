"""Fills the caches of compiled kernels for the suite, in the background of the first part.

    python -m benchmarks.suite.warm --device gpu [--tiny]

Compiles what `parts.speed` will need, in its order: nothing that is timed later is compiled in the
time of the suite then. It may be ended at any moment.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.suite.cases import Case, full_list, tiny_list
from benchmarks.suite.check import make_inputs
from benchmarks.suite.contenders.flex import Flex
from benchmarks.suite.contenders.ours import flashgens, spec_of
from benchmarks.suite.device import KINDS, Device, first_line, open_device, own_threads
from flashgen.kernels.pipeline import build, build_backward

PROCESSES = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=KINDS, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    own_threads(1)
    device = open_device(options.device)
    cases = tiny_list() if options.tiny else full_list()
    archs = list(dict.fromkeys(contender.arch for contender in flashgens(device)))
    distinct = list({(c.spec, c.head_dim, c.dtype): c for c in reversed(cases)}.values())[::-1]
    if options.tiny:
        for case in distinct:
            compile_kernels(case, archs[0])
        return
    # Spawned, because a fork would copy a process that uses a GPU.
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        done = [pool.submit(compile_kernels, case, arch) for case in distinct for arch in archs]
        for case in cases:
            if case.key:
                compile_flex(case, device)
        for future in done:
            future.result()


def compile_kernels(case: Case, arch: str) -> None:
    try:
        spec = spec_of(case)
        build(spec, arch)
        for deterministic in (False, True):
            build_backward(spec, arch, deterministic=deterministic)
    except Exception as error:  # the suite will meet it again and record it
        print(f"{case.spec}, d {case.head_dim}: {first_line(error)}", flush=True)


def compile_flex(case: Case, device: Device) -> None:
    flex = Flex()
    if flex.supports(case, device) is not None:
        return
    try:
        prepared = flex.prepare(case, device)
        inputs = make_inputs(case, device.torch, seed=0)
        torch.autograd.grad(prepared.attend(*inputs.learnt), inputs.learnt, inputs.dout)
        device.synchronize()
        print(f"flex, {case.id}", flush=True)
    except Exception as error:
        print(f"flex, {case.id}: {first_line(error)}", flush=True)


if __name__ == "__main__":
    main()
