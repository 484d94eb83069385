"""The cost model of each kernel, by code path and operand size."""

from __future__ import annotations

from flashgen.planner.models import backward_sm80, backward_sm90, forward_sm80, forward_sm90
from flashgen.planner.models.kernel_model import KernelModel

PATHS: dict[str, dict[tuple[str, int], KernelModel]] = {
    "sm_80": forward_sm80.MODELS | backward_sm80.MODELS,
    "sm_90a": forward_sm90.MODELS | backward_sm90.MODELS,
}
"""By code path: the models by kernel and bytes per operand element."""


def model_of(path: str, kernel: str, itemsize: int) -> KernelModel:
    """The model of a kernel on a code path, for operands of ``itemsize`` bytes per element."""
    return PATHS[path][kernel, itemsize]
