"""Functions of torch that a program replaces, and operators of its own, in mods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashgen as fg
from tests.support.flex_mods import noise, operands, torch_answer

Mod = Callable[..., Any]

WIDTH = [1.0]
TABLE = torch.nn.Parameter(noise(8))


def scaled(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *more: original(x, *more) * WIDTH[0]


@pytest.mark.parametrize(
    ("home", "name", "mod"),
    [
        (torch.Tensor, "tanh", lambda s, b, h, q, k: s.tanh() * 3),
        (torch.Tensor, "__add__", lambda s, b, h, q, k: s + (q - k)),
        (torch.Tensor, "__neg__", lambda s, b, h, q, k: -s),
        (torch.nn.Parameter, "exp", lambda s, b, h, q, k: s * TABLE.exp()[k]),
        (torch.nn.functional, "relu", lambda s, b, h, q, k: torch.nn.functional.relu(s)),
        (torch, "relu", lambda s, b, h, q, k: torch.nn.functional.relu(s)),
        (torch.Tensor, "tanh", lambda s, b, h, q, k: torch.nn.functional.tanhshrink(s)),
        (torch, "tanh", lambda s, b, h, q, k: torch.tanh(s) * 3),
    ],
    ids=[
        "method",
        "operator",
        "sign",
        "parameter",
        "function",
        "inside",
        "method inside",
        "builtin",
    ],
)
def test_a_replaced_function_of_torch_is_seen(
    home: Any, name: str, mod: Mod, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agrees() -> str:
        q, k, v = (x.detach() for x in operands(1, 2, 8, 8, dim=8))
        try:
            out = fg.flex_attention(q, k, v, mod)
        except fg.SpecError as error:
            return error.what
        torch.testing.assert_close(out, torch_answer(q, k, v, None, mod)[0], rtol=1e-4, atol=1e-5)
        return ""

    assert not agrees()
    assert not agrees()  # proved
    with monkeypatch.context() as patch:
        patch.setattr(home, name, scaled(getattr(home, name)))
        for width in (2.0, 0.5, 1.0):
            WIDTH[0] = width
            refused = agrees()
            assert not refused or "not torch's own" in refused
    assert not agrees()


@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    """Operators with a hidden state: of tensors, of parts that torch knows, and of numbers."""
    library = torch.library.Library("flashgen_tests_flex", "DEF")
    library.define("kernel(Tensor x) -> Tensor")
    library.impl("kernel", lambda x: x * WIDTH[0], "CPU")
    library.define("parts(Tensor x) -> Tensor")
    library.impl("parts", lambda x: x * WIDTH[0], "CompositeImplicitAutograd")
    library.define("number(float x) -> Tensor")
    library.impl("number", lambda x: torch.tensor(x * WIDTH[0]), "CompositeExplicitAutograd")
    yield torch.ops.flashgen_tests_flex
    library._destroy()


@pytest.mark.parametrize(
    "use",
    [
        lambda own, s: s * own.kernel(torch.tensor(2.0)),
        lambda own, s: s * own.kernel.default(torch.tensor(2.0)),
        lambda own, s: own.parts(s),
        lambda own, s: s * own.number(2.0),
        lambda own, s: s * own.kernel(TABLE.detach())[0],
    ],
    ids=["constant", "overload", "score", "number", "captured"],
)
def test_a_custom_operator_is_refused_and_its_result_is_captured(operators: Any, use: Any) -> None:
    q, k, v = (x.detach() for x in operands(1, 2, 8, 8, dim=8))
    for width in (1.0, 2.0):
        WIDTH[0] = width
        with pytest.raises(fg.SpecError, match="custom operator") as caught:
            fg.flex_attention(q, k, v, lambda s, b, h, q, k: use(operators, s))
        assert "as a captured tensor" in caught.value.way_out
        made = operators.number(2.0)
        out = fg.flex_attention(q, k, v, lambda s, b, h, q, k, made=made: s * made)
        wanted, _ = torch_answer(q, k, v, None, lambda s, b, h, q, k: s * 2.0 * width)  # noqa: B023
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
