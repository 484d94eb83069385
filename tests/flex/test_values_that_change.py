"""Values that mods read in any way that Python has, each changed between calls."""

from __future__ import annotations

import collections
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import flashgen as fg
from flashgen.frontends.flex.proofs import prove
from flashgen.shared.errors import SpecError
from tests.support.flex_mods import compared, operands
from tests.support.ways_to_read import WAYS, Get

Mod = Callable[..., Any]


VALUES = (2, 5, 3)


@pytest.mark.parametrize("name", WAYS)
def test_no_result_is_of_an_earlier_value(name: str) -> None:
    get, change = WAYS[name]()

    def score_mod(score, b, h, q, k):
        return score + get() * (q - k)

    def mask_mod(b, h, q, k):
        return (q - k).abs() < get()

    proofs = []
    for value in VALUES:
        change(value)
        proofs.append(prove((None, get)))
        compared(score_mod, mask_mod)
    proved = [proof.key for proof in proofs if proof is not None and not proof.tensors]
    assert len(set(proved)) == len(proved)


def test_there_are_enough_ways() -> None:
    assert len(WAYS) >= 60


# Random compositions.


def _nested(get: Get, generator: random.Random) -> Get:
    """Another function that reads the same value, by one more step."""
    holder, name = types.SimpleNamespace(get=get), "get"

    class Wrapped:
        def __init__(self) -> None:
            self.inner = get

        def __call__(self) -> Any:
            return self.inner()

        @property
        def value(self) -> Any:
            return self.inner()

    wrapped, listed, mapped = Wrapped(), [get], collections.ChainMap({"f": get})

    def default(f: Get = get) -> Any:
        return f()

    def iterated() -> Iterator[Any]:
        yield get()

    def number_of_a_tensor() -> Any:
        value = get()
        return torch.tensor(float(value)) if isinstance(value, int | float) else value

    steps: list[Get] = [
        lambda: get(),
        lambda: listed[0](),
        lambda: mapped["f"](),
        lambda: getattr(holder, name)(),
        lambda: wrapped.value,
        lambda: next(iterated()),
        lambda: [f() for f in listed][-1],
        lambda: max((get() for _ in "1"), key=lambda x: 0),
        lambda: eval("f()", {"f": get}),
        lambda: get() + 0,
        lambda: get() * 1.0,
        lambda: (get(),)[0],
        number_of_a_tensor,
        wrapped,
        default,
        functools.partial(lambda f: f(), get),
        functools.reduce(lambda f, _: lambda: f(), range(3), get),
    ]
    return generator.choice(steps)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_random_compositions_of_ways(seed: int) -> None:
    generator = random.Random(seed)
    (get, change), (other, change_other) = (
        WAYS[name]() for name in generator.sample(sorted(WAYS), 2)
    )
    for _ in range(generator.randint(1, 4)):
        get, other = _nested(get, generator), _nested(other, generator)
    if generator.random() < 0.5:
        get = functools.partial(lambda a, b: a() + 0 * b(), get, other)

    def score_mod(score, b, h, q, k):
        return score * other() + get() * (q - k)

    def mask_mod(b, h, q, k):
        return ((q - k).abs() < get()) | (q == k + other())

    for _ in range(5):
        change(generator.randint(1, 6))
        change_other(generator.randint(1, 6))
        compared(score_mod)
        compared(score_mod, mask_mod)


def written_by_a_view(w: float) -> torch.Tensor:
    made = torch.zeros(8)
    part = made[2:4]
    part += w
    return made


def written_as_out(w: float) -> torch.Tensor:
    made = torch.zeros(8)
    torch.add(torch.full((8,), w), 1.0, out=made)
    return made


def written_between_reads(w: float) -> torch.Tensor:
    made = torch.full((8,), w)
    before = made * 1
    made *= 2
    return before + made


def written_by_numpy(w: float) -> torch.Tensor:
    made = torch.zeros(8)
    made.numpy()[2] = w
    return made


@pytest.mark.parametrize(
    "make", [written_by_a_view, written_as_out, written_between_reads, written_by_numpy]
)
def test_a_mod_never_writes_into_what_it_makes(make: Callable[[float], torch.Tensor]) -> None:
    q, k, v = (x.detach() for x in operands(1, 2, 8, 8, dim=8))
    for w in (1.0, 2.0, 3.0):
        with pytest.raises(SpecError, match=r"writes into a tensor|read-only"):
            fg.flex_attention(q, k, v, lambda s, b, h, q, k, w=w: s + make(w)[k])


class Replaces(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] * 3 if func is torch.tanh else func(*args, **(kwargs or {}))


def test_modes_around_a_call_leave_nothing_in_kernels() -> None:
    def score_mod(score, b, h, q, k):
        return torch.tanh(score) + q * 0.37

    q, k, v = (x.detach() for x in operands(1, 2, 8, 8, dim=8))
    with Replaces():
        fg.flex_attention(q, k, v, score_mod)
    compared(score_mod)


def test_a_captured_tensor_is_shown_as_it_is() -> None:
    held, shown = torch.tensor([1.5, 2.5]), []

    def score_mod(score, b, h, q, k):
        shown.append(str(held))
        return score * held[h]

    q, k, v = (x.detach() for x in operands(1, 2, 8, 8, dim=8))
    fg.flex_attention(q, k, v, score_mod)
    assert shown[0] == str(held)
