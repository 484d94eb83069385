"""torch's flex_attention on flashgen's operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import flex_attention

from flashgen.frontends.flex import compiled
from flashgen.integrations.torch import register_flex, unregister_flex


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(compiled, "_told", compiled.Told())
    torch._dynamo.reset()
    register_flex()
    yield
    unregister_flex()
    torch._dynamo.reset()
