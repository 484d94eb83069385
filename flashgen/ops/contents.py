"""What captured tensors hold, looked at on the CPU only: on a GPU nobody waits for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashgen.ops.block_sparse import check_lists
from flashgen.ops.checks import Problem
from flashgen.ops.packed import check_boundaries
from flashgen.spec import AttentionSpec

Tensor = torch.Tensor


def check_contents(
    spec: AttentionSpec, captured: Mapping[str, Tensor], problem: Problem, device: torch.device
) -> None:
    """Boundaries of packed sequences and lists of a layout; kernels stay inside whatever they are.

    Raises:
        InputError: boundaries that do not ascend, lists that are not of the live blocks.
    """
    if device.type != "cpu":
        return
    if spec.packed:
        check_boundaries(spec, captured, problem.seq_q, problem.seq_k)
    if spec.block_sparse is not None and not spec.block_sparse.is_static:
        check_lists(captured)
