"""A stand-in for a GPU, for the tests of what a call launches; a torch that compiled nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flashgen.calls import launch
from flashgen.calls.runtime import backends, bound_kernel
from flashgen.calls.trust import Decision
from tests.support.fake_driver import FakeDriver


@pytest.fixture
def nothing_compiled() -> None:
    torch._dynamo.reset()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU that CPU tensors are on: its driver, and the launches that it receives."""
    driver = FakeDriver()
    monkeypatch.setitem(backends.TAKES, "gpu", "cpu")
    monkeypatch.setattr(backends, "index_of", lambda device: 0)
    monkeypatch.setattr(bound_kernel, "current_stream", lambda index: 77 + index)
    monkeypatch.setattr(backends, "decide", lambda index, capturing: Decision("sm_80", "a stub"))
    memory = launch.device_memory
    monkeypatch.setattr(backends, "device_memory", lambda index: memory(index, driver=driver))
    load, real = launch.load, launch.Launch.__call__
    monkeypatch.setattr(
        launch,
        "load",
        lambda binary, index, stream: load(binary, index, stream=stream, driver=driver),
    )
    started = []

    def recording(self, packed, stream):
        started.append(
            SimpleNamespace(
                kernel=self.kernel,
                grid=self.grid,
                block=self.block,
                packed=packed,
                stream=stream,
            )
        )
        real(self, packed, stream)

    monkeypatch.setattr(launch.Launch, "__call__", recording)
    return SimpleNamespace(driver=driver, started=started)
