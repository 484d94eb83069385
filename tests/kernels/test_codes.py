"""Paged caches of 8-bit codes: the bits of kernels are those on the decoded cache."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

import flashgen as fg
from flashgen.kernels.pipeline import build
from flashgen.spec.language.signature import split
from tests.support.codes import KV_DTYPES, Coded, same
from tests.support.paged_specs import SERVED, before
from tests.support.tiers import one_in, slow


def coded(kv_dtype: str, dtype: str = "float16", **options: object) -> fg.AttentionSpec:
    return fg.AttentionSpec(
        before, dtype=dtype, paged=True, kv_dtype=kv_dtype, name="causal_coded", **options
    )


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "arch", "ranks"),
    [
        ("int8", "float16", "sm_80", (2, 3)),
        slow("float8_e4m3fn", "bfloat16", "sm_80", (0, 1)),
        slow("float8_e4m3fn", "float16", "sm_90a", (1, 2)),
        slow("float8_e5m2", "bfloat16", "sm_80", (3, 0)),
        slow("int8", "bfloat16", "sm_90a", (3, 3)),
        slow("float8_e4m3fn", "float16", "sm_89", (3, 2)),
    ],
)
def test_the_bits_are_those_on_the_decoded_cache(
    kv_dtype: str, dtype: str, arch: str, ranks: tuple[int, int]
) -> None:
    call = Coded.of(coded(kv_dtype, dtype), ranks)
    found = call.run(arch=arch)
    expected = call.of_elements(arch=arch.rstrip("a"))
    assert found.plan.block_k == expected.plan.block_k
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)
    assert found.out.isfinite().all()
    assert found.plan.tiles_hold_codes


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_several_warps_convert_codes_once_in_shared_memory(arch: str) -> None:
    call = Coded.of(coded("int8"), queries=40)
    found = call.run(arch=arch)
    assert not found.plan.tiles_hold_codes
    assert torch.equal(found.out, call.of_elements(arch=arch.rstrip("a")).out)


@pytest.mark.parametrize("dims", [(40, 96), (128, 128), (256, 64), (96, 40), (8, 8)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.slow
def test_any_head_dims(dims: tuple[int, int], arch: str) -> None:
    call = Coded.of(coded("int8", head_dim=dims[0], head_dim_v=dims[1]))
    found, expected = call.run(arch=arch), call.of_elements(arch=arch.rstrip("a"))
    assert torch.equal(found.out, expected.out)


@pytest.mark.parametrize("name", [slow(name) for name in SERVED if name not in ("bias", "tree")])
def test_every_kind_of_served_spec(name: str) -> None:
    spec = SERVED[name].replace(kv_dtype="int8", sink=None)
    call = Coded.of(spec, queries=8)
    assert torch.equal(call.run().out, call.of_elements().out)


@pytest.mark.parametrize("kv_dtype", [slow("float8_e4m3fn"), "float8_e5m2"])
def test_all_codes_are_decoded_also_those_of_nan_and_infinity(kv_dtype: str) -> None:
    call = Coded.of(coded(kv_dtype), (0, 0))
    bits = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, call.v.shape[3])
    v = call.v.view(torch.uint8).clone()
    zeros = torch.zeros_like(call.k.view(torch.uint8)).view(call.k.dtype)
    table = torch.tensor([3, 7, 1])
    for first in (0, 96, 208):  # 0 to 47, with subnormals; NaN and infinities of both signs
        rows = torch.cat([bits, bits])[first : first + 48].reshape(3, 1, 16, -1)
        v[table] = rows
        own = replace(call, v=v.view(call.v.dtype), k=zeros)
        found, expected = own.run(), own.of_elements()
        assert same(found.out, expected.out)


@pytest.mark.parametrize(
    "scale", [0.0, slow(math.inf), slow(math.nan), 1e-40, slow(1e30), slow(3e38), slow(-300.0)]
)
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", slow("int8")])
def test_scales_of_any_number_mean_their_product(scale: float, kv_dtype: str) -> None:
    call = Coded.of(coded(kv_dtype, "bfloat16"), (3, 0))
    k_scale = call.k_scale.clone()
    k_scale[1, :, 3] = scale
    for own in (replace(call, k_scale=k_scale), replace(call, v_scale=torch.tensor(scale))):
        found, expected = own.run(), own.of_elements()
        assert same(found.out, expected.out)
        assert same(found.lse, expected.lse)


@pytest.mark.slow
def test_unaligned_caches_are_read_code_by_code() -> None:
    call = Coded.of(coded("int8"))
    k = torch.zeros(*call.k.shape[:3], call.k.shape[3] + 1, dtype=torch.int8)[..., 1:]
    v = torch.zeros_like(k)
    own = replace(call, k=k.copy_(call.k), v=v.copy_(call.v))
    found = own.run()
    assert found.report.access_bytes == 2
    assert torch.equal(found.out, call.of_elements().out)


def test_keys_and_values_are_each_aligned_to_what_is_copied_of_their_rows() -> None:
    """Of rows of 40 codes 8 are copied at once, and of rows of 16 codes 16."""
    call = Coded.of(coded("int8", head_dim=40, head_dim_v=16))
    k, v = (
        torch.zeros(*x.shape[:3], x.shape[3] + 8, dtype=x.dtype)[..., 8:] for x in (call.k, call.v)
    )
    k, v = k.copy_(call.k), v.copy_(call.v)
    expected = call.of_elements().out
    for own, access_bytes in ((replace(call, k=k), 16), (replace(call, v=v), 2)):
        found = own.run()
        assert found.report.access_bytes == access_bytes
        assert torch.equal(found.out, expected)


def test_slots_behind_the_length_have_no_effect() -> None:
    call = Coded.of(coded("float8_e5m2"), (3, 3))
    k_scale, v_scale = call.k_scale.clone(), call.v_scale.clone()
    for scale in (k_scale, v_scale):
        scale[1, :, 8:] = math.nan  # behind position 40 of the first sequence
        scale[8, :, 13:] = math.nan
        scale[[4, 6]] = math.nan
    own = replace(call, k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(own.run().out, call.run().out)


def test_integer_codes_are_all_decoded_with_small_and_with_large_scales() -> None:
    call = Coded.of(coded("int8", "bfloat16"), (0, 0))
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, call.v.shape[3])
    zeros = torch.zeros_like(call.k)
    table = torch.tensor([3, 7, 1])
    for first, scale in ((0, 0.02), (40, 2.0**100), (104, 3e35), (208, 1e-44)):
        v = call.v.clone()
        v[table] = (
            torch.cat([codes, codes])[first : first + 48].view(torch.int8).reshape(3, 1, 16, -1)
        )
        own = replace(call, v=v, k=zeros, v_scale=torch.tensor(scale))
        found, expected = own.run(), own.of_elements()
        assert same(found.out, expected.out)


@pytest.mark.parametrize("kv_dtype", one_in(3, KV_DTYPES, list(KV_DTYPES).index("float8_e4m3fn")))
def test_the_conversion_of_each_architecture_has_one_place(kv_dtype: str) -> None:
    for arch, has in (("sm_80", False), ("sm_89", True), ("sm_90a", True)):
        ptx = build(split(coded(kv_dtype, head_dim=16, head_dim_v=16)), arch).ptx
        assert ("cvt.rn.f16x2.e4m3x2" in ptx) == (has and kv_dtype == "float8_e4m3fn")


def planted(monkeypatch: pytest.MonkeyPatch, was: str, becomes: str) -> None:
    """Kernels are emitted with other text in place of `was`."""
    from flashgen.kernels.codegen import kernel

    render = kernel.render_template

    def rendered(*given: object, **fields: object) -> str:
        text = render(*given, **fields)  # type: ignore[arg-type]
        if "find_rows" in text:
            assert re.search(re.escape(was), text)
            text = text.replace(was, becomes)
        return text

    monkeypatch.setattr(kernel, "render_template", rendered)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("v_scales + page * p", "v_scales + (page ^ 1) * p"),
        slow("rows.v_scale[i] = known ? v", "rows.v_scale[i] = known ? k"),
        slow("copy_wait_all();\n    __syncthreads();", "__syncthreads();"),
        slow("copy_wait_all();\n    convert_codes", "convert_codes"),
    ],
    ids=[
        "of the neighbouring page",
        "of K",
        "products before copies",
        "conversion before its copy",
    ],
)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, was: str, becomes: str) -> None:
    spec = coded("int8", scale=0.03 + 0.001 * len(was))
    call = Coded.of(spec, queries=40 if "convert" in was else 1)
    expected = call.of_elements()
    planted(monkeypatch, was, becomes)
    try:
        found = call.run()
    except fg.EmulatorError:  # the race of a copy with the load of what it writes
        return
    assert not torch.equal(found.out, expected.out)
