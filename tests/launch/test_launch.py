"""launch: the parameter structure, the checks before a launch, the driver calls, plain errors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.calls import launch as gpu
from flashgen.calls.launch.device import first_device
from flashgen.kernels.compile import Binary, compile
from flashgen.shared.errors import LaunchError
from tests.support.compile_sources import STACKED, TOY
from tests.support.fake_driver import PRIMARY, FakeDriver, Field
from tests.support.processes import run_python

CTYPES: dict[str, Any] = {
    "pointer": ctypes.c_void_p,
    "int64": ctypes.c_int64,
    "int32": ctypes.c_int32,
    "float32": ctypes.c_float,
}


def fields(*kinds: str) -> list[Field]:
    return [Field(f"f{i}", kind) for i, kind in enumerate(kinds)]


def as_c(params: Sequence[Field], values: Sequence[Any]) -> bytes:
    """The same structure, laid out by ctypes."""
    members = [(param.name, CTYPES[param.ctype]) for param in params]
    structure = type("Params", (ctypes.Structure,), {"_fields_": members})
    raw = (ctypes.c_char * ctypes.sizeof(structure))()
    filled = structure.from_buffer(raw)
    for param, value in zip(params, values, strict=True):
        setattr(filled, param.name, value)
    return bytes(raw)


VALUES = {
    "pointer": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "float32": st.floats(width=32, allow_nan=False),
}


@given(st.data())
def test_the_layout_is_that_of_c_for_any_fields(data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(CTYPES)), min_size=1, max_size=12))
    params = fields(*kinds)
    values = [data.draw(VALUES[kind]) for kind in kinds]
    assert gpu.pack(params, values) == as_c(params, values)


def test_values_are_taken_by_name_in_the_order_of_the_structure() -> None:
    params = [Field("n", "int32"), Field("x", "pointer"), Field("scale", "float32")]
    packed = gpu.pack(params, {"scale": 0.5, "x": None, "n": np.int64(7)})
    assert packed == as_c(params, [7, None, 0.5])
    assert len(packed) == 24


def test_numpy_numbers_and_bools_are_accepted() -> None:
    params = fields("int32", "int64", "float32")
    packed = gpu.pack(params, [True, np.int32(-5), np.float64(1.5)])
    assert packed == as_c(params, [1, -5, 1.5])


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("int32", 2**31, "from -2147483648 to 2147483647"),
        ("int64", -(2**63) - 1, "from -9223372036854775808"),
        ("pointer", -1, "from 0"),
        ("int32", 1.0, "a whole number"),
        ("int64", None, "a whole number"),
        ("float32", "1", "float32's range"),
        ("float32", 1e39, "float32's range"),
        ("float32", None, "float32's range"),
    ],
)
def test_a_value_that_does_not_fit_names_the_parameter(kind: str, value: Any, says: str) -> None:
    params = [Field("seq_q", kind)]
    with pytest.raises(LaunchError, match="seq_q cannot take") as caught:
        gpu.pack(params, [value])
    assert caught.value.where == f"flashgen.calls.launch.pack, seq_q ({kind})"
    assert repr(value) in caught.value.numbers
    assert says in caught.value.numbers


def test_missing_and_superfluous_values_are_both_named() -> None:
    params = [Field("n", "int32"), Field("x", "pointer")]
    with pytest.raises(LaunchError) as caught:
        gpu.pack(params, {"n": 1, "window": 3})
    assert caught.value.numbers == "missing: x; not known to the kernel: window"
    with pytest.raises(LaunchError, match="number of values") as caught:
        gpu.pack(params, [1])
    assert caught.value.numbers == "1 values for 2 parameters: n, x"


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(LaunchError, match="unknown type 'int8'"):
        gpu.pack(fields("int8"), [1])


# ---- with a driver that records calls ------------------------------------------------------------

TOY_PARAMS = [Field("x", "pointer"), Field("y", "pointer"), Field("n", "int32")]
PACKED = gpu.pack(TOY_PARAMS, {"x": 0x7000, "y": 0x8000, "n": 100})


def toy(arch: str = "sm_80") -> Binary:
    return compile(TOY, filename="toy.cu", kernel="toy", arch=arch)


def test_a_launch_passes_the_structure_by_value_on_the_given_stream() -> None:
    driver = FakeDriver()
    kernel = gpu.load(toy(), driver=driver)
    gpu.Launch(kernel, (2, 3, 1), (64, 1, 1), 0)(PACKED, stream=0x55)
    (seen,) = driver.launches
    assert (seen.grid, seen.block, seen.smem, seen.stream) == ((2, 3, 1), (64, 1, 1), 0, 0x55)
    assert seen.params == PACKED
    assert seen.function[1] == b"toy"


def test_an_overlapping_launch_has_the_attribute_and_a_configuration_for_each_stream() -> None:
    driver = FakeDriver()
    launch = gpu.Launch(gpu.load(toy(), driver=driver), (2, 3, 1), (64, 1, 1), 8, overlaps=True)
    for stream in (0x55, 0x55, 0x66):
        launch(PACKED, stream=stream)
    assert [seen.stream for seen in driver.launches] == [0x55, 0x55, 0x66]
    for seen in driver.launches:
        assert (seen.grid, seen.block, seen.smem) == ((2, 3, 1), (64, 1, 1), 8)
        assert seen.overlaps
        assert seen.params == PACKED


def test_a_driver_whose_graphs_have_no_such_edges_gets_launches_in_full_order() -> None:
    """Launches that overlap can be captured from CUDA 12.3 on."""
    for version, overlaps in ((12020, False), (12030, True)):
        driver = FakeDriver()
        kernel = gpu.load(toy(), driver=driver)
        driver.cuda = version
        gpu.Launch(kernel, (1, 1, 1), (64, 1, 1), 0, overlaps=True)(PACKED)
        assert driver.launches[0].overlaps == overlaps


def test_the_configuration_is_one_of_the_bindings() -> None:
    """Their classes need no driver. The fake driver's take any name."""
    from cuda.bindings import driver

    driver_of_toy = FakeDriver()
    kernel = gpu.load(toy(), driver=driver_of_toy)
    launch = gpu.Launch(kernel, (2, 3, 4), (64, 1, 1), 8, overlaps=True)
    launch.kernel = replace(kernel, driver=driver)
    made = launch._config_on(0x55)
    sizes = (made.gridDimX, made.gridDimY, made.gridDimZ, made.sharedMemBytes, int(made.hStream))
    assert sizes == (2, 3, 4, 8, 0x55)
    (attribute,) = made.attrs
    assert attribute.id == 6
    assert attribute.value.programmaticStreamSerializationAllowed == 1
    assert made.numAttrs == 1


def test_the_cubin_is_loaded_once_per_device_and_never_the_ptx() -> None:
    driver = FakeDriver(devices=2)
    binary = toy()
    first = gpu.load(binary, driver=driver)
    again = gpu.load(replace(binary, seconds=9.0, from_cache=True), driver=driver)
    other = gpu.load(binary, device=1, driver=driver)
    assert first is again
    assert other is not first
    assert driver.images == [binary.cubin, binary.cubin]
    assert first.function[2] == PRIMARY
    assert other.function[2] == PRIMARY + 1


def test_the_context_that_was_current_comes_back() -> None:
    driver = FakeDriver()
    driver.contexts = [0x99]  # another context of the caller
    kernel = gpu.load(toy(), driver=driver)
    gpu.Launch(kernel, (1, 1, 1), (64, 1, 1), 0)(PACKED)
    assert driver.contexts == [0x99]
    driver.fail = {"cuLaunchKernel": 700}
    with pytest.raises(LaunchError):
        gpu.Launch(kernel, (1, 1, 1), (64, 1, 1), 0)(PACKED)
    assert driver.contexts == [0x99]


def test_beside_torch_the_context_is_left_alone() -> None:
    driver = FakeDriver()
    driver.contexts = [PRIMARY]  # torch made the primary context current
    kernel = gpu.load(toy(), driver=driver)
    gpu.Launch(kernel, (1, 1, 1), (64, 1, 1), 0)(PACKED)
    assert "cuCtxPushCurrent" not in driver.calls
    assert driver.contexts == [PRIMARY]


def test_dynamic_shared_memory_is_allowed_once_and_raised_when_needed() -> None:
    driver = FakeDriver()
    kernel = gpu.load(toy(), driver=driver)
    for smem in (0, 65_536, 65_536, 98_304, 1024):
        gpu.Launch(kernel, (1, 1, 1), (64, 1, 1), smem)(PACKED)
    assert driver.allowed_smem == [65_536, 98_304]


def test_the_architecture_is_asked_of_the_device_without_making_a_context() -> None:
    driver = FakeDriver(capability=(12, 0))
    assert gpu.device_arch(driver=driver) == "sm_120"
    assert "cuDevicePrimaryCtxRetain" not in driver.calls


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_90", (10, 0), False),
        ("sm_100", (10, 3), True),
        ("sm_120", (12, 0), True),
    ],
)
def test_a_cubin_is_loaded_only_where_it_can_run(
    arch: str, capability: tuple[int, int], runs: bool
) -> None:
    driver = FakeDriver(capability=capability)
    if runs:
        assert gpu.load(toy(arch), driver=driver).name == "toy"
        return
    with pytest.raises(LaunchError, match="for another architecture") as caught:
        gpu.load(toy(arch), driver=driver)
    have = f"sm_{capability[0]}{capability[1]}"
    assert caught.value.numbers == f"binary for {arch}; the device is {have}"
    assert have in caught.value.way_out


@pytest.mark.parametrize(
    ("ptx", "cuda", "needed"),
    [
        ("8.7", 12_000, None),
        ("8.7", 11_080, "a driver of 525 or newer"),
        ("9.0", 13_000, None),
        ("9.5", 13_000, None),
        ("9.5", 14_010, None),
        ("10.0", 13_000, "a driver for CUDA 14"),
        ("9.0", 12_080, "a driver of 580 or newer"),
    ],
)
def test_a_driver_that_is_older_than_the_compiler_is_named_before_a_load(
    ptx: str, cuda: int, needed: str | None
) -> None:
    binary = replace(toy(), ptx=f"//\n.version {ptx}\n.target sm_80\n", key=ptx)
    driver = FakeDriver(cuda=cuda)
    if needed is None:
        gpu.load(binary, driver=driver)
        return
    with pytest.raises(LaunchError, match="the driver is older") as caught:
        gpu.load(binary, driver=driver)
    assert f"the driver supports CUDA {cuda // 1000}.{cuda % 1000 // 10}" in caught.value.numbers
    assert caught.value.way_out.startswith(f"install {needed}")
    assert ("flashgen[cuda12]" in caught.value.way_out) == (cuda // 1000 == 12)
    assert not driver.images


def test_a_first_launch_in_the_capture_of_a_graph_is_refused_and_a_later_one_is_not() -> None:
    driver = FakeDriver()
    driver.capturing = {0x55}
    with pytest.raises(LaunchError, match="while a CUDA graph is being captured") as caught:
        gpu.load(toy(), stream=0x55, driver=driver)
    assert "before the capture" in caught.value.way_out
    assert not driver.images
    assert driver.contexts == [0]
    kernel = gpu.load(toy(), stream=0x66, driver=driver)
    assert gpu.load(toy(), stream=0x55, driver=driver) is kernel


@pytest.mark.parametrize(
    ("grid", "block", "smem", "packed", "what", "numbers"),
    [
        ((0, 1, 1), (64, 1, 1), 0, PACKED, "grid is empty along x", "1 to 2,147,483,647"),
        ((1, 65_536, 1), (64, 1, 1), 0, PACKED, "grid is too large along y", "1 to 65,535"),
        ((1, 1, 1), (1, 1, 65), 0, PACKED, "block is too large along z", "1 to 64"),
        ((1, 1, 1), (65, 1, 1), 0, PACKED, "too many threads", "compiled for 64"),
        ((1, 1, 1), (64, 1, 1), 166_913, PACKED, "more shared memory", "166,912 B"),
        ((1, 1, 1), (64, 1, 1), -1, PACKED, "more shared memory", "-1 B dynamic"),
        ((1, 1, 1), (64, 1, 1), 0, PACKED[:-4], "size of the kernel's structure", "24 B"),
    ],
)
def test_a_launch_beyond_the_limits_is_refused_before_the_driver_sees_it(
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    smem: int,
    packed: bytes,
    what: str,
    numbers: str,
) -> None:
    driver = FakeDriver()
    kernel = gpu.load(toy(), driver=driver)
    with pytest.raises(LaunchError, match=what) as caught:
        gpu.Launch(kernel, grid, block, smem)(packed)
    assert numbers in caught.value.numbers
    assert caught.value.where == "launch of toy on CUDA device 0"
    assert driver.launches == []


def test_static_shared_memory_counts_towards_the_limit() -> None:
    binary = compile(STACKED, filename="stacked.cu", kernel="stacked", arch="sm_80")
    driver = FakeDriver()
    kernel = gpu.load(binary, driver=driver)
    packed = bytes(20)
    gpu.Launch(kernel, (1, 1, 1), (128, 1, 1), 166_912 - 384)(packed)
    with pytest.raises(LaunchError, match="more shared memory"):
        gpu.Launch(kernel, (1, 1, 1), (128, 1, 1), 166_912 - 383)(packed)


def test_registers_are_counted_for_the_whole_block() -> None:
    binary = toy()
    greedy = replace(binary, resources=replace(binary.resources, registers=255, max_threads=512))
    kernel = gpu.load(replace(greedy, key="greedy"), driver=FakeDriver())
    with pytest.raises(LaunchError, match="more registers") as caught:
        gpu.Launch(kernel, (1, 1, 1), (512, 1, 1), 0)(PACKED)
    assert "512 threads * 255 registers = 130,560" in caught.value.numbers


@pytest.mark.parametrize(
    ("call", "code", "what", "way_out"),
    [
        ("cuDevicePrimaryCtxRetain", 2, "out of memory", "smaller batch"),
        ("cuModuleLoadData", 209, "not for this device", "device_arch"),
        ("cuLaunchKernel", 700, "outside its buffers", "emulator"),
        ("cuLaunchKernel", 900, "while a CUDA graph is being captured", "before the capture"),
        ("cuLaunchKernel", 999, "unknown error", "emulator"),
    ],
)
def test_an_error_of_the_driver_is_explained(call: str, code: int, what: str, way_out: str) -> None:
    driver = FakeDriver(fail={call: code})
    with pytest.raises(LaunchError, match=what) as caught:
        gpu.Launch(gpu.load(toy(), driver=driver), (1, 1, 1), (64, 1, 1), 0)(PACKED)
    assert caught.value.numbers.startswith("CUDA_ERROR_")
    assert caught.value.numbers.endswith(f"code {code}")
    assert way_out in caught.value.way_out


def test_an_absent_device_is_an_error() -> None:
    with pytest.raises(LaunchError, match="no device of this number") as caught:
        gpu.load(toy(), device=3, driver=FakeDriver())
    assert caught.value.where == "CUDA device 3"


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (FakeDriver(), None),
        (FakeDriver(devices=0), "the NVIDIA driver sees no device"),
        (
            FakeDriver(fail={"cuInit": 100}),
            "the NVIDIA driver sees no device (CUDA_ERROR_NO_DEVICE, code 100)",
        ),
        (
            FakeDriver(fail={"cuDeviceGetCount": 999}),
            "unknown error (CUDA_ERROR_UNKNOWN, code 999)",
        ),
    ],
    ids=["present", "no_device", "init_fails", "count_fails"],
)
def test_the_probe_says_why_there_is_no_gpu(driver: FakeDriver, reason: str | None) -> None:
    assert first_device(driver) == reason


def test_without_a_driver_everything_answers_at_once() -> None:
    program = """
import ctypes

def absent(name, *rest, **more):
    raise OSError("cannot open shared object file")

ctypes.CDLL = absent
from flashgen.calls import launch
from flashgen.shared.errors import LaunchError

print(launch.available())
for ask in (launch.device_arch, lambda: launch.load(None)):
    try:
        ask()
    except LaunchError as error:
        print(error.what, "|", error.numbers, "|", error.way_out)
"""
    done = run_python("-c", program)
    first, *others = done.stdout.splitlines()
    assert first.startswith("no NVIDIA driver is installed")
    assert len(others) == 2
    for line in others:
        assert line.startswith("no kernel can be launched on this machine | no NVIDIA driver")
        assert "emulator" in line


def test_every_function_of_the_driver_that_a_launch_calls_is_one_of_the_bindings() -> None:
    from cuda.bindings import driver

    named = [name for name in vars(FakeDriver) if name.startswith("cu")]
    assert len(named) > 10
    assert [name for name in named if not hasattr(driver, name)] == []
