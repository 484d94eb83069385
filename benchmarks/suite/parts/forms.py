"""Forms of one call that alternate in one process: tiles, schemes and edited kernels.

The first form of a comparison is the plan's. The results of the others are compared with its own: a
form that is further away than two computations in one dtype may be is wrong, and is not timed.

Each edited kernel FOLDER/FILE.cu under benchmarks/overrides is one more form, called FOLDER, of the
comparisons whose plan has a kernel with the emitted file FILE.cu (docs/emitted-file.md). How many
query heads the parts of a group have is no form, because the rule of the launch alone chooses it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite.cases import ROOT, Case, make
from benchmarks.suite.check import Inputs, distance, make_inputs, worst_of
from benchmarks.suite.contenders.ours import spec_of
from benchmarks.suite.context import Context
from benchmarks.suite.device import Device, first_line
from benchmarks.suite.timing import measure
from flashgen.calls.launch import available, device_memory
from flashgen.calls.runtime import backward, forward
from flashgen.kernels.pipeline import build, build_backward
from flashgen.kernels.planner import Tile
from flashgen.shared.call import CallOptions, LaunchOptions, Operands, OutputGradients
from flashgen.shared.errors import FlashgenError

Tensor = torch.Tensor

OVERRIDES = ROOT / "benchmarks" / "overrides"
ARCH = "sm_90a"
SECONDS = 1.2
"""Of timing per comparison."""
COMPILING = 12
"""Kernels that are compiled at the same time."""


@dataclass(frozen=True)
class Form:
    """One way to compute a pass.

    Attributes:
        tiles: tiles by kernel, instead of the plan's.
        override: an edited file, compiled instead of the emitted one of its name.
    """

    name: str
    tiles: Mapping[str, Tile] = field(default_factory=dict)
    deterministic: bool = False
    override: Path | None = None


PLAN = Form("plan")
DETERMINISTIC = Form("deterministic", deterministic=True)


@dataclass(frozen=True)
class Comparison:
    """A pass of a problem, and the forms of it; the first one is `PLAN`."""

    pass_: str
    case: Case
    forms: tuple[Form, ...]

    @property
    def subject(self) -> str:
        """The name in records."""
        case = self.case
        sizes = f"b{case.batch} h{case.heads_q}/{case.heads_kv} {case.seq_q}x{case.seq_k}"
        scalars = "".join(f" {name}={value}" for name, value in case.scalars)
        return f"{self.pass_} {case.spec} {sizes} d{case.head_dim}{scalars}"


def fused(queries: int) -> Form:
    """So many queries in each step of the fused kernel, whose blocks own 128 keys."""
    return Form(f"{queries}", {"fused": Tile(queries, 8, 1, 1)})


def rows(queries: int, keys: int) -> Form:
    """A tile of the forward kernel."""
    return Form(f"{queries}x{keys}", {"forward": Tile(keys, queries // 16, 1, 1)})


def compared(
    pass_: str, spec: str, batch: int, heads: tuple[int, int], seq: int, head_dim: int, *forms: Form
) -> Comparison:
    """The plan beside other forms of a square problem in bfloat16."""
    case = make("forms", spec, batch, *heads, seq, seq, head_dim)
    return Comparison(pass_, case, (PLAN, *forms))


HEADS = {64: (32, 32), 96: (16, 16), 128: (16, 16)}
NEIGHBOURS = {
    128: (fused(80), fused(48)),
    64: (fused(112), fused(96)),
    96: (fused(96), fused(64)),
}
"""Of the plan's 64, 128 and 80 queries."""
TILES = {
    64: (rows(128, 128), rows(128, 80), rows(192, 96)),
    128: (rows(128, 128), rows(128, 80), rows(192, 64)),
}
"""Beside the plan's 192 x 112 and 192 x 80."""
COMPARISONS = (
    *(
        compared("backward", spec, 2, HEADS[head_dim], 8192, head_dim, *forms)
        for head_dim, forms in NEIGHBOURS.items()
        for spec in ("causal", "full")
    ),
    *(
        compared("forward", "causal", 16384 // seq, HEADS[head_dim], seq, head_dim, *forms)
        for seq in (1024, 512)
        for head_dim, forms in TILES.items()
    ),
    compared("backward", "causal", 1, (64, 8), 8192, 128, DETERMINISTIC),
    compared("backward", "causal", 1, (16, 2), 16384, 128, DETERMINISTIC),
)


def run(context: Context, comparisons: Sequence[Comparison] = COMPARISONS) -> None:
    if context.tiny:
        last = {comparison.pass_: comparison for comparison in comparisons}
        comparisons = [shrunk(comparison) for comparison in last.values()]
    elif ARCH not in context.device.archs:
        context.journal.skipped(f"forms: their tiles are those of {ARCH}")
        return
    else:
        compile_all(comparisons)
    emitted: set[str] = set()
    for comparison in comparisons:
        step = comparison.subject
        if context.journal.done(step) or context.journal.lost(step):
            continue
        if context.budget.left < 3:
            context.journal.skipped(f"forms of {step}")
            continue
        try:
            with context.journal.step(step):
                emitted |= _compare(context, comparison)
        except Exception as error:
            context.usable()
            context.journal.failed(f"forms of {step}: {first_line(error)}")
        context.device.free()
    for path in edited():
        if emitted and path.name not in emitted:
            context.journal.skipped(f"edited kernel {path}: no comparison has a kernel of its name")


def edited() -> list[Path]:
    return sorted(OVERRIDES.glob("*/*.cu"))


def shrunk(comparison: Comparison) -> Comparison:
    """The plan and one more form on a small problem: a whole tile of keys and a piece of one."""
    case = replace(comparison.case, batch=1, heads_q=1, heads_kv=1, seq_q=140, seq_k=140)
    return replace(comparison, case=case, forms=comparison.forms[:2])


def compile_all(comparisons: Iterable[Comparison]) -> None:
    """Compiles the forms side by side; what fails here fails again where it is recorded."""
    memory = device_memory() if available() is None else None

    def compiled(comparison: Comparison, form: Form) -> None:
        case, spec = comparison.case, spec_of(comparison.case)
        sizes = case.batch, case.heads_q, case.heads_kv, case.seq_q, case.seq_k
        with contextlib.suppress(FlashgenError):
            build(spec, ARCH, tile=form.tiles.get("forward"))
            if comparison.pass_ == "backward":
                fixed = form.deterministic
                options: dict[str, Any] = {"deterministic": fixed, "tiles": form.tiles}
                build_backward(spec, ARCH, **options, sizes=sizes, memory=memory)

    with ThreadPoolExecutor(COMPILING) as pool:
        for comparison in comparisons:
            for form in comparison.forms:
                pool.submit(compiled, comparison, form)


def _compare(context: Context, comparison: Comparison) -> set[str]:
    """Checks, times and records all forms; returns the names of the files of the plan's form."""
    subject, device, write = comparison.subject, context.device, context.writer.measure
    inputs = make_inputs(comparison.case, device.torch, seed=0, learnt=False)
    first = Prepared(comparison, PLAN, inputs, device)
    forms = {form.name: form for form in comparison.forms}
    for path in edited():
        if path.name in first.files:  # one folder may have several kernels of a call
            short, long = path.parent.name, f"{path.parent.name}/{path.name}"
            name = long if short in forms else short
            forms[name] = Form(name, override=path)
    calls: dict[str, Prepared] = {}
    for form in forms.values():
        try:
            call = first if form is PLAN else Prepared(comparison, form, inputs, device)
        except Exception as error:
            context.usable()
            reason = first_line(error)
            write(subject, "compiles", 0, "", form.name, reason)
            if form.override is not None:
                context.journal.failed(f"{subject}, {form.name}: {reason}")
            continue
        verdict = worst_of(
            distance(name, call.results[name], first.results[name]) for name in first.results
        )
        if verdict.ok:
            calls[form.name] = call
        else:
            write(subject, "right", 0, "", form.name, verdict.text)
            context.journal.failed(f"{subject}, {form.name} is wrong: {verdict.text}")
    if not calls:
        return first.files
    times = measure(
        device,
        calls,
        1,
        min(SECONDS, context.budget.left / 2),
        rounds=(1, 1) if context.tiny else (7, 60),
    )
    for name, measured in times.items():
        timing = measured.timing
        note = f"p20 {timing.p20:.5g}, p80 {timing.p80:.5g}"
        write(subject, "time", timing.p50, "ms", name, note)
    return first.files


class Prepared:
    """A call of a form, which has run once: only then is the edited kernel in the environment.

    Attributes:
        run: runs the call again.
        results: its results by name.
        files: the names of the emitted files of its kernels.
    """

    def __init__(self, comparison: Comparison, form: Form, inputs: Inputs, device: Device) -> None:
        """
        Raises:
            FlashgenError: there is no such tile, or it does not compile.
        """
        spec = spec_of(comparison.case)
        numbers = dict(comparison.case.scalars)
        options = CallOptions(
            backend=device.backend,
            arch=ARCH,
            deterministic=form.deterministic,
            scalars=tuple(numbers[scalar.name] for scalar in spec.scalars),
        )
        launch, operands = LaunchOptions(tiles=form.tiles), Operands(*inputs.learnt, (), None)
        self.run: Callable[[], Any]
        if comparison.pass_ == "forward":
            with overriding(form.override):
                ahead = forward.prepare(spec, operands, options, launch)
                out, _, forward_record = ahead.run(operands)
            self.run = lambda: ahead.run(operands)
            self.results = {"out": out}
            reports = [forward.report(forward_record)]
        else:
            out, lse, _ = forward.prepare(spec, operands, options).run(operands)
            output_gradients = OutputGradients(out, lse, inputs.dout, None)
            with overriding(form.override):
                back = backward.prepare(spec, operands, output_gradients, options, launch)
                gradients, record = back.run(operands, output_gradients)
            self.run = lambda: back.run(operands, output_gradients)
            self.results = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
            reports = list(record.reports())
        device.synchronize()
        self.files = {report.kernel.source.filename for report in reports if report.kernel}

    def __call__(self, _: int) -> None:
        self.run()


@contextlib.contextmanager
def overriding(path: Path | None) -> Iterator[None]:
    """FLASHGEN_OVERRIDE names this file alone."""
    before = os.environ.pop("FLASHGEN_OVERRIDE", None)
    if path is not None:
        os.environ["FLASHGEN_OVERRIDE"] = str(path)
    try:
        yield
    finally:
        os.environ.pop("FLASHGEN_OVERRIDE", None)
        if before is not None:
            os.environ["FLASHGEN_OVERRIDE"] = before
