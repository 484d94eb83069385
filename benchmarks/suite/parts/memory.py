"""Peak memory of a call against the length of the sequence, beyond its inputs."""

from __future__ import annotations

import torch

from benchmarks.suite.cases import Case, make
from benchmarks.suite.check import make_inputs
from benchmarks.suite.contenders import Contender, contenders
from benchmarks.suite.context import Context
from benchmarks.suite.device import first_line

LENGTHS = (8192, 65536, 1024, 32768, 4096, 16384, 2048)
NAMES = ("flashgen sm_80", "flashgen sm_90a", "sdpa flash", "sdpa math", "standard")


def run(context: Context) -> None:
    for seq in (64, 96) if context.tiny else LENGTHS:
        case = make("memory", "causal", 1, 2, 2, seq, seq, 64)
        if not context.tiny:
            case = make("memory", "causal", 1, 8, 8, seq, seq, 128)
        for contender in contenders(context.device):
            step = f"{contender.name}, {seq}"
            journal = context.journal
            if contender.name not in NAMES or journal.done(step) or journal.lost(step):
                continue
            if context.budget.left < 1:
                journal.skipped(f"memory of {step}")
                continue
            with journal.step(step):
                _measured(context, contender, case)


def _measured(context: Context, contender: Contender, case: Case) -> None:
    setting = f"seq={case.seq_q} batch={case.batch} heads={case.heads_q} d={case.head_dim}"
    reason = contender.supports(case, context.device)
    if reason is not None:
        context.writer.measure(contender.name, "forward", None, "B", setting, reason)
        return
    try:
        for metric, peak in peaks(context, contender, case).items():
            context.writer.measure(contender.name, metric, peak, "B", setting)
    except torch.cuda.OutOfMemoryError:
        context.writer.measure(contender.name, "both", None, "B", setting, "out of memory")
        context.device.free()
    except Exception as error:
        context.usable()
        report = context.journal.failed if contender.ours else context.journal.skipped
        report(f"memory of {contender.name}: {first_line(error)}")


def peaks(context: Context, contender: Contender, case: Case) -> dict[str, int]:
    """Bytes that a call takes at most beyond q, k, v and dO: forward, and forward and backward."""
    device = context.device
    inputs = make_inputs(case, device.torch, seed=0)
    prepared = contender.prepare(case, device)
    bytes_by_metric: dict[str, int] = {}
    for metric in ("forward", "both"):
        if metric not in prepared.passes:
            continue
        for turn in range(2):  # the first call may compile
            device.synchronize()
            device.free()
            device.reset_peak()
            before = device.peak_bytes()
            out = prepared.attend(*inputs.learnt)
            if metric == "both":
                torch.autograd.grad(out, inputs.learnt, inputs.dout)
            device.synchronize()
            del out
            if turn:
                bytes_by_metric[metric] = device.peak_bytes() - before
    return bytes_by_metric
