"""Small matters of layout in emitted files."""

from __future__ import annotations

import textwrap

COLUMNS = 100


def comment(text: str, indent: str = "") -> list[str]:
    """``text`` as C++ line comments; lines that continue are set in by ``indent`` more."""
    lead = text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(
        text.strip(), COLUMNS - 3, initial_indent=lead, subsequent_indent=lead + indent
    )
    # A comment that ended in a backslash would swallow the line below it.
    return [f"// {line}".rstrip().rstrip("\\") for line in lines] or ["//"]


def comments(lines: list[str], indent: str = "") -> list[str]:
    """Each line as comments of its own, in order."""
    return [wrapped for line in lines for wrapped in comment(line, indent)]


def wrap_code(line: str, indent: int) -> list[str]:
    """One C++ statement, broken at spaces when it would pass the line limit."""
    if indent + len(line) <= COLUMNS:
        return [line]
    return textwrap.wrap(
        line,
        COLUMNS - indent,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
