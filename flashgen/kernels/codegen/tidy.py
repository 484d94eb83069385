"""The last changes to an emitted file, which depend on its whole text.

Templates hold all helpers of a hardware unit, all fields that a kind of kernel may take, and all
locals that its steps may need. Which of them one kernel uses depends on the spec and on the plan;
it is read from the text itself: a declaration stays if its name can be reached from the kernel, and
a local of the kernel if a later line of its block mentions it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flashgen.kernels.codegen.source import Param

_KERNEL = 'extern "C" __global__'
_CONSTANT_OF_ONE = re.compile(r"^constexpr int (\w+) = 1;", re.M)
_LOOP = re.compile(r"( *)(?:UNROLL |ROLLED )?for \(int (\w+) = 0; \2 < (\w+); \+\+\2\)( \{)?")
_STEP = re.compile(r"^( *// )(\d+)([a-z]?)\. ", re.M)


_CONSTANT = re.compile(r"constexpr \w+ (\w+) =")
_ALIAS = re.compile(r"(?:typedef .* |using )(\w+)(?:;| =)")
_FUNCTION = re.compile(r"(?:DEVICE|__device__ __noinline__) .*?(\w+)\(")
_MACRO = re.compile(r"(?:#define |UNARY\(|BINARY\()(\w+)")
_STRUCT = re.compile(r"struct (?:alignas\(\d+\) )?(\w+) \{")
_TEMPLATE = re.compile(r"^template <[^{]*?>\s+(?=DEVICE|struct)")
_OPENED_OR_ENDED = re.compile(r"(?:(?!//)[^{;])*[{;]")
_MACROS = ("#define ", "UNARY(", "BINARY(")  # the last two declare a function
_DECLARATIONS = (
    *_MACROS,
    "template <",
    "DEVICE ",
    "__device__ ",
    "struct ",
    "constexpr ",
    "typedef ",
    "using ",
)
_WORD = re.compile(r"[A-Za-z_]\w*")
_FIELD = re.compile(r"\b(?:p|packed|call)\.(\w+)")
_PARAMS = "Params"
_LOCAL = re.compile(
    r"( +)(?:(?:const|constexpr) [\w<>*& ]+?|unsigned)[ *&](\w+)(?:\[[^=]*\])?(?: =|;|\()"
)
_NEXT_LOCAL = re.compile(r", (\w+) = ")
_KEPT_LINES = 1 << 14  # kernels share most of their lines
_Line = tuple[str, frozenset[str], re.Match[str] | None]
"""A line of a kernel, the words of its code, and the local that it declares."""


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
        heads = bool(lines) and lines[-1].startswith("// ----")
        if not line and (not lines or not lines[-1] or opens or heads):
            continue
        if line.strip() in ("}", "};") and lines and not lines[-1]:
            lines.pop()
        lines.append(line)
    return "\n".join(lines).rstrip() + "\n"


def _numbered(body: str) -> str:
    """The text with steps numbered 1, 2, 2a, 2b ... without gaps, where a template omits some."""
    number, letter, last = 0, "", ("", "")

    def renumber(match: re.Match[str]) -> str:
        nonlocal number, letter, last
        step = (match[2], match[3])
        if step[0] != last[0]:
            number, letter = number + 1, ""
        if step[1] and step != last:
            letter = chr(ord(letter) + 1) if letter else "a"
        last = step
        return f"{match[1]}{number}{letter if step[1] else ''}. "

    return _STEP.sub(renumber, body)


def _without_single_rounds(lines: list[str], ones: frozenset[str]) -> list[str]:
    """The lines of a kernel in which each loop that runs once is replaced by its body, at index 0.

    Args:
        ones: the names of constants with the value 1.
    """
    result: list[str] = []
    start = 0
    while start < len(lines):
        loop = _LOOP.match(lines[start])
        if loop is None or loop[3] not in ones:
            result.append(lines[start])
            start += 1
            continue
        indent, index = loop[1], loop[2]
        if loop[4]:
            end = next(n for n in range(start, len(lines)) if lines[n] == f"{indent}}}")
            inner = [line.removeprefix("  ") for line in lines[start + 1 : end]]
        else:
            end = start
            inner = [indent + lines[start][loop.end() :].lstrip()]
        lines = [*lines[:start], *(_at_zero(line, index) for line in inner), *lines[end + 1 :]]
    return result


def _at_zero(line: str, index: str) -> str:
    """A line of C++ for index 0: terms of a sum in which the index is a factor are omitted."""
    line = line.replace(f"[{index}]", "[0]")
    term = rf"(?:[\w.]+ \* )*\b{index}\b(?: \* [\w.]+)*"
    line = re.sub(rf" \+ {term}(?![\w(\[]| [/%])", "", line)
    line = re.sub(rf"(?<![\w.*] ){term} \+ ", "", line)
    line = re.sub(rf"(?<![\w.\"%]){term}(?=[,;)])", "0", line)
    code, mark, words = line.partition("//")
    return re.sub(rf"(?<![\w.\"%])\b{index}\b", "0", code) + mark + words


class _Piece(NamedTuple):
    """Lines that are kept or removed together.

    Attributes:
        name: the name that the lines declare; None for lines that are always kept.
        lines: the lines of the declaration, or all other lines up to the next declaration.
        comment: the comment lines directly above.
    """

    name: str | None
    lines: tuple[str, ...]
    comment: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1024)
def _code_of(lines: tuple[str, ...]) -> str:
    """The lines without comments, which may mention unused names.

    Cached, because kernels share most helpers.
    """
    return "\n".join(map(_code, lines))


@functools.lru_cache(maxsize=1024)
def _words_of(lines: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_WORD.findall(_code_of(lines)))


@functools.lru_cache(maxsize=1024)
def _fields_of(lines: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_FIELD.findall(_code_of(lines)))


def _code(line: str) -> str:
    return line.partition("//")[0].rstrip()


@functools.lru_cache(maxsize=_KEPT_LINES)
def _read(line: str) -> _Line:
    return line, frozenset(_WORD.findall(_code(line))), _LOCAL.match(line)


def used(text: str, params: Sequence[Param]) -> tuple[str, tuple[Param, ...]]:
    """The file without unused helpers, constants, locals and fields of ``struct Params``.

    Args:
        text: a kernel and its helpers. Declarations begin at the left margin.
        params: the fields of the text's ``struct Params``, in order.
    """
    head, kernel, body = text.partition(_KERNEL)
    lines = [*head.splitlines(), *_with_used_locals((kernel + body).splitlines())]
    pieces = list(_pieces(lines))
    reached = _reached(pieces)
    mentioned = frozenset().union(*(_fields_of(p.lines) for p in pieces if p.name in reached))
    used_params = tuple(param for param in params if param.field in mentioned)
    unused = {param.declaration for param in params} - {param.declaration for param in used_params}
    lines = []
    heading: tuple[str, ...] = ()  # the comment of a group whose first declarations are unused
    for piece in pieces:
        if piece.name not in reached:
            heading = heading or piece.comment
            continue
        lines += piece.comment or (heading if piece.name else ())
        lines += (
            (line for line in piece.lines if line.partition("  //")[0].strip() not in unused)
            if piece.name == _PARAMS
            else piece.lines
        )
        heading = ()
    return "\n".join(lines) + "\n", used_params


def _with_used_locals(lines: list[str]) -> list[str]:
    """The lines of a kernel without the locals that no later line of their block mentions."""
    later: list[_Line] = []  # the last line first
    for line in reversed(lines):
        later.append(_read(line))
        local = later[-1][2]
        if local is None or line.endswith("{"):
            continue
        statement = [later.pop()]
        while not _code(statement[-1][0]).endswith(";"):
            statement.append(later.pop())
        names = (local[2], *_NEXT_LOCAL.findall(_code(line)))
        if any(_is_mentioned(name, local[1], later) for name in names):
            later += reversed(statement)
    return [line for line, *_ in reversed(later)]


def _is_mentioned(name: str, indent: str, later: list[_Line]) -> bool:
    """Whether the rest of a block mentions a local of its own, not one of an inner block."""
    inner: str | None = None  # the indentation of a block that declares the name again
    for line, words, local in reversed(later):
        if not _is_within(line, indent):
            return False
        if inner is not None and _is_within(line, inner):
            continue
        inner = local[1] if local is not None and local[2] == name else None
        if inner is None and name in words:
            return True
    return False


def _is_within(line: str, indent: str) -> bool:
    """Whether a line is in a block with this indentation, which directives need not have."""
    return line.startswith(indent) or line.lstrip()[:1] in ("", "#")


def _reached(pieces: list[_Piece]) -> set[str | None]:
    """The names that are used, directly or by used declarations; None stands for other lines."""
    declared = {piece.name for piece in pieces}
    names: dict[str | None, set[str | None]] = {}  # the declarations that a piece mentions
    for piece in pieces:
        names.setdefault(piece.name, set()).update(_words_of(piece.lines) & declared)
    reached: set[str | None] = {None}
    pending: list[str | None] = [None]
    while pending:
        new = names.get(pending.pop(), set()) - reached
        reached |= new
        pending += new
    return reached


def _pieces(lines: list[str]) -> Iterator[_Piece]:
    comment: list[str] = []
    others: list[str] = []
    start = 0
    while start < len(lines):
        line = lines[start]
        if line.startswith("//") and not line.startswith("// ----"):
            comment.append(line)
            start += 1
            continue
        name, end = None, start + 1
        if line.startswith(_DECLARATIONS):
            end = _end(lines, start)
            name = _declared(tuple(lines[start : min(end, start + 3)]))
        if name is None:
            others += (*comment, *lines[start:end])
        else:
            if others:
                yield _Piece(None, tuple(others))
            others = []
            yield _Piece(name, tuple(lines[start:end]), tuple(comment))
        comment, start = [], end
    if others or comment:
        yield _Piece(None, (*others, *comment))


@functools.lru_cache(maxsize=1024)
def _declared(lines: tuple[str, ...]) -> str | None:
    """The name that the first lines of a declaration declare."""
    text = " ".join(line.partition("//")[0] for line in lines)
    text = _TEMPLATE.sub("", text)
    for pattern in (_CONSTANT, _ALIAS, _FUNCTION, _STRUCT, _MACRO):
        match = pattern.match(text)
        if match:
            return match[1]
    return None


def _end(lines: list[str], index: int) -> int:
    """The index after the last line of the declaration that begins at ``index``."""
    if lines[index].startswith(_MACROS):
        return next(n for n in range(index, len(lines)) if not lines[n].endswith("\\")) + 1
    while not _OPENED_OR_ENDED.match(lines[index]):
        index += 1
    if "{" not in lines[index] or _code(lines[index]).endswith(("}", "};")):
        return index + 1
    return next(n for n in range(index, len(lines)) if lines[n] in ("}", "};")) + 1
