"""Host time per call: the time of Python and the dispatcher, without the kernel.

The problem is so small that the GPU is done before the host queues the next call. "queued" is the
host's time to queue a call; "finished" is the time per call of a hundred calls and one wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.suite.cases import make
from benchmarks.suite.check import make_inputs
from benchmarks.suite.contenders import Prepared, contenders
from benchmarks.suite.contenders.sdpa import Sdpa
from benchmarks.suite.context import Context
from benchmarks.suite.device import Device, first_line
from benchmarks.suite.statistics import Timing, timing_of

NAMES = ("flashgen sm_80", "flashgen sm_90a", "flex")


def run(context: Context) -> None:
    case = make("overhead", "causal", 1, 2, 2, 32, 32, 64, dtype="float16", key=True)
    inputs = make_inputs(case, context.device.torch, seed=0)
    calls, rounds = (1, 2) if context.tiny else (100, 40)
    # To choose a backend of torch's attention takes the host longer than the call itself.
    chosen = [c for c in contenders(context.device) if c.name in NAMES]
    for contender in (Sdpa("sdpa default", None), *chosen):
        step = contender.name
        if contender.supports(case, context.device):
            continue
        if context.journal.lost(step) or context.journal.done(step):
            continue
        if context.budget.left < 1:
            context.journal.skipped(f"overhead of {step}")
            continue
        with context.journal.step(step):
            try:
                prepared = contender.prepare(case, context.device)
                for mode, call in modes(prepared, inputs.learnt, inputs.dout).items():
                    for metric, timing in host_us(context.device, call, calls, rounds).items():
                        context.writer.measure(
                            contender.name, metric, timing.p50, "us", f"mode={mode}",
                            f"p20 {timing.p20:.3g}, p80 {timing.p80:.3g}",
                        )  # fmt: skip
            except Exception as error:
                context.usable()
                report = context.journal.failed if contender.ours else context.journal.skipped
                report(f"overhead of {contender.name}: {first_line(error)}")


def modes(
    prepared: Prepared, learnt: tuple[torch.Tensor, ...], dout: torch.Tensor
) -> dict[str, Callable[[], object]]:
    q, k, v = learnt
    plain = [tensor.detach() for tensor in learnt]
    calls: dict[str, Callable[[], object]] = {
        "no gradients": lambda: prepared.attend(*plain),
        "forward": lambda: prepared.attend(q, k, v),
    }
    if "both" in prepared.passes:
        calls["both"] = lambda: torch.autograd.grad(prepared.attend(q, k, v), (q, k, v), dout)
    return calls


def host_us(
    device: Device, call: Callable[[], object], calls: int, rounds: int
) -> dict[str, Timing]:
    """Microseconds per call, until it is queued and until it is finished."""
    for _ in range(max(2, calls // 10)):
        call()
    queued, finished = [], []
    for _ in range(rounds):
        device.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        queued.append((time.perf_counter() - start) / calls * 1e6)
        device.synchronize()
        finished.append((time.perf_counter() - start) / calls * 1e6)
    return {"queued": timing_of(queued), "finished": timing_of(finished)}
