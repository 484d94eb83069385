"""Removes unused helpers, constants and parameters from an emitted file.

Templates hold all helpers of a hardware unit and all fields that a kind of kernel may take. Which
of them one kernel uses depends on the spec and on the plan; it is read from the text itself: a
declaration stays if its name can be reached from the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashgen.codegen.source import Param

_CONSTANT = re.compile(r"constexpr \w+ (\w+) =")
_ALIAS = re.compile(r"typedef .* (\w+);")
_FUNCTION = re.compile(r"__device__ __forceinline__ .*?(\w+)\(")
_STRUCT = re.compile(r"struct (?:alignas\(\d+\) )?(\w+) \{")
_WORD = re.compile(r"[A-Za-z_]\w*")
_FIELD = re.compile(r"\b(?:p|packed)\.(\w+)")


@dataclass(frozen=True)
class _Piece:
    """Lines that stay or go together.

    Attributes:
        name: the name that they declare; None for lines that always stay.
        lines: the lines of the declaration, or a single other line.
        comment: the comment lines directly above.
    """

    name: str | None
    lines: tuple[str, ...]
    comment: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The lines without comments, which may mention unused names."""
        return "\n".join(line.partition("//")[0] for line in self.lines)


def used(text: str, params: Sequence[Param]) -> tuple[str, tuple[Param, ...]]:
    """The file without unused helpers, constants and fields of ``struct Params``.

    Args:
        text: a kernel and what it may use. Declarations begin at the left margin.
        params: the fields of the text's ``struct Params``, in order.
    """
    pieces = list(_pieces(text.splitlines()))
    reached = _reached(pieces)
    mentioned = set(_FIELD.findall("\n".join(p.code for p in pieces if p.name in reached)))
    kept = tuple(param for param in params if param.field in mentioned)
    unused = {param.declaration for param in params} - {param.declaration for param in kept}
    lines: list[str] = []
    heading: tuple[str, ...] = ()  # the comment of a group whose first declarations are unused
    for piece in pieces:
        if piece.name not in reached:
            heading = heading or piece.comment
            continue
        lines += piece.comment or (heading if piece.name else ())
        lines += [line for line in piece.lines if line.partition("  //")[0].strip() not in unused]
        heading = ()
    return "\n".join(lines) + "\n", kept


def _reached(pieces: list[_Piece]) -> set[str | None]:
    """The names that are used, directly or by used declarations; None stands for other lines."""
    words: dict[str | None, set[str]] = {}
    for piece in pieces:
        words.setdefault(piece.name, set()).update(_WORD.findall(piece.code))
    reached: set[str | None] = {None}
    pending: list[str | None] = [None]
    while pending:
        new = words[pending.pop()] & (words.keys() - reached)
        reached |= new
        pending += new
    return reached


def _pieces(lines: list[str]) -> Iterator[_Piece]:
    comment: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("//") and not line.startswith("// ----"):
            comment.append(line)
            at += 1
            continue
        end = _end(lines, at)
        name = _declared(lines[at:end])
        if name is None:
            yield from (_Piece(None, (each,)) for each in (*comment, *lines[at:end]))
        else:
            yield _Piece(name, tuple(lines[at:end]), tuple(comment))
        comment, at = [], end
    yield from (_Piece(None, (each,)) for each in comment)


def _declared(lines: list[str]) -> str | None:
    text = " ".join(line.partition("//")[0] for line in lines[:3])
    text = re.sub(r"^template <[^{]*?>\s+(?=__device__|struct)", "", text)
    for pattern in (_CONSTANT, _ALIAS, _FUNCTION, _STRUCT):
        found = pattern.match(text)
        if found:
            return found[1]
    return None


def _end(lines: list[str], at: int) -> int:
    """The index after the last line of the block in braces, or statement, that begins there."""
    line = lines[at]
    if not re.match(r"template <|__device__|struct |constexpr |typedef ", line):
        return at + 1
    while not re.search(r"[{;]", lines[at].partition("//")[0]):
        at += 1
    if "{" not in lines[at] or lines[at].rstrip().endswith(("}", "};")):
        return at + 1
    return next(n for n in range(at, len(lines)) if lines[n] in ("}", "};")) + 1
