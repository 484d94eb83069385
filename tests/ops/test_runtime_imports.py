"""The modules that run a call can be imported without sympy and jinja2.

An exported kernel is launched where neither is installed. The test follows the imports that Python
executes when a module is loaded: those outside functions and outside ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())
PACKAGE = ROOT / "flashgen"
FORBIDDEN = {"sympy", "jinja2"}
RUNS_A_CALL = ("launch", "runtime", "ops", "emulator")


def name_of(path: Path) -> str:
    parts = ("flashgen", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def executed(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that run when a module is loaded."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from executed(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from executed(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from executed(handler.body)


def imported(source: str, package: tuple[str, ...]) -> set[str]:
    """The modules that a module imports when it is loaded, with the packages that hold them."""
    found: set[str] = set()
    for node in executed(ast.parse(source).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = node.module or ""
        if node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
        found.add(base)
        found |= {f"{base}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in found]
    return {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}


@functools.cache
def imports_of(module: str) -> tuple[str, ...]:
    path, parts = MODULES[module], tuple(module.split("."))
    package = parts if path.name == "__init__.py" else parts[:-1]
    return tuple(sorted(imported(path.read_text(encoding="utf-8"), package)))


def way_to(start: str, targets: set[str]) -> list[str] | None:
    """The shortest chain of imports from a module of flashgen to one of ``targets``."""
    chains = [[start]]
    seen = {start}
    for chain in chains:
        for name in imports_of(chain[-1]):
            if name in targets:
                return [*chain, name]
            if name in MODULES and name not in seen:
                seen.add(name)
                chains.append([*chain, name])
    return None


@pytest.mark.parametrize(
    "module",
    sorted(name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in RUNS_A_CALL),
)
def test_the_modules_that_run_a_call_need_neither_sympy_nor_jinja2(module: str) -> None:
    assert way_to(module, FORBIDDEN) is None


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
    assert imported(source, ("flashgen", "ops")) == {
        *("typing", "typing.TYPE_CHECKING", "flashgen", "flashgen.arch", "torch", "torch.fx")
    }
