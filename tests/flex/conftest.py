"""torch's flex_attention on flashgen's operators, and what was read of mods before a test."""

import pytest

from flashgen.frontends.flex import known_mods
from tests.support.compiled_flex import registered

__all__ = ["registered"]


@pytest.fixture
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_variants_of_keys", "_proved", "_stable_records", "_versions"):
        monkeypatch.setattr(known_mods, name, type(getattr(known_mods, name))())
