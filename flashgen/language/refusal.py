"""Refusing something in a mod: a SpecError at the user's line that is running."""

from __future__ import annotations

from typing import NoReturn

from flashgen.errors import SpecError
from flashgen.language.user_source import user_location


def refuse(what: str, *, numbers: str, way_out: str) -> NoReturn:
    """Raise a SpecError that points at the user's line now running."""
    raise SpecError(what, where=user_location(), numbers=numbers, way_out=way_out) from None
