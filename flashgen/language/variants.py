"""A spec with another dtype, without dropout or with fewer gradients: the same expressions."""

from __future__ import annotations

import copy
import functools

from flashgen.language import Tensor
from flashgen.language.spec import AttentionSpec


@functools.lru_cache(maxsize=1024)
def with_dtype(spec: AttentionSpec, dtype: str) -> AttentionSpec:
    """``spec`` for operands of another dtype, for calls under autocast."""
    return _changed(spec, "dtype", dtype)


@functools.lru_cache(maxsize=1024)
def without_dropout(spec: AttentionSpec) -> AttentionSpec:
    """``spec`` with kernels that drop nothing, for calls whose dropout_p is 0."""
    return _changed(spec, "dropout", False)


@functools.lru_cache(maxsize=1024)
def learning(spec: AttentionSpec, names: frozenset[str]) -> AttentionSpec:
    """``spec`` with kernels that compute the gradients of these captured tensors only."""
    if all(tensor.grad == (tensor.name in names) for tensor in spec.tensors):
        return spec
    tensors = {
        tensor.name: Tensor(tensor.name, tensor.dims, tensor.dtype, grad=tensor.name in names)
        for tensor in spec.tensors
    }
    sink = None if spec.sink is None else tensors[spec.sink.name]
    return _with(spec, tensors=tuple(tensors.values()), sink=sink)


def _changed(spec: AttentionSpec, option: str, value: object) -> AttentionSpec:
    return spec if getattr(spec, option) == value else _with(spec, **{option: value})


def _with(spec: AttentionSpec, **options: object) -> AttentionSpec:
    """A copy with other options, on which the traced expressions do not depend."""
    changed = copy.copy(spec)
    for option, value in options.items():
        object.__setattr__(changed, option, value)
    return changed
