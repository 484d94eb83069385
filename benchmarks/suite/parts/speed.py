"""The benchmark suite: every case of `cases`, most important first, until time is out."""

from __future__ import annotations

from benchmarks.suite.cases import PASSES, all_spec_names, full_list, tiny_list
from benchmarks.suite.contenders import contenders
from benchmarks.suite.context import Context
from benchmarks.suite.one_case import run_case
from benchmarks.variants import ADDED, CAPTURED, FORMS

SECONDS = 1.2
"""Of timing per case; a check and the warm-up come on top."""


def run(context: Context) -> None:
    for name in all_spec_names():
        if name not in {**FORMS, **CAPTURED, **ADDED}:
            context.journal.skipped(f"specs/{name}.py: benchmarks/variants.py has no torch form")
    cases = tiny_list() if context.tiny else full_list()
    compared = contenders(context.device)
    for case in cases:
        if context.budget.out:
            context.journal.skipped(case.id)
            continue
        passes = ("forward",) if case.group == "decode" else PASSES
        seconds = 0.01 if context.tiny else SECONDS
        run_case(context, case, compared, passes=passes, seconds=seconds)
