"""Whole models on each attention backend: 20 training steps, and 256 decoded tokens.

The reference is transformers' eager attention in the same dtype, which is not timed. A backend
whose losses, first gradients or last logits are further from it than `verdict_on` allows is wrong,
and its row has no times.
"""

from __future__ import annotations

import gc
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.suite.check import Verdict, distance, worst_of
from benchmarks.suite.contenders.libraries import named
from benchmarks.suite.context import Context, OutOfTime, Unusable
from benchmarks.suite.device import first_line
from benchmarks.suite.records import Row
from benchmarks.suite.statistics import timing_of
from benchmarks.suite.whole_models import (
    DTYPE,
    EAGER,
    TRAIN,
    Problem,
    Result,
    problems,
    run_problem,
)

CURVE = torch.finfo(DTYPE).eps / 4
"""The largest relative distance of two losses: half of what rounding to the dtype may change."""
STANDARD_ERRORS = 4.0
"""How many of them two losses with dropout may be apart, in addition."""


@dataclass(frozen=True)
class Backend:
    """
    Attributes:
        implementation: its name as `attn_implementation` of a configuration.
        package: the name under which its version is installed.
        lacks: the features that it cannot compute, in the words of `Problem.needs`; releases
            of transformers differ in whether they refuse it or leave it out.
        seconds: the remaining time below which it is not begun on a GPU: it may have to compile.
    """

    name: str
    implementation: str
    package: str
    lacks: tuple[str, ...] = ()
    seconds: float = 5.0


REFERENCE = Backend(EAGER, EAGER, "transformers")
FLASHGEN = Backend("flashgen", "fg", "flashgen")
FLEX = Backend("flex", "flex", "torch", ("dropout",), 25.0)
BACKENDS = (
    FLASHGEN,
    Backend("sdpa", "sdpa", "torch", ("softcap", "sinks")),
    Backend("flash_attention_4", "flash_attention_4", "flash-attn-4", ("dropout",), 15.0),
    FLEX,
)


def run(context: Context) -> None:
    if importlib.util.find_spec("transformers") is None:
        context.journal.skipped("all models: the package transformers is not installed")
        return
    register()
    references: dict[Problem, Result | None] = {}
    every = [(problem, backend) for problem in problems(context.tiny) for backend in BACKENDS]
    # FlexAttention compiles for as long as all others run: it is last.
    for problem, backend in sorted(every, key=lambda pair: pair[1] is FLEX):
        _entered(context, problem, backend, references)


def register() -> None:
    """Makes flashgen and FlexAttention known to transformers.

    FlexAttention is transformers' own function under another name, because transformers offers it
    only for some models, and refuses GPT-2.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from flashgen.integrations import transformers as integration

    integration.register(FLASHGEN.implementation)
    AttentionInterface.register(FLEX.implementation, ALL_ATTENTION_FUNCTIONS["flex_attention"])
    mask = ALL_MASK_ATTENTION_FUNCTIONS["flex_attention"]
    AttentionMaskInterface.register(FLEX.implementation, mask)


def _entered(
    context: Context, problem: Problem, backend: Backend, references: dict[Problem, Result | None]
) -> None:
    """One row, or a line that says that it was left out."""
    journal, step = context.journal, f"{problem.name}, {backend.name}"
    if journal.done(step):
        return
    if (lost := journal.lost(step)) is not None:
        journal.failed(f"{step} crashed: {lost}")
        with journal.step(step):
            context.writer.models([_row(problem, backend) | {"status": "crashed", "note": lost}])
        return
    if context.budget.left <= (0 if context.tiny else backend.seconds):
        journal.skipped(step)
        return
    try:
        if problem not in references:
            references[problem] = _reference(context, problem)
        reference = references[problem]
        if reference is None:
            journal.skipped(f"{step}: nothing to compare it with")
            return
        with journal.step(step):
            context.writer.models([_measured(context, problem, backend, reference)])
    except OutOfTime as stopped:
        journal.skipped(f"{step}: {stopped}")
    if context.device.kind == "gpu":
        gc.collect()  # modules refer to each other
    context.device.free()


def _reference(context: Context, problem: Problem) -> Result | None:
    """The run that all others are compared with; its row is written once."""
    step = f"{problem.name}, {REFERENCE.name}"
    if (lost := context.journal.lost(step)) is not None:
        context.journal.failed(f"{step} crashed: {lost}")
        return None
    is_done = context.journal.done(step)
    with context.journal.step(step):
        try:
            result = run_problem(problem, REFERENCE.implementation, context.device, context.budget)
        except OutOfTime:
            raise
        except Exception as error:
            context.usable()
            context.journal.failed(f"{step}: {first_line(error)}")
            return None
        if not is_done:
            row = _row(problem, REFERENCE, result) | {"status": "ok", "note": "not timed"}
            context.writer.models([row])
    return result


def _measured(context: Context, problem: Problem, backend: Backend, reference: Result) -> Row:
    step = f"{problem.name}, {backend.name}"
    ours = backend is FLASHGEN
    for need in problem.needs:
        if need in backend.lacks:
            return _row(problem, backend) | {"status": "unsupported", "note": f"it has no {need}"}
    try:
        if backend is FLEX:
            every_kernel_compiled()
        result = run_problem(problem, backend.implementation, context.device, context.budget)
    except (OutOfTime, Unusable):
        raise
    except Exception as error:  # a backend may raise anything: it is recorded
        context.usable()
        note = first_line(error)
        if ours:
            context.journal.failed(f"{step}: {note}")
            return _row(problem, backend) | {"status": "error", "note": note}
        is_expected = isinstance(error, (ImportError, NotImplementedError, ValueError))
        status = "unsupported" if is_expected else "refused"
        return _row(problem, backend) | {"status": status, "note": note}
    row = _row(problem, backend, result)
    verdict = verdict_on(problem, result, reference)
    row |= {"difference": verdict.error, "allowed": verdict.allowed}
    if not verdict.ok:
        context.journal.failed(f"{step} is wrong: {verdict.text}")
        return row | {"status": "wrong", "note": verdict.text}
    timing = timing_of(result.ms)
    return row | {
        "status": "ok",
        "samples": timing.samples,
        "ms_p20": timing.p20,
        "ms_p50": timing.p50,
        "ms_p80": timing.p80,
        "tokens_per_s": 1e3 * problem.tokens / timing.p50,
        "peak_bytes": result.peak_bytes or None,
        "note": f"{verdict.text}{kernels() if ours else ''}",
    }


def every_kernel_compiled() -> None:
    """torch.compile gives up after eight kernels, and would run the others unfused in silence."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def verdict_on(problem: Problem, result: Result, reference: Result) -> Verdict:
    """Whether a backend computes what the reference computes."""
    if problem.mode != TRAIN:
        return distance("the vector of the last logits", result.tensor, reference.tensor)
    curve = curve_verdict(problem, result, reference)
    if problem.dropout:
        if not result.drops:
            return Verdict(False, 0.0, 0.0, "nothing is dropped", math.inf)
        return curve
    name = "the first gradient of attention layers"
    gradient = distance(name, result.tensor, reference.tensor, problem.layers)
    return worst_of([curve, gradient])


def curve_verdict(problem: Problem, result: Result, reference: Result) -> Verdict:
    """Whether two loss curves are equal within the bound, at the step that is nearest to it.

    The bound is `CURVE` of the loss. With dropout, where backends draw different elements, the loss
    of a step is the mean of the losses of n tokens in which chance has a part, of a standard
    deviation not above theirs: `STANDARD_ERRORS` of the difference of two such means are added.
    """
    verdicts = []
    rows = zip(result.losses, reference.losses, reference.spreads, strict=True)
    for turn, (loss, other, spread) in enumerate(rows):
        allowed = CURVE * other
        if problem.dropout:
            allowed += STANDARD_ERRORS * spread * math.sqrt(2 / problem.tokens)
        apart = abs(loss - other)
        text = (
            f"loss {loss:.5g} at step {turn}, reference {other:.5g}: {apart:.2g} of {allowed:.2g}"
        )
        share = apart / allowed if math.isfinite(apart) else math.inf
        verdicts.append(Verdict(apart <= allowed, apart, allowed, text, share))
    return worst_of(verdicts)


def kernels() -> str:
    """Where the last calls of flashgen's operators ran, for a note."""
    from flashgen.integrations import transformers as integration

    backends = {op.report.backend for op in integration.operators() if op.report is not None}
    return f"; ran on {', '.join(sorted(backends))}"


def _row(problem: Problem, backend: Backend, result: Result | None = None) -> Row:
    row: Row = {
        "model": problem.model.name,
        "mode": problem.mode,
        "dropout": problem.dropout,
        "batch": problem.batch,
        "positions": problem.model.positions,
        "dtype": str(DTYPE).removeprefix("torch."),
        "backend": backend.name,
        "library": named(backend.package),
    }
    if result is not None:
        row |= {"parameters": result.parameters, "losses": in_short(result.losses)}
    return row


def in_short(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.5g}" for loss in losses)
