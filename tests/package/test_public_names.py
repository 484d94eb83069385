"""The public names: one table, and the imports that type checkers read."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass
from importlib import import_module

import pytest

import flashgen as fg
from flashgen.shared.errors import FrozenError, called_by_users
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
        ("flashgen.integrations.diffusers", "flashgen.frontends.diffusers"),
        ("flashgen.integrations.transformers", "flashgen.frontends.transformers"),
    ],
)
def test_a_public_module_has_the_names_of_its_package(public: str, package: str) -> None:
    names = {name: getattr(import_module(package), name) for name in import_module(package).__all__}
    module = import_module(public)
    assert {name: getattr(module, name) for name in module.__all__} == names


CALLED = [
    getattr(importlib.import_module(module), name)
    for module in (
        "flashgen",
        "flashgen.distributed",
        "ptx_emulator",
        "flashgen.integrations.diffusers",
        "flashgen.integrations.torch",
        "flashgen.integrations.transformers",
    )
    for name in importlib.import_module(module).__all__
]
CALLED = [
    each
    for each in (*CALLED, fg.AttentionSpec(name="empty").replace, fg.Layout.of)
    if callable(each) and not (inspect.isclass(each) and issubclass(each, BaseException))
]


@pytest.mark.parametrize("public", CALLED, ids=lambda each: getattr(each, "__qualname__", "size"))
def test_a_public_callable_refuses_arguments_that_it_does_not_have(public: object) -> None:
    for given, named in ((range(40), {}), ((), {"no_such_argument": 1})):
        with pytest.raises(fg.FlashgenError) as caught:
            public(*given, **named)  # type: ignore[operator]
        error = caught.value
        assert all((error.what, error.where, error.numbers, error.way_out))
        assert error.__cause__ is None
        assert error.__context__ is None


def test_wrong_arguments_are_answered_with_the_users_line_and_what_there_is() -> None:
    with pytest.raises(fg.SpecError) as caught:
        fg.BlockSparse(lambda i, j: True, block=8)  # type: ignore[call-arg]
    assert caught.value.where.startswith("tests/package/test_public_names.py:")
    assert "takes (layout=None, block_q=64, block_k=64, heads='q')" in caught.value.numbers
    assert caught.value.way_out == "block_q=... instead of block=..."
    with pytest.raises(fg.InputError) as caught_too:
        fg.distributed.balance(seq="a")  # type: ignore[call-arg]
    assert "missing a required argument: 'spec'" in caught_too.value.what
    way_out = caught_too.value.way_out
    assert way_out == "fg.distributed.balance(spec, seq, world), and others by name"


def test_the_signature_stays_and_a_type_error_inside_a_function_is_its_own() -> None:
    @called_by_users()
    def length(of: object, *, least: int = 0) -> int:
        return max(len(of), least)  # type: ignore[arg-type]

    assert str(inspect.signature(length)) == "(of: 'object', *, least: 'int' = 0) -> 'int'"
    assert list(inspect.signature(fg.Tensor).parameters) == ["name", "dims", "dtype", "grad"]
    assert length("ab") == 2
    with pytest.raises(TypeError, match="has no len"):
        length(3)


def test_a_field_of_a_spec_cannot_be_set_and_the_way_out_works() -> None:
    spec = fg.AttentionSpec(head_dim=64)
    for change in (lambda: setattr(spec, "head_dim", 32), lambda: delattr(spec, "head_dim")):
        with pytest.raises(FrozenError, match=r"head_dim") as caught:
            change()
        assert isinstance(caught.value, fg.SpecError)
        assert isinstance(caught.value, FrozenInstanceError)
        assert "spec.replace(head_dim=...)" in caught.value.way_out
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert spec.replace(head_dim=32).head_dim == 32
    with pytest.raises(FrozenError):
        spec.own = 3  # type: ignore[attr-defined]


def test_a_frozen_value_can_still_be_made_and_copied() -> None:
    @called_by_users()
    @dataclass(frozen=True)
    class Pair:
        first: int
        second: int = 2

    assert Pair(1) == Pair(1, 2)
    assert Pair(1).second == 2
    with pytest.raises(fg.InputError, match="missing"):
        Pair()  # type: ignore[call-arg]
