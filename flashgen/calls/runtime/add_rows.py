"""A kernel that adds rows to the rows of float32 sums in a fixed order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashgen.calls.runtime.backends import Target
from flashgen.calls.runtime.bound_kernel import BoundKernel, KernelRun
from flashgen.calls.runtime.kernel_arguments import KernelArguments
from flashgen.shared.call import LaunchOptions
from flashgen.shared.dtypes import dtype_name

Tensor = torch.Tensor


class Order(NamedTuple):
    """Which blocks of rows are added to each block of sums.

    Attributes:
        blocks: int64 [blocks of rows], the blocks for the first block of sums, then for the next.
        starts: int64 [blocks of sums + 1], the index in ``blocks`` where each block of sums begins.
    """

    blocks: Tensor
    starts: Tensor

    @staticmethod
    def by_sums(blocks_of_sums: Tensor, sums: int) -> Order:
        """The blocks of rows in ascending order for each block of sums.

        Args:
            blocks_of_sums: int64 [blocks of rows], the block of sums of each; ``sums`` for none.
            sums: the number of blocks of sums.
        """
        ordered, blocks = blocks_of_sums.sort(stable=True)
        return Order(
            blocks,
            torch.searchsorted(ordered, torch.arange(sums + 1, device=blocks_of_sums.device)),
        )


def add_rows(
    total: Tensor, rows: Tensor, order: Order, target: Target, launch: LaunchOptions
) -> KernelRun:
    """Adds rows to sums, in place. Returns the launch.

    Args:
        total: float32 [blocks, rows of a block, columns], contiguous.
        rows: [blocks of rows * rows of a block, columns].
    """
    from flashgen.kernels.pipeline import build_add_rows
    from flashgen.kernels.planner.streaming_kernels import lane_bits_of_append

    blocks, block_k, columns = total.shape
    build = build_add_rows(dtype_name(rows.dtype), target.arch)
    vectors = columns * rows.element_size() // 16
    lane_bits = lane_bits_of_append(vectors)
    keys = blocks * block_k
    numbers = {
        "added_stride": rows.stride(0),
        "keys": keys,
        "block_k": block_k,
        "vectors": vectors,
        "lane_bits": lane_bits,
    }
    grid = -(-keys // (build.plan.threads >> lane_bits)), 1, 1
    bound = BoundKernel(build, KernelArguments(build.source.params, numbers), grid)
    tensors = {"added": rows, "sums": total, "order": order.blocks, "starts": order.starts}
    return bound.timed(target, tensors, launch)
