"""The predictions of the plan's model for the main shapes: nothing here was measured.

The model counts clocks of one SM per score element (`Plan.cost`); over the SMs and the clock of
the product that the architecture's facts name, that is a rate. It includes neither the start and
the end of work tiles nor masked tiles.
"""

from __future__ import annotations

import flashgen as fg
from benchmarks.suite.cases import Case, flops, grid, llama, make
from benchmarks.suite.contenders.ours import in_short, spec_of
from flashgen.kernels.planner import Plan, plan_backward
from flashgen.kernels.planner.models.fitted_time import STATED_ERROR
from flashgen.shared.arch import facts


def cases() -> list[Case]:
    return [
        llama("causal", 8192),
        grid("causal", 8192, 64),
        grid("full", 8192, 64),
        grid("causal", 8192, 128),
        grid("full", 8192, 128),
        grid("full", 8192, 256),
        make("variant", "softcap", 2, 16, 16, 8192, 8192, 128),
        make("variant", "alibi", 2, 16, 16, 8192, 8192, 128),
    ]


def table(arch: str) -> str:
    """One row per case and pass, with empty columns for the outcome."""
    product = facts(arch)
    lines = [
        f"Predicted for {arch} with the rates of one {product.product}; {STATED_ERROR}:",
        "",
        "| problem | pass | plan | predicted TFLOP/s | measured | why they differ |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases():
        spec = spec_of(case)
        forward = fg.plan(spec, arch)
        backward = plan_backward(spec, arch).kernels
        for pass_, plans in (("forward", (forward,)), ("backward", backward)):
            rate = predicted(case, pass_, plans, arch)
            name = f"{case.spec}, {case.seq_q}, {case.heads_q}/{case.heads_kv}, d {case.head_dim}"
            plan = "; ".join(map(in_short, plans))
            lines.append(f"| {name} | {pass_} | {plan} | {rate:.0f} | | |")
    return "\n".join(lines)


def predicted(case: Case, pass_: str, plans: tuple[Plan, ...], arch: str) -> float:
    """TFLOP/s, as if every tile that is computed were full; masked tiles are not in the model."""
    product = facts(arch)
    clocks = sum(
        # Kernels that stream count per row, and a row has seq_k score elements.
        plan.cost / (case.seq_k if plan.streams else 1)
        for plan in plans
    )
    return flops(pass_, 1, case.head_dim) / clocks * product.sms * product.clock_hz / 1e12
