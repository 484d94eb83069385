"""Device functions of emitted files, and line breaking of comments and statements."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

COLUMNS = 100


@dataclass(frozen=True)
class DeviceFunction:
    """One device function of the emitted file.

    Attributes:
        returns, parameters: the C++ type of its result, and its parameters with their types.
        comment: the lines above it.
        body: its statements, or parts of them that stand on separate lines.
    """

    name: str
    returns: str
    parameters: tuple[str, ...]
    comment: tuple[str, ...]
    body: tuple[str, ...]

    @property
    def is_inlined(self) -> bool:
        return True

    @property
    def text(self) -> str:
        """The function, without a final newline."""
        kind = "DEVICE" if self.is_inlined else "__device__ __noinline__"
        head = f"{kind} {self.returns} {self.name}("
        tail = f"{', '.join(self.parameters)}) {{"
        signature = head + tail if len(head + tail) <= COLUMNS else f"{head}\n    {tail}"
        whole = f"{signature} {self.body[0]} }}"
        if len(self.body) == 1 and len(whole) <= COLUMNS:
            return "\n".join([*self.comment, whole])
        body = (f"  {line}" for text in self.body for line in wrap_code(text, indent=2))
        return "\n".join([*self.comment, signature, *body, "}"])

    def call(self, **replaced: str) -> str:
        """C++ of a call in the kernel; ``replaced`` gives other text for single arguments."""
        names = (parameter.split()[-1] for parameter in self.parameters)
        return f"{self.name}({', '.join(replaced.get(name, name) for name in names)})"


def printable(text: str) -> str:
    """``text`` with escapes in place of characters that are not printed, such as line breaks."""
    if text.isprintable():  # most texts, and all of a spec without unusual names
        return text
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def one_line(text: str) -> str:
    """``text`` as the end of a line comment in C, whatever its characters.

    A backslash at the end, or the trigraph of one, would continue the comment on the next line and
    is left out.
    """
    shown = printable(text)
    while shown.endswith(("\\", "??/", " ")):
        shown = shown.removesuffix("??/").rstrip("\\ ")
    return shown


def comment(text: str, indent: str = "") -> list[str]:
    """``text`` as C++ line comments; continuation lines are indented by ``indent``."""
    text = text.expandtabs().replace("\n", " ")
    lead = text[: len(text) - len(text.lstrip())]
    if text.isprintable() and len(text) <= COLUMNS - 3:  # most lines, without the work of wrapping
        return [f"// {one_line(text.rstrip())}".rstrip()]
    lines = textwrap.wrap(
        text.strip(), COLUMNS - 3, initial_indent=lead, subsequent_indent=lead + indent
    )
    return [f"// {one_line(line)}".rstrip() for line in lines] or ["//"]


def comments(lines: list[str]) -> list[str]:
    """Each line as a separate C++ line comment, in order; long lines are wrapped and indented."""
    return [wrapped for line in lines for wrapped in comment(line, " " * 4)]


# Operators from the loosest to the tightest, each with whether its operands get separate lines.
_OPERATORS = (
    ((" ? ", " : "), True),
    ((" || ",), True),
    ((" && ",), True),
    ((" | ",), True),
    ((" & ",), True),
    ((" == ", " != ", " <= ", " >= ", " < ", " > "), True),
    ((" + ", " - "), False),
    ((" * ", " / ", " % "), False),
)
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_INDENT = " " * 4
_CONDITION = re.compile(r"(?:UNROLL |ROLLED )?(?:if|for|while) \(")


def wrap_code(line: str, indent: int) -> list[str]:
    """The lines of a C++ statement, broken before its loosest operators to keep the line limit.

    Args:
        line: the statement, with spaces around its binary operators.
        indent: columns that the caller puts before each line.
    """
    margin = line[: len(line) - len(line.lstrip())]
    lines = _broken(line.strip(), COLUMNS - indent - len(margin))
    return [margin + text for text in lines]


def within_columns(text: str) -> str:
    """A file whose lines keep the line limit, whatever the fields of its template became."""
    lines = (_within_columns(line) if len(line) > COLUMNS else [line] for line in text.split("\n"))
    return "\n".join(part for some in lines for part in some)


def _within_columns(line: str) -> list[str]:
    code, mark, words = line.partition("// ")
    text = code.lstrip()
    if '"' in code or line.endswith("\\"):
        return [line]
    if mark:  # words stand behind short code, and above long code
        short = len(code) < COLUMNS // 2
        lead = code if short else code[: len(code) - len(text)]
        continuation = " " * len(lead) + mark
        comment_lines = textwrap.wrap(
            words, COLUMNS, initial_indent=lead + mark, subsequent_indent=continuation
        )
        return comment_lines if short else [*comment_lines, *_within_columns(code.rstrip())]
    return [line] if text.startswith("#") else wrap_code(line, indent=0)


def _broken(text: str, width: int) -> list[str]:
    """The lines of a statement or of a part of a statement; all but the first are indented."""
    if len(text) <= width:
        return [text]
    condition, statement = _divided(text)
    if statement:
        return [
            *_broken(condition, width),
            *("  " + line for line in _broken(statement, width - 2)),
        ]
    for operators, one_per_line in _OPERATORS:
        first, *others = _split(text, operators)
        if others:
            if len(first) > width:
                lines = _behind("", _broken(first, width - len(_INDENT)))
            else:
                lines = [first]
            return _continued(lines, others, width, one_per_line=one_per_line)
    start, end = _longest_group(text)
    if start == end:
        return [text]
    opened, closed = text[:start], text[end:]
    first, *others = _split(text[start:end], (", ", "; "))
    inner = width - len(_INDENT) - len(closed)
    if len(opened + first) <= width and others:
        lines = _continued([opened + first], others, width - len(closed))
    elif others:
        lines = _behind(opened, ["", *_continued(_broken(first, inner), others, inner, set_in="")])
    else:
        lines = _behind(opened, _broken(first, min(inner, width - len(opened))))
    return [*lines[:-1], lines[-1] + closed]


def _divided(text: str) -> tuple[str, str]:
    """A condition or loop, and the statement behind it on the same line; "" without one."""
    depth = 0
    for index, letter in enumerate(text) if _CONDITION.match(text) else ():
        depth += (letter in _BRACKETS) - (letter in _BRACKETS.values())
        if letter == ")" and depth == 0:
            statement = text[index + 1 :].strip()
            return (text, "") if statement in ("", "{") else (text[: index + 1], statement)
    return text, ""


def _behind(opened: str, lines: list[str]) -> list[str]:
    return [opened + lines[0], *(_INDENT + line for line in lines[1:])]


def _continued(
    lines: list[str],
    parts: list[str],
    width: int,
    *,
    one_per_line: bool = False,
    set_in: str = _INDENT,
) -> list[str]:
    """``lines`` followed by further parts; several parts share a line where they fit."""
    for part in parts:
        if not one_per_line and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += " " + part
        else:
            lines += [set_in + line for line in _broken(part, width - len(set_in))]
    return lines


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """The parts of a text between separators outside brackets, each with its operator first."""
    cuts, depth = [0], 0
    for index, letter in enumerate(text):
        depth += (letter in _BRACKETS) - (letter in _BRACKETS.values())
        if letter == " " and depth == 0 and text.startswith(separators, index):
            cuts.append(index)
        elif letter in ",;" and depth == 0 and text.startswith(separators, index):
            cuts.append(index + 1)
    ends = [*cuts[1:], len(text)]
    return [text[start:end].strip() for start, end in zip(cuts, ends, strict=True)]


def _longest_group(text: str) -> tuple[int, int]:
    """The start and end of the contents of the longest brackets; equal where there are none."""
    best, start, depth = (0, 0), 0, 0
    for index, letter in enumerate(text):
        if letter in _BRACKETS:
            depth += 1
            start = index + 1 if depth == 1 else start
        elif letter in _BRACKETS.values():
            depth -= 1
            if depth == 0 and index - start > best[1] - best[0]:
                best = start, index
    return best
