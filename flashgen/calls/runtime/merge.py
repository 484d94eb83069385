"""Merging of partial results: outputs and LSE of rows over several disjoint sets of keys.

With O_s and LSE_s of part s: LSE = ln(sum of exp(LSE_s)) and O = sum of exp(LSE_s - LSE) O_s, in
float32. Parts are results of `spec.language.signature.partial`, or those over the keys of each
split of one call. Splits begin at the global key positions 0, S, 2S, and so on, so that the keys of
a split do not depend on the number of queries or on the other batch entries. A call with split_size
is a call of a variant of its spec, which has S as a scalar (`spec.language.signature.split`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from flashgen.calls.runtime.arguments.positions import rows_outside
from flashgen.calls.runtime.arguments.refusals import check_is_tensor, refuse
from flashgen.calls.runtime.backends import Target, target_of
from flashgen.calls.runtime.bind_arguments import bind
from flashgen.calls.runtime.bound_kernel import BoundKernel, KernelRun
from flashgen.calls.runtime.memory_layout import empty_rows, rows_before_heads
from flashgen.calls.runtime.programs import CallProgram, LaunchableKernel
from flashgen.calls.sinks import head_logits, logits_of, rows_of_call
from flashgen.shared.call import DEFAULT_LAUNCH, CheckedCall, LaunchOptions
from flashgen.shared.dtypes import dtype_name
from flashgen.shared.split_choice import SPLITS_OF_GROUP

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor]
"""out and lse."""


@torch.no_grad()
def merge(
    parts_out: Tensor,
    parts_lse: Tensor,
    *,
    merged: Results | None = None,
    sink: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    arch: str | None = None,
) -> Results:
    """Merges results over disjoint sets of keys into the result over all of them.

    The sums have a fixed order (the sink, ``merged``, then the parts), so that equal arguments give
    equal bits. Where the LSE of a part is -inf, the row has no keys there: its output is not read
    and may be memory that nothing has written. A row without keys in any part has output 0 and LSE
    -inf, or the sink's logit.

    Args:
        parts_out: float32 [splits, batch, heads, rows, head_dim_v].
        parts_lse: float32 [splits, batch, heads, rows], natural log.
        merged: out and lse of an earlier merge over other keys.
        sink: logits that join the normaliser once, [heads] or one for all heads.
        out_dtype: the dtype of the merged output.
        backend, arch: as in `flashgen.attention`.

    Returns:
        out [batch, heads, rows, head_dim_v], with the axis order of a part in memory,
        and lse [batch, heads, rows], float32.

    Raises:
        InputError: an argument is wrong; nothing has run then.
        SpecError: there is no kernel for the head dim or for the dtype of the output.
    """
    _check(parts_out, parts_lse, merged, sink)
    target = target_of(backend, arch, parts_out.device)
    if sink is not None:
        sink = sink.float().reshape(-1).expand(parts_out.shape[2])
    if target.backend == "tiled":
        return _on_cpu((parts_out, parts_lse), merged, sink, out_dtype)
    out = empty_rows(parts_out[0], parts_out.shape[4], out_dtype)
    lse = torch.empty_like(parts_lse[0], memory_format=torch.contiguous_format)
    if lse.numel():
        run_merge(target, (parts_out, parts_lse), (out, lse), merged, sink)
    return out, lse


def run_merge(
    target: Target,
    parts: Results,
    results: Results,
    merged: Results | None = None,
    sink: Tensor | None = None,
    launch: LaunchOptions = DEFAULT_LAUNCH,
) -> Any:
    """Runs the merge kernel, which writes ``results``. Returns the emulator's counters.

    Args:
        parts, merged: as in `merge`, checked.
        sink: float32 [heads].

    Raises:
        InputError: the kernel cannot read a tensor in its memory layout.
    """
    _check_layout("parts_out", parts[0])
    if merged is not None:
        _check_layout("merged", merged[0])
    from flashgen.kernels.pipeline import build_merge

    merge_tensors, out = (parts, results, merged, sink), results[0]
    kernel = build_merge(out.shape[3], dtype_name(out.dtype), target.arch)
    return bind_merge(kernel, *merge_tensors).run(target, tensors_of_merge(*merge_tensors), launch)


def tensors_of_merge(
    parts: Results, results: Results, merged: Results | None, sink: Tensor | None
) -> dict[str, Tensor | None]:
    """The tensors of `run_merge` by the names that the kernel uses."""
    return {
        "o": results[0],
        "lse": results[1],
        "parts_o": parts[0],
        "parts_lse": parts[1].contiguous(),
        "merged_o": None if merged is None else merged[0],
        "merged_lse": None if merged is None else merged[1].contiguous(),
        "sink": sink,
    }


def bind_merge(
    kernel: LaunchableKernel,
    parts: Results,
    results: Results,
    merged: Results | None,
    sink: Tensor | None,
    run: int = 1,
) -> BoundKernel:
    """The merge kernel bound to tensors of these sizes and strides; ``run``: splits of a part."""
    parts_out, out = parts[0], results[0]
    batch, heads, rows, dim = out.shape
    return bind(
        kernel,
        CheckedCall(batch, heads, heads, rows, 0, dim, dim, 0, 0, 1.0, {}),
        # The strides of a part. Without an earlier result its strides are never used.
        {"o": out, "parts_o": parts_out[0], "merged_o": out if merged is None else merged[0]},
        numbers={
            "splits": len(parts_out),
            "parts_of_group": SPLITS_OF_GROUP // run,
            "parts_o_stride_s": parts_out.stride(0),
            "sink_stride": 0 if sink is None else sink.stride(0),
        },
    )


class Splits:
    """The results over the keys of each split, in calls of the same sizes."""

    def __init__(self, program: CallProgram, call: CheckedCall, target: Target) -> None:
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
        merge_tensors = parts, results, *self._sink(captured, results[0])
        if self._merge is None:
            kernel = self._program.merge(self._target.arch)
            self._merge = bind_merge(kernel, *merge_tensors, run=self._call.run)
        run = self._merge.timed(self._target, tensors_of_merge(*merge_tensors), launch)
        if self._signature.packed and self._signature.sink is not None:
            results[1].masked_fill_(rows_outside(captured, results[1].shape[2]), -math.inf)
        return run

    def _sink(
        self, captured: Mapping[str, Tensor], out: Tensor
    ) -> tuple[Results | None, Tensor | None]:
        """The sink as an earlier result, or as the float32 logits [heads] of the call's heads."""
        argument = self._signature.sink
        if argument is None:
            return None, None
        sink = captured[argument.name]
        if argument.by_row:
            first_head, q_offset = self._call.first_head, self._call.q_offset
            rows = rows_of_call(self._signature, captured, out, first_head, q_offset)
            return sink_as_result(out, logits_of(sink, argument.dims, rows)), None
        first, heads = self._call.first_head, self._call.heads_q
        return None, head_logits(sink.float().reshape(-1), first, heads).expand(heads)


def sink_as_result(out: Tensor, logits: Tensor) -> Results:
    """The result over a key whose V is 0 and whose scores are the logits of the rows of ``out``."""
    zeros = out.new_zeros(out.shape[-1], dtype=torch.float32)
    return zeros.expand(out.shape), logits.expand(out.shape[:3]).contiguous()


def _on_cpu(
    parts: Results, merged: Results | None, sink: Tensor | None, out_dtype: torch.dtype
) -> Results:
    results_of_parts = [*([] if merged is None else [merged]), *zip(*parts, strict=True)]
    top = torch.stack([lse for _, lse in results_of_parts]).amax(0)
    logits = None if sink is None else sink[:, None].expand(top.shape)
    if logits is not None:
        top = torch.maximum(top, logits)
    # Where no part has keys, all weights are exp(-inf - 0).
    shift = top.masked_fill(top == -math.inf, 0.0)
    total = torch.zeros_like(top) if logits is None else (logits - shift).exp()
    out = empty_rows(parts[0][0], parts[0].shape[4]).zero_()
    for part, lse in results_of_parts:
        weight = (lse - shift).exp()
        total += weight
        out += torch.where((lse == -math.inf)[..., None], 0.0, part * weight[..., None])
    out /= total.masked_fill(total == 0, 1.0)[..., None]
    return out.to(out_dtype), top + total.log()


def _check(
    parts_out: Tensor, parts_lse: Tensor, merged: Results | None, sink: Tensor | None
) -> None:
    tensors = {"parts_out": parts_out, "parts_lse": parts_lse}
    if merged is not None:
        tensors |= {"merged[0]": merged[0], "merged[1]": merged[1]}
    for name, tensor in tensors.items():
        way_out = "results of a call whose spec is a partial one"
        check_is_tensor(name, tensor, way_out, f"argument {name} of merge")
    shape = tuple(parts_out.shape)
    wanted = {"parts_lse": shape[:-1], "merged[0]": shape[1:], "merged[1]": shape[1:-1]}
    for name, tensor in tensors.items():
        size, device = tuple(tensor.shape), parts_out.device
        wrong = size != wanted.get(name, size) or len(shape) != 5 or not shape[0]
        if wrong or tensor.dtype != torch.float32 or tensor.device != device:
            refuse(
                "partial results do not fit together",
                f"argument {name} of merge",
                f"shape {size}, {tensor.dtype}, on {tensor.device}; parts_out has shape {shape}",
                "float32 parts_out [splits, batch, heads, rows, head_dim_v], parts_lse [splits, "
                "batch, heads, rows], merged the same without splits, on one device",
            )
    if sink is not None and (sink.numel() not in (1, shape[2]) or sink.device != parts_out.device):
        refuse(
            "the sink does not have a logit for each head",
            "argument sink of merge",
            f"shape {tuple(sink.shape)}, on {sink.device}; {shape[2]} heads on {parts_out.device}",
            "[heads], or one element for all heads",
        )


def _check_layout(name: str, tensor: Tensor) -> None:
    """The kernel reads 16 bytes at once."""
    steps = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    uneven = [stride for size, stride in steps if size > 1 and stride % 4]
    if tensor.stride(-1) != 1 or uneven or tensor.data_ptr() % 16:
        refuse(
            f"the merge kernel cannot read {name} in 16-byte vectors",
            f"argument {name} of merge",
            f"strides {tensor.stride()}, address {tensor.data_ptr() % 16} B past a multiple of 16",
            f"{name}.contiguous()",
        )
