"""Code paths: what each of them names exists, and the architectures that take it."""

from __future__ import annotations

import importlib

import pytest

from flashgen.arch import Arch, facts, known
from flashgen.paths import PATHS, CodePath, path_on
from tests.support.paths import ROOT

EACH = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


@EACH
def test_what_a_code_path_names_exists(path: CodePath) -> None:
    folder = ROOT / "templates" / path.templates
    for kernel in ("forward", "backward_dkdv", "backward_dq", "backward_learned"):
        assert (folder / f"{kernel}.cu.j2").is_file()
    kernels = {
        key
        for name in path.models
        for key in importlib.import_module(f"flashgen.planner.models.{name}").MODELS
    }
    names = ("forward", "dkdv", "dq", "fused", "captured", "captured_exact")
    assert kernels == {(name, size) for name in names for size in path.itemsizes}
    if path.template_fields:
        importlib.import_module(f"flashgen.codegen.{path.template_fields}")
    assert path.tensor_rate in Arch.__dataclass_fields__
    assert set(path.persistent) <= set(names)


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
    assert {path_on(name).name for name in known()} == {"sm_80"}
    assert [str(facts(name).code_path) for path in PATHS.values() for name in path.only_on] == [
        path.name for path in PATHS.values() if path.only_on
    ]
