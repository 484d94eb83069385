"""The Python of a spec's mods, and the lines of the emitted file that are made from each."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashgen.kernels.codegen import Source
from flashgen.spec.language.user_source import parsed

_QUOTED = re.compile(r"// (?P<file>[^\s:]+):(?P<line>\d+)$")
_FUNCTION = re.compile(r"(?:struct|DEVICE|__device__)\s.*?(?P<name>\w+)\s*(?:\(|\{)")
_OF_SCORE = re.compile(r"(?:score|Score|d_score|place|element_of|sum_of|Partials)")
"""The emitted functions of score_mod and of its derivatives; all others are made from mask_mod."""
_READER = re.compile(r"(?:read|greatest|least)_(?P<tensor>\w+?)(?:_\d+)?$")


@dataclass(frozen=True)
class PythonText:
    """The Python that a page shows.

    Attributes:
        title: the path of the file, or where the mods are from.
        lines: the text.
        numbers: the number of each line in its file.
        note: the parts that are missing, and why; "" where nothing is.
    """

    title: str
    lines: tuple[str, ...]
    numbers: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Mod:
    """Lines of Python, by their numbers, and the lines of the emitted file made from them."""

    name: str
    python: tuple[int, ...]
    cuda: tuple[int, ...]


def file_text(title: str, text: str) -> PythonText:
    """A whole file."""
    lines = tuple(text.splitlines())
    return PythonText(title, lines, tuple(range(1, len(lines) + 1)))


def python_of(source: Source, whole: PythonText | None) -> tuple[PythonText, tuple[Mod, ...]]:
    """The Python of an emitted file, and its links with the functions made from it.

    Args:
        source: the emitted file, which quotes each mod above the function that evaluates it.
        whole: the file of the spec; None to show the quoted mods alone.
    """
    functions = list(_functions(source))
    quoted = dict(_quoted(functions))
    if whole is None:
        whole = _quotations(quoted)
    lines_of_mods = {}
    for start, (_, lines) in quoted.items():
        lines_of_mods[start] = _reached(whole, start, len(lines))
    first = min(lines_of_mods, default=0)
    kinds = _kinds(functions)
    mods = []
    for function in functions:
        reader = _READER.match(function.name)
        if reader:
            python = _naming(whole, reader["tensor"])
        else:
            python = lines_of_mods.get(kinds.get(_kind(function.name), first), ())
        if python:
            mods.append(Mod(function.name, tuple(python), function.lines))
    return whole, tuple(mods)


@dataclass(frozen=True)
class _Function:
    """A function of the spec in the emitted file, with its comments."""

    name: str
    text: tuple[str, ...]
    lines: tuple[int, ...]


def _functions(source: Source) -> Iterator[_Function]:
    for section in source.spec_section:
        start = source.text.find(section)
        if start < 0:
            continue
        first = source.text.count("\n", 0, start) + 1
        text = tuple(section.rstrip("\n").splitlines())
        names = [match["name"] for match in map(_FUNCTION.match, text) if match]
        yield _Function(names[-1] if names else "", text, tuple(range(first, first + len(text))))


def _quoted(functions: Sequence[_Function]) -> Iterator[tuple[int, tuple[str, tuple[str, ...]]]]:
    """The quoted mods by the number of their first line: the file and the lines."""
    for function in functions:
        match = _QUOTED.match(function.text[0])
        if match:
            lines = []
            for line in function.text[1:]:
                if not line.startswith("//   "):
                    break
                lines.append(line.removeprefix("//   "))
            yield int(match["line"]), (match["file"], tuple(lines))


def _quotations(quoted: dict[int, tuple[str, tuple[str, ...]]]) -> PythonText:
    lines: list[str] = []
    numbers: list[int] = []
    for start in sorted(quoted):
        lines += quoted[start][1]
        numbers += range(start, start + len(quoted[start][1]))
    files = " and ".join(dict.fromkeys(file for file, _ in quoted.values()))
    note = "" if lines else "The kernel has neither a mask_mod nor a score_mod."
    return PythonText(files or "no mods", tuple(lines), tuple(numbers), note)


def _kind(name: str) -> str:
    return "score" if _OF_SCORE.match(name) else "mask"


def _kinds(functions: Sequence[_Function]) -> dict[str, int]:
    """For the functions of masks and of scores, the first line of the mod."""
    first_lines: dict[str, int] = {}
    for function in functions:
        match = _QUOTED.match(function.text[0])
        if match:
            first_lines.setdefault(_kind(function.name), int(match["line"]))
    return first_lines


def _naming(text: PythonText, name: str) -> tuple[int, ...]:
    """The lines in which a name occurs as a word or a string."""
    word = re.compile(rf"\b{re.escape(name)}\b")
    return tuple(n for n, line in zip(text.numbers, text.lines, strict=True) if word.search(line))


def _reached(text: PythonText, start: int, count: int) -> tuple[int, ...]:
    """The lines of a mod and of all that it names at the top level of its file."""
    own_lines = tuple(n for n in text.numbers if start <= n < start + max(count, 1))
    tree = parsed("\n".join(text.lines))
    if not tree.body:  # quoted mods, such as a lambda in the middle of a call
        return own_lines
    spans = {}
    for node in tree.body:
        for name in _defined(node):
            spans[name] = node
    at_start = [
        node
        for node in tree.body
        if text.numbers[node.lineno - 1] <= start <= text.numbers[(node.end_lineno or 1) - 1]
    ]
    reached: list[ast.stmt] = []
    waiting = [node for node in at_start if not isinstance(node, ast.Expr)]
    while waiting:
        node = waiting.pop()
        if node in reached:
            continue
        reached.append(node)
        if node in at_start and not isinstance(node, ast.FunctionDef):
            continue  # a lambda in the call that makes the spec: only its own lines
        names = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
        waiting += [spans[name] for name in names if name in spans]
    numbers = set(own_lines)
    for node in reached:
        if node in at_start and not isinstance(node, ast.FunctionDef):
            continue
        numbers |= {text.numbers[n] for n in range(node.lineno - 1, node.end_lineno or 1)}
    return tuple(sorted(numbers))


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (leaf.id for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
