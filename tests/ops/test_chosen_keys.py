"""Queries that choose their keys, from the public interface: arguments, autograd, compilation."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.shared.errors import InputError, SpecError
from tests.support.chosen_lists import random_lists, spec_of
from tests.support.judged import normal
from tests.support.tiers import slow

Tensor = torch.Tensor
SIZES = (2, 4, 2, 10, 40)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, heads_kv, seq_q, seq_k = SIZES
    return (
        normal((batch, heads, seq_q, 16), dtype, 1),
        normal((batch, heads_kv, seq_k, 16), dtype, 2),
        normal((batch, heads_kv, seq_k, 16), dtype, 3),
    )


def lists_of(spec: fg.AttentionSpec, seed: int = 0) -> dict[str, Tensor]:
    return random_lists(spec, (SIZES[0], SIZES[2]), SIZES[3:], 3, seed)


def layout_of(lists: dict[str, Tensor]) -> Any:
    return fg.Layout.from_lists(*lists.values())


SPEC = spec_of(2, 8, head_dim=16, dtype="float32")


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
def test_rows_that_no_group_lists_have_no_effect(backend: str) -> None:
    op = fg.attention(SPEC)
    q, k, v = operands()
    lists = lists_of(SPEC)
    lists["kv_indices"] = lists["kv_indices"].where(lists["kv_indices"] != 2, -1)
    expected = op(q, k, v, layout=layout_of(lists), backend=backend)
    for x in (k, v):
        x[:, :, 16:24] = torch.nan
        x.requires_grad_()
    out = op(q, k, v, layout=layout_of(lists), backend=backend)
    assert torch.equal(out, expected)
    for gradient in torch.autograd.grad(out.sum(), (k, v)):
        assert not gradient[:, :, 16:24].any()
        assert not gradient.isnan().any()


@pytest.mark.parametrize(
    ("needed", "backend"),
    [(True, "tiled"), (False, "tiled"), (True, "emulator"), slow(False, "emulator")],
)
def test_learned_tensors_have_gradients_where_they_are_needed(needed: bool, backend: str) -> None:
    bias = fg.Tensor("bias", ("heads", "seq_q", "seq_k"), "float32", grad=True)
    spec = SPEC.replace(score_mod=lambda s, b, h, q, k: s + bias[h, q, k])
    lists = lists_of(spec)
    given = [x.requires_grad_() for x in operands()]
    table = normal((4, 10, 40), torch.float32, 4).requires_grad_(needed)
    out = fg.attention(spec)(*given, layout=layout_of(lists), bias=table, backend=backend)
    wanted = [*given, table] if needed else given
    found = torch.autograd.grad(out.sum(), wanted)
    exact = reference.gradients(
        spec, *(x.detach() for x in given), torch.ones_like(out), tensors={**lists, "bias": table}
    )
    for one, other in zip(found, exact, strict=False):
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("block_k", "needed"), [(8, False), slow(8, True), slow(16, True)])
def test_mods_have_the_random_numbers_of_the_call(block_k: int, needed: bool) -> None:
    spec = spec_of(2, block_k, head_dim=16, dtype="float32").replace(
        mask_mod=lambda b, h, q, k: fg.rand(b, h, q, k) >= 0.3
    )
    call = {"layout": layout_of(lists_of(spec)), "rng": torch.tensor([7, 4])}
    results = []
    for backend in ("tiled", "emulator"):
        given = [x.requires_grad_(needed) for x in operands()]
        out = fg.attention(spec)(*given, **call, backend=backend)
        more = torch.autograd.grad(out.square().sum(), given) if needed else ()
        results.append((out, *more))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_whose_weights_sum_to_0_have_gradients_of_0() -> None:
    spec = SPEC.replace(weight_mod=lambda s, *_: fg.maximum(s, 0) ** 2, normalize="sum")
    lists = lists_of(spec)
    given = operands()
    given[0][:, :, 4:6] = 0  # all queries of a group, whose scores are 0
    exact = reference.gradients(spec, *given, torch.ones_like(given[0]), tensors=lists)
    given = tuple(x.requires_grad_() for x in given)
    out = fg.attention(spec)(*given, layout=layout_of(lists), backend="emulator")
    for one, other in zip(torch.autograd.grad(out.sum(), given), exact, strict=False):
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-4, atol=1e-5)


def test_calls_compile_to_one_graph_with_lists_of_any_length() -> None:
    op = fg.attention(SPEC)

    def call(q: Tensor, k: Tensor, v: Tensor, counts: Tensor, blocks: Tensor) -> Tensor:
        return op(q, k, v, layout=fg.Layout.from_lists(counts, blocks))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in (0, 1):
        lists = lists_of(SPEC, seed)
        given = [x.requires_grad_() for x in operands()]
        out, expected = (f(*given, *lists.values()) for f in (compiled, call))
        assert torch.equal(out, expected)
        gradients = (torch.autograd.grad(x.sum(), given) for x in (out, expected))
        assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_forward_mode_and_second_derivatives() -> None:
    op, layout = fg.attention(SPEC), layout_of(lists_of(SPEC))
    q, k, v = (x.requires_grad_() for x in operands())

    def call(q: Tensor) -> Tensor:
        return op(q, k, v, layout=layout)

    out, tangent = torch.func.jvp(call, (q,), (k.repeat_interleave(2, 1)[:, :, :10],))
    assert tangent.shape == out.shape
    (gradient,) = torch.autograd.grad(call(q).square().sum(), q, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), k)[0].shape == k.shape


def test_statistics_of_rows_are_those_of_the_listed_keys() -> None:
    op, layout = fg.attention(SPEC), layout_of(lists_of(SPEC))
    request = fg.AuxRequest(lse=True, max_scores=True, entropy=True, block_mass=8)
    found = [
        op(*operands(), layout=layout, return_aux=request, backend=backend)[1]
        for backend in ("tiled", "emulator")
    ]
    for name in ("lse", "max_scores", "entropy", "block_mass"):
        one, other = (getattr(each, name) for each in found)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="no statistics of keys"):
        op(*operands(), layout=layout, return_aux=fg.AuxRequest(key_mass=True))


# dK by the lists of groups, and by those of blocks
@pytest.mark.parametrize("block_k", [8, slow(16)])
def test_calls_with_statistics_have_the_gradients_of_the_output_and_of_the_entropy(
    block_k: int,
) -> None:
    spec = spec_of(2, block_k, head_dim=16, dtype="float32")
    op, layout = fg.attention(spec), layout_of(lists_of(spec))
    request = fg.AuxRequest(max_scores=True, entropy=True)
    found = []
    for backend in ("tiled", "emulator"):
        given = [x.requires_grad_() for x in operands()]
        out, aux = op(*given, layout=layout, return_aux=request, backend=backend)
        assert aux.entropy is not None
        loss = out.square().sum() + aux.entropy.sin().sum()
        found.append(torch.autograd.grad(loss, given))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
def test_statistics_of_calls_whose_positions_are_a_tensor(backend: str) -> None:
    op, given = fg.attention(SPEC), operands()
    first = torch.tensor([3, 20], dtype=torch.int32)
    request = fg.AuxRequest(lse=True, entropy=True, block_mass=8)

    def call(at: Any, part: slice) -> tuple[Tensor, ...]:
        layout = fg.Layout.from_lists(COUNTS[part], BLOCKS[part])
        rows = [x[part].requires_grad_() for x in given]
        out, aux = op(*rows, layout=layout, q_offset=at, return_aux=request, backend=backend)
        assert aux.entropy is not None
        gradients = torch.autograd.grad(out.sum() + aux.entropy.sin().sum(), rows)
        return out, aux.lse, aux.entropy, aux.block_mass, *gradients

    together = call(first, slice(None))
    alone = [call(int(first[b]), slice(b, b + 1)) for b in range(2)]
    for found, parts in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(found, torch.cat(parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_packed_queries_of_a_paged_cache_are_refused(backend: str) -> None:
    q, k, v = (x.detach() for x in operands())
    tables = {
        "page_table": torch.tensor([[0], [1]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([40, 13], dtype=torch.int32),
    }
    call = {"layout": layout_of(LISTS), "backend": backend}
    op = fg.attention(SPEC.replace(paged=True))
    with pytest.raises(InputError, match="not packed") as caught:
        op(q[:1], k, v, cu_seqlens_q=torch.tensor([0, 4, 10], dtype=torch.int32), **tables, **call)
    assert caught.value.where == "argument cu_seqlens_q"
    with pytest.raises(InputError, match="no block of the keys") as caught:
        op(q, k, v, **tables, **call)
    assert "13 keys in blocks of 8" in caught.value.numbers


def test_lists_without_entries_are_lists_without_blocks() -> None:
    lists = lists_of(SPEC)
    empty = fg.Layout.from_lists(lists["kv_num_blocks"] * 0, lists["kv_indices"][..., :0])
    assert not fg.attention(SPEC)(*operands(), layout=empty).any()


def test_operators_and_lists_can_be_copied_and_pickled() -> None:
    op, layout = fg.attention(SPEC), layout_of(lists_of(SPEC))
    expected = op(*operands(), layout=layout)
    for made in (pickle.loads(pickle.dumps(op)), copy.deepcopy(op)):
        found = made(*operands(), layout=pickle.loads(pickle.dumps(layout)))
        assert torch.equal(found, expected)
    assert SPEC.replace(block_sparse=fg.BlockSparse(block_q=2, block_k=8)) != SPEC


LISTS = lists_of(SPEC)
COUNTS, BLOCKS = LISTS.values()
WRONG: dict[str, tuple[str, Callable[[], object]]] = {
    "no layout": ("have lists of blocks", lambda: {}),
    "a mask": ("have lists of blocks", lambda: {"layout": torch.ones(1, 1, 5, 5).bool()}),
    "other groups": (
        "not those of the groups",
        lambda: {"layout": fg.Layout.from_lists(COUNTS[..., :4], BLOCKS[:, :, :4])},
    ),
    "no block": (
        "no block of the keys",
        lambda: {"layout": fg.Layout.from_lists(COUNTS, BLOCKS + 9)},
    ),
    "a block twice": (
        "has a block twice",
        lambda: {"layout": fg.Layout.from_lists(COUNTS.clamp(2), BLOCKS * 0)},
    ),
    "a length": (
        "a length that is none",
        lambda: {"layout": fg.Layout.from_lists(COUNTS + 9, BLOCKS)},
    ),
    "ranks": ("no int32 tensor", lambda: {"layout": fg.Layout.from_lists(BLOCKS, BLOCKS)}),
    "int64": ("no int32 tensor", lambda: {"layout": fg.Layout.from_lists(COUNTS.long(), BLOCKS)}),
    "k_offset": ("a call of their own", lambda: {"layout": layout_of(LISTS), "k_offset": 3}),
    "h_offset": ("a call of their own", lambda: {"layout": layout_of(LISTS), "h_offset": 2}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str) -> None:
    what, options = WRONG[name]
    with pytest.raises(InputError, match=what):
        fg.attention(SPEC)(*operands(), **options())  # type: ignore[call-overload]


def test_errors_have_the_names_that_the_user_gives() -> None:
    op = fg.attention(SPEC)
    with pytest.raises(InputError, match=r"of 2: a tensor of shape .*; a tensor of") as caught:
        op(*operands(), layout=(COUNTS, BLOCKS))
    assert "\n" not in caught.value.numbers
    with pytest.raises(InputError, match="'size' is not a tensor of the spec") as caught:
        op(*operands(), layout=layout_of(LISTS), size=3)
    assert caught.value.numbers.endswith("takes: layout; given: layout, size")
    assert caught.value.way_out.endswith("op(q, k, v, layout=...) computes without it")
    with pytest.raises(InputError, match="'layout' is not a tensor of the spec"):
        op(*operands(), layout=layout_of(LISTS), **LISTS)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_an_element_outside_of_a_tensor_is_named_as_the_mod_names_it(backend: str) -> None:
    ids = fg.Tensor("ids", ("batch", "seq_k"), "int32")
    lists = fg.BlockSparse(block_q=1, block_k=16, heads="kv")
    spec = fg.AttentionSpec(lambda b, h, q, k: ids[b, k + 1] == 1, head_dim=16, block_sparse=lists)
    q, k = (torch.zeros(1, 2, n, 16, dtype=torch.float16) for n in (3, 40))
    of_row = torch.full((1, 1, 3), 3), torch.arange(3).expand(1, 1, 3, 3)
    layout = fg.Layout.from_lists(*(each.int() for each in of_row))
    given = torch.ones(1, 40, dtype=torch.int32)
    with pytest.raises(InputError, match="outside of the captured tensor 'ids'") as caught:
        fg.attention(spec)(q, k, k, layout=layout, ids=given, q_offset=37, backend=backend)
    assert "index 40 of dimension 1 (seq_k), whose length is 40" in caught.value.numbers
    assert "fg.clamp(" in caught.value.way_out
    assert "listed" not in str(caught.value)
    assert "q=0" not in str(caught.value)


@pytest.mark.parametrize("option", [{"packed": True}, {"dropout": True}])
def test_specs_that_cannot_have_lists_are_refused(option: dict[str, bool]) -> None:
    with pytest.raises(SpecError, match="choose their keys cannot have"):
        SPEC.replace(**option)


def test_a_call_with_dropout_is_not_told_to_ask_for_what_lists_exclude() -> None:
    with pytest.raises(InputError, match="without dropout") as caught:
        fg.attention(SPEC)(*operands(), layout=layout_of(LISTS), dropout_p=0.5)
    assert caught.value.way_out == "leave dropout_p and rng out: lists exclude it"


def test_lists_for_a_layout_of_all_heads_are_refused() -> None:
    spec = SPEC.replace(block_sparse=fg.BlockSparse(block_q=2, block_k=8))
    with pytest.raises(InputError, match="another kind of layout"):
        fg.attention(spec)(*operands(), layout=layout_of(LISTS))
