"""Calls of flex_attention that a CUDA graph captures; the capture itself is pretended."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flashgen as fg
from flashgen.frontends import flex
from flashgen.frontends.flex import block_masks, graph_capture, known_mods
from tests.support.flex_mods import causal_mask, noise, operands


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    state = {"on": True}
    for module in (flex, block_masks, known_mods):
        monkeypatch.setattr(module, "captures_a_graph", lambda device: state["on"])
    monkeypatch.setattr(graph_capture, "_warned", set())
    return state


def told(mod: Any = None, block_mask: Any = None) -> list[str]:
    q, k, v = (x.detach() for x in operands(1, 2, 64, 64, dim=8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fg.flex_attention(q, k, v, mod, block_mask)
    return [str(each.message) for each in caught if "CUDA graph" in str(each.message)]


def test_nothing_is_said_of_mods_that_read_tensors_and_literals(capture: dict[str, bool]) -> None:
    table = noise(64)
    assert told(lambda s, b, h, q, k: s * 2 + table[k]) == []
    assert told() == []


def test_numbers_are_named_once_with_their_lines(capture: dict[str, bool]) -> None:
    def scaled(w: float) -> Any:
        return lambda s, b, h, q, k: s * w

    (text,) = told(scaled(0.75))
    assert "numbers of the mods: 0.75 (tests/flex/test_graph_capture.py:" in text
    assert told(scaled(0.75)) == []
    assert "0.5" in told(scaled(0.5))[0]
    capture["on"] = False
    assert told(scaled(0.25)) == []


def chosen_by(value: Any) -> Any:
    table = noise(64)

    def mod(s, b, h, q, k):
        return s * table[k] if value else s

    return mod


def repeated(count: int) -> Any:
    def mod(s, b, h, q, k):
        for _ in range(count):
            s = s * 2
        return s

    return mod


def filled(value: float) -> Any:
    return lambda s, b, h, q, k: torch.where(q >= k, s, value)


def divided(rounding: str) -> Any:
    return lambda s, b, h, q, k: s + torch.div(q, 2, rounding_mode=rounding)


def equal_to_a_literal(value: float) -> Any:
    return lambda s, b, h, q, k: s * value + 2.0


def of_a_default(value: bool) -> Any:
    return lambda s, b, h, q, k, kept=value: s if kept else s * 2


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (chosen_by, True),
        (chosen_by, 0),
        (repeated, 3),
        (filled, -torch.inf),
        (divided, "floor"),
        (equal_to_a_literal, 2.0),
        (of_a_default, True),
    ],
)
def test_values_that_are_no_operands_are_named(
    capture: dict[str, bool], make: Any, value: Any
) -> None:
    (text,) = told(make(value))
    assert f"reads {value!r} (tests/flex/test_graph_capture.py:" in text


def test_constants_of_modules_are_not_named(capture: dict[str, bool]) -> None:
    assert told(lambda s, b, h, q, k: torch.where(q >= k, s, -torch.inf)) == []
    assert told(lambda s, b, h, q, k: s + q.to(torch.float32)) == []


def test_mods_that_may_read_anything_are_named(capture: dict[str, bool]) -> None:
    options = {"causal": True}

    def chosen(s, b, h, q, k):
        return s * 2 if options["causal"] else s

    (text,) = told(chosen)
    assert "other Python values that chosen reads (tests/flex/test_graph_capture.py:" in text


def test_blocks_are_named_and_never_read(capture: dict[str, bool]) -> None:
    mask = create_block_mask(causal_mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        told(block_mask=mask)
    capture["on"] = False
    assert told(block_mask=mask) == []
    capture["on"] = True
    (text,) = told(block_mask=mask)
    assert "kv_num_blocks, kv_indices" in text
    mask.kv_num_blocks.fill_(0)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        told(block_mask=mask)


def test_what_changes_on_a_gpu_is_told_by_versions() -> None:
    seen = block_masks._Seen(torch.zeros(3, device="meta"))  # no elements to compare
    tensor = torch.zeros(3, device="meta")
    assert not seen.is_same(tensor)
    seen = block_masks._Seen(tensor)
    assert seen.is_same(tensor)
    tensor.add_(1)
    assert not seen.is_same(tensor)
    with torch.inference_mode():
        tensor = torch.zeros(3, device="meta")
    assert not block_masks._Seen(tensor).is_same(tensor)  # torch counts no versions
