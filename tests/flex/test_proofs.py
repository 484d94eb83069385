"""Mods of which it is proved what they read, so that a call need not record them again."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import and_masks, or_masks

import flashgen as fg
from flashgen.frontends.flex import known_mods
from flashgen.frontends.flex.proofs import prove
from tests.support.flex_mods import MAKERS, noise, operands, torch_answer

Mod = Callable[..., Any]
WIDTH = 3
TABLE = noise(4)


def helper(x: Any, factor: Any = 2) -> Any:
    return x * factor


def cells(w: Any = 2, table: Any = None) -> Mod:
    table = noise(8) if table is None else table

    def mod(s, b, h, q, k):
        near = torch.where((q - k).abs() <= w, s, 20 * torch.tanh(s / 20))
        return helper(near) + table[k] * math.sqrt(w)

    return mod


def test_a_proved_mod_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    inner = known_mods.record

    def counted(*given: Any) -> Any:
        recorded.append(1)
        return inner(*given)

    monkeypatch.setattr(known_mods, "record", counted)
    q, k, v = (x.detach() for x in operands(1, 2, 8, 8, dim=8))

    def calls(mod: Mod) -> int:
        recorded.clear()
        wanted, _ = torch_answer(q, k, v, None, mod)
        torch.testing.assert_close(fg.flex_attention(q, k, v, mod), wanted, rtol=1e-4, atol=1e-5)
        return len(recorded)

    assert calls(cells()) > 0
    assert calls(cells()) == 0  # another closure of the same code, and another tensor
    assert calls(cells(table=noise(8, seed=5))) == 0
    assert calls(cells(3)) > 0
    assert calls(cells(3.0)) > 0  # not the same number, though it is equal
    assert calls(cells(table=noise(9))) > 0  # a mod may ask for the length
    assert calls(cells(table=noise(8).double())) > 0
    monkeypatch.setitem(globals(), "helper", lambda x: x * 3)
    assert calls(cells()) > 0
    monkeypatch.undo()


@pytest.mark.parametrize("name", MAKERS)
def test_common_mods_are_proved(name: str) -> None:
    mask_mod, score_mod, _ = MAKERS[name](2, 4, 8, 8)
    assert prove((mask_mod, score_mod)) is not None


def window(w: int) -> Mod:
    return lambda b, h, q, k: (q - k).abs() <= w


def test_combined_masks_are_proved_with_their_parts() -> None:
    def key(*widths: int, combined: Any = and_masks) -> Any:
        proof = prove((combined(*map(window, widths)), None))
        assert proof is not None
        return proof.key

    assert key(2, 3) == key(2, 3)
    others = [key(2, 4), key(3, 2), key(2), key(2, 3, combined=or_masks)]
    assert len({key(2, 3), *others}) == 5


class Options:
    w = 2

    def __init__(self) -> None:
        self.held = 3

    def __call__(self, s, b, h, q, k):
        return s * self.held


OPTIONS = Options()


def stateful(s, b, h, q, k):
    return s * stateful.w


stateful.w = 2


def unproved() -> dict[str, Mod]:
    """Mods whose code may read or change something else than numbers, tensors and functions."""
    listed, counted = [2], 0

    def writes_a_cell(s, b, h, q, k):
        nonlocal counted
        counted = counted + 1
        return s * counted

    def makes_a_function(s, b, h, q, k):
        return (lambda x: x * WIDTH)(s)

    def imports(s, b, h, q, k):
        import random

        return s * random.randint(1, 2)

    def in_place(s, b, h, q, k):
        s += 1
        return s

    def catches(s, b, h, q, k):
        try:
            return s * WIDTH
        except TypeError:
            return s

    return {
        "a list": lambda s, b, h, q, k: s * listed[0],
        "an object": lambda s, b, h, q, k: s * OPTIONS.held,
        "a class": lambda s, b, h, q, k: s * Options.w,
        "a callable object": OPTIONS,
        "a method": OPTIONS.__call__,
        "a partial": functools.partial(cells(), 2),
        "globals": lambda s, b, h, q, k: s * globals()["WIDTH"],
        "getattr": lambda s, b, h, q, k: s * getattr(OPTIONS, "held"),  # noqa: B009
        "eval": lambda s, b, h, q, k: s * eval("WIDTH"),
        "a function with attributes": stateful,
        "an attribute of a tensor": lambda s, b, h, q, k: s * TABLE.scale,
        "a method that changes": lambda s, b, h, q, k: s.add_(1),
        "an unknown function of torch": lambda s, b, h, q, k: s * torch.rand(()),
        "a module of the user": lambda s, b, h, q, k: s * known_mods.WIDTH,
        "a cell that is written": writes_a_cell,
        "a function of its own": makes_a_function,
        "an import": imports,
        "an operation in place": in_place,
        "an exception": catches,
    }


@pytest.mark.parametrize("name", unproved())
def test_nothing_is_assumed_of_other_code(name: str) -> None:
    assert prove((None, unproved()[name])) is None


def test_a_function_of_torch_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def mod(s, b, h, q, k):
        return torch.tanh(s) + functional.relu(s)

    keys = [prove((None, mod)).key]
    monkeypatch.setattr(torch, "tanh", torch.sin)
    keys.append(prove((None, mod)).key)
    monkeypatch.setattr(functional, "relu", torch.sin)
    keys.append(prove((None, mod)).key)
    assert len(set(keys)) == 3
    monkeypatch.setitem(globals(), "functional", OPTIONS)
    assert prove((None, mod)) is None
