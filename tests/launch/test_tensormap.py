"""Tensor maps for a GPU: the arguments of the driver call, and the packed bytes."""

from __future__ import annotations

import pytest

from flashgen.calls import launch as gpu
from flashgen.shared.errors import LaunchError
from flashgen.shared.tensormap import ELEMENT_BYTES, TensorMapSpec
from tests.support.fake_driver import PRIMARY, FakeDriver, Field, Result

SPEC = TensorMapSpec("bfloat16", (128, 1000, 16), (256, 256_000), (64, 128, 1), 128)


def test_the_driver_is_asked_innermost_dimension_first() -> None:
    driver = FakeDriver((9, 0))
    encoded = gpu.encode(SPEC, 0x7F00_0000_1000, driver=driver)
    assert encoded == bytes([1]) * 128
    assert driver.tensor_maps == [
        (
            "BFLOAT16",
            3,
            0x7F00_0000_1000,
            [128, 1000, 16],
            [256, 256_000],
            [64, 128, 1],
            [1, 1, 1],
            "NONE",
            "128B",
            "L2_128B",
            "NONE",
        )
    ]


def test_every_name_that_encode_uses_is_one_of_the_bindings() -> None:
    from cuda.bindings import driver

    for dtype in ELEMENT_BYTES:
        assert hasattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"), (
            dtype
        )
    for span in ("NONE", "32B", "64B", "128B"):
        assert hasattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{span}")
    for size in ("NONE", "L2_64B", "L2_128B", "L2_256B"):
        assert hasattr(driver.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{size}")
    assert hasattr(driver.CUtensorMapInterleave, "CU_TENSOR_MAP_INTERLEAVE_NONE")
    assert hasattr(driver.CUtensorMapFloatOOBfill, "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE")
    assert int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) == 9
    assert driver.CUresult(700).name == "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_a_refusal_of_the_driver_names_the_map() -> None:
    driver = FakeDriver((9, 0), fail={"cuTensorMapEncodeTiled": Result.CUDA_ERROR_UNKNOWN})
    with pytest.raises(LaunchError, match="unknown error") as caught:
        gpu.encode(SPEC, 0x1000, driver=driver)
    assert "bfloat16, dims (128, 1000, 16)" in caught.value.where


def test_a_map_is_encoded_in_the_context_of_its_device() -> None:
    driver = FakeDriver((9, 0), devices=2)
    driver.contexts = [0x99]
    gpu.encode(SPEC, 0x1000, device=1, driver=driver)
    assert driver.contexts == [0x99]
    assert driver.encoded_in == PRIMARY + 1


def test_a_driver_without_tensor_maps_is_named() -> None:
    with pytest.raises(LaunchError, match="no function for tensor maps") as caught:
        gpu.encode(SPEC, 0x1000, driver=FakeDriver((9, 0), cuda=11_080))
    assert "525" in caught.value.way_out


def test_an_address_that_is_not_aligned_never_reaches_the_driver() -> None:
    driver = FakeDriver((9, 0))
    with pytest.raises(LaunchError, match="not aligned to 16 bytes"):
        gpu.encode(SPEC, 0x1008, driver=driver)
    assert not driver.calls


def test_a_map_lies_at_a_multiple_of_128_bytes_of_the_parameters() -> None:
    fields = [Field("n", "int32"), Field("q", "tensormap"), Field("o", "pointer")]
    packed = gpu.pack(fields, [7, bytes(range(128)), 9])
    assert len(packed) == 384
    assert packed[:4] == (7).to_bytes(4, "little")
    assert packed[128:256] == bytes(range(128))
    assert packed[256:264] == (9).to_bytes(8, "little")


@pytest.mark.parametrize("value", [bytes(127), bytes(129), 5, None])
def test_what_is_no_map_is_named(value: bytes | int | None) -> None:
    with pytest.raises(LaunchError, match="the kernel parameter q cannot take this value"):
        gpu.pack([Field("q", "tensormap")], [value])


def test_a_map_knows_its_sizes() -> None:
    assert SPEC.inner_bytes == 128
    assert SPEC.box_bytes == 64 * 128 * 2
    assert SPEC.span_bytes == 15 * 256_000 + 999 * 256 + 256


# ---- maps whose boxes end where a packed sequence does ----------------------------------------

ROWS = TensorMapSpec("float16", (64, 500, 4, 1), (512, 128, 128), (64, 128, 1, 1), 128)


def test_a_map_with_ragged_rows_begins_at_its_tensor() -> None:
    driver = FakeDriver((9, 0))
    gpu.encode(ROWS.ragged(), 0x7F00_0000_0000, driver=driver)
    (asked,) = driver.tensor_maps
    address, dims, strides = asked[2:5]
    assert address == 0x7F00_0000_0000
    assert dims == [64, 1 << 30, 4, 0x7FFF0000, 0x7FFF0000]
    # Row 7 of a sequence of 20 rows that ends before row 300 of the tensor, head 3.
    coordinates = ((1 << 30) - 20 + 7, 3, 300, 1 << 30)
    offset = sum(at * step for at, step in zip(coordinates, strides, strict=True))
    assert offset % (1 << 64) == (300 - 20 + 7) * 512 + 3 * 128


def test_what_no_map_with_ragged_rows_can_be_made_of_is_refused() -> None:
    several = TensorMapSpec("float16", (64, 500, 4, 2), (512, 128, 512_000), (64, 128, 1, 1), 128)
    for spec in (several, SPEC):
        with pytest.raises(LaunchError, match="packed sequences in several batch entries"):
            spec.ragged()
    many = TensorMapSpec("float16", (64, (1 << 30) + 1, 4, 1), (512, 128, 0), (64, 128, 1, 1))
    with pytest.raises(LaunchError, match="as many rows of packed sequences") as caught:
        many.ragged()
    assert "at most 1,073,741,824" in caught.value.numbers
