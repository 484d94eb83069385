"""The numbered steps of an emitted file, read off its text, and what each took."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.emulator import Totals
from flashgen.emulator.counters import Place, added
from flashgen.profile.value import Phase, SourceLine
from flashgen.render import Source

_STEP = re.compile(r"\s*// (\d+[a-z]?)\. (.+)")
_KERNEL = re.compile(r'extern "C" __global__')


@dataclass(frozen=True)
class Step:
    """A comment ``// 5b. S = Q K^T`` of a kernel.

    Attributes:
        line: of the comment; the step ends where the next one begins.
    """

    number: str
    title: str
    line: int


def steps_of(text: str) -> tuple[Step, ...]:
    """The steps of the kernel in an emitted file, in the order of its lines."""
    lines = text.splitlines()
    begin = next((n for n, line in enumerate(lines, 1) if _KERNEL.match(line)), len(lines))
    found = []
    for number, line in enumerate(lines[begin:], begin + 1):
        match = _STEP.match(line)
        if match:
            found.append(Step(match[1], match[2].strip(), number))
    return tuple(found)


def phases_of(source: Source, by_line: Mapping[Place, Totals]) -> tuple[Phase, ...]:
    """What each step took, from what the outermost lines did.

    Before the first step is the kernel's head, and last what has no line in the file: what the
    compiler made of none, and of other files.
    """
    steps = steps_of(source.text)
    starts = [step.line for step in steps]
    parts: list[list[Totals]] = [[] for _ in range(len(steps) + 2)]
    for (file, line), totals in by_line.items():
        own = line > 0 and file == source.filename
        parts[bisect_right(starts, line) if own else -1].append(totals)
    titles = [("", "before the first step"), *((step.number, step.title) for step in steps)]
    titles.append(("", "of no line: constants, and what the compiler adds"))
    return tuple(
        Phase(number, title, added(part))
        for (number, title), part in zip(titles, parts, strict=True)
        if part
    )


def lines_of(source: Source, by_line: Mapping[Place, Totals]) -> tuple[SourceLine, ...]:
    """What each line of the file took, the most warp instructions first."""
    text = source.text.splitlines()
    found = [
        SourceLine(line, text[line - 1].strip(), totals)
        for (file, line), totals in by_line.items()
        if file == source.filename and 0 < line <= len(text)
    ]
    return tuple(sorted(found, key=lambda each: (-each.totals.warp_instructions, each.line)))
