"""Small matters of layout in emitted files."""

from __future__ import annotations

import textwrap

COLUMNS = 100


def comment(text: str) -> list[str]:
    """``text`` as C++ line comments, wrapped."""
    return [f"// {line}" for line in textwrap.wrap(text, COLUMNS - 3)]


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
