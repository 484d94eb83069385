"""The last changes to an emitted file, which depend on its whole text."""

from __future__ import annotations

import re

_KERNEL = 'extern "C" __global__'
_CONSTANT_OF_ONE = re.compile(r"^constexpr int (\w+) = 1;", re.M)
_LOOP = re.compile(r"( *)for \(int (\w+) = 0; \2 < (\w+); \+\+\2\)( \{)?")
_STEP = re.compile(r"^( *// )(\d+)([a-z]?)\. ", re.M)


def simplified(text: str) -> str:
    """The file without loops of one iteration and without gaps in the numbers of its steps."""
    head, kernel, body = text.partition(_KERNEL)
    ones = frozenset(_CONSTANT_OF_ONE.findall(head))
    lines = _without_single_rounds(body.splitlines(), ones)
    return head + kernel + _numbered("\n".join(lines))


def tidy(text: str) -> str:
    """The text without trailing spaces and superfluous blank lines; directives are not indented."""
    lines: list[str] = []
    for line in (raw.rstrip() for raw in text.splitlines()):
        if line.lstrip().startswith("#"):
            line = line.lstrip()
        opens = bool(lines) and lines[-1].endswith("{") and lines[-1] != "{"
        if not line and (not lines or not lines[-1] or opens):
            continue
        if line.strip() in ("}", "};") and lines and not lines[-1]:
            lines.pop()
        lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


def _numbered(body: str) -> str:
    """The text with steps numbered 1, 2, 2a, 2b ... without gaps, where a template omits some."""
    number, letter, last = 0, "", ("", "")

    def renumber(found: re.Match[str]) -> str:
        nonlocal number, letter, last
        step = (found[2], found[3])
        if step[0] != last[0]:
            number, letter = number + 1, ""
        if step[1] and step != last:
            letter = chr(ord(letter) + 1) if letter else "a"
        last = step
        return f"{found[1]}{number}{letter if step[1] else ''}. "

    return _STEP.sub(renumber, body)


def _without_single_rounds(lines: list[str], ones: frozenset[str]) -> list[str]:
    """The lines of a kernel in which each loop that runs once is replaced by its body, at index 0.

    Args:
        ones: the names of constants with the value 1.
    """
    kept: list[str] = []
    at = 0
    while at < len(lines):
        loop = _LOOP.match(lines[at])
        if loop is None or loop[3] not in ones:
            kept.append(lines[at])
            at += 1
            continue
        if kept and kept[-1].lstrip().startswith("#pragma unroll"):
            kept.pop()
        indent, index = loop[1], loop[2]
        if loop[4]:
            end = next(n for n in range(at, len(lines)) if lines[n] == f"{indent}}}")
            inner = [line.removeprefix("  ") for line in lines[at + 1 : end]]
        else:
            end = at
            inner = [indent + lines[at][loop.end() :].lstrip()]
        lines = [*lines[:at], *(_at_zero(line, index) for line in inner), *lines[end + 1 :]]
    return kept


def _at_zero(line: str, index: str) -> str:
    """A line of C++ for index 0: terms of a sum in which the index is a factor are omitted."""
    line = line.replace(f"[{index}]", "[0]")
    term = rf"(?:[\w.]+ \* )*\b{index}\b(?: \* [\w.]+)*"
    line = re.sub(rf" \+ {term}(?![\w(\[]| [/%])", "", line)
    line = re.sub(rf"(?<![\w.*] ){term} \+ ", "", line)
    line = re.sub(rf"(?<![\w.\"%]){term}(?=[,;)])", "0", line)
    code, mark, words = line.partition("//")
    return re.sub(rf"(?<![\w.\"%])\b{index}\b", "0", code) + mark + words
