"""Reuse of traced mods by flex_attention, and the changes that cause another trace."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import flashgen as fg
from flashgen.calls.ops import api
from flashgen.frontends.flex import known_mods, traced_mods
from tests.support import flex_mods
from tests.support.flex_mods import MAKERS, causal_mask, compared, noise, operands, torch_answer
from tests.support.paths import from_root

WINDOW = 5
global_table = noise(64)


class Counts:
    """How often mods were read and how many operators were made since the last look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read = 0
        self._before = 0
        inner = known_mods.trace

        def counted(*args, **kwargs):
            self.read += 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(known_mods, "trace", counted)
        self.look()

    def look(self) -> tuple[int, int]:
        made = api._attention.cache_info().misses
        found = self.read, made - self._before
        self.read, self._before = 0, made
        return found


@pytest.fixture
def counts(nothing_is_known: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    return Counts(monkeypatch)


call = functools.partial(compared, sizes=(2, 4, 24, 32))


def test_other_lengths_batches_and_contents(counts: Counts) -> None:
    def biased(bias, ids):
        def document_mask(b, h, q, k):
            return ids[b, q] == ids[b, k]

        def bias_mod(score, b, h, q, k):
            return score + bias[h, q - k] + bias[-1, k]

        return bias_mod, document_mask

    for seed, sizes in enumerate([(2, 4, 24, 32), (2, 4, 40, 17), (3, 4, 24, 33), (1, 2, 1, 1)]):
        length = max(sizes[2:])
        bias = noise(sizes[1], 2 * length, seed=seed)
        ids = (noise(sizes[0], length, seed=seed) > 0).int()
        call(*biased(bias, ids), sizes=sizes)
        assert counts.look() == ((1, 1) if seed == 0 else (0, 0))


def test_a_bound_that_only_some_lengths_have(counts: Counts) -> None:
    """A negative index counts from the end: where there can be one, the kernel must look."""
    table = noise(80)

    def mod(score, b, h, q, k):
        return score + table[q - k + 31]

    call(mod, sizes=(1, 2, 32, 32))
    assert counts.look() == (1, 1)
    call(mod, sizes=(1, 2, 20, 30))
    assert counts.look() == (0, 0)
    call(mod, sizes=(1, 2, 20, 50))
    assert counts.look() == (1, 1)
    call(mod, sizes=(1, 2, 10, 45))
    assert counts.look() == (0, 0)


def test_numbers_are_constants(counts: Counts) -> None:
    def window(width):
        return lambda b, h, q, k: (q - k).abs() <= width

    call(mask_mod=window(5))
    assert counts.look() == (1, 1)
    call(mask_mod=window(5))
    assert counts.look() == (0, 0)
    call(mask_mod=window(6))
    assert counts.look() == (1, 1)
    call(mask_mod=window(6.0))
    assert counts.look()[0] == 1  # not the same number, though it is equal
    call(mask_mod=window(torch.tensor(5)))
    assert counts.look() == (1, 1)
    call(mask_mod=window(torch.tensor(7)))
    assert counts.look() == (0, 0)


def test_dtypes_and_gradients_are_part_of_it(counts: Counts) -> None:
    def biased(bias):
        return lambda score, b, h, q, k: score + bias[k]

    call(biased(noise(32)))
    assert counts.look() == (1, 1)
    call(biased(noise(32).requires_grad_()))
    assert counts.look() == (1, 1)
    call(biased(noise(32).half()))
    assert counts.look() == (1, 1)
    call(biased(noise(32, seed=3)))
    assert counts.look() == (0, 0)


def test_an_element_of_a_constant_has_its_own_shape_and_dtype() -> None:
    """Also where another mod has applied the same operations to constants of other kinds."""
    pairs = [[0.5, 2.0]] * 32
    compared(lambda s, b, h, q, k: s + torch.tensor([0.5] * 32)[k], sizes=(1, 2, 8, 32))
    compared(lambda s, b, h, q, k: torch.where(torch.tensor([True, False] * 16)[k], s, -s))

    def shape_in_python(s, b, h, q, k):
        x = torch.tensor(pairs)[k]
        return s + x.sum() * x.numel()

    compared(shape_in_python)

    def dtype_in_python(s, b, h, q, k):
        return s + (2 if (q / 2).dtype == torch.float64 else 1) * (q - k)

    q, k, v = (x.detach() for x in operands(1, 2, 8, 8))
    found = [fg.flex_attention(q, k, v, dtype_in_python)]
    torch.set_default_dtype(torch.float64)
    try:
        found.append(fg.flex_attention(q, k, v, dtype_in_python))
    finally:
        torch.set_default_dtype(torch.float32)
    wanted = fg.flex_attention(q, k, v, lambda s, b, h, q, k: s + 2 * (q - k))
    torch.testing.assert_close(found[1], wanted)
    assert not torch.allclose(found[0], wanted)


def test_one_tensor_twice_is_one_capture() -> None:
    def both(a, c):
        return lambda score, b, h, q, k: score + a[q] - c[k]

    call(both(global_table, global_table))
    call(both(noise(40), noise(41)))


def test_globals(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    def mod(score, b, h, q, k):
        return score + global_table[k] * (q - k < WINDOW)

    call(mod)
    assert counts.look() == (1, 1)
    monkeypatch.setitem(globals(), "global_table", noise(50))
    call(mod)
    assert counts.look() == (0, 0)
    monkeypatch.setitem(globals(), "WINDOW", 7)
    call(mod)
    assert counts.look() == (1, 1)


def helper(score, table, index):
    return score + table[index] * WINDOW


def test_helpers_partials_and_defaults(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    def mod(table, score, b, h, q, k, *, factor=2):
        return helper(score, table, k) * factor

    call(functools.partial(mod, noise(40)))
    assert counts.look() == (1, 1)
    call(functools.partial(mod, noise(44)))
    assert counts.look() == (0, 0)
    call(functools.partial(mod, noise(44), factor=3))
    assert counts.look() == (1, 1)
    monkeypatch.setitem(globals(), "WINDOW", 8)
    call(functools.partial(mod, noise(40)))
    assert counts.look() == (1, 1)


class Options:
    unread = object()

    def __init__(self, width, table):
        self.width = width
        self.table = table

    @property
    def doubled(self):
        return self.width * 2

    def near(self, q, k):
        return (q - k).abs() <= self.doubled


class Layer(torch.nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.options = Options(width, [noise(40)])
        self.slopes = torch.nn.Parameter(noise(heads))
        self.projection = torch.nn.Linear(4, 4)

    def mask_mod(self, b, h, q, k):
        return self.options.near(q, k)

    def score_mod(self, score, b, h, q, k):
        return score * self.slopes[h] + self.options.table[0][k]


def test_methods_and_objects(counts: Counts) -> None:

    def call(layer):
        # PyTorch requires a function as mask_mod; flashgen accepts any callable.
        q, k, v = (x.detach() for x in operands(2, 4, 24, 32))
        mask = create_block_mask(causal_mask, None, None, 24, 32, device="cpu")
        mask.mask_mod = layer.mask_mod
        out = fg.flex_attention(q, k, v, layer.score_mod, mask)
        wanted, _ = torch_answer(q, k, v, layer.mask_mod, layer.score_mod)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)

    layer = Layer(5)
    call(layer)
    assert counts.look() == (1, 1)
    other = Layer(5)
    call(other)
    assert counts.look() == (0, 0)
    other.options.width = 9
    call(other)
    assert counts.look() == (1, 1)
    other.options.table = [noise(40), noise(50)]
    call(other)
    assert counts.look()[1] == 0

    out = fg.flex_attention(*operands(1, 4, 8, 8), layer.score_mod)
    out.sum().backward()
    assert layer.slopes.grad is not None
    assert layer.slopes.grad.abs().max() > 0


class Magic:
    """Its attributes are computed."""

    def __init__(self, table):
        self._table = table

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._table


def test_computed_attributes(counts: Counts) -> None:
    magic = Magic(noise(40))

    def mod(score, b, h, q, k):
        return score + magic.anything[k]

    call(mod)
    assert counts.look() == (1, 1)
    magic._table = noise(41)
    call(mod)
    assert counts.look() == (0, 0)


def test_lengths_that_a_mod_asks_for(counts: Counts) -> None:
    def biased(table):
        return lambda score, b, h, q, k: score + table[table.shape[0] - 1 - k]

    call(biased(noise(40)))
    assert counts.look() == (1, 1)
    call(biased(noise(40, seed=1)))
    assert counts.look() == (0, 0)
    call(biased(noise(33)))
    assert counts.look() == (1, 1)
    call(biased(noise(40)))
    assert counts.look() == (0, 0)


def test_combined_masks_are_read_once(counts: Counts) -> None:
    for _ in range(2):
        for name in ("prefix_lm", "stitched", "transfusion"):
            mask_mod, _, _ = MAKERS[name](2, 4, 24, 32)
            call(mask_mod=mask_mod)
    assert counts.look()[0] == 3


def test_captured_tensors_are_not_kept() -> None:
    def use() -> weakref.ref[torch.Tensor]:
        table = noise(40)
        call(lambda score, b, h, q, k: score + table[k])
        return weakref.ref(table)

    gone = use()
    gc.collect()
    assert gone() is None


def test_a_mask_is_named_and_shown_by_the_users_lines() -> None:
    mask_mod, score_mod, _ = MAKERS["prefix_lm"](2, 4, 24, 32)
    sizes = traced_mods.CallSizes(2, 4, 24, 32, torch.device("cpu"))
    spec = known_mods.read(mask_mod, score_mod, sizes)[0].operator(16, 16, "float32").spec
    assert str(spec.mask_line).startswith(f"{from_root(flex_mods.__file__)}:")
    assert [t.name for t in spec.tensors] == ["lengths"]
    assert spec.tensors[0].dims == ("lengths_0",)

    def strictly_causal(b, h, q, k):
        return q > k

    spec = known_mods.read(strictly_causal, None, sizes)[0].operator(16, 16, "float32").spec
    assert spec.name == "strictly_causal"
    assert spec.mask_line.text == "def strictly_causal(b, h, q, k):\n    return q > k"

    strictly_causal.__name__ = "of_a_long_name" * 10  # that of a file would be too long
    spec = known_mods.read(strictly_causal, lambda s, b, h, q, k: s + q, sizes)[0]
    made = spec.operator(16, 16, "float32").spec
    assert made.name == fg.AttentionSpec(strictly_causal).name == ("of_a_long_name" * 10)[:80]


def test_an_error_names_the_tensor_of_its_own_mod(nothing_is_known: None) -> None:
    q, k, v = operands(1, 2, 24, 32)
    fits, short = torch.zeros(2, 32), torch.zeros(2, 5)

    def first(score, b, h, q, k):
        return score + fits[h, k]

    def second(score, b, h, q, k):
        return score + short[h, k]

    fg.flex_attention(q, k, v, score_mod=first)
    with pytest.raises(fg.InputError, match="outside of the captured tensor 'short'") as error:
        fg.flex_attention(q, k, v, score_mod=second)
    line = second.__code__.co_firstlineno
    assert error.value.where.startswith(f"tests/flex/test_reuse.py:{line}, short[")
