"""The facts of a GPU, without a context on it."""

from __future__ import annotations

import pytest

from flashgen.calls.launch import device_memory, gpu, gpu_facts, gpus
from flashgen.shared.arch import GpuMemory, facts
from flashgen.shared.errors import LaunchError
from tests.support.fake_driver import FakeDriver


def test_the_facts_are_those_of_the_driver_and_need_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "driver_version", lambda: "580.65.06")
    driver = FakeDriver((9, 0), name="NVIDIA H200", compute_mode=3, cuda=12_080)
    found = gpu_facts(driver=driver)
    assert (found.name, found.arch, found.sms) == ("NVIDIA H200", "sm_90", 108)
    assert found.memory_bytes == 80 << 30
    assert (found.cuda, found.driver) == ((12, 8), "580.65.06")
    assert found.is_exclusive
    assert not [name for name in driver.calls if "Ctx" in name]


def test_the_rate_of_memory_is_two_bits_in_a_clock_on_each_line() -> None:
    found = device_memory(driver=FakeDriver())
    assert found == GpuMemory(40 << 20, 2 * 1_593_000e3 * 5120 / 8)
    assert found.bytes_per_s == pytest.approx(facts("sm_80").memory.bytes_per_s, rel=1e-3)


@pytest.mark.parametrize("missing", range(3))
def test_memory_that_the_driver_does_not_report_is_unknown(missing: int) -> None:
    reported = [1_593_000, 5120, 40 << 20]
    reported[missing] = 0
    assert device_memory(driver=FakeDriver(memory=tuple(reported))) is None


def test_every_device_is_listed_and_another_one_is_an_error() -> None:
    driver = FakeDriver(devices=3)
    assert [each.index for each in gpus(driver=driver)] == [0, 1, 2]
    with pytest.raises(LaunchError, match="no device of this number"):
        gpu_facts(3, driver=driver)


def test_the_driver_is_found_in_both_forms_of_its_line() -> None:
    line = "NVRM version: NVIDIA UNIX {}  580.159.03  Tue Oct  7 00:00:00 UTC 2025\nGCC 12.2.0\n"
    assert gpu.version_in(line.format("x86_64 Kernel Module")) == "580.159.03"
    assert gpu.version_in(line.format("Open Kernel Module for x86_64")) == "580.159.03"
    assert gpu.version_in("nothing") == ""
