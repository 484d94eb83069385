"""Integers have 32 bits where a call keeps all values within int32, and 64 bits elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.kernels.codegen import beyond_int32
from flashgen.kernels.pipeline import build
from flashgen.shared.call import CallRanges
from flashgen.shared.dtypes import POSITION_LIMIT, SCALAR_LIMIT
from flashgen.shared.paths import PATHS
from tests.support.judged import Call, normal

near, far = fg.Scalar("near", "int32"), fg.Scalar("far", "int32")


def mask_mod(batch: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & (k % 5 < near + far) & ((q * 5 - k * 3) % 7 != 3)


SPEC = fg.AttentionSpec(mask_mod, dtype="float16", head_dim=16, name="integer_width")
ON_PATHS = [None, "sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)]
BORDER = [(2**30 - 1, 32), (2**30, 64)]  # far = 2^30 - 1 is the last for which near + far fits


def call_of(scalars: dict[str, int], arch: str | None, **numbers: Any) -> Call:
    operands = tuple(normal((1, 2, 40, 16), torch.float16, seed) for seed in range(3))
    how = {"backend": "tiled"} if arch is None else {"arch": arch}
    return Call(SPEC, operands, {"scalars": scalars, **numbers}, **how)


@pytest.mark.parametrize("arch", ON_PATHS)
@pytest.mark.parametrize(("far_end", "bits"), BORDER)
def test_results_are_right_at_both_sides_of_the_border(
    far_end: int, bits: int, arch: str | None
) -> None:
    run = call_of({"near": SCALAR_LIMIT, "far": far_end}, arch).judged_forward()
    if arch is not None:
        assert run.report.integers.startswith(f"{bits}-bit: ")
        assert run.plan is not None
        assert run.source is not None
        assert run.plan.integer_bits == bits
        assert run.source.name.endswith("_int64") == (bits == 64)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize(("far_end", "bits"), BORDER)
def test_backward_kernels_are_right_at_both_sides_of_the_border(
    far_end: int, bits: int, arch: str
) -> None:
    call = call_of({"near": SCALAR_LIMIT, "far": far_end}, arch)
    run = call.judged_backward(call.judged_forward())
    widths = {report.integers[:6] for report in run.reports if report.integers}
    assert widths == {f"{bits}-bit"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("most", "bits"), [(POSITION_LIMIT, 64), (POSITION_LIMIT // 2, 32)])
def test_results_are_right_at_the_last_positions(
    most: int, bits: int, sign: int, arch: str
) -> None:
    # In 32 bits a remainder of positions takes them to be natural numbers.
    bits = 64 if sign < 0 else bits
    offset = sign * (most - 40)
    call = call_of({"near": 3, "far": 4}, arch, q_offset=offset, k_offset=offset)
    forward = call.judged_forward()
    assert forward.report.integers.startswith(f"{bits}-bit: ")
    call.judged_backward(forward)


@pytest.mark.parametrize("arch", ON_PATHS)
def test_a_word_of_64_bits_has_a_bit_for_each_of_60_keys(arch: str | None) -> None:
    words = fg.Tensor("words", ("seq_q",), "int64")
    spec = fg.AttentionSpec(lambda b, h, q, k: (words[q] >> k) % 2 == 1, head_dim=16)
    operands = tuple(normal((1, 2, 60, 16), torch.float16, seed) for seed in range(3))
    random = torch.Generator().manual_seed(0)
    given = {"words": torch.randint(1, 2**60, (60,), generator=random)}
    how = {"backend": "tiled"} if arch is None else {"arch": arch}
    call = Call(spec, operands, {"tensors": given}, **how)
    call.judged_backward(call.judged_forward())


def assumptions(spec: fg.AttentionSpec) -> tuple[Any, ...]:
    return fg.emit(spec, "sm_80").forward.assumptions


def ranges(**scalars: int) -> CallRanges:
    sizes = {"batch": 1, "heads": 2, "seq_q": 40, "seq_k": 40}
    return CallRanges.from_call(sizes, {"q_offset": 0, "k_offset": 0}, scalars)


def test_the_border_is_the_largest_int32() -> None:
    spec = fg.AttentionSpec(lambda batch, h, q, k: k % 5 < near + far, name="border")
    found = assumptions(spec)
    assert beyond_int32(found, ranges(near=2**30, far=2**30 - 1)) == ""
    assert (
        beyond_int32(found, ranges(near=2**30, far=2**30)) == "far + near can reach 2,147,483,648"
    )
    assert beyond_int32(found, ranges(near=-(2**30), far=-(2**30))) != ""


def test_offsets_that_only_the_device_knows_may_be_any() -> None:
    spec = fg.AttentionSpec(lambda batch, h, q, k: (q - k) * 3 % 7 < near, name="far")
    sizes = {"batch": 1, "heads": 2, "seq_q": 40, "seq_k": 40}
    known = CallRanges.from_call(sizes, {"q_offset": 7, "k_offset": 7}, {"near": 1})
    unknown = CallRanges.from_call(sizes, {"q_offset": None, "k_offset": 7}, {"near": 1})
    assert beyond_int32(assumptions(spec), known) == ""
    assert beyond_int32(assumptions(spec), unknown) == ""
    spec = fg.AttentionSpec(lambda batch, h, q, k: (q - k) * 8 % 7 < near, name="farther")
    assert beyond_int32(assumptions(spec), known) == ""
    assert beyond_int32(assumptions(spec), unknown) != ""


def test_elements_that_may_have_any_value_are_wide_in_every_call() -> None:
    ids = fg.Tensor("ids", ("seq_k",), "int32")
    spec = fg.AttentionSpec(lambda batch, h, q, k: ids[k] + 1 > q, name="any_element")
    source = fg.emit(spec, "sm_80").forward
    assert "int64(" in source.text
    assert source.integers(ranges()) == ""


def test_a_spec_within_int32_has_one_kernel() -> None:
    spec = fg.load("specs/sliding_window.py")
    assert fg.emit(spec).forward.integers(ranges(window=2**30)) == ""
    assert build(spec, ranges=ranges(window=2**30)) is build(spec)


def test_ranges_of_calls_are_shared_between_lengths() -> None:
    def rounded(length: int) -> CallRanges:
        sizes = {"batch": 1, "heads": 2, "seq_q": 1, "seq_k": length}
        offsets = {"q_offset": length - 1, "k_offset": 0}
        return CallRanges.from_call(sizes, offsets, {}).rounded()

    assert rounded(5000) == rounded(5001)
    sizes, offsets = (
        {"batch": 3, "heads": 5, "seq_q": 1, "seq_k": 9},
        {"q_offset": -4, "k_offset": 0},
    )
    exact = CallRanges.from_call(sizes, offsets, {})
    for (low, high), (lower, higher) in zip(exact.ends, exact.rounded().ends, strict=True):
        assert lower <= low <= high <= higher
