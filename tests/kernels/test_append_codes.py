"""Rows appended as codes of 8 bits, with scales that are given or written by the call."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.runtime import append_kv
from flashgen.kernels.append_pipeline import build_append_codes
from flashgen.shared.call import LaunchOptions
from flashgen.shared.dtypes import CACHE_DTYPES, OPERAND_DTYPES
from tests.support.codes import KV_DTYPES
from tests.support.judged import check_gates
from tests.support.paged_caches import Appended, rows_of
from tests.support.planted import caught, planted
from tests.support.tiers import one_in, slow

Tensor = torch.Tensor
HEADS, PAGE = 3, 4
SHAPE = 12, HEADS, PAGE
MOST = {name: kind.most for name, kind in CACHE_DTYPES.items()}


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class Caches:
    """K and V of codes, filled with ones, and a scale for each slot, filled with 7.

    Args:
        pad: unused codes in front of each row.
        by_token: whether the heads of a slot are neighbours (NHD).
    """

    def __init__(
        self, kv_dtype: str, dims: tuple[int, int], *, pad: int = 0, by_token: bool = False
    ) -> None:
        pages, heads, page = SHAPE
        made = []
        for dim in dims:
            sizes = (pages, page, heads) if by_token else SHAPE
            stored = torch.ones(*sizes, dim + pad, dtype=torch.uint8)
            view = stored.view(getattr(torch, kv_dtype))[..., pad:]
            made.append(view.transpose(1, 2) if by_token else view)
        self.k, self.v = made
        self.scales = {name: torch.full(SHAPE, 7.0) for name in ("k_scale", "v_scale")}

    def append(self, rows: Appended, given: dict[str, Any], **how: Any) -> Caches:
        how = {"write_scales": True, **how}
        fg.append_kv(rows.k, rows.v, self.k, self.v, **given, **{**self.scales, **how})
        return self

    @property
    def contents(self) -> tuple[Tensor, ...]:
        """The bytes of codes and scales."""
        return tuple(map(bytes_of, (self.k, self.v, *self.scales.values())))


def appended_in_a_loop(rows: Appended, caches: Caches) -> None:
    """Row after row, by the definition of scales and codes."""
    n = rows.k.shape[2]
    for (token, slot), h in itertools.product(enumerate(rows.slots.tolist()), range(HEADS)):
        if slot < 0:
            continue
        at = slot // PAGE, h, slot % PAGE
        for name, new in (("k", rows.k), ("v", rows.v)):
            cache, scales = getattr(caches, name), caches.scales[f"{name}_scale"]
            x = new[token // n, h, token % n].float()
            most = MOST[str(cache.dtype).removeprefix("torch.")]
            scales[at] = x.abs().max() / most
            codes = torch.zeros_like(x) if scales[at] == 0 else (x / scales[at]).clamp(-most, most)
            codes = codes if cache.is_floating_point() else codes.round()
            cache.view(torch.uint8)[at] = codes.to(cache.dtype).view(torch.uint8)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", one_in(3, list(OPERAND_DTYPES)))
@pytest.mark.parametrize("layout", [{}, {"by_token": True}, {"pad": 1}])
def test_a_row_has_the_scale_of_its_largest_number_and_the_nearest_codes(
    kv_dtype: str, dtype: str, layout: dict[str, Any]
) -> None:
    dims = (40, 16)
    rows = rows_of((3, 0, 2), (3, 9, 14), SHAPE, dims, getattr(torch, dtype), packed=True, behind=1)
    by_loop = Caches(kv_dtype, dims, **layout)
    appended_in_a_loop(rows, by_loop)
    for how in ({"backend": "tiled"}, {"backend": "emulator", "arch": "sm_80"}):
        for given in (rows.by_table, rows.by_slots):
            found = Caches(kv_dtype, dims, **layout).append(rows, given, **how)
            assert all(map(torch.equal, found.contents, by_loop.contents)), how


@pytest.mark.parametrize("dims", [(8, 8), (256, 72), slow((576, 512)), slow((16, 1024))])
def test_rows_of_any_head_dim_have_their_own_scale(dims: tuple[int, int]) -> None:
    rows = rows_of((3, 3), (3, 14), SHAPE, dims, torch.float16)
    by_loop = Caches("float8_e4m3fn", dims)
    appended_in_a_loop(rows, by_loop)
    found = Caches("float8_e4m3fn", dims).append(rows, rows.by_slots, backend="emulator")
    assert all(map(torch.equal, found.contents, by_loop.contents))


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_values_that_are_columns_of_the_keys_have_their_codes(backend: str) -> None:
    rows = rows_of((3, 3), (3, 14), SHAPE, (32, 16), torch.float16)
    alone = Caches("int8", (32, 16)).append(rows, rows.by_slots, backend=backend)
    cache, scale = Caches("int8", (32, 16)).k, torch.full(SHAPE, 7.0)
    columns = rows.k, rows.k[..., :16], cache, cache[..., :16]
    given = {**rows.by_slots, "k_scale": scale, "write_scales": True, "backend": backend}
    with pytest.raises(fg.InputError, match="would replace what is written to v_cache") as error:
        fg.append_kv(*columns, **given, v_scale=scale.clone())
    assert "and v_scale=k_scale, for values" in error.value.way_out
    fg.append_kv(*columns, **given, v_scale=scale)
    assert torch.equal(cache, alone.k)
    assert torch.equal(scale, alone.scales["k_scale"])


def all_numbers(dtype: torch.dtype) -> Tensor:
    """The 65,536 numbers of a dtype of 16 bits, in rows that no infinity shares with others."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def special_scales() -> Tensor:
    least = 2.0**-149
    given = [0.0, -0.0, math.inf, -math.inf, math.nan, least, 2.0**-130, 1.0, -1.0, 0.013, 3e38]
    return torch.tensor([*given, 2.0**-127])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", one_in(2, [torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("write", [True, False])
def test_kernel_and_cpu_path_agree_on_all_numbers_and_scales(
    kv_dtype: str, dtype: torch.dtype, write: bool
) -> None:
    """Infinities, NaN of every payload, zeros and subnormal numbers among them."""
    k = all_numbers(dtype).view(1, 1, 256, 256)
    v = k.mT.contiguous()  # all magnitudes in one row
    scales = special_scales().repeat(22)[:256].view(256, 1, 1)
    found = []
    for backend in ("tiled", "emulator"):
        caches = [torch.zeros(256, 1, 1, 256).to(getattr(torch, kv_dtype)) for _ in "kv"]
        own = [scales.clone() for _ in "kv"]
        fg.append_kv(
            *(k, v, *caches),
            slot_mapping=torch.arange(256),
            k_scale=own[0],
            v_scale=own[1],
            write_scales=write,
            backend=backend,
        )
        found.append([bytes_of(x) for x in (*caches, *own)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(found[0][2], bytes_of(scales)) != write


def numbers_of_codes(kv_dtype: str) -> dict[int, Fraction]:
    """The finite numbers of codes from 0 on, by the code."""
    codes = torch.arange(128, dtype=torch.uint8).view(getattr(torch, kv_dtype)).float().tolist()
    return {code: Fraction(x) for code, x in enumerate(codes) if math.isfinite(x)}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_ties_go_to_the_even_code_and_neighbours_of_ties_to_the_nearest(kv_dtype: str) -> None:
    known = numbers_of_codes(kv_dtype)
    expected: list[tuple[float, int]] = []
    for code, x in known.items():
        if code + 1 in known:
            middle = float((x + known[code + 1]) / 2)
            step = 2.0**-23 * middle
            expected += [
                (middle, code + code % 2),
                (middle - step, code),
                (middle + step, code + 1),
                (float(x), code),
            ]
    expected = expected[: len(expected) // 8 * 8]
    x = torch.tensor([each for each, _ in expected]).view(1, 1, -1, 8)
    tokens = x.shape[2]
    for backend in ("tiled", "emulator"):
        caches = [torch.zeros(tokens, 1, 1, 8).to(getattr(torch, kv_dtype)) for _ in "kv"]
        one = torch.tensor(1.0)
        slots = torch.arange(tokens)
        given = {"slot_mapping": slots, "k_scale": one, "v_scale": one, "backend": backend}
        fg.append_kv(x, -x, *caches, **given)
        found = caches[0].view(torch.uint8).flatten().tolist()
        assert found == [code for _, code in expected]
        assert torch.equal(caches[1].float(), -caches[0].float())


def test_rows_without_a_finite_scale_are_nan_for_attention_and_zeros_are_zeros() -> None:
    """As in a cache of 16 bits, an infinity or a NaN in a key does not stay unseen."""
    spec = fg.AttentionSpec(head_dim=16, paged=True, kv_dtype="int8", name="of_special_rows")
    for bad, seen in ((math.inf, True), (-math.inf, True), (math.nan, True), (0.0, False)):
        rows = rows_of((1, 1), (3, 5), SHAPE, (16, 16), torch.float16)
        rows.k[0, :, 0, :] = 0
        rows.k[0, :, 0, 3] = bad
        caches = Caches("int8", (16, 16))
        for x in caches.scales.values():
            x.fill_(0.01)
        caches.append(rows, rows.by_table)
        scale = caches.scales["k_scale"][rows.table[0, 0], :, 2]
        assert scale.isnan().all() if math.isnan(bad) else (scale == abs(bad)).all()
        out = fg.attention(spec)(
            *(torch.ones(2, HEADS, 1, 16).half(), caches.k, caches.v),
            page_table=rows.table,
            cache_seqlens=rows.lengths,
            **caches.scales,
        )
        assert bool(out[0].isnan().all()) == seen
        assert not out[1].isnan().any()


def test_numbers_below_the_least_scale_become_zeros_or_saturate() -> None:
    """A scale is a float32: 448 times its least number is the smallest row that it can hold."""
    least = 2.0**-149
    x = torch.zeros(1, 1, 3, 8)
    x[0, 0, :, 0] = torch.tensor([least, 448 * least, 670 * least])
    for backend in ("tiled", "emulator"):
        caches = [torch.ones(1, 1, 4, 8).to(torch.float8_e4m3fn) for _ in "kv"]
        scales = {name: torch.zeros(1, 1, 4) for name in ("k_scale", "v_scale")}
        given = {"slot_mapping": torch.arange(3), "write_scales": True, "backend": backend}
        fg.append_kv(x, x, *caches, **given, **scales)
        assert (scales["k_scale"][0, 0, :3] / least).tolist() == [0.0, 1.0, 1.0]
        assert caches[0][0, 0, :3, 0].float().tolist() == [0.0, 448.0, 448.0]


def test_scales_of_any_strides_are_written_in_place() -> None:
    rows = rows_of((3, 3), (3, 14), SHAPE, (16, 16), torch.bfloat16)
    expected = Caches("int8", (16, 16)).append(rows, rows.by_table)
    for backend in ("tiled", "emulator"):
        found = Caches("int8", (16, 16))
        both = torch.full((12, PAGE, 2, HEADS), 7.0)  # beside each other, by slot
        for i, name in enumerate(found.scales):
            found.scales[name] = both[:, :, i].transpose(1, 2)
        found.append(rows, rows.by_table, backend=backend)
        assert all(map(torch.equal, found.contents, expected.contents))


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("kv_dtype", one_in(3, list(KV_DTYPES)))
@pytest.mark.parametrize("dtype", one_in(3, list(OPERAND_DTYPES)))
def test_kernels_have_no_spill_and_stay_within_their_plan(
    dtype: str, kv_dtype: str, aligned: bool, write: bool
) -> None:
    build = build_append_codes(dtype, kv_dtype, write, aligned)
    check_gates(build)
    assert max(map(len, build.source.text.splitlines())) <= 100


def test_every_element_and_every_code_is_moved_once() -> None:
    """The second reading of a row with written scales is that of L1."""
    dims = (64, 128)
    rows = rows_of((3, 3), (3, 14), SHAPE, dims, torch.float16)
    tokens = 6 * HEADS
    for write in (True, False):
        caches = Caches("int8", dims)
        operands = append_kv.AppendOperands(
            *(rows.k, rows.v, caches.k, caches.v),
            slot_mapping=rows.slots,
            **caches.scales,
            write_scales=write,
        )
        run = append_kv.prepare(operands, "emulator", "sm_80").run(operands, LaunchOptions())
        lanes = 16
        assert run.global_write_bytes == tokens * (sum(dims) + 8 * write)
        once = tokens * 2 * sum(dims)
        of_scales = 0 if write else 4 * 2 * tokens * lanes
        assert run.global_read_bytes == (1 + write) * once + of_scales + 8 * 2 * tokens * lanes


# ---- planted bugs


def differs(old: str, new: str, kv_dtype: str = "float8_e4m3fn", **how: Any) -> bool:
    """Whether the kernel with a changed text writes other bytes than the CPU path."""
    dims = (40, 40)
    rows = rows_of((3, 3), (3, 14), SHAPE, dims, torch.float16)
    rows.k[0, 0, 0, 5] = math.nan
    rows.v[1, 2, 2, 7] = 1e-5 * rows.v[1, 2, 2].max()
    expected = Caches(kv_dtype, dims).append(rows, rows.by_table, backend="tiled", **how)
    with pytest.MonkeyPatch.context() as patch, planted("append_codes", old, new):
        patch.setattr(append_kv, "_prepared", {})
        found = Caches(kv_dtype, dims).append(rows, rows.by_table, backend="emulator", **how)
    return not all(map(torch.equal, found.contents, expected.contents))


OF_HEAD = "{0}_scale + to.page * p.{0}_scale_stride_b + h * p.{0}_scale_stride_h"
BUGS = [
    # the largest number of the rows beside it, of fewer lanes, or with its sign
    ("(2u << lanes - 1) - 1 << (threadIdx.x % 32 - lane)", "0xffffffffu"),
    ("largest = __reduce_max_sync(members, largest);", ""),
    ("__float_as_uint(x[j]) & 0x7fffffffu", "__float_as_uint(x[j])"),
    # the place of the next head, of K and of V
    (OF_HEAD.format("k"), OF_HEAD.format("k").replace("h *", "(h + 1) % p.heads *")),
    (OF_HEAD.format("v"), OF_HEAD.format("v").replace("h *", "(h + 1) % p.heads *")),
    # rounding towards 0, no equal steps of small codes, NaN as a number, no saturation
    ("(1u << SHIFT - 1) - 1 + (size >> SHIFT & 1)", "0"),
    ("size < LEAST ? steps : rounded", "rounded"),
    ("if (bits > 0x7f800000u) return 0x7fu;", ""),
    ("return code | __float_as_uint(y) >> 31 << 7;", "return code;"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), BUGS)
def test_a_planted_bug_changes_codes_or_scales(old: str, new: str) -> None:
    assert differs(old, new)
    assert not differs(old, old)


def test_a_given_scale_of_the_neighbouring_page_is_seen() -> None:
    old = "p.k_scale + to.page * p.k_scale_stride_b"
    scale = torch.rand(SHAPE[:2], generator=torch.Generator().manual_seed(0)) / 50
    how = {"k_scale": scale, "v_scale": torch.tensor(0.02), "write_scales": False}
    assert not differs(old, old, **how)
    assert differs(old, "p.k_scale + (to.page ^ 1) * p.k_scale_stride_b", **how)


def test_a_missing_saturation_is_seen() -> None:
    old = "min(bits, __float_as_uint(MOST))"
    how = {"k_scale": torch.tensor(1e-3), "v_scale": torch.tensor(1e-3), "write_scales": False}
    assert not differs(old, old, **how)
    assert differs(old, "bits", **how)
    old = "max(-int(MOST), min(int(MOST), __float2int_rn(y)))"
    assert differs(old, "__float2int_rn(y)", kv_dtype="int8", **how)


def test_a_missing_bound_of_pages_is_named() -> None:
    rows = rows_of((3, 3), (3, 12), SHAPE, (8, 8), torch.float16)
    rows.table[:] = 900
    caches = Caches("int8", (8, 8))
    operands = append_kv.AppendOperands(
        *(rows.k, rows.v, caches.k, caches.v),
        **rows.by_table,
        **caches.scales,
        write_scales=True,
    )
    before = caches.contents
    append_kv.prepare(operands, "emulator", "sm_80").run(operands)
    assert all(map(torch.equal, caches.contents, before))
    bound = "if (to.page < 0 || to.page >= p.pages) return;"
    with pytest.MonkeyPatch.context() as patch, planted("append_codes", bound, ""):
        patch.setattr(append_kv, "_prepared", {})
        with caught("OutOfBounds"):
            append_kv.prepare(operands, "emulator", "sm_80").run(operands)
