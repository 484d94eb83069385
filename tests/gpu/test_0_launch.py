"""On a GPU: `flashgen.calls.launch` loads a kernel and runs it, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashgen.calls import launch as gpu
from flashgen.calls.launch.device import check, current, real_driver
from tests.launch.test_launch import TOY_PARAMS, toy
from tests.support.gpu_device import DRY


def test_a_kernel_runs_on_the_gpu() -> None:
    if DRY:
        pytest.skip("the emulator has no driver")
    driver = real_driver()
    kernel = gpu.load(toy(gpu.device_arch()))
    x = np.arange(100, dtype=np.float32)
    y = np.zeros_like(x)

    def ask(result: tuple[Any, ...]) -> Any:
        return check(driver, result, "test")

    with current(kernel.device, driver):
        on_gpu = [ask(driver.cuMemAlloc(x.nbytes)) for _ in range(2)]
        ask(driver.cuMemcpyHtoD(on_gpu[0], x.ctypes.data, x.nbytes))
        packed = gpu.pack(TOY_PARAMS, [*(int(pointer) for pointer in on_gpu), len(x)])
        gpu.Launch(kernel, (2, 1, 1), (64, 1, 1), 65_536)(packed)
        ask(driver.cuMemcpyDtoH(y.ctypes.data, on_gpu[1], y.nbytes))
        for pointer in on_gpu:
            ask(driver.cuMemFree(pointer))
    np.testing.assert_array_equal(y, 2 * x)
