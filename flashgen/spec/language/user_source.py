"""Source locations of the user's Python, for error messages and for the emitted file."""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import os
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

from flashgen.shared.errors import SpecError, called_by_users

_PACKAGE = __name__.partition(".")[0]
LIBRARIES = ("sympy", "mpmath", "numpy", "torch")
"""Packages beside flashgen in whose code the user cannot correct an error."""
_ROOT_MARKS = ("pyproject.toml", ".git")
_parser = threading.RLock()


@dataclass(frozen=True)
class SourceLines:
    """A function or expression in the user's Python source.

    Attributes:
        file: path relative to its project or to the working directory, never absolute.
        line: number of its first line, from 1.
        text: the function or lambda as written, dedented; the expression where no file exists.
    """

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def shown_path(file: str) -> str:
    """``file`` as messages and emitted files show it, the same from every working directory.

    The path is relative to the nearest parent folder that is a project, else to the working
    directory; otherwise it is the bare name. It is never absolute.
    """
    if file.startswith("<"):
        return file
    path = Path(os.path.abspath(file))
    for parent in path.parents:
        if any(os.path.exists(os.path.join(parent, mark)) for mark in _ROOT_MARKS):
            return path.relative_to(parent).as_posix()
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except (ValueError, FileNotFoundError):  # the working directory is another one, or removed
        return path.name


def user_location() -> str:
    """``file:line`` of the innermost code that is running and that the user can correct."""
    frame = user_frame()
    if frame is None:
        return "unknown"
    return f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def user_frame() -> FrameType | None:
    """The innermost frame outside flashgen and `LIBRARIES`, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package_of(frame) in (_PACKAGE, *LIBRARIES):
        frame = frame.f_back
    return frame


def user_line_in(error: Exception) -> tuple[str, int] | None:
    """The file and line of the innermost code in the traceback that the user can correct."""
    steps = traceback.walk_tb(error.__traceback__)
    users = [
        (frame.f_code.co_filename, line)
        for frame, line in steps
        if _package_of(frame) not in (_PACKAGE, *LIBRARIES)
    ]
    return users[-1] if users else None


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def refuse(what: str, *, numbers: str, way_out: str, kind: type[SpecError] = SpecError) -> NoReturn:
    """Raises a SpecError that points at the user's line that is running now."""
    raise kind(what, where=user_location(), numbers=numbers, way_out=way_out) from None


in_specs = called_by_users(SpecError, user_location)
"""The decorator of what users call in specs."""


def code_of(function: Callable[..., object]) -> CodeType | None:
    """The code object behind a function, method, partial or object with ``__call__``, or None."""
    for _ in range(8):
        if hasattr(function, "__code__"):
            code = function.__code__
            return code if isinstance(code, CodeType) else None
        if hasattr(function, "func"):
            function = function.func
        elif hasattr(function, "__func__"):
            function = function.__func__
        elif hasattr(type(function), "__call__"):  # noqa: B004  (the method itself is needed)
            inner = type(function).__call__
            if not hasattr(inner, "__code__"):
                return None
            function = inner
    return None


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """The code, and the code of the functions defined in it, at any depth."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from nested_codes(inner)


def lines_of(function: Callable[..., object], fallback: str) -> SourceLines:
    """The location and text of ``function``; ``fallback`` is the text if no file exists."""
    code = code_of(function)
    if code is None:
        return SourceLines("<built-in>", 0, fallback)
    file, line = code.co_filename, code.co_firstlineno
    source = "".join(linecache.getlines(file))
    text = _function_text(source, code) if source else None
    return SourceLines(shown_path(file), line, text if text is not None else fallback)


@functools.lru_cache(maxsize=256)
def _function_text(source: str, code: CodeType) -> str | None:
    nodes = _functions_of(source).get((code.co_name, code.co_firstlineno), ())
    if len(nodes) > 1:
        # Several lambdas can begin on one line: the compiled code tells them apart.
        nodes = [node for node in nodes if _same_code(node, code)] or nodes
    if not nodes:
        return None
    node = nodes[0]
    # The parser ends no line at a form feed, as str.splitlines() does. ast.get_source_segment()
    # reads the whole file character by character.
    lines = source.split("\n")[node.lineno - 1 : node.end_lineno]
    if isinstance(node, ast.Lambda):
        # Columns of the parser are bytes. The end is cut first, for lambdas of one line.
        lines[-1] = lines[-1].encode()[: node.end_col_offset].decode()
        lines[0] = lines[0].encode()[node.col_offset :].decode()
        return "\n".join(lines)
    return textwrap.dedent("\n".join(lines))


def parsed(source: str) -> ast.Module:
    """The syntax tree of a text; an empty one where it is not Python.

    Threads take turns: in Python 3.11, of several threads that parse at once, one may fail with a
    SystemError.
    """
    with _parser:
        try:
            return ast.parse(source)
        except SyntaxError:
            return ast.Module([], [])


@functools.lru_cache(maxsize=16)
def _functions_of(source: str) -> dict[tuple[str, int], list[ast.FunctionDef | ast.Lambda]]:
    """The functions in the text of a file by the name and first line that their code has."""
    functions: dict[tuple[str, int], list[ast.FunctionDef | ast.Lambda]] = {}
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Lambda):
            functions.setdefault(("<lambda>", node.lineno), []).append(node)
        elif isinstance(node, ast.FunctionDef):
            first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
            functions.setdefault((node.name, first), []).append(node)
    return functions


def _same_code(node: ast.AST, code: CodeType) -> bool:
    if not isinstance(node, ast.Lambda):
        return False
    module = compile(ast.Expression(body=node), code.co_filename, "eval")
    inner = next(const for const in module.co_consts if isinstance(const, CodeType))
    return _operations(inner) == _operations(code)


def _operations(code: CodeType) -> list[tuple[str, str]]:
    """The instructions, independent of whether outer names are globals or closure cells."""
    return [
        ("LOAD" if step.opname in _OUTER_LOADS else step.opname, step.argrepr.split(" + ")[-1])
        for step in dis.get_instructions(code)
        if step.opname not in _BOOKKEEPING
    ]


_OUTER_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
_BOOKKEEPING = ("RESUME", "COPY_FREE_VARS", "MAKE_CELL", "PUSH_NULL", "NOP", "CACHE", "PRECALL")
