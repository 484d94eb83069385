"""Fills the caches of compiled kernels for the suite, beside parts that measure no time.

    python -m benchmarks.suite.warm --device gpu [--tiny]

Compiles what `parts.speed` will need, in its order: nothing that is timed later is compiled in the
time of the suite then. It may be ended at any moment.
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from benchmarks.suite.cases import Case, full_list, tiny_list
from benchmarks.suite.check import make_inputs
from benchmarks.suite.contenders import Contender
from benchmarks.suite.contenders.cudnn_flex import CudnnFlex
from benchmarks.suite.contenders.flash_attention import FlashAttention
from benchmarks.suite.contenders.flashinfer import FlashInfer
from benchmarks.suite.contenders.flex import flexes
from benchmarks.suite.contenders.ours import flashgens, spec_of
from benchmarks.suite.device import KINDS, first_line, open_device
from flashgen.kernels.pipeline import build, build_backward

PROCESSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=KINDS, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # several processes share few cores
    device = open_device(options.device)
    cases = tiny_list() if options.tiny else full_list()
    archs = list(dict.fromkeys(contender.arch for contender in flashgens(device)))
    distinct = list({kernel_of(case): case for case in reversed(cases)}.values())[::-1]
    if options.tiny:
        for case in distinct:
            compile_kernels(case, archs[0])
        return
    # Spawned, because a fork would copy a process that uses a GPU.
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        done = []
        peers: list[Contender] = [FlashAttention(), CudnnFlex(), FlashInfer()]
        for case in distinct:
            done += [pool.submit(compile_kernels, case, arch) for arch in archs]
            done += [
                pool.submit(compile_peer, contender, shortened(case), options.device)
                for contender in peers
                if contender.supports(case, device) is None
            ]
        # torch's compiler has processes of its own, and compiles for lengths.
        for case in distinct:
            for contender in flexes():
                if contender.supports(case, device) is None:
                    compile_peer(contender, case, options.device)
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


def kernel_of(case: Case) -> tuple[object, ...]:
    """What the compilers of all contenders see of a case, but for lengths."""
    share = case.heads_q // case.heads_kv
    return case.spec, case.head_dim, case.head_dim_v, case.dtype, share, case.seq_q == 1


def shortened(case: Case) -> Case:
    """The same kernel on little memory, since other processes use the GPU too."""
    rows, keys = min(case.seq_q, 1024), min(case.seq_k, 1024)
    return replace(case, batch=1, seq_q=rows, seq_k=keys)


def compile_peer(contender: Contender, case: Case, kind: str) -> None:
    """Runs a peer once, whose compiler keeps its kernels on disk."""
    try:
        device = open_device(kind)
        prepared = contender.prepare(case, device)
        inputs = make_inputs(case, device.torch, seed=0)
        out = prepared.attend(*inputs.learnt)
        if "both" in prepared.passes:
            torch.autograd.grad(out, inputs.learnt, inputs.dout)
        device.synchronize()
        print(f"{contender.name}, {case.id}", flush=True)
    except Exception as error:
        print(f"{contender.name}, {case.id}: {first_line(error)}", flush=True)


if __name__ == "__main__":
    main()
