"""cuDNN by its own interface: the sdpa node of a graph of cudnn-frontend.

It has windows, ALiBi, sinks, dropout, pages and deterministic gradients, which do not reach cuDNN
through torch but as a dense mask. The numbers of a graph are constants of the graph, though not of
its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Prepared, Tensor, learned, passes_of
from benchmarks.suite.contenders.libraries import CUDNN, cudnn_text
from benchmarks.suite.contenders.served import PAGE, pages_of, table_of
from benchmarks.suite.device import Device


class CudnnGraph:
    ours = False

    def __init__(self, *, deterministic: bool = False, paged: bool = False) -> None:
        self.name = "cuDNN graph" + " deterministic" * deterministic + " paged" * paged
        self.deterministic, self.paged = deterministic, paged

    def library(self, device: Device) -> str:
        return f"{cudnn_text()}; {CUDNN.on(device)}"

    def supports(self, case: Case, device: Device) -> str | None:
        mods = case.mods
        if case.dtype == "float32":
            return "16-bit operands only"
        if mods.starts is not None:
            return "packed sequences are measured by its flex_attention"
        if mods.mask is not None and mods.band is None:
            return "its mask is no band of keys"
        if mods.score is not None and not (mods.slopes and mods.is_causal):
            return "its score function is not ALiBi with a causal mask"
        if mods.slopes and case.heads_q & (case.heads_q - 1):
            return "its slopes are those of a power of two of heads"
        if mods.mask is not None and case.seq_q != case.seq_k:
            return "its bands are for square problems"
        if self.deterministic and case.seq_q == 1:
            return "decoding has no gradients"
        if self.paged and (case.seq_q != 1 or case.seq_k % PAGE):
            return f"for decoding, with keys in whole pages of {PAGE}"
        return CUDNN.missing(device)

    def prepare(self, case: Case, device: Device) -> Prepared:
        cudnn, captured = CUDNN.load(device), case.tensors(device.torch)
        mods = case.mods_of({**dict(case.scalars), **captured})
        options: dict[str, Any] = {"attn_scale": case.head_dim**-0.5}
        if mods.mask is not None:
            left, right = mods.band or (None, None)
            options["diagonal_band_right_bound"] = right
            if left is not None:
                options["diagonal_band_left_bound"] = left + 1  # the query's own key is counted
        if mods.slopes:
            options["use_alibi_mask"] = True
        library = Node(cudnn, options, self.deterministic, mods.sink, device.torch)
        if self.paged:
            library.pages(table_of(case, device.torch), case.seq_k)
        if mods.dropout:
            library.dropout = mods.dropout

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = _Sdpa.apply(q, k, v, mods.sink, library)
            return out

        plain = Node(cudnn, options, self.deterministic, mods.sink, device.torch)
        return Prepared(
            attend,
            passes_of(case, deterministic=self.deterministic),
            learned=learned(captured),
            undropped=(lambda *t: _Sdpa.apply(*t, mods.sink, plain)) if mods.dropout else None,
        )


class Node:
    """The forward and the backward graph of one node, built for the shapes of their first call."""

    def __init__(
        self, cudnn: Any, options: dict[str, Any], deterministic: bool, sink: Any, device: Any
    ) -> None:
        self.cudnn, self.options, self.deterministic = cudnn, options, deterministic
        self.dropout = 0.0
        self.sink = None if sink is None else sink.detach().view(1, -1, 1, 1)
        self.table: Tensor | None = None
        self.seed = torch.full((1, 1, 1, 1), 7, dtype=torch.int64, device=device)
        self._handle = cudnn.create_handle()
        self._built: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor]], None]] = {}

    def pages(self, table: Tensor, keys: int) -> None:
        """Makes k and v caches of pages, in the order of ``table``, int32 [batch, pages]."""
        self.table = table[:, None, :, None].contiguous()
        self.lengths = torch.full_like(table[:, :1, None, None], keys)
        self.keys = keys

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the statistics that the backward pass needs."""
        if self.table is not None:
            k, v = pages_of(k), pages_of(v)
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        stats = q.new_empty(*q.shape[:3], 1, dtype=torch.float32)
        self._run("forward", (q, k, v), (out, stats))
        return out, stats

    def backward(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gradients of q, k, v and a sink, from (q, k, v, out, dout, stats)."""
        gradients = [torch.empty_like(tensor) for tensor in operands[:3]]
        gradients += [] if self.sink is None else [torch.empty_like(self.sink)]
        self._run("backward", operands, gradients)
        return tuple(gradients)

    def _run(self, pass_: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        if pass_ not in self._built:
            self._built[pass_] = self._graph(pass_, operands, results)
        self._built[pass_](operands, results)

    def _graph(self, pass_: str, operands: Sequence[Tensor], results: Sequence[Tensor]) -> Any:
        cudnn, types = self.cudnn, self.cudnn.data_type
        graph = cudnn.pygraph(
            io_data_type=types.BFLOAT16 if operands[0].dtype == torch.bfloat16 else types.HALF,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=self._handle,
        )
        inputs = [graph.tensor_like(tensor) for tensor in operands]
        options = dict(self.options)
        others: dict[Any, Tensor] = {}

        def constant(name: str, tensor: Tensor) -> Any:
            options[name] = graph.tensor_like(tensor)
            others[options[name]] = tensor
            return options[name]

        if self.sink is not None:
            constant("sink_token", self.sink)
        if self.dropout:
            seed, offset = (constant(name, self.seed) for name in ("seed", "offset"))
            del options["seed"], options["offset"]
            options["dropout"] = (self.dropout, seed, offset)
        if self.table is not None:
            constant("paged_attention_k_table", self.table)
            constant("paged_attention_v_table", self.table)
            constant("seq_len_kv", self.lengths)
            constant("seq_len_q", torch.ones_like(self.lengths))
            options |= {"paged_attention_max_seq_len_kv": self.keys, "use_padding_mask": True}
        if pass_ == "forward":
            outputs = list(graph.sdpa(*inputs, generate_stats=True, **options))
        else:
            if self.sink is not None:
                options["dSink_token"] = graph.tensor_like(results[3])
            outputs = list(
                graph.sdpa_backward(
                    *inputs, use_deterministic_algorithm=self.deterministic, **options
                )
            )
            outputs += [options["dSink_token"]] if self.sink is not None else []
        for output, tensor in zip(outputs, results, strict=True):
            output.set_output(True).set_dim(tuple(tensor.shape)).set_stride(tensor.stride())
            if tensor.dtype == torch.float32:
                output.set_data_type(types.FLOAT)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        size = max(1, graph.get_workspace_size())
        workspace = torch.empty(size, dtype=torch.uint8, device=operands[0].device)

        def run(operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
            if operands[0].is_cuda:
                stream = torch.cuda.current_stream().cuda_stream
                cudnn.set_stream(handle=self._handle, stream=stream)
            tensors = dict(zip((*inputs, *outputs), (*operands, *results), strict=True))
            graph.execute({**tensors, **others}, workspace, handle=self._handle)

        return run


class _Sdpa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Any, node: Node) -> Tensor:
        out, stats = node.forward(*(tensor.detach() for tensor in (q, k, v)))
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.node = node
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, stats = (tensor.detach() for tensor in ctx.saved_tensors)
        dq, dk, dv, *dsink = ctx.node.backward((q, k, v, out, dout.contiguous(), stats))
        return dq, dk, dv, dsink[0].view(-1) if dsink else None, None
