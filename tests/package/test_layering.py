"""The shape of the package: imports point one way, one module reads the environment, files end."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT
from tests.support.processes import run_python

PACKAGES = ("flashgen", "ptx_emulator")

# The wings in their order: a module may import its own wing and those before it.
WINGS = ("version", "shared", "ptx_emulator", "spec", "reference", "kernels", "calls", "frontends")
# These may import everything: the commands and reports, and the modules with public names.
TOP = {"tools", "__init__", "__main__", "distributed", "emulator", "export", "integrations"}
# What a function may import when it is called: the page of a report is made of the report.
LATE = {("calls", "tools")}
# The emulator is a package of its own, which shares its errors and TMA descriptors with flashgen.
OF_FLASHGEN = {"ptx_emulator": ("flashgen.shared.errors", "flashgen.shared.tensormap")}
# Packages from outside the standard library, by the longest name that contains a module. numpy is
# for those that hold numbers.
OUTSIDE = {
    "version": set(),
    "shared": set(),
    "shared.aux_results": {"torch"},
    "shared.call": {"torch"},
    "shared.paged": {"torch"},
    "shared.dropout": {"numpy"},
    "shared.split_choice": {"numpy"},  # the time of calls for many sizes of splits at once
    "ptx_emulator": {"numpy"},
    "spec.language": {"sympy", "mpmath"},
    "spec.analysis": {"sympy", "numpy"},  # numpy: an expression evaluated over many elements
    "reference": {"torch", "numpy", "sympy"},
    "kernels": set(),
    "kernels.planner": {"sympy"},
    "kernels.visits": {"sympy", "numpy"},
    "kernels.codegen": {"sympy", "jinja2"},
    "kernels.compile": {"cuda", "filelock"},
    "calls": {"torch"},
    "calls.launch": {"cuda"},
    "calls.trust": set(),
    "calls.cpu": {"torch", "numpy", "sympy"},
    "calls.runtime": {"torch", "numpy"},
    "calls.export": set(),
    "frontends.flash_operators": {"torch"},
    "frontends.score_tensors": {"torch"},
    "frontends.diffusers": {"torch", "diffusers"},
    "frontends.flex": {"torch", "numpy", "sympy"},
    "frontends.transformers": {"torch", "transformers"},
    "frontends.distributed": {"torch", "numpy", "matplotlib"},
    "tools.cli": None,  # all
    "tools.profile": {"torch", "numpy", "matplotlib"},
    "tools.views": {"torch", "numpy", "sympy", "matplotlib", "jinja2"},
    "tools.tune": {"torch"},
    "tools.doctor": {"torch", "numpy"},
}
FILES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def module_of(path: Path, root: Path = ROOT) -> tuple[str, ...]:
    """The dotted name of a file in parts; that of a package ends with "__init__"."""
    return path.relative_to(root).with_suffix("").parts


MODULES = {".".join(module_of(path)).removesuffix(".__init__"): path for path in FILES}
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
def imports_of(path: Path, root: Path = ROOT) -> tuple[Import, ...]:
    return tuple(imports(path.read_text(encoding="utf-8"), module_of(path, root)))


def prefixes(name: str) -> list[str]:
    """a, a.b and a.b.c for "a.b.c": what Python loads for it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def wing_of(parts: Sequence[str]) -> str:
    """The wing of a dotted name in parts: the folder in flashgen/, or the package beside it."""
    return parts[0] if parts[0] != "flashgen" else parts[1] if len(parts) > 1 else "__init__"


def complaints(path: Path, root: Path = ROOT) -> list[str]:
    parts = module_of(path, root)
    wing, shown = wing_of(parts), path.relative_to(root).as_posix()
    known = [key for key in prefixes(".".join(parts).removeprefix("flashgen.")) if key in OUTSIDE]
    outside = None if wing in TOP - {"tools"} else OUTSIDE[known[-1]] if known else set()
    if wing not in TOP and wing not in WINGS:
        return [f"{shown} is in no wing: give {wing!r} its place in this test"]
    before = set(WINGS) | TOP if wing in TOP else set(WINGS[: WINGS.index(wing) + 1])
    found = []
    for line, name, when in imports_of(path, root):
        head = name.partition(".")[0]
        if head in PACKAGES:
            target = wing_of(name.split("."))
            far = wing in OF_FLASHGEN and head != wing and not name.startswith(OF_FLASHGEN[wing])
            late = when == "call" and (wing, target) in LATE
            if far or (target not in before and not late):
                found.append(f"{shown}:{line} imports {name}, which {wing!r} may not")
        elif head not in sys.stdlib_module_names and outside is not None and head not in outside:
            may = ", ".join(sorted(outside)) or "the standard library alone"
            found.append(f"{shown}:{line} imports {head}; {known[-1]!r} may import {may}")
    return found


def test_imports_point_one_way() -> None:
    assert [complaint for path in FILES for complaint in complaints(path)] == []


def test_a_wrong_import_is_named_in_a_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "flashgen" / "spec" / "analysis"
    folder.mkdir(parents=True)
    file = folder / "tiles.py"
    file.write_text(
        "import sympy\nfrom flashgen import distributed\nfrom ..language import x\n"
        "def f():\n    import torch\n    from ...kernels.codegen.cache import y\n"
    )
    assert complaints(file, tmp_path) == [
        "flashgen/spec/analysis/tiles.py:2 imports flashgen.distributed, which 'spec' may not",
        "flashgen/spec/analysis/tiles.py:5 imports torch; 'spec.analysis' may import numpy, sympy",
        "flashgen/spec/analysis/tiles.py:6 imports flashgen.kernels.codegen.cache.y, which 'spec' "
        "may not",
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
    assert readers == {"flashgen/shared/config.py"}


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
TYPES_FROM_ABOVE = {"ptx_emulator.state.wave"}


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
    assert circles(graph) == set()


def test_the_rooms_of_a_wing_have_no_import_circle() -> None:
    def room(name: str) -> str:
        return ".".join(name.split(".")[:3])

    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        if wing_of(name.split(".")) in WINGS:
            others = {room(other) for other in imported_modules(path)} - {room(name)}
            graph.setdefault(room(name), set()).update(others)
    for others in graph.values():
        others.intersection_update(graph)
    assert circles(graph) == set()


def test_a_circle_of_three_modules_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"a"}}
    assert circles(graph) == {("a", "b", "c")}


def test_the_floors_of_the_emulator_import_one_way() -> None:
    names = sorted(name for name in MODULES if name.startswith("ptx_emulator."))

    def floor(name: str) -> int:
        return FLOORS.index(name.split(".")[1])

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
RUNS_A_CALL = (
    "flashgen.calls.launch",
    "flashgen.calls.runtime",
    "flashgen.calls.ops",
    "flashgen.calls.exported",
    "ptx_emulator",
)


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
    modules = [name for name in MODULES if name.startswith(RUNS_A_CALL)]
    assert len(modules) > 50
    assert [way for name in modules if (way := way_to(name, FORBIDDEN))] == []


def test_an_import_through_another_module_is_found() -> None:
    assert way_to("flashgen.spec.language.signature", FORBIDDEN) is not None
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
