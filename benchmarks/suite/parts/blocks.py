"""Time of the forward kernel against its block size: the plan's choice, the paper's, and others.

Smaller blocks come from planning for less shared memory than there is. Beside each time stands what
the plan predicted for it: bytes moved, and clocks per score element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import flashgen as fg
from benchmarks.suite.cases import Case, flops, grid, make
from benchmarks.suite.check import Inputs, Oracle, make_inputs
from benchmarks.suite.contenders.ours import in_short, spec_of
from benchmarks.suite.context import Context
from benchmarks.suite.device import first_line
from benchmarks.suite.timing import measure, sets_needed
from benchmarks.variants import live_elements
from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.bind_arguments import bind
from flashgen.calls.runtime.calls import check
from flashgen.kernels.pipeline import Build
from flashgen.kernels.planner import forward_traffic
from flashgen.shared.errors import FlashgenError

KIB = 1024
BUDGETS = tuple(size * KIB for size in (8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 227))


@dataclass(frozen=True)
class Choice:
    policy: str
    sram: int | None
    build: Build


def run(context: Context) -> None:
    if context.tiny:
        cases = [make("blocks", "full", 1, 1, 1, 96, 96, 64, dtype="float16")]
    else:
        cases = [grid("full", 4096, 64), grid("causal", 4096, 128), grid("full", 4096, 128)]
    for case in cases:
        step = case.id
        if context.journal.done(step) or context.journal.lost(step):
            continue
        if context.budget.left < 2:
            context.journal.skipped(f"block sizes of {step}")
            continue
        with context.journal.step(step):
            _measured(context, case)


def choices(case: Case, arch: str, few: bool = False) -> list[Choice]:
    """Builds with distinct tiles: the plan's own choice first."""
    spec = spec_of(case)
    asked: list[tuple[str, int | None]] = [("derived", None), ("paper", None)]
    for sram in BUDGETS[2:3] if few else BUDGETS:
        asked += [("derived", sram), ("paper", sram)]
    found: dict[str, Choice] = {}
    for policy, sram in asked:
        try:
            plan = fg.plan(spec, arch, sram=sram, policy=policy)
        except FlashgenError:
            continue  # nothing fits into so little, or so much does not exist
        if in_short(plan) not in found:
            build = fg.build(spec, arch, sram=sram, policy=policy)
            found[in_short(plan)] = Choice(policy, sram, build)
    return list(found.values())


def _measured(context: Context, case: Case) -> None:
    device = context.device
    inputs = make_inputs(case, device.torch, seed=0, learnt=False)
    oracle = Oracle(case, inputs, backward=False)
    found = choices(case, device.arch, few=context.tiny)
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for choice in found:
        name = in_short(choice.build.plan)
        call = forced(choice.build, case, inputs, device.backend)
        try:
            verdict = oracle.verdict({"out": call()}, ours=True)
        except Exception as error:
            context.usable()
            context.journal.failed(f"block size {name}: {first_line(error)}")
            continue
        if verdict.ok:
            calls[name] = call
        else:
            context.journal.failed(f"block size {name}, {case.id} is wrong: {verdict.text}")
    if not calls:
        return
    rounds = (2, 2) if context.tiny else (7, 60)
    seconds = min(5.0, context.budget.left / 2)
    times = measure(
        device,
        {name: (lambda _, call=call: call()) for name, call in calls.items()},
        sets_needed(case.bytes, 0),
        seconds,
        rounds=rounds,
    )
    live = live_elements(case.mods, case.batch, case.heads_q, case.seq_q, case.seq_k, device.torch)
    for choice in found:
        plan = choice.build.plan
        name = in_short(plan)
        if name not in times:
            continue
        timing = times[name].timing
        heads = (case.batch, case.heads_q, case.heads_kv, case.seq_q, case.seq_k)
        setting = (
            f"case={case.id} policy={choice.policy} block_q={plan.block_q} block_k={plan.block_k}"
        )
        for metric, value, unit in (
            ("ms_p50", timing.p50, "ms"),
            ("tflops", flops("forward", live, case.head_dim) / timing.p50 / 1e9, "TFLOP/s"),
            ("predicted bytes", forward_traffic(plan, *heads).issued, "B"),
            ("predicted cost", plan.cost, "clk per score element"),
        ):
            note = "all tiles, masked ones too" if metric == "predicted bytes" else ""
            context.writer.measure(f"flashgen {name}", metric, value, unit, setting, note)


def forced(build: Build, case: Case, inputs: Inputs, backend: str) -> Callable[[], torch.Tensor]:
    """A forward call of this very kernel; the operator would choose one itself."""
    q, k, v = (tensor.detach() for tensor in inputs.learnt)
    problem = check(
        spec_of(case), q, k, v, scale=None, q_offset=0, k_offset=0, scalars=dict(case.scalars)
    )
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    tensors = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "rng": None}
    bound = bind(build, problem, tensors)
    target = Target(backend, build.plan.arch, q.device, q.device.index or 0)
    persistent = bound.blocks is not None and bound.blocks.persistent

    def call() -> torch.Tensor:
        counter = torch.zeros(1, dtype=torch.int32, device=q.device) if persistent else None
        bound.run(target, {**tensors, "tile_counter": counter})
        return out

    return call
