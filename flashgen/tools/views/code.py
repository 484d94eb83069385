"""The four texts of a kernel (Python, CUDA, PTX, SASS), linked line by line, and their heat maps.

Lines of PTX and of SASS name their line of CUDA: by ``.loc`` and by the line table of the cubin.
A mod is traced to one expression, so that its lines of Python are linked as a whole with the
functions that are emitted for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import ptx_emulator as emulator
from flashgen.kernels.compile.disassembly import INSTALL, MISSING, disassembled, find_nvdisasm
from flashgen.kernels.pipeline import Build
from flashgen.tools.views.python_lines import Mod, PythonText, python_of
from ptx_emulator.counters.ptx_lines import PtxLine, ptx_lines

MOST_LINES = 30_000
"""Lines of one text that a page holds."""

METRICS = {
    "warps": "warp instructions",
    "sectors": "sectors of 32 B",
    "conflicts": "bank conflicts",
    "global_bytes": "global bytes",
    "shared_bytes": "shared-memory bytes",
}
"""The counts of a line, by the names of `PtxLine`, in words."""

_LINE_INFO = re.compile(r'\s*//## File "(?P<file>[^"]*)", line (?P<line>\d+)')
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w]*)")
_SPACES = re.compile(r"\*/ +")
_LABEL = re.compile(r"\s*\.?[\w$.]+:\s*$")


@dataclass(frozen=True)
class LinkedText:
    """A text whose lines name lines of the emitted file.

    Attributes:
        title: its title, such as the name of a file.
        lines: from line 1.
        links: for each line the line of the emitted file that it comes from; 0 for none.
        outer: for each line the line of the kernel at which that code is inlined; 0 for none.
        note: why there is no text, or what was left out; "" where it is whole.
    """

    title: str
    lines: tuple[str, ...]
    links: tuple[int, ...] = ()
    outer: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Heat:
    """The counts of one metric, by line.

    Attributes:
        cuda: by line of the emitted file, code of inlined functions at their own lines.
        outer: the same, code of inlined functions at the line of the kernel that has them.
        ptx: by line of the PTX.
        total: of the whole launch, lines without a location included.
    """

    cuda: dict[int, int]
    outer: dict[int, int]
    ptx: dict[int, int]
    total: int


@dataclass(frozen=True)
class KernelTexts:
    """The texts of a kernel.

    Attributes:
        mods: which lines of Python belong to which lines of the emitted file.
        heat: by the names of `METRICS`; those that the launch did not count are absent.
        opcodes: the machine instructions by opcode, the most frequent first.
        sass_of_line: machine instructions by line of the emitted file.
    """

    python: PythonText
    cuda: LinkedText
    ptx: LinkedText
    sass: LinkedText
    mods: tuple[Mod, ...]
    heat: dict[str, Heat]
    opcodes: tuple[tuple[str, int], ...]
    sass_of_line: dict[int, int]


def code_of(
    build: Build, counted: Sequence[PtxLine] | None, spec_file: PythonText | None = None
) -> KernelTexts:
    """The linked texts of a compiled kernel.

    Args:
        counted: the work of each line of the PTX; None for a launch that was not counted.
        spec_file: the file of the spec; None to show the mods as the emitted file quotes them.
    """
    source = build.source
    lines = counted or ptx_lines(emulator.load(build.ptx, source.name))
    python, mods = python_of(source, spec_file)
    sass, opcodes = sass_of(build)
    return KernelTexts(
        python=python,
        cuda=_cut(LinkedText(source.filename, tuple(source.text.splitlines()))),
        ptx=_cut(_ptx_text(build, lines)),
        sass=_cut(sass),
        mods=mods,
        heat={} if counted is None else heat_of(lines, source.filename),
        opcodes=opcodes,
        sass_of_line=dict(Counter(link for link in sass.links if link)),
    )


def heat_of(lines: Sequence[PtxLine], filename: str) -> dict[str, Heat]:
    """The heat maps of all metrics that have a count."""
    heats = {}
    for metric in METRICS:
        cuda: Counter[int] = Counter()
        outer: Counter[int] = Counter()
        ptx: Counter[int] = Counter()
        for ptx_line in lines:
            count = getattr(ptx_line, metric)
            if count:
                ptx[ptx_line.line] += count
                cuda[_line_in_file(ptx_line.source, filename)] += count
                outer[_line_in_file(ptx_line.outer, filename)] += count
        total = sum(ptx.values())
        if total or metric == "conflicts":
            heats[metric] = Heat(dict(cuda), dict(outer), dict(ptx), total)
    return heats


def _line_in_file(location: tuple[str, int], filename: str) -> int:
    """The line of a location in the emitted file; 0 for code of other files and of none."""
    return location[1] if location[0] == filename else 0


def _ptx_text(build: Build, lines: Sequence[PtxLine]) -> LinkedText:
    """The PTX; each line of an instruction has a link, and so has each ``.loc``."""
    source = build.source
    text = tuple(build.ptx.expandtabs(4).splitlines())
    links, outer = [0] * len(text), [0] * len(text)
    for ptx_line in lines:
        for line in range(ptx_line.line, min(ptx_line.last, len(text)) + 1):
            links[line - 1] = _line_in_file(ptx_line.source, source.filename)
            outer[line - 1] = _line_in_file(ptx_line.outer, source.filename)
    return LinkedText(f"{source.name}.ptx", text, tuple(links), tuple(outer))


def sass_of(build: Build) -> tuple[LinkedText, tuple[tuple[str, int], ...]]:
    """The machine code with its lines of the emitted file, and its instructions by opcode.

    Where there is no disassembler, the text has a note in place of lines.
    """
    title = f"{build.source.name}.cubin"
    if find_nvdisasm() is None:
        note = f"{MISSING}. {INSTALL} installs it."
        return LinkedText(title, (), note=note), ()
    listing = disassembled(build.cubin, build.binary.kernel, build.binary.arch, ("-c", "-gi"))
    lines, links, outer = [], [], []
    opcodes: Counter[str] = Counter()
    for text, own_line, caller in _sass_lines(listing, build.source.filename):
        match = _INSTRUCTION.match(text)
        if match:
            opcodes[match["opcode"]] += 1
        lines.append(_SPACES.sub("*/ ", text.strip()))
        links.append(own_line if match else 0)
        outer.append(caller if match else 0)
    return (
        LinkedText(title, tuple(lines), tuple(links), tuple(outer)),
        tuple(opcodes.most_common()),
    )


def _sass_lines(listing: str, filename: str) -> Iterator[tuple[str, int, int]]:
    """Labels and instructions, each with its own line and with the line of the kernel.

    A chain of inlined calls is printed as one comment for each function, the innermost first.
    """
    chain: list[int] = []
    in_chain = False
    for text in listing.splitlines():
        info = _LINE_INFO.match(text)
        if info:
            chain = chain if in_chain else []
            in_chain = True
            is_emitted = info["file"].replace("\\", "/").rpartition("/")[2] == filename
            chain.append(int(info["line"]) if is_emitted else 0)
            continue
        if _INSTRUCTION.match(text):
            in_chain = False
            yield text, chain[0] if chain else 0, chain[-1] if chain else 0
        elif _LABEL.match(text):
            yield text, 0, 0


def _cut(text: LinkedText) -> LinkedText:
    """The text with at most `MOST_LINES` lines."""
    if len(text.lines) <= MOST_LINES:
        return text
    note = f"The first {MOST_LINES:,} of {len(text.lines):,} lines are shown."
    return LinkedText(
        text.title,
        text.lines[:MOST_LINES],
        text.links[:MOST_LINES],
        text.outer[:MOST_LINES],
        note,
    )
