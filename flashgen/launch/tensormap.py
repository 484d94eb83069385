"""Encodes tensor maps as the 128 bytes that a kernel receives by value."""

from __future__ import annotations

import ctypes
from typing import Any

from flashgen.launch.device import check, real_driver
from flashgen.tensormap import MAP_BYTES, TensorMapSpec

_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_PROMOTIONS = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}


def encode(
    spec: TensorMapSpec, address: int, *, l2_promotion: int = 128, driver: Any = None
) -> bytes:
    """The CUtensorMap of a tensor on the device, to be passed by value (`__grid_constant__`).

    Args:
        spec: the tensor map.
        address: the address of the tensor's first element on the device, in bytes.
        l2_promotion: bytes that L2 fetches together: 0, 64, 128 or 256.
        driver: replaces ``cuda.bindings.driver``.

    Returns:
        128 bytes, a value for a parameter of type "tensormap" of `flashgen.launch.pack`.

    Raises:
        LaunchError: the address does not fit the map, there is no driver, or the driver rejects
            the map.
    """
    first = spec.first(address)
    driver = driver or real_driver()

    def named(kind: str, name: str) -> Any:
        # Such as CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B.
        words = {"DataType": "DATA_TYPE", "L2promotion": "L2_PROMOTION"}.get(kind, kind.upper())
        return getattr(getattr(driver, f"CUtensorMap{kind}"), f"CU_TENSOR_MAP_{words}_{name}")

    result = driver.cuTensorMapEncodeTiled(
        named("DataType", spec.dtype.upper()),
        len(spec.dims),
        first,
        [driver.cuuint64_t(size) for size in spec.dims],
        [driver.cuuint64_t(step) for step in spec.strides],
        [driver.cuuint32_t(size) for size in spec.box],
        [driver.cuuint32_t(1) for _ in spec.box],
        named("Interleave", "NONE"),
        named("Swizzle", _SWIZZLES[spec.swizzle]),
        named("L2promotion", _PROMOTIONS[l2_promotion]),
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    where = f"tensor map of {spec.dtype}, dims {spec.dims}, box {spec.box}"
    encoded = check(driver, result, where)
    return ctypes.string_at(int(encoded.getPtr()), MAP_BYTES)
