"""The public names: one table, and the imports that type checkers read."""

from __future__ import annotations

import ast
from importlib import import_module

import pytest

import flashgen as fg
from tests.support.paths import ROOT


def imported_for_types(source: str) -> dict[str, str]:
    """The names that a module imports for type checkers, each with its module."""
    tree = ast.parse(source)
    block = next(node for node in tree.body if isinstance(node, ast.If))
    plain = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {
        alias.name: (node.module or "").removeprefix("flashgen").removeprefix(".")
        for node in (*plain, *block.body)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name  # only these are public to a type checker
    }


def test_type_checkers_see_the_names_of_the_table() -> None:
    assert imported_for_types((ROOT / "flashgen/__init__.py").read_text()) == fg._HOME


def test_every_public_name_can_be_had() -> None:
    assert fg.__all__ == dir(fg) == sorted(set(fg.__all__))
    assert [name for name in fg.__all__ if not hasattr(fg, name)] == []


@pytest.mark.parametrize(
    ("public", "package"),
    [
        ("flashgen.distributed", "flashgen.frontends.distributed"),
        ("flashgen.emulator", "ptx_emulator"),
        ("flashgen.export", "flashgen.calls.export"),
        ("flashgen.integrations.transformers", "flashgen.frontends.transformers"),
    ],
)
def test_a_public_module_has_the_names_of_its_package(public: str, package: str) -> None:
    names = {name: getattr(import_module(package), name) for name in import_module(package).__all__}
    module = import_module(public)
    assert {name: getattr(module, name) for name in module.__all__} == names
