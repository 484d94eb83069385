"""The compiled kernels that append to a paged cache, from what they depend on."""

from __future__ import annotations

from flashgen.kernels import codegen
from flashgen.kernels.compile import override
from flashgen.kernels.pipeline import Build, analysed, compiled
from flashgen.kernels.planner import plan_rows
from flashgen.shared.arch import DEFAULT_ARCH
from flashgen.shared.dtypes import ITEMSIZE
from flashgen.spec.language.spec import AttentionSpec

__all__ = ["build_append_codes", "build_append_kv"]


@override.cached(maxsize=64)
def build_append_kv(access_bytes: int, arch: str = DEFAULT_ARCH) -> Build:
    """The kernel that appends to a paged cache, compiled; it serves all dtypes and head dims.

    Args:
        access_bytes: the bytes that a lane copies at once: 1, 2, 4, 8 or 16.

    Raises:
        PlanError: the architecture is unknown.
        RenderError: the template and the plan disagree.
        CompileError: NVRTC is missing or rejects the source.
    """
    spec = AttentionSpec(head_dim=64, name="append_kv")
    source = codegen.append_kv(spec, plan_rows("append_kv", spec, arch, access_bytes=access_bytes))
    return compiled(source, analysed(spec, codegen.walk_of_kernel(source.role)))


@override.cached(maxsize=64)
def build_append_codes(
    dtype: str, kv_dtype: str, writes_scales: bool, aligned: bool, arch: str = DEFAULT_ARCH
) -> Build:
    """The kernel that writes new rows to a paged cache as codes of 8 bits, compiled.

    Args:
        dtype: the dtype of the rows.
        kv_dtype: the dtype of the caches.
        writes_scales: whether each row gets a scale by its largest number; else scales are given.
        aligned: whether rows begin at multiples of 16 bytes, and those of the caches of 8.

    Raises:
        PlanError: the architecture is unknown.
        RenderError: the template and the plan disagree.
        CompileError: NVRTC is missing or rejects the source.
    """
    spec = AttentionSpec(head_dim=64, dtype=dtype, name="append_codes")
    access_bytes = 16 if aligned else ITEMSIZE[dtype]
    plan = plan_rows("append_codes", spec, arch, access_bytes=access_bytes)
    source = codegen.append_codes(spec, plan, kv_dtype, writes_scales)
    return compiled(source, analysed(spec, codegen.walk_of_kernel(source.role)))
