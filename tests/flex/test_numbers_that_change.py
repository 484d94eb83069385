"""Captured numbers that change from call to call: a constant, then a run-time scalar."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen import SpecError
from flashgen.calls.ops import api
from flashgen.frontends.flex import known_mods
from tests.support.flex_mods import compared, noise, operands

Mod = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("nothing_is_known")


def kernels(calls: Iterator[Any] | list[Any]) -> int:
    """How many operators were made by calls."""
    before = api._attention.cache_info().misses
    for _ in calls:
        pass
    return api._attention.cache_info().misses - before


NUMBERS: dict[str, Callable[[Any], Mod]] = {
    "a factor": lambda w: lambda s, b, h, q, k: s * w,
    "two factors": lambda w: lambda s, b, h, q, k: s * w + (q - k) / (w + 2),
    "a cap": lambda w: lambda s, b, h, q, k: w * torch.tanh(s / w),
    "an exponent": lambda w: lambda s, b, h, q, k: s.abs() ** w,
    "bounds": lambda w: lambda s, b, h, q, k: s.clamp(-w, w),
    "a bound beside a constant": lambda w: lambda s, b, h, q, k: torch.clamp(s, min=-w, max=5),
    "a choice": lambda w: lambda s, b, h, q, k: torch.where(q >= k, s, w),
    "a tensor of a number": lambda w: lambda s, b, h, q, k: s + torch.tensor(w),
    "a tensor of numbers": lambda w: lambda s, b, h, q, k: s + torch.tensor([w, 2 * w])[k % 2],
    "a filled tensor": lambda w: lambda s, b, h, q, k: s * torch.full((3,), w)[k % 3],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_changes_costs_two_kernels(name: str) -> None:
    make = NUMBERS[name]
    assert kernels(compared(make(w / 4)) for w in range(1, 10, 2)) <= 2
    assert kernels(compared(make(w / 4)) for w in range(10, 2, -2)) == 0


def test_a_width_of_a_mask() -> None:
    def window(w: int) -> Mod:
        return lambda b, h, q, k: ((q - k).abs() <= w) & (q % w >= k % w)

    assert kernels(compared(None, window(w)) for w in range(1, 10)) == 2


def test_a_number_of_a_layer_as_an_index() -> None:
    table = noise(20, 8)

    def layer(number: int) -> Mod:
        return lambda s, b, h, q, k: s + table[number, k]

    assert kernels(compared(layer(number)) for number in range(-4, 6)) == 2


BYTES = torch.tensor([0, 255, 128, 7, 200, 64, 1, 90], dtype=torch.uint8)
SMALL = torch.tensor([-128, 127, 0, -1, 64, 3, -77, 50], dtype=torch.int8)
WRAPPED: dict[str, Callable[[Any], Mod]] = {
    "a sum": lambda w: lambda s, b, h, q, k: s + (BYTES[k] + w) / 50,
    "a difference": lambda w: lambda s, b, h, q, k: s + (w - BYTES[k]) / 50,
    "a product": lambda w: lambda s, b, h, q, k: s + SMALL[k] * w / 50,
    "a product with a cast": lambda w: lambda s, b, h, q, k: s + k.to(torch.int8) * w / 50,
    "a shift": lambda w: lambda s, b, h, q, k: s + (SMALL[k] << w % 8) / 50,
    "a quotient": lambda w: lambda s, b, h, q, k: s + SMALL[k] // min(w - 8, -1),
    "a choice": lambda w: lambda s, b, h, q, k: s + torch.where(q >= k, BYTES[k], -w) / 50,
    "a bound": lambda w: lambda s, b, h, q, k: s + torch.clamp(BYTES[k], max=w) / 50,
    "beside a condition": lambda w: lambda s, b, h, q, k: s + BYTES[k] * (q > 3) * w / 50,
    "a float": lambda w: lambda s, b, h, q, k: s + BYTES[k] * (w / 4) / 50,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_number_that_changes_wraps_beside_narrow_integers(name: str) -> None:
    assert kernels(compared(WRAPPED[name](w)) for w in (1, 60, 7, 3, 11)) == 2


def test_a_number_that_changes_in_a_quotient_of_narrow_integers_is_a_float() -> None:
    q, k, v = (x.detach() for x in operands(1, 2, 8, 8, dim=8))
    for w in (3, 300, -2):
        out = fg.flex_attention(q, k, v, lambda s, b, h, q, k, w=w: s + BYTES[k] / w)
        wanted = torch.softmax(q @ k.mT / 8**0.5 + BYTES / w, -1) @ v
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_powers_of_integers_are_exact() -> None:
    for w in (2, 3, 4, 5, 0):
        compared(lambda s, b, h, q, k, w=w: s + (k % 8 + 300) ** w % 7)
        compared(lambda s, b, h, q, k, w=w: s + (BYTES[k] ** w) / 50)


def test_several_numbers_of_which_some_change() -> None:
    def mod(a: float, b: float, c: float) -> Mod:
        return lambda s, b_, h, q, k: a * torch.tanh(s / b) + c * (q - k)

    changes = [(1.0, 2.0, 3.0), (1.0, 2.0, 4.0), (1.0, 2.0, 5.0), (3.0, 2.0, 5.0), (4.0, 5.0, 6.0)]
    assert kernels(compared(mod(*each)) for each in changes) == 4
    later = [tuple(x / 7 for x in each) for each in changes]
    assert kernels(compared(mod(*each)) for each in later) == 0


def test_the_first_value_keeps_its_kernel_and_its_bits() -> None:
    make = NUMBERS["a cap"]
    first = compared(make(0.7))
    compared(make(0.9))
    assert torch.equal(compared(make(0.7)), first)


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (lambda w: lambda s, b, h, q, k: s + TABLE[w:, 0][0], "slice"),
        (lambda w: lambda s, b, h, q, k: torch.nn.functional.leaky_relu(s, w / 10), "slope"),
        (lambda w: lambda s, b, h, q, k: s + (q + (2**40 + w)) % 7, "integer"),
        (lambda w: lambda s, b, h, q, k: torch.where(q >= k, s, -1e30 - w * 1e20), "mask"),
    ],
    ids=["slice", "slope", "integer", "mask"],
)
def test_the_eighth_constant_is_an_error(make: Callable[[int], Mod], operation: str) -> None:
    for w in range(7):
        compared(make(w))
    with pytest.raises(SpecError, match="value number 8") as caught:
        compared(make(7))
    assert "test_numbers_that_change.py" in caught.value.where
    compared(make(3))  # those that there are go on


TABLE = noise(9, 2)


def repeated(n: int) -> Mod:
    def mod(s, b, h, q, k):
        for _ in range(n):
            s = s * 1.01 + 0.01 * q
        return s

    return mod


def chosen(n: int) -> Mod:
    bits = [bool(n >> place & 1) for place in range(8)]
    return lambda s, b, h, q, k: torch.where(torch.tensor(bits)[k], s, s * 2)


VERSIONS: dict[str, Callable[[int], Mod]] = {
    "a list of bools": chosen,
    "the count of a loop": repeated,
    "a list of another length": lambda n: lambda s, b, h, q, k: s + torch.tensor([0.5] * n)[k % n],
    "a range": lambda n: lambda s, b, h, q, k: s * torch.arange(n + 8)[k],
    "a length in an expression": lambda n: lambda s, b, h, q, k: s + torch.arange(n).flip(0)[k % n],
    "a shape": lambda n: lambda s, b, h, q, k: s + torch.stack([q.float()] * n).sum(0),
    "a sum over a captured tensor": lambda n: functools.partial(with_sum, noise(n)),
}


def with_sum(table, s, b, h, q, k):
    return s + table.sum()


@pytest.mark.parametrize("name", VERSIONS)
def test_the_versions_of_a_mod_are_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_mods, "MOST_VERSIONS", 7)
    make = VERSIONS[name]
    for n in range(1, 8):
        compared(make(n))
    with pytest.raises(SpecError, match="version number 8") as caught:
        compared(make(8))
    assert "test_numbers_that_change.py" in caught.value.where
    compared(make(3))  # those that there are go on


def test_the_versions_of_a_mod_without_operations_are_limited_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_mods, "MOST_VERSIONS", 7)
    q, k, v = (x.detach() for x in operands(1, 2, 8, 8, dim=8))

    def returned(n: int) -> Mod:
        return lambda *given: [*given, -math.inf, -0.0, math.inf][n]

    for n in range(7):
        fg.flex_attention(q, k, v, returned(n))
    with pytest.raises(SpecError, match="version number 8") as caught:
        fg.flex_attention(q, k, v, returned(7))
    assert "test_numbers_that_change.py" in caught.value.where


def test_lengths_that_change_no_expression_are_no_versions() -> None:
    def mod(table: torch.Tensor, ids: torch.Tensor) -> Mod:
        weights = torch.nn.functional.softmax
        return lambda s, b, h, q, k: s * weights(table, 0)[h] + ids[k]

    table = noise(2)
    assert kernels(compared(mod(table, noise(8 + n))) for n in range(12)) == 1


def test_the_same_lines_with_other_functions_are_other_mods() -> None:
    functions = (torch.sin, torch.cos, torch.tanh, torch.exp, torch.abs, torch.erf, torch.sigmoid)
    for function in (*functions, torch.relu, torch.square):
        compared(lambda s, b, h, q, k, function=function: function(s))


def test_numbers_that_are_written_in_the_code_are_constants_of_deterministic_calls() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        bits = []
        for values in ([0.7, 0.9, 1.1], [1.1, 0.9, 0.7]):
            known_mods._variants_of_keys.clear()
            made = [compared(NUMBERS["a cap"](w)) for w in values]
            assert kernels(compared(NUMBERS["a cap"](w)) for w in (0.3, 0.5)) == 0
            bits.append(dict(zip(values, made, strict=True)))
        assert all(torch.equal(bits[0][w], bits[1][w]) for w in bits[0])
        sizes = known_mods.CallSizes(1, 2, 8, 8, torch.device("cpu"))
        traced, _ = known_mods.read(None, lambda s, b, h, q, k: 20 * torch.tanh(s / 20), sizes)
        assert not traced.numbers
    finally:
        torch.use_deterministic_algorithms(False)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, s, b, h, q, k):
        self.count += 1
        return s * self.count


DRAWS: dict[str, Callable[[], Mod]] = {
    "random": lambda: lambda s, b, h, q, k: s * random.random(),
    "a coin": lambda: lambda s, b, h, q, k: s if random.getrandbits(1) else s * 2,
    "numpy": lambda: lambda s, b, h, q, k: s * np.random.rand(),
    "an array of numpy": lambda: (
        lambda s, b, h, q, k: s + torch.from_numpy(np.random.rand(8).astype("f"))[k]
    ),
    "a generator": lambda: functools.partial(drawn, random.Random(5)),
    "the time": lambda: lambda s, b, h, q, k: s * time.perf_counter_ns() % 100003,
    "a counter": Counter,
    "an iterator": lambda: functools.partial(drawn_next, itertools.count(1)),
    "torch": lambda: lambda s, b, h, q, k: s * torch.rand(()),
    "torch in place": lambda: lambda s, b, h, q, k: s * torch.zeros(()).uniform_(),
}


def drawn(generator, s, b, h, q, k):
    return s * generator.random()


def drawn_next(numbers, s, b, h, q, k):
    return s * next(numbers)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
def test_a_mod_that_draws_is_refused(name: str, known: bool) -> None:
    if known:  # kernels for such numbers
        for w in (1, 2, 3, 0.1, 0.2):
            compared(NUMBERS["a factor"](w))
    q, k, v = (x.detach() for x in operands(1, 2, 8, 8, dim=8))
    mod = DRAWS[name]()
    for _ in range(2):
        with pytest.raises(SpecError, match=r"something else each time|random numbers") as caught:
            fg.flex_attention(q, k, v, mod)
        assert "test_numbers_that_change.py" in caught.value.where


def test_memory_does_not_grow_with_the_values() -> None:
    import gc
    import tracemalloc

    make = NUMBERS["a cap"]
    for w in range(1, 10):
        compared(make(w / 8))
    gc.collect()
    tracemalloc.start()
    for w in range(10, 30):
        compared(make(w / 8))
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 20 * 20_000  # a kernel for each would take more than 100,000 bytes a step
