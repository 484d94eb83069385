"""Parsing of NVRTC's log: resources and warnings of a success, source lines of a failure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashgen.kernels.compile import cubin as elf
from flashgen.kernels.compile.nvrtc import NvrtcRejection
from flashgen.shared.errors import CompileError

_PROPERTIES = re.compile(
    r"Function properties for (?P<name>\S+)\s*\n\D*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers(?:, used (?P<barriers>\d+) barriers)?")
_MESSAGE = re.compile(
    r"^.+?\((?P<line>\d+)\): [\w ]*error(?: #[\w-]+)?: (?P<text>.*)\n"
    r"(?:(?P<shown>.*)\n(?P<caret> *)\^)?",
    re.MULTILINE,
)
_ASSEMBLER = re.compile(
    r"^\s*ptxas (?:.*?line (?P<line>\d+); )?(?:error|fatal)\s*: (?P<text>.*)$", re.MULTILINE
)
_CONTEXT_LINES = 3
_MOST_MESSAGES = 5


@dataclass(frozen=True)
class Resources(elf.KernelFacts):
    """The resources of one kernel, from its cubin and from the compiler's log; sizes in bytes."""

    spill_store_bytes: int  # written to local memory, in all functions, per thread
    spill_load_bytes: int
    barriers: int  # per block

    @property
    def clean(self) -> bool:
        """True without spills and stack: all values are in registers."""
        return not (self.stack_bytes or self.spill_store_bytes or self.spill_load_bytes)

    @property
    def local_memory(self) -> str:
        """A thread's local memory in words: its spills, or a stack that was meant to be there."""
        spilled = self.spill_store_bytes + self.spill_load_bytes
        if spilled:
            return f"SPILLS {spilled:,} B"
        return "no spills, " + (
            f"{self.stack_bytes:,} B of stack" if self.stack_bytes else "no stack"
        )


def resources(cubin: bytes, kernel: str, log: str) -> Resources:
    """The resources of a kernel: spills and barriers from the log, all others from the cubin.

    Raises:
        CompileError: the cubin lacks the kernel, or the log lacks the spills of a kernel that has
            a stack (without a stack there are none).
    """
    facts = elf.kernel_facts(cubin, kernel)
    properties = {match["name"]: match for match in _PROPERTIES.finditer(log)}
    if kernel not in properties and facts.stack_bytes:
        raise CompileError(
            "NVRTC's log does not contain the spills of the kernel",
            where=f"log of NVRTC for {kernel}",
            numbers=f"{facts.stack_bytes:,} bytes of stack; functions in the log: "
            f"{', '.join(properties) or 'none'}",
            way_out="use a release of NVRTC between 12.8 and 13.5",
        )
    used = _USED.search(log, properties[kernel].end()) if kernel in properties else None
    return Resources(
        **vars(facts),
        spill_store_bytes=sum(int(match["stores"]) for match in properties.values()),
        spill_load_bytes=sum(int(match["loads"]) for match in properties.values()),
        barriers=int(used["barriers"] or 0) if used else 0,
    )


def steady(log: str) -> str:
    """The log without its timings, so that the same source gives the same log."""
    return re.sub(r"^\s*ptxas info\s*: Compile time = .*\n?", "", log, flags=re.MULTILINE).strip()


def warnings(log: str) -> tuple[str, ...]:
    """The warnings in the log of a success, one string each, in order.

    They are the compiler's warnings (with their source lines), the assembler's (spills), and its
    diagnostics with a (C7xxx) code, such as "wgmma.mma_async instructions are serialized".
    """
    messages: list[str] = []
    for paragraph in re.split(r"\n\s*\n", log):
        lines = paragraph.splitlines()
        start = next((i for i, text in enumerate(lines) if ": warning" in text), None)
        if start is not None and not lines[start].startswith("ptxas"):
            messages.append("\n".join(lines[start:]))
            continue
        for text in lines:
            if re.match(r"\s*ptxas\b.*\bwarning\b", text) or re.search(r"\(C7\d{3}\)", text):
                messages.append(re.sub(r"^\s*ptxas (info|warning)\s*: ", "", text))
    return tuple(messages)


def excerpt(source: str, line: int, note: str = "", column: int = 0) -> str:
    """A few numbered lines of the source around a marked line; lines count from 1.

    A note goes below the marked line, with a caret under the given column (from 0).
    """
    lines = source.splitlines()
    first, last = max(1, line - _CONTEXT_LINES), min(len(lines), line + _CONTEXT_LINES)
    width = len(str(last))
    shown = []
    for number in range(first, last + 1):
        mark = ">" if number == line else " "
        shown.append(f"{mark} {number:{width}} | {lines[number - 1]}".rstrip())
        if number == line and note:
            shown.append(f"  {'':{width}} | {'':{column}}^ {note}")
    return "\n".join(shown)


def explain(
    rejected: NvrtcRejection,
    source: str,
    *,
    filename: str,
    arch: str,
    nvrtc: str,
    archs: tuple[str, ...],
) -> CompileError:
    """The error for a program that NVRTC rejected.

    Args:
        nvrtc: NVRTC's version.
        archs: the architectures that it supports.
    """
    if "--gpu-architecture" in rejected.log:
        return CompileError(
            f"NVRTC does not compile for {arch}",
            where=filename,
            numbers=f"NVRTC {nvrtc} supports {', '.join(archs)} (and sm_90a, sm_100a, ... of some)",
            way_out="choose one of these, or a newer nvidia-cuda-nvrtc",
        )
    located = [
        (int(match["line"]), _column(source, match), match["text"])
        for match in _MESSAGE.finditer(rejected.log)
    ]
    if not located:
        located = [
            (_source_line(rejected.ptx, int(match["line"] or 0)), 0, match["text"])
            for match in _ASSEMBLER.finditer(rejected.log)
            if "aborted due to errors" not in match["text"]
        ]
    locations = [
        f"{filename}:{line}\n{excerpt(source, line, text, column)}" if line else text
        for line, column, text in located[:_MOST_MESSAGES]
    ]
    first = located[0][2] if located else (rejected.log or rejected.status)
    count = f"{len(located)} error{'s' if len(located) != 1 else ''}"
    if len(located) > _MOST_MESSAGES:
        count += f", the first {_MOST_MESSAGES} shown"
    return CompileError(
        f"NVRTC rejects {filename}: {first}",
        where="\n".join(locations) or filename,
        numbers=f"{count} ({rejected.status}) in {len(source.splitlines()):,} lines, for {arch}, "
        f"NVRTC {nvrtc}",
        way_out="the lines come from the template or from the spec's expressions: correct them "
        f"there, or try a change first by editing {filename} and setting FLASHGEN_OVERRIDE to it",
    )


def _column(source: str, message: re.Match[str]) -> int:
    """The column of the source below which a message has its caret; 0 without a caret.

    The compiler prints the line with a different indentation.
    """
    if message["caret"] is None:
        return 0
    line, shown = source.splitlines()[int(message["line"]) - 1], message["shown"]
    indent = len(line) - len(line.lstrip())
    return max(0, len(message["caret"]) - (len(shown) - len(shown.lstrip())) + indent)


def _source_line(ptx: str, line: int) -> int:
    """Line of the source that a line of PTX was made from, by the ``.loc`` above; 0 if unknown."""
    for text in reversed(ptx.splitlines()[:line]):
        location = re.match(r"\s*\.loc\s+\d+\s+(\d+)", text)
        if location:
            return int(location[1])
    return 0
