"""A spec with another dtype or without dropout: the same expressions, not read again."""

from __future__ import annotations

import copy
import functools

from flashgen.spec import AttentionSpec


@functools.lru_cache(maxsize=1024)
def with_dtype(spec: AttentionSpec, dtype: str) -> AttentionSpec:
    """``spec`` for operands of another dtype: under autocast."""
    return _changed(spec, "dtype", dtype)


@functools.lru_cache(maxsize=1024)
def without_dropout(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` with kernels that drop nothing: for a call whose dropout_p is 0."""
    return _changed(spec, "dropout", False)


def _changed(spec: AttentionSpec, option: str, value: object) -> AttentionSpec:
    """What was read from the user's functions depends on neither option."""
    if getattr(spec, option) == value:
        return spec
    changed = copy.copy(spec)
    object.__setattr__(changed, option, value)
    return changed
