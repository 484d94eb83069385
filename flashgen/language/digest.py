"""A hash of values and expressions that is the same in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import sympy


def digest_of(parts: Sequence[object]) -> str:
    """SHA-256 in hex of ``parts`` as text: sympy expressions in full, anything else by repr."""
    content = [sympy.srepr(part) if isinstance(part, sympy.Basic) else part for part in parts]
    return hashlib.sha256(repr(content).encode()).hexdigest()
