"""Split keys: the results of a call over the keys of each split, and their merge.

Splits begin at the global key positions 0, S, 2S, and so on, so that the keys of a split do not
depend on the number of queries or on the other batch entries. A call with split_size is a call of a
variant of its spec, which has S as a scalar (`flashgen.language.signature.split`).
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter

import torch

from flashgen.call import CheckedCall, LaunchOptions
from flashgen.runtime.backends import Target
from flashgen.runtime.bound_kernel import BoundKernel
from flashgen.runtime.memory_layout import rows_before_heads
from flashgen.runtime.merge import Results, bind_merge, tensors_of_merge
from flashgen.runtime.minmax_tables import KernelRun
from flashgen.runtime.programs import Program
from flashgen.sinks import of_heads

Tensor = torch.Tensor


class Splits:
    """The results over the keys of each split, in calls of the same sizes."""

    def __init__(self, program: Program, call: CheckedCall, target: Target) -> None:
        self._program, self._call, self._target = program, call, target
        self._signature = program.signature
        self._merge: BoundKernel | None = None

    def parts(self, out: Tensor, lse: Tensor) -> Results:
        """Uninitialised results over the keys of each split, for results over all keys."""
        batch, heads, rows, dim = out.shape
        if rows_before_heads(out):
            order = out.new_empty(self._call.splits, batch, rows, heads, dim, dtype=torch.float32)
            parts_out = order.transpose(2, 3)
        else:
            parts_out = out.new_empty(
                self._call.splits, batch, heads, rows, dim, dtype=torch.float32
            )
        return parts_out, lse.new_empty(self._call.splits, *lse.shape)

    def merge(
        self,
        parts: Results,
        results: Results,
        captured: Mapping[str, Tensor],
        launch: LaunchOptions,
    ) -> KernelRun:
        """Writes the results over all keys and the sink."""
        start = perf_counter()
        given = parts, results, None, self._sink(captured)
        if self._merge is None:
            self._merge = bind_merge(self._program.merge(self._target.arch), *given)
        counters = self._merge.run(self._target, tensors_of_merge(*given), launch)
        return KernelRun(self._merge.build, counters, perf_counter() - start)

    def _sink(self, captured: Mapping[str, Tensor]) -> Tensor | None:
        """The logits of the call's heads, float32 [heads]."""
        if self._signature.sink is None:
            return None
        first, heads = self._call.first_head, self._call.heads_q
        sink = captured[self._signature.sink.name].float().reshape(-1)
        return of_heads(sink, first, heads).expand(heads)
