"""The signature of an AttentionSpec: the facts that a call of it needs, as plain values."""

from __future__ import annotations

import functools

from flashgen.language import BATCH, B, Scalar, Tensor
from flashgen.language.spec import AttentionSpec
from flashgen.signature import CallSignature, ScalarArgument, TensorArgument


@functools.lru_cache(maxsize=1024)
def signature_of(spec: AttentionSpec) -> CallSignature:
    """The signature of calls of ``spec``: sizes, options, scalars and tensors, without sympy."""
    assert spec.name is not None, "set when a spec is made"
    assert spec.head_dim_v is not None, "set when a spec is made"
    return CallSignature(
        name=spec.name,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        dtype=spec.dtype,
        scale=spec.scale,
        dropout=spec.dropout,
        packed=spec.packed,
        scalars=tuple(map(scalar_argument, spec.scalars)),
        tensors=tuple(map(_tensor_argument, spec.tensors)),
        sink=None if spec.sink is None else _tensor_argument(spec.sink),
        block_sparse=spec.block_sparse,
        reads_batch=bool({B, BATCH} & (spec.mask.free_symbols | spec.score.free_symbols)),
    )


def scalar_argument(scalar: Scalar) -> ScalarArgument:
    """The facts of one run-time scalar."""
    return ScalarArgument(scalar.name, scalar.dtype, scalar.minimum)


def _tensor_argument(tensor: Tensor) -> TensorArgument:
    return TensorArgument(tensor.name, tensor.dims, tensor.dtype, tensor.grad)
