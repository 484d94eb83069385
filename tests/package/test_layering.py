"""The shape of the package: imports point one way, one module reads the environment, files end."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python

PACKAGE = ROOT / "flashgen"

# The pipeline in its order: a module may import those before it.
PIPELINE = (
    "version",
    "errors",
    "plain",
    "dtypes",
    "signature",
    "call",
    "paths",
    "launch_facts",
    "paged",
    "sinks",
    "split_choice",
    "tensormap",
    "config",
    "arch",
    "dropout",
    "language",
    "analysis",
    "planner",
    "codegen",
    "compile",
    "launch",
    "trust",
    "built_kernel",
    "pipeline",
    "append_pipeline",
)
# Those beside it, and all that they may import of flashgen.
BESIDE = {
    "emulator": {"errors", "tensormap"},
    "reference": {"errors", "dtypes", "signature", "paged", "dropout", "language"},
    "cpu": set(PIPELINE)
    - {"codegen", "compile", "launch", "trust", "built_kernel", "pipeline", "append_pipeline"},
    "runtime": {*PIPELINE, "emulator", "reference", "cpu"},
    "ops": {*PIPELINE, "emulator", "reference", "cpu", "runtime"},
    "exported": {*PIPELINE, "emulator", "reference", "cpu", "runtime", "ops"},
    "export": {*PIPELINE, "emulator", "reference", "cpu", "runtime", "ops", "exported"},
    "flex": {*PIPELINE, "emulator", "reference", "cpu", "runtime", "ops"},
    "profile": {*PIPELINE, "emulator", "cpu", "runtime", "ops"},
    "views": {*PIPELINE, "emulator", "reference", "cpu", "runtime", "ops", "flex", "profile"},
    "tune": {*PIPELINE, "reference", "runtime", "ops", "profile"},
    "distributed": {*PIPELINE, "cpu", "runtime", "ops"},
    "doctor": {*PIPELINE, "emulator", "reference", "runtime", "ops", "tune"},
}
# What a function may import when it is called: the page of a report is made of the report.
LATE = {("runtime", "views")}
# These may import everything.
TOP = {"__init__", "__main__", "cli", "integrations"}
ALLOWED = {
    **{name: set(PIPELINE[:place]) for place, name in enumerate(PIPELINE)},
    **BESIDE,
}
# Packages from outside the standard library. numpy is for those that hold numbers.
OUTSIDE = {
    "version": set(),
    "errors": set(),
    "plain": set(),
    "dtypes": set(),
    "signature": set(),
    "call": {"torch"},
    "paths": set(),
    "launch_facts": set(),
    "paged": {"torch"},
    "sinks": {"torch"},
    "split_choice": set(),
    "tensormap": set(),
    "config": set(),
    "arch": set(),
    "dropout": {"numpy"},
    "language": {"sympy", "mpmath"},
    "analysis": {"sympy", "numpy"},  # numpy: an expression evaluated over many elements
    "planner": {"sympy"},
    "codegen": {"sympy", "jinja2"},
    "compile": {"cuda", "filelock"},
    "launch": {"cuda"},
    "trust": set(),
    "built_kernel": set(),
    "pipeline": set(),
    "append_pipeline": set(),
    "emulator": {"numpy"},
    "reference": {"torch", "numpy", "sympy"},
    "cpu": {"torch", "numpy", "sympy"},
    "runtime": {"torch", "numpy"},
    "ops": {"torch"},
    "exported": {"torch"},
    "export": set(),
    "flex": {"torch", "numpy", "sympy"},
    "profile": {"torch", "numpy", "matplotlib"},
    "views": {"torch", "numpy", "sympy", "matplotlib", "jinja2"},
    "tune": {"torch"},
    "distributed": {"torch", "numpy", "matplotlib"},
    "doctor": {"torch", "numpy"},
    "integrations": {"torch", "transformers"},
}
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {
    ".".join(("flashgen", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in FILES
}
NAMES = {path: name for name, path in MODULES.items()}


class Import(NamedTuple):
    """One imported name, absolute, and when it is imported: "load", "call" or "types"."""

    line: int
    name: str
    when: str


def statements_in(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below a node but for expressions, which are most nodes of a module."""
    return (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def imports(source: str, parts: tuple[str, ...]) -> Iterator[Import]:
    """Every import of a module.

    Args:
        parts: the module's dotted name; a package ends with "__init__".
    """

    def walk(node: ast.AST, when: str) -> Iterator[Import]:
        for child in statements_in(node):
            if isinstance(child, ast.Import):
                yield from (Import(child.lineno, alias.name, when) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = parts[: -child.level] if child.level else ()
                base = ".".join([*package, *filter(None, [child.module])])
                yield from (
                    Import(child.lineno, f"{base}.{alias.name}", when) for alias in child.names
                )
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                yield from walk(ast.Module(child.body, []), "types")
                yield from walk(ast.Module(child.orelse, []), when)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and when == "load":
                yield from walk(child, "call")
            else:
                yield from walk(child, when)

    return walk(ast.parse(source), "load")


@functools.cache
def imports_of(path: Path) -> tuple[Import, ...]:
    parts = ("flashgen", *path.relative_to(PACKAGE).with_suffix("").parts)
    return tuple(imports(path.read_text(encoding="utf-8"), parts))


def prefixes(name: str) -> list[str]:
    """a, a.b and a.b.c for "a.b.c": what Python loads for it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def complaints(path: Path) -> list[str]:
    module = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    shown = path.relative_to(ROOT).as_posix()
    if module in TOP:
        return []
    if module not in ALLOWED:
        return [f"{shown} has no place in the order of imports: give {module!r} one in this test"]
    found = []
    for line, name, when in imports_of(path):
        head, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if head == "flashgen":
            late = when == "call" and (module, target) in LATE
            if target != module and target not in ALLOWED[module] and not late:
                what = f"imports flashgen.{target}" if target else "imports flashgen itself"
                found.append(f"{shown}:{line} {what}, which is not before {module!r}")
        elif head not in sys.stdlib_module_names and head not in OUTSIDE[module]:
            may = ", ".join(sorted(OUTSIDE[module])) or "the standard library alone"
            found.append(f"{shown}:{line} imports {head}; {module!r} may import {may}")
    return found


def test_imports_point_one_way() -> None:
    assert [complaint for path in FILES for complaint in complaints(path)] == []


def test_a_wrong_import_is_named_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flashgen" / "analysis"
    folder.mkdir(parents=True)
    file = folder / "tiles.py"
    file.write_text(
        "import sympy\nfrom flashgen import codegen, language\nfrom .ranges import x\n"
        "def f():\n    import torch\n    from ..compile.cache import y\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "flashgen")
    assert complaints(file) == [
        "flashgen/analysis/tiles.py:2 imports flashgen.codegen, which is not before 'analysis'",
        "flashgen/analysis/tiles.py:5 imports torch; 'analysis' may import numpy, sympy",
        "flashgen/analysis/tiles.py:6 imports flashgen.compile, which is not before 'analysis'",
    ]


def test_only_config_reads_the_environment() -> None:
    readers = set()
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "env" in text else ():
            names = {getattr(node, "attr", ""), getattr(node, "id", "")}
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names |= {alias.name for alias in node.names}
            if names & {"environ", "environb", "getenv", "getenvb"}:
                readers.add(path.relative_to(ROOT).as_posix())
    assert readers == {"flashgen/config.py"}


def test_import_flashgen_is_cheap_and_touches_nothing() -> None:
    program = """
import sys

touched = []

def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        touched.append((event, args[0]))
    if event in ("os.mkdir", "os.rename", "os.remove", "socket.connect", "subprocess.Popen"):
        touched.append((event, args[0]))

sys.addaudithook(watch)
import flashgen
print([name for name in ("torch", "cuda", "triton") if name in sys.modules], touched)
"""
    done = run_python("-c", program, PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout == "[] []\n"
    assert done.stderr == ""


# ---- inside the packages

# The floors of the emulator in their order: a module may import its own floor and those before it.
FLOORS = ("errors", "ptx", "state", "counters", "checks", "isa", "machine", "entry")
# Modules of the emulator that may import types of floors above theirs, under TYPE_CHECKING.
TYPES_FROM_ABOVE = {"flashgen.emulator.state.wave"}


def imported_modules(path: Path, *, types_only: bool = False) -> set[str]:
    """The modules of flashgen that a file imports: for types only, or all others."""
    every = [each for each in imports_of(path) if (each.when == "types") == types_only]
    known = ([n for n in prefixes(each.name)[-2:] if n in MODULES] for each in every)
    return {names[-1] for names in known if names} - {NAMES[path]}


def circles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], number[other])
        if lowest[name] == number[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                found.add(tuple(sorted(stack[start:])))
            del stack[start:]

    for name in sorted(graph):
        if name not in number:
            visit(name)
    return found


def test_no_package_has_an_import_circle() -> None:
    graph = {name: imported_modules(path) for name, path in MODULES.items()}
    # Imports between packages point one way, so every circle lies inside one of them.
    assert circles(graph) == set()


def test_a_circle_of_three_modules_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"a"}}
    assert circles(graph) == {("a", "b", "c")}


def test_the_floors_of_the_emulator_import_one_way() -> None:
    names = sorted(name for name in MODULES if name.startswith("flashgen.emulator."))

    def floor(name: str) -> int:
        return FLOORS.index(name.split(".")[2])

    def lower(name: str) -> set[str]:
        """What must lie on its own floor or below."""
        found = imported_modules(MODULES[name])
        if name not in TYPES_FROM_ABOVE:
            found |= imported_modules(MODULES[name], types_only=True)
        return found & set(names)

    wrong = [(name, other) for name in names for other in lower(name) if floor(other) > floor(name)]
    assert wrong == [], "imports of what is above"


# ---- what runs a call

# An exported kernel is launched where neither is installed.
FORBIDDEN = {"sympy", "jinja2"}
RUNS_A_CALL = {"launch", "runtime", "ops", "emulator", "exported"}


def way_to(start: str, targets: set[str]) -> list[str] | None:
    """The shortest chain of imports at load from a module of flashgen to one of ``targets``."""
    chains, seen = [[start]], {start}
    for chain in chains:
        loaded = [each.name for each in imports_of(MODULES[chain[-1]]) if each.when == "load"]
        for name in sorted({prefix for each in loaded for prefix in prefixes(each)}):
            if name in targets:
                return [*chain, name]
            if name in MODULES and name not in seen:
                seen.add(name)
                chains.append([*chain, name])
    return None


def test_the_modules_that_run_a_call_need_neither_sympy_nor_jinja2() -> None:
    modules = [name for name in MODULES if set(name.split(".")[1:2]) & RUNS_A_CALL]
    assert len(modules) > 50
    assert [way for name in modules if (way := way_to(name, FORBIDDEN))] == []


def test_an_import_through_another_module_is_found() -> None:
    assert way_to("flashgen.language.signature", FORBIDDEN) is not None
    source = """
from typing import TYPE_CHECKING
from .. import arch
if TYPE_CHECKING:
    import sympy
def f():
    import jinja2
try:
    import torch.fx
finally:
    pass
"""
    assert [each[1:] for each in imports(source, ("flashgen", "ops", "__init__"))] == [
        ("typing.TYPE_CHECKING", "load"),
        ("flashgen.arch", "load"),
        ("sympy", "types"),
        ("jinja2", "call"),
        ("torch.fx", "load"),
    ]


# ---- the sizes of functions
