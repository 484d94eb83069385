"""append_kv as an operator of torch: opcheck, torch.compile, fakes, gradients, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flashgen as fg
import flashgen.calls.ops  # registers the operator
from flashgen.calls.runtime.append_kv import PreparedAppend, prepare
from flashgen.calls.runtime.arguments.new_rows import AppendOperands
from tests.support.opchecks import passes_opcheck
from tests.support.paged_caches import Appended, Cache, append_in_a_loop, cache_of, rows_of
from tests.support.processes import run_python
from tests.support.tiers import slow

Tensor = torch.Tensor
OVERLOAD = torch.ops.flashgen.append_kv.default
SHAPE, DIMS = (12, 2, 4), (16, 16)


pytestmark = pytest.mark.usefixtures("nothing_compiled")


def rows_and_cache(layout: str = "hnd", **options: Any) -> tuple[Appended, Cache]:
    new = (2, 3) if options.get("packed") else (3, 3)
    rows = rows_of(new, (3, 14), SHAPE, DIMS, torch.float32, **options)
    return rows, cache_of(layout, SHAPE, DIMS, torch.float32)


@pytest.mark.parametrize("layout", ["split", slow("nhd")])
@pytest.mark.parametrize("packed", [True, slow(False)])
def test_torch_finds_nothing_wrong_with_the_operator(layout: str, packed: bool) -> None:
    rows, cache = rows_and_cache(layout, packed=packed)
    for given in (rows.by_table, rows.by_slots):
        assert passes_opcheck(OVERLOAD, (rows.k, rows.v, cache.k, cache.v), **given)


def test_torch_finds_nothing_wrong_with_the_emulated_kernel() -> None:
    rows, cache = rows_and_cache()
    given = rows.by_table | {"backend": "emulator"}
    assert passes_opcheck(OVERLOAD, (rows.k, rows.v, cache.k, cache.v), **given)


def written(rows: Appended, layout: str) -> tuple[Tensor, ...]:
    cache = rows_and_cache(layout)[1]
    append_in_a_loop(rows, cache)
    return cache.storage


def step(k, v, k_cache, v_cache, table, lengths, backend=None):
    fg.append_kv(
        2 * k, v, k_cache, v_cache, page_table=table, cache_seqlens=lengths, backend=backend
    )
    return k_cache.sum() + v_cache.sum()


@pytest.mark.parametrize("backend", [slow(None), "emulator"])
@pytest.mark.parametrize("compiler", ["aot_eager", slow("inductor")])
def test_a_compiled_step_is_one_graph_that_writes_its_arguments_in_place(
    compiler: str, backend: str | None
) -> None:
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for lengths in ((3, 14), (9, 5)):
        rows = rows_of((3, 3), lengths, SHAPE, DIMS, torch.float32)
        _, cache = rows_and_cache("nhd")
        before = cache.k._version, cache.v._version
        total = compiled(rows.k / 2, rows.v, cache.k, cache.v, rows.table, rows.lengths, backend)
        assert all(map(torch.equal, cache.storage, written(rows, "nhd")))
        torch.testing.assert_close(total, cache.k.sum() + cache.v.sum())
        assert cache.k._version > before[0]
        assert cache.v._version > before[1]
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", ["split", "pairs"])
def test_a_compiled_step_writes_views_of_one_tensor(layout: str) -> None:
    """vLLM's caches, divided into K and V outside or inside of the compiled function."""
    rows, cache = rows_and_cache(layout)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    compiled(rows.k / 2, rows.v, cache.k, cache.v, rows.table, rows.lengths)
    assert torch.equal(cache.storage[0], *written(rows, layout))

    def inside(k, v, one, slots):
        views = one.split(16, -1) if layout == "split" else one.transpose(2, 3).unbind(1)
        fg.append_kv(k, v, *views, slot_mapping=slots)

    one = rows_and_cache(layout)[1].storage[0]
    torch.compile(inside, backend="aot_eager", fullgraph=True)(rows.k, rows.v, one, rows.slots)
    assert torch.equal(one, *written(rows, layout))


@pytest.mark.slow
def test_the_first_use_may_be_inside_of_a_compiled_function() -> None:
    program = """
import torch, flashgen as fg

def write(k, cache, slots):
    fg.append_kv(k, k, cache[0], cache[1], slot_mapping=slots)

cache = torch.zeros(2, 3, 1, 4, 8)
slots = torch.tensor([5, -1])
torch.compile(write, backend="eager", fullgraph=True)(torch.ones(1, 1, 2, 8), cache, slots)
print(cache.sum().item(), cache[:, 1, 0, 1].sum().item())
"""
    assert run_python("-c", program).stdout == "16.0 16.0\n"


def test_fakes_have_no_contents_and_are_checked_all_the_same() -> None:
    rows, cache = rows_and_cache()
    with FakeTensorMode() as mode:
        k, v, k_cache, v_cache, slots = map(
            mode.from_tensor, (rows.k, rows.v, cache.k, cache.v, rows.slots)
        )
        fg.append_kv(k, v, k_cache, v_cache, slot_mapping=slots)
        with pytest.raises(fg.InputError, match="do not fit together"):
            fg.append_kv(k, v[:, :1], k_cache, v_cache, slot_mapping=slots)
    tensors = [x.to("meta") for x in (rows.k, rows.v, cache.k, cache.v)]
    fg.append_kv(*tensors, slot_mapping=rows.slots.to("meta"))
    with pytest.raises(fg.InputError, match="on one CUDA GPU or all on the CPU"):
        fg.append_kv(*tensors, slot_mapping=rows.slots)


def test_the_way_out_of_a_cache_of_another_dtype_writes_the_cache() -> None:
    rows, cache = rows_and_cache()
    with pytest.raises(fg.InputError, match="k_cache has a dtype") as error:
        fg.append_kv(rows.k.half(), rows.v.half(), cache.k, cache.v, **rows.by_slots)
    assert error.value.way_out.startswith("k.to(torch.float32) and v.to(torch.float32); or a cache")


@pytest.mark.parametrize("name", ["k", "v", "k_cache"])
def test_tensors_that_require_gradients_are_refused(name: str) -> None:
    rows, cache = rows_and_cache()
    given = {"k": rows.k, "v": rows.v, "k_cache": cache.k, "v_cache": cache.v}
    given[name].requires_grad_(True)
    for call in (fg.append_kv, torch.ops.flashgen.append_kv):
        with pytest.raises(fg.InputError, match="no gradients") as error:
            call(**given, **rows.by_slots)
        assert f"argument {name}" in error.value.where
        assert "torch.no_grad()" in error.value.way_out
    with torch.no_grad():
        fg.append_kv(**given, **rows.by_slots)
    assert torch.equal(cache.k, written(rows, "hnd")[0])


def test_autograd_notices_that_a_cache_has_changed() -> None:
    rows, cache = rows_and_cache()
    x = torch.ones_like(cache.k, requires_grad=True)
    for call in (fg.append_kv, torch.ops.flashgen.append_kv):
        loss = (x * cache.k).sum()
        call(rows.k, rows.v, cache.k, cache.v, **rows.by_slots)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_inference_mode_writes_caches_made_inside_and_outside_of_it() -> None:
    rows, cache = rows_and_cache()
    with torch.inference_mode():
        _, other = rows_and_cache()
        for each in (cache, other):
            fg.append_kv(rows.k, rows.v, each.k, each.v, **rows.by_slots)
            assert torch.equal(each.k, written(rows, "hnd")[0])


def test_a_mapped_call_is_refused_with_what_replaces_it() -> None:
    k, cache = torch.ones(2, 1, 2, 3, 8), torch.zeros(2, 2, 4, 2, 4, 8)

    def write(k, cache, slots):
        fg.append_kv(k, k, cache[0], cache[1], slot_mapping=slots)

    with pytest.raises(fg.InputError, match="cannot map a call") as error:
        torch.vmap(write)(k, cache, torch.arange(6).reshape(2, 3))
    assert "k and v [batch, heads, rows, head dim]" in error.value.way_out


@pytest.mark.slow
def test_an_exported_program_writes_in_place() -> None:
    class Write(torch.nn.Module):
        def forward(self, k, v, k_cache, v_cache, slots):
            fg.append_kv(k, v, k_cache, v_cache, slot_mapping=slots)
            return k_cache.sum()

    rows, cache = rows_and_cache()
    given = rows.k, rows.v, cache.k, cache.v, rows.slots
    assert torch.export.export(Write(), given).module()(*given) == cache.k.sum()
    assert all(map(torch.equal, cache.storage, written(rows, "hnd")))


def test_a_spec_may_have_the_name_of_the_operator() -> None:
    op = fg.attention(fg.AttentionSpec(head_dim=16, dtype="float32", name="append_kv"))
    assert op.name.startswith("append_kv_")
    op(*torch.ones(3, 1, 1, 4, 16))


def one_row(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"slot_mapping": None}, "no way or in more than one", "page_table"),
    ({"page_table": torch.zeros(1, 1).int()}, "no way or in more than one", "page_table"),
    ({"cu_seqlens": torch.tensor([0, 2]).int()}, "no way or in more than one", "cu_seqlens"),
    ({"k": 3}, "not a torch tensor", "k"),
    *(({name: None}, "not a torch tensor", name) for name in ("k", "v", "k_cache", "v_cache")),
    ({"k": one_row(1, 1, 2, 8).double()}, "has a dtype", "k"),
    ({"v": one_row(1, 1, 2, 8).half()}, "has a dtype", "v"),
    ({"slot_mapping": torch.tensor([0, 1]).int()}, "has a dtype", "slot_mapping"),
    ({"slot_mapping": torch.tensor([0])}, "does not fit the new rows", "slot_mapping"),
    ({"slot_mapping": torch.tensor([[0, 1]])}, "does not fit the new rows", "slot_mapping"),
    ({"v": one_row(1, 1, 3, 8)}, "do not fit together", "v"),
    ({"v": one_row(1, 1, 2, 8)[0]}, "do not fit together", "v"),
    ({"k_cache": one_row(3, 2, 4, 8)}, "do not fit together", "k_cache"),
    ({"v_cache": one_row(3, 1, 4, 16)}, "do not fit together", "v_cache"),
    ({"v_cache": one_row(3, 1, 5, 8)}, "do not fit together", "v_cache"),
    ({"k": one_row(1, 1, 2, 16)}, "do not fit together", "k_cache"),
    ({"k": one_row(1, 1, 8, 2).transpose(2, 3)}, "not contiguous", "k"),
    ({"v_cache": one_row(3, 1, 8, 4).transpose(2, 3)}, "not contiguous", "v_cache"),
    ({"k_cache": one_row(3, 1, 1, 8).expand(3, 1, 4, 8)}, "is expanded", "k_cache"),
    ({"k_cache": torch.zeros(96).as_strided((3, 1, 4, 8), (28, 0, 8, 1))}, "in common", "k_cache"),
    ({"v_cache": torch.zeros(96).as_strided((3, 1, 4, 8), (24, 0, 7, 1))}, "in common", "v_cache"),
    ({"k": one_row(1, 1, 2, 8).to_sparse()}, "not an ordinary dense tensor", "k"),
    ({"k": one_row(1, 1, 2, 8).to("meta")}, "on one CUDA GPU or all on the CPU", "v"),
    ({"backend": "cuda"}, "there is no such backend", "backend"),
    ({"backend": "gpu"}, "takes cuda tensors", "backend"),
    ({"write_scales": np.ones(3)}, "neither True nor False", "write_scales"),
    ({"arch": 80}, "not the name of an architecture", "arch"),
]


def test_values_do_not_replace_keys_unless_they_are_columns_of_them() -> None:
    cache = torch.zeros(4, 2, 8, 16)
    k, v = torch.randn(2, 1, 2, 3, 16)
    slots = torch.tensor([5, 9, 30])
    fg.append_kv(k, v, cache, cache.clone(), slot_mapping=slots)
    for same in (cache, cache[:]):  # after a call that differs in this alone
        with pytest.raises(fg.InputError, match="would replace what is written to v_c") as error:
            fg.append_kv(k, v, cache, same, slot_mapping=slots)
        assert error.value.way_out.startswith("v_cache=torch.zeros_like(v_cache)")
    fg.append_kv(v, v[..., :8], cache, cache[..., :8], slot_mapping=slots)
    assert torch.equal(cache[1, :, 1], v[0, :, 1])
    with pytest.raises(fg.InputError, match="would replace what is written to v_cache") as error:
        fg.append_kv(v, k[..., :8], cache, cache[..., :8], slot_mapping=slots)
    assert "; or v=k[..., :8], v_cache=k_cache[..., :8], for" in error.value.way_out
    fg.append_kv(v[:, :, :0], k[:, :, :0], cache, cache, slot_mapping=slots[:0])  # no rows


def test_caches_share_storage_but_no_element_unless_values_are_the_same_columns_of_keys() -> None:
    k, v = torch.randn(2, 1, 2, 3, 16)
    slots = torch.tensor([5, 9, 30])
    interleaved = torch.zeros(4, 2, 2, 8, 16)
    fg.append_kv(k, v, interleaved[:, 0], interleaved[:, 1], slot_mapping=slots)
    side_by_side = torch.zeros(4, 2, 8, 32)
    fg.append_kv(k, v, *side_by_side.split(16, -1), slot_mapping=slots)
    last = torch.zeros(4, 2, 8, 16)
    fg.append_kv(k, k[..., 8:], last, last[..., 8:], slot_mapping=slots)
    for slot, row in zip(slots.tolist(), range(3), strict=True):
        page, place = divmod(slot, 8)
        assert torch.equal(interleaved[page, :, :, place], torch.stack((k[0], v[0]))[:, :, row])
        assert torch.equal(side_by_side[page, :, place], torch.cat((k, v), -1)[0, :, row])
        assert torch.equal(last[page, :, place], k[0, :, row])
    for rows, k_cache, v_cache in (
        (v, side_by_side[..., :16], side_by_side[..., 8:24]),
        (v, interleaved[:3, 0], interleaved[1:, 0]),  # each page of keys is the former of values
        (k[..., 8:], last, last[..., :8]),  # other columns of the cache than of the rows
    ):
        with pytest.raises(fg.InputError, match="would replace what is written") as error:
            fg.append_kv(k, rows, k_cache, v_cache, slot_mapping=slots)
        assert "v_cache has elements of k_cache" in error.value.numbers


def test_rows_that_lie_behind_a_pool_of_caches_share_a_checked_call_wherever_they_are() -> None:
    """A layer's caches begin in the middle of the pool, whose end is nearer than its size."""
    count = 8 * 4 * 2 * 8 * 16  # layers, pages, heads, slots of a page and columns
    memory = np.zeros(count + 4096, np.float32)
    pool = torch.frombuffer(memory, dtype=torch.float32, count=count).view(8, 4, 2, 8, 16)
    slots = torch.tensor([5, 9, 30])

    def prepared(place: int, layer: int) -> PreparedAppend:
        rows = torch.frombuffer(
            memory, dtype=torch.float32, count=192, offset=4 * (count + place)
        ).view(2, 1, 2, 3, 16)
        caches = pool[layer], pool[layer - 1]
        return prepare(AppendOperands(*rows, *caches, slot_mapping=slots), "emulator", "sm_80")

    first = prepared(0, 6)
    assert all(prepared(place, layer) is first for place in (0, 256, 3072) for layer in (4, 6, 7))


@pytest.mark.parametrize(("change", "what", "argument"), WRONG)
def test_wrong_arguments_are_named(change: dict[str, Any], what: str, argument: str) -> None:
    given = {
        "k": one_row(1, 1, 2, 8),
        "v": one_row(1, 1, 2, 8),
        "k_cache": one_row(3, 1, 4, 8),
        "v_cache": one_row(3, 1, 4, 8),
        "slot_mapping": torch.tensor([0, 1]),
    }
    with pytest.raises(fg.InputError, match=what) as error:
        fg.append_kv(**given | change)
    assert argument in error.value.where
    assert error.value.numbers
    assert error.value.way_out


def test_packed_rows_are_of_one_batch_entry_and_have_boundaries_for_every_length() -> None:
    rows, cache = rows_and_cache(packed=True)
    k = rows.k.expand(2, -1, -1, -1)
    with pytest.raises(fg.InputError, match="in one batch entry"):
        fg.append_kv(k, k, cache.k, cache.v, **rows.by_table)
    given = rows.by_table | {"cu_seqlens": torch.zeros(5, dtype=torch.int32)}
    with pytest.raises(fg.InputError, match="cache_seqlens does not fit"):
        fg.append_kv(rows.k, rows.v, cache.k, cache.v, **given)


def test_head_dims_are_multiples_of_8() -> None:
    k, cache = torch.ones(1, 1, 1, 12), torch.ones(1, 1, 1, 12)
    with pytest.raises(fg.InputError, match="not a multiple of 8"):
        fg.append_kv(k, k, cache, cache.clone(), slot_mapping=torch.tensor([0]))
