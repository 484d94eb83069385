"""Where the warps of the main kernels wait: samples by instruction, line, stage and reason.

Nsight Compute samples the warps of one launch. An instruction belongs to the line of the emitted
file where it, or the call that it was inlined for, stands in the kernel's body, and to the stage of
that line: the comments "5a. ..." number the stages. FlashAttention-4's backward kernel runs on the
same problems; of its text nothing is known.

All instructions are written to one file beside the summary, stalls-RUN.txt.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from benchmarks import sass
from benchmarks.suite import ncu
from benchmarks.suite.contenders.libraries import FA4
from benchmarks.suite.context import Context
from benchmarks.suite.ncu import Sampled
from benchmarks.suite.parts.roofline import program
from benchmarks.suite.supervisor import environment, tail, watch

SECTIONS = ("SourceCounters", "WarpStateStats")
METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.max",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "smsp__inst_issued.avg.per_cycle_active",
    *(
        f"smsp__inst_executed{of}.sum"
        for of in ("", "_pipe_xu", "_pipe_lsu", "_op_shared_ld", "_op_shared_st")
    ),
    *(f"l1tex__data_pipe_lsu_wavefronts_mem_shared{of}.sum" for of in ("", "_op_ld", "_op_st")),
    *(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{of}.sum" for of in ("ld", "st")),
    "lts__t_sector_hit_rate.pct",
    "lts__t_sectors_op_red.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
)
PEER = "flash_bwd_sm90"
SIZES = ("--batch", "2", "--heads", "16", "--seq", "8192")
RUNS = (
    ("FlashAttention-4", "peer", "causal", "128"),
    ("flashgen", "fused", "causal full", "128 64"),
    ("FlashAttention-4", "peer", "causal", "64"),
    ("FlashAttention-4", "peer", "full", "128"),
)
"""Contender, family of one_kernel.py, specs and head dims: each is one process. The peer is first,
because flashgen's eight kernels take more than a minute."""
STAGE = re.compile(r"\s*// (\d+[a-z]?)\. (.*)")


def run(context: Context) -> None:
    if ncu.missing(context):
        return
    if FA4.missing(context.device):
        context.journal.skipped(f"stalls of FlashAttention-4: {FA4.missing(context.device)}")
    for contender, family, specs, dims in RUNS[:2] if context.tiny else RUNS:
        step = f"{contender}, {specs}, d {dims}"
        journal = context.journal
        if journal.done(step) or journal.lost(step):
            continue
        if family == "peer" and FA4.missing(context.device):
            continue
        if context.budget.left < 5:
            journal.skipped(f"stalls of {step}")
            continue
        with journal.step(step):
            _profiled(context, contender, family, specs.split(), dims.split())


def _profiled(
    context: Context, contender: str, family: str, specs: Sequence[str], dims: Sequence[str]
) -> None:
    sizes = ("--heads", "1", "--seq", "64") if context.tiny else SIZES
    specs, dims = (specs[:1], dims[-1:]) if context.tiny else (specs, dims)
    arguments = ("--family", family, *sizes, "--spec", *specs, "--head-dim", *dims)
    name, ours = "-".join((family, *specs, *dims)), family != "peer"
    folder = context.work / f"kept-{name}"
    folder.mkdir(exist_ok=True)
    command = program(context.device.kind, (*arguments, "--keep", str(folder)))
    if context.device.kind == "gpu":
        options = [word for section in SECTIONS for word in ("--section", section)]
        options += ["--metrics", ",".join(METRICS)]
        kernels = ncu.OURS if ours else PEER
        texts = ncu.pages(context, name, kernels, options, command, ("source", "raw"))
    else:
        log = context.work / f"{name}.log"
        ended = watch(command, log=log, budget=context.budget, environment=environment())
        if ended.code:
            context.journal.failed(f"stalls of {name}: {ended.reason}: {tail(log)}")
        texts = {"source": stand_in(folder)}
    setting = " ".join((contender, *arguments[2:]))
    for row in ncu.raw(texts.get("raw", "")):
        kernel = row.pop("kernel")
        for metric, (value, unit) in row.items():
            context.writer.measure(kernel if ours else PEER, metric, value, unit, setting)
    for kernel, code in ncu.source(texts.get("source", "")):
        profile = Profile.from_files(kernel if ours else PEER, code, folder)
        if ours and not profile.stages:
            context.journal.skipped(f"stages of {kernel}: nvdisasm was not there to name lines")
        record(context, profile, setting)


def stand_in(folder: Path) -> str:
    """In a dry run, ncu's source page of the kernels in a folder; its samples are invented."""
    page = []
    for kernel in sorted(path for path in folder.glob("*.cu") if re.search(ncu.OURS, path.name)):
        page += [f'"Kernel Name","{kernel.stem}"', '"Address","Source","# Samples","stall_wait"']
        listing, code = kernel.with_suffix(".sass"), ["NOP"]
        if listing.exists():
            instructions = sass.instructions(listing.read_text(encoding="utf-8"))
            code = [f"{instruction.op} {instruction.operands}" for instruction in instructions]
        for number, text in enumerate(code):
            page.append(f'"{16 * number:#x}","{text}","{number % 7 + 1}","1"')
    return "\n".join(page)


@dataclass(frozen=True)
class Profile:
    """A kernel's instructions; of each its line in the emitted text and its stage, where known.

    Attributes:
        lines: line numbers from 1 on; 0 where it is not known.
        text: the lines of the emitted file; () for a kernel of a peer.
        stages: "5a. S = Q K^T" and so on, by their first line.
    """

    kernel: str
    code: Sequence[Sampled]
    lines: Sequence[int]
    text: Sequence[str]
    stages: dict[int, str]

    @classmethod
    def from_files(cls, kernel: str, code: Sequence[Sampled], folder: Path) -> Profile:
        """With the text and the listing that `one_kernel` has left in a folder, if it has."""
        text, listing = ((folder / kernel).with_suffix(suffix) for suffix in (".cu", ".sass"))
        if not listing.exists():
            return cls(kernel, code, [0] * len(code), (), {})
        lines = text.read_text(encoding="utf-8").splitlines()
        marks = ((number, STAGE.match(line)) for number, line in enumerate(lines, 1))
        stages = {number: f"{match[1]}. {match[2]}" for number, match in marks if match}
        instructions = sass.instructions(listing.read_text(encoding="utf-8"))
        # Both are in the order of addresses.
        line_numbers = [
            next((line for line in instruction.lines if line >= min(stages)), 0)
            if instruction and instruction.base == sampled.op.split(".")[0]
            else 0
            for sampled, instruction in zip_longest(code, instructions[: len(code)])
        ]
        return cls(kernel, code, line_numbers, lines, stages)

    @property
    def samples(self) -> float:
        return sum(sampled.samples for sampled in self.code)

    def stage(self, line: int) -> str:
        before = [first for first in self.stages if first <= line]
        return self.stages[max(before)] if before else ""

    def number(self, line: int) -> str:
        """That of the stage, such as "5a"."""
        return self.stage(line).split(".")[0]

    def by_stage(self) -> dict[str, list[Sampled]]:
        code_by_stage: dict[str, list[Sampled]] = {name: [] for name in self.stages.values()}
        for sampled, line in zip(self.code, self.lines, strict=True):
            code_by_stage.setdefault(self.stage(line), []).append(sampled)
        return code_by_stage

    def by_line(self) -> dict[int, list[Sampled]]:
        code_by_line: dict[int, list[Sampled]] = {}
        for sampled, line in zip(self.code, self.lines, strict=True):
            code_by_line.setdefault(line, []).append(sampled)
        return dict(sorted(code_by_line.items()))


def record(context: Context, profile: Profile, setting: str) -> None:
    """Rows of the totals by reason and by stage, and the tables of lines and instructions."""
    whole = max(profile.samples, 1)
    for reason, count in total(profile.code).most_common():
        note = f"{count / whole:.1%} of all"
        context.writer.measure(profile.kernel, f"stall {reason}", count, "samples", setting, note)
    for stage, code in profile.by_stage().items():
        if stage and (samples := total_of(code)):
            number, words = stage.split(". ", 1)
            note = f"{samples / whole:.1%} of all; {most(code)}; {words}"
            metric = f"stage {number}"
            context.writer.measure(profile.kernel, metric, samples, "samples", setting, note)
    with (context.out / f"stalls-{context.run}.txt").open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in table(profile, setting))


def table(profile: Profile, setting: str) -> Iterator[str]:
    """A kernel for reading: lines of its text with samples, then all instructions."""
    whole = max(profile.samples, 1)
    yield f"==== {profile.kernel}, {setting}: {profile.samples:.0f} samples; {most(profile.code)}"
    if profile.text:
        yield "samples  share  line  stage"
        for line, code in profile.by_line().items():
            if line and (count := total_of(code)):
                text = profile.text[line - 1].strip()
                location = f"{line:>5}  {profile.number(line):<5}"
                yield f"{count:>7.0f} {count / whole:>6.1%} {location}  {text}  // {most(code)}"
    yield " number samples  share    executed  line  stage"
    for number, (sampled, line) in enumerate(zip(profile.code, profile.lines, strict=True)):
        yield (
            f"{number:>7} {sampled.samples:>7.0f} {sampled.samples / whole:>6.1%} "
            f"{sampled.executed:>11.0f} {line or '':>5}  {profile.number(line):<5}  "
            f"{sampled.text:<70} {most([sampled])}"
        ).rstrip()


def total(code: Iterable[Sampled]) -> Counter[str]:
    """Samples by reason."""
    return sum((sampled.stalls for sampled in code), Counter())


def total_of(code: Iterable[Sampled]) -> float:
    return sum(sampled.samples for sampled in code)


def most(code: Sequence[Sampled]) -> str:
    """The three most frequent reasons, with their shares of the samples."""
    reasons, whole = total(code), max(total_of(code), 1)
    return ", ".join(f"{name} {count / whole:.0%}" for name, count in reasons.most_common(3))
