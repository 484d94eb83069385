"""Code paths: what each of them names exists, and the architectures that take it."""

from __future__ import annotations

import ast
import importlib

import pytest

from flashgen.shared.arch import Arch, facts, known_archs
from flashgen.shared.paths import PATHS, CodePath, path_on
from tests.support.paths import ROOT
from tests.support.processes import run_python

EACH = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


@EACH
def test_what_a_code_path_names_exists(path: CodePath) -> None:
    folder = ROOT / "templates" / path.templates
    for kernel in ("forward", "backward_dkdv", "backward_dq", "tangent"):
        assert (folder / f"{kernel}.cu.j2").is_file()
    kernels = {
        key
        for name in path.models
        for key in importlib.import_module(f"flashgen.kernels.planner.models.{name}").MODELS
    }
    names = ("forward", "dkdv", "dq", "fused", "captured", "captured_exact", "tangent")
    assert kernels == {(name, size) for name in names for size in path.itemsizes}
    if path.template_fields:
        importlib.import_module(f"flashgen.kernels.codegen.{path.template_fields}")
    assert path.tensor_rate in Arch.__dataclass_fields__
    assert set(path.persistent) <= set(names)


def compared_with_names(source: str) -> list[int]:
    """The lines that compare a value with the name of a code path."""
    named = any(name in source for name in PATHS)
    return [
        node.lineno
        for node in (ast.walk(ast.parse(source)) if named else ())
        if isinstance(node, ast.Compare) and "path" in ast.unparse(node)
        for side in (node.left, *node.comparators)
        for each in ast.walk(side)
        if isinstance(each, ast.Constant) and each.value in PATHS
    ]


def test_nothing_is_decided_by_the_name_of_a_code_path() -> None:
    folders = [path for path in (ROOT / "flashgen").iterdir() if path.name != "emulator"]
    sources = [path for folder in folders for path in (folder, *folder.rglob("*.py"))]
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sources
        if path.suffix == ".py" and (lines := compared_with_names(path.read_text()))
    }
    assert found == {}
    templates = [path.read_text() for path in (ROOT / "templates").rglob("*.j2")]
    assert [text for text in templates if "plan.path " in text] == []
    source = 'x = a.path == "sm_80"\ny = path in ("sm_90a",)\nz = f(path, "sm_80")'
    assert compared_with_names(source) == [1, 2]


@EACH
def test_operands_that_a_path_does_not_take_have_another_path(path: CodePath) -> None:
    everything = set(path.itemsizes) == {2, 4} and not path.copies_by_tma
    assert everything == (path.fallback == "")
    assert everything or PATHS[path.fallback].fallback == ""


def test_the_architectures_with_instructions_of_their_own_have_a_path_of_their_own() -> None:
    assert {name: facts(name).path for name in ("sm_90a", "sm_100a", "sm_90")} == {
        "sm_90a": "sm_90a",
        "sm_100a": "sm_80",
        "sm_90": "sm_80",
    }
    assert {path_on(name).name for name in known_archs()} == {"sm_80"}
    assert [str(facts(name).code_path) for path in PATHS.values() for name in path.only_on] == [
        path.name for path in PATHS.values() if path.only_on
    ]


FURTHER = """
from dataclasses import replace
import flashgen as fg
from flashgen.shared.paths import PATHS
like = PATHS["sm_90a"]
PATHS["sm_90f"] = replace(like, name="sm_90f", only_on=("sm_90f",))
for name in ("causal", "t5_bias"):
    spec = fg.load(f"specs/{name}.py")
    made, wanted = (fg.emit(spec, arch=arch) for arch in ("sm_90f", "sm_90a"))
    for one, other in zip((made.forward, *made.backward), (wanted.forward, *wanted.backward)):
        code, as_there = (each.text.partition("// ---- plan")[2] for each in (one, other))
        assert code == as_there, one.name
        print(one.plan.kernel, one.plan.path)
"""


def test_a_further_code_path_is_one_value() -> None:
    """A path with another name and Hopper's templates and rates has Hopper's kernels."""
    found = set(run_python("-c", FURTHER).stdout.splitlines())
    assert {f"{role} sm_90f" for role in ("forward", "fused", "captured")} <= found
