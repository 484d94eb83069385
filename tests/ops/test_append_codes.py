"""append_kv to caches of 8-bit codes, and what calls with kv_dtype refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flashgen as fg
from flashgen.calls.export.collect import ExportRequest
from tests.support.codes import (
    KV_DTYPES,
    LENGTHS,
    PAGE,
    PAGES,
    TABLE,
    elements,
    finite_codes,
    scales_of,
)
from tests.support.opchecks import passes_opcheck
from tests.support.paged_specs import before
from tests.support.tiers import slow

Tensor = torch.Tensor
SHAPE = (PAGES, 2, PAGE, 8)
ONE_SCALE = torch.zeros(SHAPE[:3])


def distances_of(x: Tensor, scale: Tensor, kv_dtype: str) -> Tensor:
    """The distances of x / scale from all finite numbers of codes."""
    known = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kv_dtype)).float()
    known = known[known.isfinite() & (known > -128 if kv_dtype == "int8" else True)].unique()
    return ((x.float() / scale)[..., None] - known).abs()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("way", ["table", "slots", "packed"])
def test_codes_are_those_nearest_to_rows_over_scales(kv_dtype: str, rank: int, way: str) -> None:
    dtype = getattr(torch, kv_dtype)
    caches = [finite_codes(kv_dtype, SHAPE, seed) for seed in (0, 1)]
    before_call = [cache.view(torch.uint8).clone() for cache in caches]
    new = torch.randn(2, 2, 2, 3, 8, generator=torch.Generator().manual_seed(3))
    scales = [scales_of(rank, 2, seed) for seed in (4, 5)]
    places = []
    for b in range(2):
        for i in range(3):
            position = int(LENGTHS[b]) - 3 + i
            places.append((int(TABLE[b, position // PAGE]), position % PAGE))
    rows = list(new)
    given: dict[str, Tensor] = {"page_table": TABLE, "cache_seqlens": LENGTHS}
    if way == "slots":
        given = {"slot_mapping": torch.tensor([page * PAGE + slot for page, slot in places])}
    elif way == "packed":
        given["cu_seqlens"] = torch.tensor([0, 3, 6], dtype=torch.int32)
        rows = [x.transpose(0, 1).flatten(1, 2)[None] for x in rows]
    fg.append_kv(*rows, *caches, **given, k_scale=scales[0], v_scale=scales[1])
    written = torch.zeros(PAGES, PAGE, dtype=torch.bool)
    for x, cache, scale, was in zip(new, caches, scales, before_call, strict=True):
        assert cache.dtype == dtype
        full = elements(torch.ones(SHAPE, dtype=torch.int8), scale, torch.float32)[..., :1]
        for token, (page, slot) in enumerate(places):
            written[page, slot] = True
            row = x[token // 3, :, token % 3]
            distance = distances_of(row, full[page, :, slot], kv_dtype)
            found = cache[page].float()[:, slot]
            least = distance.min(-1).values
            own = (row / full[page, :, slot] - found).abs()
            assert torch.allclose(own, least)
        untouched = ~written[:, None, :, None].expand(SHAPE)
        assert torch.equal(cache.view(torch.uint8)[untouched], was[untouched])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_numbers_out_of_range_saturate(kv_dtype: str) -> None:
    most = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}[kv_dtype]
    x = torch.tensor([1e6, -1e6, math.inf, -math.inf, math.nan, 0.0, 1.0, -1.0])
    k = x.expand(1, 2, 1, 8).contiguous()
    caches = [torch.zeros(SHAPE).to(getattr(torch, kv_dtype)) for _ in range(2)]
    fg.append_kv(
        *(k, -k, *caches),
        slot_mapping=torch.tensor([5]),
        k_scale=torch.tensor(1.0),
        v_scale=torch.tensor(0.0),
    )
    nan = 0.0 if kv_dtype == "int8" else math.nan
    expected = torch.tensor([most, -most, most, -most, nan, 0.0, 1.0, -1.0])
    torch.testing.assert_close(
        caches[0][0].float()[:, 5], expected.expand(2, 8), equal_nan=True, rtol=0, atol=0
    )
    assert not caches[1].float().any()  # of a scale of 0


def test_the_kernel_writes_the_codes_of_the_cpu_path() -> None:
    k = torch.randn(2, 2, 2, 16, generator=torch.Generator().manual_seed(0)).half()
    given = {"page_table": TABLE, "cache_seqlens": LENGTHS}
    scales = {"k_scale": scales_of(2, 2), "v_scale": scales_of(3, 2)}
    for pad in (0, 1):
        made = []
        for backend in ("tiled", "emulator"):
            caches = [
                torch.zeros(PAGES, 2, PAGE, 16 + pad, dtype=torch.int8)[..., pad:] for _ in range(2)
            ]
            fg.append_kv(k, -k, *caches, **given, **scales, backend=backend)
            made.append(caches)
        for ours, theirs in zip(*made, strict=True):
            assert ours.any()
            assert torch.equal(ours, theirs)


def test_codes_are_copied_without_scales() -> None:
    rows = finite_codes("float8_e5m2", (1, 2, 1, 8))
    caches = [torch.zeros(SHAPE).to(torch.float8_e5m2) for _ in range(2)]
    fg.append_kv(rows, rows, *caches, slot_mapping=torch.tensor([PAGE + 2]))
    assert torch.equal(caches[0][1].float()[:, 2], rows[0, :, 0].float())


SPEC = fg.AttentionSpec(before, head_dim=8, paged=True, kv_dtype=torch.int8, name="coded")


def call(spec: fg.AttentionSpec = SPEC, **changes: object) -> Tensor:
    codes = finite_codes("int8", SHAPE)
    scale = torch.tensor(0.1)
    given = {
        "q": torch.randn(2, 4, 1, 8, generator=torch.Generator().manual_seed(0)).half(),
        "k": codes,
        "v": codes,
        "k_scale": scale,
        "v_scale": scale,
        "page_table": TABLE,
        "cache_seqlens": LENGTHS,
        **changes,
    }
    given = {name: x for name, x in given.items() if x is not None}
    return fg.attention(spec)(**given)


def test_calls_take_scales_of_every_rank() -> None:
    expected = call(k_scale=torch.full((PAGES, 2, PAGE), 0.1))
    for rank in range(3):
        assert torch.equal(call(k_scale=torch.full(((), (2,), (PAGES, 2))[rank], 0.1)), expected)


def test_entropy_and_maxima_are_those_of_the_decoded_cache() -> None:
    request = fg.AuxRequest(lse=True, max_scores=True, entropy=True)
    codes, q = finite_codes("int8", SHAPE), torch.randn(2, 4, 1, 8).half()
    _, found = call(q=q, return_aux=request)
    cache = elements(codes, torch.tensor(0.1), torch.float16)
    op = fg.attention(SPEC.replace(kv_dtype=None))
    _, expected = op(q, cache, cache, page_table=TABLE, cache_seqlens=LENGTHS, return_aux=request)
    assert torch.equal(found.lse, expected.lse)
    assert torch.equal(found.max_scores, expected.max_scores)
    assert torch.equal(found.entropy, expected.entropy)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"k": torch.zeros(SHAPE).half()}, "does not hold codes"),
        ({"k_scale": None}, "k_scale"),
        ({"k_scale": torch.ones(3)}, "belongs to no part"),
        ({"v_scale": torch.ones(PAGES, 2, PAGE, 1)}, "belongs to no part"),
        ({"v_scale": 0.5}, "v_scale"),
    ],
)
def test_calls_refuse_what_they_cannot_decode(changes: dict[str, object], what: str) -> None:
    with pytest.raises(fg.InputError, match=what):
        call(**changes)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"paged": False, "kv_dtype": "int8"}, "those of a paged cache"),
        ({"paged": True, "kv_dtype": "float4"}, "codes of this dtype"),
        ({"paged": True, "kv_dtype": "int8", "dtype": "float32"}, "16 bits"),
    ],
)
def test_specs_refuse_caches_that_kernels_do_not_read(
    options: dict[str, object], what: str
) -> None:
    with pytest.raises(fg.SpecError, match=what):
        fg.AttentionSpec(before, **options)


def test_contiguous_keys_are_pages_too() -> None:
    codes = finite_codes("int8", (2, 2, 61, 8))
    scale = torch.tensor(0.1)
    q = torch.randn(2, 4, 1, 8).half()
    table = torch.arange(2, dtype=torch.int32)[:, None]
    found = fg.attention(SPEC)(
        *(q, codes, codes), page_table=table, cache_seqlens=LENGTHS, k_scale=scale, v_scale=scale
    )
    keys = elements(codes, scale, torch.float16)
    expected = fg.attention(SPEC.replace(kv_dtype=None))(
        q, keys, keys, page_table=table, cache_seqlens=LENGTHS
    )
    assert torch.equal(found, expected)


def test_gradients_of_codes_are_refused_with_the_reason() -> None:
    k = torch.randn(1, 2, 1, 8, requires_grad=True)
    caches = [torch.zeros(SHAPE, dtype=torch.int8) for _ in range(2)]
    scale = torch.tensor(0.1)
    with pytest.raises(fg.InputError, match="has no gradients"):
        fg.append_kv(*(k, k, *caches), slot_mapping=torch.tensor([5]), k_scale=scale, v_scale=scale)
    codes = torch.zeros(SHAPE).to(torch.float8_e5m2).requires_grad_()
    spec = SPEC.replace(kv_dtype="float8_e5m2")
    with pytest.raises(fg.InputError, match="have no gradients"):
        call(spec, k=codes, v=codes)
    with pytest.raises(fg.FlashgenError, match="no backward pass"):
        call(q=torch.randn(2, 4, 1, 8).half().requires_grad_()).sum().backward()


def test_scales_are_for_caches_of_codes_and_codes_need_them() -> None:
    k = torch.randn(1, 2, 1, 8)
    where = {"slot_mapping": torch.tensor([5])}
    scale = torch.tensor(0.1)
    with pytest.raises(fg.InputError, match="caches that hold codes"):
        fg.append_kv(k, k, torch.zeros(SHAPE), torch.zeros(SHAPE), **where, k_scale=scale)
    caches = [torch.zeros(SHAPE, dtype=torch.int8) for _ in range(2)]
    with pytest.raises(fg.InputError, match="k_scale"):
        fg.append_kv(k, k, *caches, **where)


CODED = {
    "k": torch.randn(2, 2, 2, 8, generator=torch.Generator().manual_seed(0)).half(),
    "page_table": TABLE,
    "cache_seqlens": LENGTHS,
}
"""New rows, which are keys and values alike."""


def caches_and_scales() -> tuple[list[Tensor], dict[str, Tensor]]:
    caches = [torch.zeros(SHAPE, dtype=torch.int8) for _ in "kv"]
    return caches, {name: torch.zeros(SHAPE[:3]) for name in ("k_scale", "v_scale")}


def written(**changes: Any) -> tuple[Tensor, ...]:
    """The caches and the scales after a call that writes scales."""
    caches, scales = caches_and_scales()
    given = {**CODED, **scales, "write_scales": True, **changes}
    fg.append_kv(given.pop("k"), CODED["k"], *caches, **given)
    return *caches, *scales.values()


def test_written_scales_are_those_that_give_the_same_codes() -> None:
    found = written()
    assert found[2].any()
    caches = caches_and_scales()[0]
    scales = dict(zip(("k_scale", "v_scale"), found[2:], strict=True))
    tables = {"page_table": TABLE, "cache_seqlens": LENGTHS}
    fg.append_kv(CODED["k"], CODED["k"], *caches, **tables, **scales)
    assert all(map(torch.equal, caches, found))


@pytest.mark.parametrize("write", [True, False])
def test_torch_finds_nothing_wrong_with_the_operators(write: bool) -> None:
    caches, scales = caches_and_scales()
    name = "append_kv" + "_writing_scales" * write
    given = {"page_table": TABLE, "cache_seqlens": LENGTHS, **scales}
    overload = getattr(torch.ops.flashgen, name).default
    assert passes_opcheck(overload, (CODED["k"], CODED["k"], *caches), **given)


@pytest.mark.parametrize("backend", [None, "emulator"])
@pytest.mark.parametrize("compiler", ["aot_eager", slow("inductor")])
def test_a_compiled_step_writes_codes_and_scales_in_place(
    compiler: str, backend: str | None
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(compiler)

    def step(k: Tensor, caches: list[Tensor], scales: dict[str, Tensor]) -> Tensor:
        tables = {"page_table": TABLE, "cache_seqlens": LENGTHS}
        how = {"write_scales": True, "backend": backend}
        fg.append_kv(2 * k, 2 * k, *caches, **tables, **scales, **how)
        return scales["k_scale"].sum()

    caches, scales = caches_and_scales()
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    total = compiled(CODED["k"] / 2, caches, scales)
    torch.testing.assert_close(total, scales["k_scale"].sum())
    assert all(map(torch.equal, (*caches, *scales.values()), written()))
    assert counter.frame_count == 1


def test_autograd_notices_that_scales_have_changed_where_they_are_written() -> None:
    caches, scales = caches_and_scales()
    x = torch.ones(SHAPE[:3], requires_grad=True)
    where = {"page_table": TABLE, "cache_seqlens": LENGTHS}
    for write in (False, True):
        loss = (x * scales["v_scale"]).sum()
        fg.append_kv(CODED["k"], CODED["k"], *caches, **where, **scales, write_scales=write)
        if write:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()


@pytest.mark.parametrize(
    ("changes", "what", "argument"),
    [
        ({"k_scale": torch.zeros(PAGES, 2)}, "slots share its elements", "k_scale"),
        ({"v_scale": torch.zeros(())}, "slots share its elements", "v_scale"),
        (
            {"k_scale": torch.zeros(PAGES, 2, 1).expand(SHAPE[:3])},
            "slots share its elements",
            "k_scale",
        ),
        ({"v_scale": torch.zeros(PAGES, 1, PAGE)}, "slots share its elements", "v_scale"),
        (dict.fromkeys(("k_scale", "v_scale"), ONE_SCALE), "would replace", "v_scale"),
        ({"k_scale": ONE_SCALE, "v_scale": ONE_SCALE[:]}, "would replace", "v_scale"),
        ({"k_scale": torch.zeros(PAGES, 3, PAGE)}, "belongs to no part", "k_scale"),
        ({"k_scale": None}, "not a torch tensor", "k_scale"),
        ({"v_scale": torch.zeros(SHAPE[:3]).half()}, "not a float32 tensor", "v_scale"),
        ({"write_scales": 2}, "neither True nor False", "write_scales"),
        ({"k": CODED["k"].to(torch.int8)}, "become codes are floats", "k"),
        ({"k": CODED["k"].clone().requires_grad_()}, "has no gradients", "k"),
    ],
)
def test_scales_that_a_call_cannot_write_are_named(
    changes: dict[str, Any], what: str, argument: str
) -> None:
    with pytest.raises(fg.InputError, match=what) as error:
        written(**changes)
    assert f"argument {argument}" in error.value.where
    assert error.value.numbers
    assert error.value.way_out


def test_nothing_that_a_call_writes_replaces_another_argument() -> None:
    where = {"page_table": TABLE, "cache_seqlens": LENGTHS}
    count = math.prod(SHAPE[:3])
    memory = torch.zeros(2, math.prod(SHAPE) + 4 * count, dtype=torch.int8)
    codes = [part[: math.prod(SHAPE)].view(SHAPE) for part in memory]

    def scale(part: torch.Tensor, start: int) -> torch.Tensor:
        return part[start : start + 4 * count].view(torch.float32).view(SHAPE[:3])

    apart = [scale(part, math.prod(SHAPE)) for part in memory]
    given = {"k": CODED["k"], "v": CODED["k"], "k_cache": codes[0], "v_cache": codes[1]}
    fg.append_kv(**given, k_scale=apart[0], v_scale=apart[1], **where, write_scales=True)
    before = memory.clone()
    rows = memory[0].view(CODED["k"].dtype)[: CODED["k"].numel()].view(CODED["k"].shape)
    for changes, written, replaced in (
        ({"k_scale": scale(memory[0], 0)}, "k_cache", "k_scale"),
        ({"v_scale": scale(memory[0], 8)}, "k_cache", "v_scale"),
        ({"k_scale": scale(memory[1], math.prod(SHAPE) - 4)}, "v_cache", "k_scale"),
        ({"v_scale": apart[0]}, "k_scale", "v_scale"),
        ({"v_scale": scale(memory[0], 0), "write_scales": False}, "k_cache", "v_scale"),
        ({"v": rows}, "k_cache", "v"),
        ({"cache_seqlens": memory[1].view(torch.int32)[:2]}, "v_cache", "cache_seqlens"),
    ):
        scales = {"k_scale": apart[0], "v_scale": apart[1], "write_scales": True}
        with pytest.raises(fg.InputError, match=f"written to {written} would replace") as error:
            fg.append_kv(**given | where | scales | changes)
        assert f"argument {replaced} of" in error.value.where
        assert error.value.way_out.startswith(f"{replaced}=")
    assert torch.equal(memory, before)


def test_scales_of_caches_of_16_bits_are_not_written() -> None:
    caches = [torch.zeros(SHAPE).half() for _ in "kv"]
    where = {"page_table": TABLE, "cache_seqlens": LENGTHS}
    with pytest.raises(fg.InputError, match="caches that hold codes"):
        fg.append_kv(CODED["k"], CODED["k"], *caches, **where, write_scales=True)


def test_nothing_is_written_where_a_page_is_unknown() -> None:
    caches, scales = caches_and_scales()
    where = {"page_table": TABLE + 100, "cache_seqlens": LENGTHS}
    with pytest.raises(fg.InputError, match="a page of a new row lies outside"):
        fg.append_kv(CODED["k"], CODED["k"], *caches, **where, **scales, write_scales=True)
    assert not any(x.any() for x in (*caches, *scales.values()))


def test_attention_reads_the_scales_that_a_call_has_written() -> None:
    generator = torch.Generator().manual_seed(5)
    caches, scales = caches_and_scales()
    rows = torch.randn(2, 1, 2, 101, 8, generator=generator).half()
    ends = torch.tensor([0, 40, 101], dtype=torch.int32)
    tables = {"page_table": TABLE, "cache_seqlens": LENGTHS}
    fg.append_kv(*rows, *caches, **tables, cu_seqlens=ends, **scales, write_scales=True)
    found = call(k=caches[0], v=caches[1], **scales)
    kept = [elements(x, s, torch.float16) for x, s in zip(caches, scales.values(), strict=True)]
    exact = [torch.zeros(SHAPE).half() for _ in "kv"]
    fg.append_kv(*rows, *exact, **tables, cu_seqlens=ends)
    op = fg.attention(SPEC.replace(kv_dtype=None))
    q = torch.randn(2, 4, 1, 8, generator=torch.Generator().manual_seed(0)).half()
    assert torch.equal(found, op(q, *kept, **tables))
    torch.testing.assert_close(found, op(q, *exact, **tables), atol=0.02, rtol=0.02)


def test_an_export_of_codes_is_refused() -> None:
    with pytest.raises(fg.InputError, match="not exported"):
        ExportRequest(spec=SPEC, archs=("sm_80",))


def test_blocks_of_contiguous_tokens_are_pages_too() -> None:
    batch, blocks, block = 2, 4, 16
    x = finite_codes("int8", (batch, blocks * block, 2, 8))
    pages = x.unflatten(1, (-1, block)).flatten(0, 1).transpose(1, 2)
    assert pages.data_ptr() == x.data_ptr()
    scale = torch.rand(batch, blocks, 2, generator=torch.Generator().manual_seed(2)) / 50
    table = torch.arange(batch * blocks, dtype=torch.int32).view(batch, blocks)
    scales = {"k_scale": scale.flatten(0, 1), "v_scale": torch.tensor(0.01)}
    q = torch.randn(2, 4, 1, 8, generator=torch.Generator().manual_seed(0)).half()
    given = {"page_table": table, "cache_seqlens": LENGTHS}
    found = fg.attention(SPEC)(q, pages, pages, **given, **scales)
    by_token = scale.transpose(1, 2).repeat_interleave(block, -1)[..., None]
    k = (x.transpose(1, 2).float() * by_token).half()
    v = (x.transpose(1, 2).float() * 0.01).half()
    whole = {"page_table": table[:, :1] // blocks, "cache_seqlens": LENGTHS}
    assert torch.equal(found, fg.attention(SPEC.replace(kv_dtype=None))(q, k, v, **whole))
