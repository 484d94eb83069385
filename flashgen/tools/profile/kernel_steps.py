"""The numbered steps of an emitted file, parsed from its text, and the work of each."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashgen.kernels.codegen import Source
from flashgen.tools.profile.kernel_profile import Phase, SourceLine
from ptx_emulator import Totals
from ptx_emulator.counters.totals import FileLine, added

_STEP = re.compile(r"\s*// (\d+[a-z]?)\. (.+)")
_GOES_ON = re.compile(r"\s*// {2,}(\S.*)")
_KERNEL = re.compile(r'extern "C" __global__')


@dataclass(frozen=True)
class KernelStep:
    """A comment ``// 5b. S = Q K^T`` of a kernel.

    Attributes:
        number, title: as in the comment: "5b" and "S = Q K^T".
        line: the line of the comment; the step ends where the next one begins.
    """

    number: str
    title: str
    line: int


def steps_of(text: str) -> tuple[KernelStep, ...]:
    """The steps of the kernel in an emitted file, in the order of its lines."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines, 1) if _KERNEL.match(line)), len(lines))
    steps = []
    for number, line in enumerate(lines[begin:], begin + 1):
        match = _STEP.match(line)
        if match:
            steps.append(KernelStep(match[1], _title(match[2].strip(), lines[number:]), number))
    return tuple(steps)


def _title(first: str, rest: Sequence[str]) -> str:
    """The complete sentences of a comment's first line; its first sentence where it has none."""
    following = [
        match[1] for match in itertools.takewhile(bool, map(_GOES_ON.match, rest)) if match
    ]
    if first.endswith(".") or not following:
        return first
    done, dot, _ = first.rpartition(". ")
    if not dot:
        done, dot, _ = " ".join([first, *following, ""]).partition(". ")
    return done + dot.rstrip()


def phases_of(source: Source, by_line: Mapping[FileLine, Totals]) -> tuple[Phase, ...]:
    """The work of each step, from the work of its lines with the functions inlined in them.

    The first phase is the kernel's code before its first step. The last phase has the instructions
    without a line in this file: those that the compiler adds, and those of other files.
    """
    steps = steps_of(source.text)
    starts = [step.line for step in steps]
    parts: list[list[Totals]] = [[] for _ in range(len(steps) + 2)]
    for (file, line), totals in by_line.items():
        in_file = line > 0 and file == source.filename
        parts[bisect_right(starts, line) if in_file else -1].append(totals)
    before = KernelStep("", "before the first step", 0)
    after = KernelStep("", "of no line: constants, and what the compiler adds", 0)
    return tuple(
        Phase(step.number, step.title, step.line, added(part))
        for step, part in zip((before, *steps, after), parts, strict=True)
        if part
    )


def lines_of(source: Source, by_line: Mapping[FileLine, Totals]) -> tuple[SourceLine, ...]:
    """The work of each line of the file, the line with the most warp instructions first."""
    text = source.text.splitlines()
    source_lines = [
        SourceLine(line, text[line - 1].strip(), totals)
        for (file, line), totals in by_line.items()
        if file == source.filename and 0 < line <= len(text)
    ]
    return tuple(sorted(source_lines, key=lambda x: (-x.totals.warp_instructions, x.line)))
