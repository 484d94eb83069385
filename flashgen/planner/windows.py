"""The windows of the kernels for learned tensors: sums in shared memory, one set per warp."""

from __future__ import annotations

from collections.abc import Iterator

from flashgen.analysis import Window, kind_of_sum, window_of
from flashgen.dtypes import OPERANDS
from flashgen.language import Element, elements_of
from flashgen.language.spec import AttentionSpec
from flashgen.planner.models.kernel_model import LEARNED_KERNELS

Learned = tuple[tuple[Element, tuple[int | str, ...]], ...]
"""Elements of learned tensors, each with the dims of its tensor."""


def added_by_scores(spec: AttentionSpec, kernel: str) -> Learned:
    """The elements to whose gradients each score of a kernel adds for itself."""
    if kernel not in LEARNED_KERNELS:
        return ()
    dims = {tensor.symbol: tensor.dims for tensor in spec.tensors if tensor.grad}
    return tuple(
        (element, dims[element.tensor])
        for element in elements_of(spec.score)
        if element.tensor in dims and kind_of_sum(element) == "element"
    )


def windows_of(learned: Learned, rows: int, keys: int) -> Iterator[Window]:
    """The windows of a warp with this part of a tile, in the order of ``learned``."""
    for element, dims in learned:
        window = window_of(element, dims, rows, keys)
        if window is not None:
            yield window


def window_bytes(kernel: str, dtype: str, learned: Learned, rows: int, keys: int) -> int:
    """Bytes of shared memory for the windows of one warp."""
    entries = sum(window.entries for window in windows_of(learned, rows, keys))
    return (8 if kernel == "captured_exact" else OPERANDS[dtype].sums.itemsize) * entries
