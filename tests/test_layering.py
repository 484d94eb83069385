"""The shape of the package: imports point one way, one module reads the environment, files end."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flashgen"
MOST_LINES = 450

# The pipeline in its order: a module may import those before it.
PIPELINE = (
    "version",
    "errors",
    "tensormap",
    "config",
    "arch",
    "dropout",
    "expr",
    "sparse",
    "spec",
    "analysis",
    "plan",
    "cprint",
    "render",
    "compile",
    "launch",
    "pipeline",
)
# Those beside it, and all that they may import of flashgen.
BESIDE = {
    "certify": {"errors", "arch", "expr", "spec", "analysis", "plan"},
    "emulator": {"errors", "tensormap"},
    "reference": {"errors", "dropout", "expr", "sparse", "spec"},
    "tiled": set(PIPELINE) - {"render", "compile", "launch", "pipeline"},
    "ops": {*PIPELINE, "emulator", "reference", "tiled"},
    "flex": {*PIPELINE, "emulator", "reference", "tiled", "ops"},
    "profile": {*PIPELINE, "emulator", "tiled", "ops"},
}
# These may import everything.
TOP = {"__init__", "__main__", "cli"}
ALLOWED = {
    **{name: set(PIPELINE[:place]) for place, name in enumerate(PIPELINE)},
    **BESIDE,
}
# Packages from outside the standard library. numpy is for those that hold numbers.
OUTSIDE = {
    "version": set(),
    "errors": set(),
    "tensormap": set(),
    "config": set(),
    "arch": set(),
    "dropout": {"numpy"},
    "expr": {"sympy", "mpmath"},
    "sparse": {"sympy"},
    "spec": {"sympy"},
    "analysis": {"sympy", "numpy"},  # numpy: an expression evaluated over many elements
    "plan": {"sympy"},
    "certify": {"sympy"},
    "cprint": {"sympy"},
    "render": {"sympy", "jinja2"},
    "compile": {"cuda", "filelock"},
    "launch": {"cuda"},
    "pipeline": set(),
    "emulator": {"numpy"},
    "reference": {"torch", "numpy", "sympy"},
    "tiled": {"torch", "numpy", "sympy"},
    "ops": {"torch", "numpy", "sympy"},
    "flex": {"torch", "numpy", "sympy"},
    "profile": {"torch", "numpy", "matplotlib"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The part of flashgen that a file belongs to: "analysis" for flashgen/analysis/ranges.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file with its line, in functions too; relative ones made absolute."""
    parts = ("flashgen", *path.relative_to(PACKAGE).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*parts[: -node.level], *filter(None, [node.module])])
            if base == "flashgen":
                for alias in node.names:
                    yield node.lineno, f"flashgen.{alias.name}"
            else:
                yield node.lineno, base


def complaints(path: Path) -> list[str]:
    module = module_of(path)
    shown = path.relative_to(ROOT).as_posix()
    if module in TOP:
        return []
    if module not in ALLOWED:
        return [f"{shown} has no place in the order of imports: give {module!r} one in this test"]
    found = []
    for line, name in imports(path):
        head, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if head == "flashgen":
            if target != module and target not in ALLOWED[module]:
                what = f"imports flashgen.{target}" if target else "imports flashgen itself"
                found.append(f"{shown}:{line} {what}, which is not before {module!r}")
        elif head not in sys.stdlib_module_names and head not in OUTSIDE[module]:
            may = ", ".join(sorted(OUTSIDE[module])) or "the standard library alone"
            found.append(f"{shown}:{line} imports {head}; {module!r} may import {may}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_point_one_way(path: Path) -> None:
    assert complaints(path) == []


def test_a_wrong_import_is_named_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flashgen" / "analysis"
    folder.mkdir(parents=True)
    file = folder / "tiles.py"
    file.write_text(
        "import sympy\nfrom flashgen import expr, render\nfrom .ranges import x\n"
        "def f():\n    import torch\n    from ..compile.cache import y\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "flashgen")
    assert complaints(file) == [
        "flashgen/analysis/tiles.py:2 imports flashgen.render, which is not before 'analysis'",
        "flashgen/analysis/tiles.py:5 imports torch; 'analysis' may import numpy, sympy",
        "flashgen/analysis/tiles.py:6 imports flashgen.compile, which is not before 'analysis'",
    ]


def test_only_config_reads_the_environment() -> None:
    readers = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {getattr(node, "attr", ""), getattr(node, "id", "")}
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names |= {alias.name for alias in node.names}
            if names & {"environ", "environb", "getenv", "getenvb"}:
                readers.add(path.relative_to(ROOT).as_posix())
    assert readers == {"flashgen/config.py"}


def test_no_file_is_without_an_end() -> None:
    lines = {p.relative_to(ROOT).as_posix(): p.read_bytes().count(b"\n") for p in FILES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


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
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[] []\n"
    assert done.stderr == ""
