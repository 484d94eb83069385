"""`flashgen.attention`, which makes a callable operator from a spec."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch.autograd import forward_ad

from flashgen.calls.native.build import missing
from flashgen.calls.ops.autograd import are_plain, attend_plain, is_plain
from flashgen.calls.ops.dispatched_call import dispatched_call, mode_while_traced
from flashgen.calls.ops.dtensors import refuse_drawn
from flashgen.calls.ops.operator import Operator
from flashgen.calls.ops.registration import operator_of
from flashgen.calls.ops.statistics import call_with_statistics
from flashgen.calls.runtime import forward
from flashgen.calls.runtime.arguments.call import Call
from flashgen.calls.runtime.arguments.options import (
    draw_rng,
    invariant_options,
    new_rng,
    refuse_positional,
    refuse_return_lse,
    refuse_two_requests,
)
from flashgen.calls.runtime.arguments.pages import check_positions_of_pages
from flashgen.calls.runtime.arguments.refusals import (
    is_dtensor,
    refuse_jit_trace,
    runs_while_traced,
)
from flashgen.calls.runtime.arguments.slices import refuse_split
from flashgen.calls.runtime.arguments.tensors import values_of
from flashgen.calls.runtime.programs import CallProgram, Variant, program_of
from flashgen.calls.runtime.reports import Report
from flashgen.shared import config
from flashgen.shared.call import DEFAULT_OPTIONS, INVARIANT, CallOptions, Operands
from flashgen.shared.errors import SpecError

if TYPE_CHECKING:
    from flashgen.shared.aux_results import AuxOutput, AuxRequest
    from flashgen.shared.signature import CallSignature
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

_C = torch._C


def attention(spec: AttentionSpec | None = None, *more: Any, **others: Any) -> Attention:
    """Returns the operator that computes ``spec``; equal specs share one operator.

    The operator is also registered as ``torch.ops.flashgen.<name>``, with the name of the spec.
    If a different spec already has the name, a short hash is appended.

    Args:
        spec: the variant to compute.

    Returns:
        A callable; `flashgen.calls.ops.Attention.__call__` lists its arguments.

    Raises:
        SpecError: ``spec`` is not an AttentionSpec, or not the only argument.
    """
    from flashgen.spec.language.spec import AttentionSpec

    if more or others:
        raise SpecError(
            "an operator is made from an AttentionSpec alone",
            where="flashgen.attention",
            numbers=f"given {len(more)} more by position and {', '.join(others) or 'none'} by name",
            way_out="options of the variant in fg.AttentionSpec(...), and what belongs to a call "
            "in the call: fg.attention(spec)(q, k, v, scale=...)",
        )
    if not isinstance(spec, AttentionSpec):
        raise SpecError(
            "an operator is made from an AttentionSpec",
            where="flashgen.attention",
            numbers=f"given a {type(spec).__name__}",
            way_out="fg.attention(fg.AttentionSpec(mask_mod=..., score_mod=...))",
        )
    return _attention(spec)


def _spec_of_output(spec: Any) -> Any:
    """The spec without statistics, which do not change its output."""
    if not getattr(spec, "statistics", ()):
        return spec
    from flashgen.spec.language.statistic_specs import without_statistics

    return without_statistics(spec)


@functools.cache
def _attention(spec: AttentionSpec) -> Attention:
    return Attention(spec)


class Attention:
    """A callable that computes one spec; kernels are compiled at the first call that needs them.

    Operators can be pickled and copied, also as attributes of a module. torch.compile and
    torch.export trace a call as one node.

    Attributes:
        spec: the variant that is computed.
        is_exported: whether the kernels are those of an export.
        own_statistics: the name of each statistic that the spec names, and what it is over:
            "keys" or "queries".
    """

    def __init__(self, spec: AttentionSpec | CallProgram) -> None:
        self.spec: Any = spec
        self._operator = operator_of(_spec_of_output(spec))
        self._paged = self._operator.signature.paged
        self._shares_kv = self._operator.signature.shared_kv
        self._weighs = self._operator.signature.normalize != "softmax"
        self._draws = self._operator.signature.draws
        self._latest = self._operator.latest
        self._variants = SimpleNamespace()
        self._for_maxima: Attention | None = None
        self.is_exported = isinstance(spec, CallProgram)
        statistics = getattr(spec, "statistics", ())
        self.own_statistics = tuple((name, statistic.over) for name, statistic in statistics)

    def __repr__(self) -> str:
        return f"flashgen.attention({self.spec!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return attention, (self.spec,)

    def __copy__(self) -> Attention:
        return self

    def __deepcopy__(self, memo: Any) -> Attention:
        return self

    @property
    def name(self) -> str:
        """Name of the operator in torch.ops.flashgen."""
        return self._operator.name

    @property
    def _used(self) -> Operator:
        """The operator of the last call: that of the spec, or of a variant."""
        used: Operator = self._latest.used
        return used

    @property
    def report(self) -> Report | None:
        """Backend, kernel and counters of the last call; None before the first call."""
        done = self._used.last_forward()
        return None if done is None else forward.report(done)

    @property
    def backward_reports(self) -> tuple[Report, ...]:
        """A report for each kernel of the last backward pass; empty before the first pass."""
        done = self._used.last_backward()
        return () if done is None else done.reports()

    @property
    def native_calls(self) -> str:
        """How many calls were made without Python, in words; the reason where none can be.

        The numbers are those of the variant of the last call.
        """
        native = self._used.native
        if native is None:
            return missing() or "no call has run on a GPU"
        forward_calls, backward_calls = native.hits
        said = f"{forward_calls:,} forward and {backward_calls:,} backward calls without Python"
        reasons = "".join(f"; in Python: {reason}" for reason in dict.fromkeys(native.reasons))
        return said + reasons

    @overload
    def __call__(
        self,
        /,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        return_lse: Literal[True],
        **rest: Any,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def __call__(
        self,
        /,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        return_aux: AuxRequest,
        **rest: Any,
    ) -> tuple[Tensor, AuxOutput]: ...

    @overload
    def __call__(
        self,
        /,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        *,
        return_lse: Literal[False] = False,
        **rest: Any,
    ) -> Tensor: ...

    def __call__(
        self,
        /,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        *more: Any,
        scale: float | None = None,
        q_offset: int | Tensor | None = None,
        k_offset: int | Tensor = 0,
        h_offset: int = 0,
        whole: Mapping[str, int] | None = None,
        split_size: int | None = None,
        return_lse: bool = False,
        return_aux: AuxRequest | None = None,
        dropout_p: float | Tensor = 0,  # torch.compile can make symbols of floats, also of this one
        rng: Tensor | None = None,
        backend: str | None = None,
        arch: str | None = None,
        deterministic: bool | None = None,
        batch_invariant: bool | None = None,
        **captures: Any,
    ) -> Tensor | tuple[Tensor, ...] | tuple[Tensor, AuxOutput]:
        """Computes attention of q over k and v, with gradients for them and for learned tensors.

        The algorithm is that of FlashAttention-2 (Dao, 2023): Algorithm 1 forward, Algorithm 2
        backward. Under torch.autocast, q, k and v are cast to the autocast dtype and the kernels of
        that dtype run. Meta tensors give meta tensors.

        Args:
            q: [batch, heads_q, seq_q, head_dim], of the spec's dtype (where that is None:
                float16, bfloat16 or float32), on the CPU or a CUDA device. Any strides with a
                contiguous last dimension; expanded tensors are allowed.
            k: [batch, heads_kv, seq_k, head_dim]; heads_q is a multiple of heads_kv. With
                paged=True, k and v are caches [pages, heads_kv, page_size, head dim].
            v: [batch, heads_kv, seq_k, head_dim_v]. With shared_kv=True it is not given: it is the
                first head_dim_v columns of k, and gradients of both uses are added.
            scale: factor on q.k; if None, the scale of the spec, or 1 / sqrt(head_dim).
            q_offset: global position of the first query, which mods see: an int, or an int32 or
                int64 tensor of dims (), (1,) or (batch,) on the device of q, with one position for
                each batch entry. Kernels read the tensor, so that no call waits for the device and
                a replayed CUDA graph uses its new values. Positions beyond +-2^28 are refused on
                the CPU and clamped on a GPU. With dropout_p above 0 an int that is a multiple of
                16. None: 0, or for paged=True the position with which the queries come last.
            k_offset: global position of the first key, likewise.
            h_offset: number of the first query head, for mods, dropout, the sink and block layouts,
                where the call has some of the heads of a whole.
            whole: the sizes of the whole of which the call computes a part, where they are larger
                than those of the call: {"heads": ..., "seq_q": ..., "seq_k": ...}, each of them
                optional. Mods see them as fg.heads, fg.seq_q and fg.seq_k, and captured tensors
                with a dimension "heads" have all heads. Packed sequences have lengths of their own.
            split_size: number of keys after which another thread block continues with the keys of a
                row, a multiple of 16. Splits begin at the global key positions 0, split_size, 2 *
                split_size, and so on; a kernel merges their results. This computes few queries over
                many keys on all SMs, and the bits of a row then depend on its own query and keys,
                not on the number of queries or of batch entries. 0: all keys of a row in one
                thread block. None: `flashgen.kernels.planner.split_of_call` chooses, a number of
                keys for paged=True and for few query rows, else 0. Gradients are those of any
                other call. With batch_invariant the spec and the architecture alone decide.
            return_lse: whether to also return the log-sum-exp of each row.
            return_aux: which statistics to return beside the output, as `flashgen.AuxOutput`, with
                those that the spec names: a `flashgen.AuxRequest`, or PyTorch's.
            dropout_p: probability with which an element of P is dropped, in [0, 1), rounded to a
                multiple of 2^-16; a number, or a CPU tensor of one element. Above 0 only for a spec
                with dropout=True. Which elements depends on rng, batch entry, head and global
                positions alone.
            rng: int64 [2] on the device of q, seed and offset of dropout and of fg.rand; if None,
                drawn from PyTorch's generator of that device.
            backend: "gpu" launches the kernels on the current CUDA stream (default for CUDA
                tensors); "tiled" computes tiles in PyTorch (default for CPU tensors);
                "emulator" executes the kernels on CPU tensors with memory and race checkers, and
                "emulator:7" does so in an order of blocks and warps that is drawn from 7.
                FLASHGEN_BACKEND replaces the default.
            arch: architecture to compile for, such as "sm_90a"; if None, FLASHGEN_ARCH, the
                architecture of the GPU, or sm_80.
            deterministic: whether gradients have the same bits in every run; if None, the setting
                of torch.use_deterministic_algorithms.
            batch_invariant: whether the bits of a row of the results depend on its query, its keys
                and its position alone, in this call and in all others, with deterministic
                gradients; if None, the setting of `flashgen.batch_invariant_mode`.
            captures: a number for each scalar and a tensor for each captured tensor of the spec, by
                name. Tensors have the declared rank and dtype, lie on the device of q and may have
                any strides. Floats of another dtype are converted to the declared one, and their
                gradients have the dtype that was given. With paged=True: page_table, int32
                [sequences, pages], cache_seqlens, int32 [sequences], the keys of each; and
                cu_seqlens_q, int32 [sequences + 1], where the queries of all sequences are one
                batch entry of q. If the spec's block_sparse
                has no function, ``layout`` too: a bool tensor [batch or 1, heads or 1, row blocks,
                column blocks] counted from global position 0, a flashgen.Layout, or a PyTorch
                BlockMask with the spec's block size, whose blocks are used and whose mask_mod is
                not.

        Returns:
            out: [batch, heads_q, seq_q, head_dim_v], of q's dtype and with its axes in the memory
            order of q's. With return_lse a tuple (out, lse): lse is [batch, heads_q, seq_q],
            float32, natural logarithm. A row without a kept key has out 0 and lse -inf (or the
            spec's sink), as has every row if seq_k is 0. Gradients flow through both, tangents and
            second derivatives too. With return_aux a tuple (out, flashgen.AuxOutput).

        Raises:
            InputError: an argument has a wrong shape, dtype, device, stride, value or name; nothing
                has run. Also for third derivatives, and forward mode over forward mode.
            PlanError: no tile fits the architecture.
            CompileError: NVRTC is missing or rejects a kernel.
            LaunchError: a kernel cannot be loaded or launched.
            EmulatorError: an emulated kernel violates a rule of PTX.
        """
        if return_lse is not False and (return_lse is not True or self._weighs):
            refuse_return_lse(return_lse)
        if more:
            refuse_positional(more[0])
        operator = self._operator
        traced = torch.compiler.is_compiling()
        if batch_invariant is None:
            batch_invariant = mode_while_traced() if traced else config.batch_invariant()
        if batch_invariant is not False:
            split_size, deterministic = invariant_options(
                batch_invariant, split_size, deterministic
            )
        elif type(split_size) is int and split_size == INVARIANT:
            refuse_split(split_size)  # calls have it by `batch_invariant` alone
        if self._paged:
            check_positions_of_pages(q_offset, k_offset)
        if self._draws and rng is None and isinstance(q, Tensor):
            if is_dtensor(q):
                refuse_drawn()
            rng = new_rng(q.device)
        if return_aux is not None:
            if return_lse:
                refuse_two_requests()
            numbers = scale, q_offset, k_offset, backend, arch, deterministic, split_size
            return call_with_statistics(
                self,
                return_aux,
                Operands(q, k, v, (), rng),
                CallOptions(*numbers, (), dropout_p),
                captures,
                h_offset=h_offset,
                whole=whole,
            )
        if self._shares_kv:
            v = values_of(self._operator.signature, k, v)
        if q_offset is None:
            q_offset = 0
        autocast = traced or _C._is_any_autocast_enabled()
        operands = Operands(q, k, v, (), rng)
        starts_are_ints = type(q_offset) is int and type(k_offset) is int
        if (
            not traced  # a graph would guard the values
            and starts_are_ints
            and not q_offset
            and not k_offset
            and scale is None
            and backend is None
            and arch is None
            and deterministic is None
            and split_size is None
            and type(dropout_p) in (int, float)
            and not dropout_p
        ):
            options = DEFAULT_OPTIONS  # most calls: later comparisons find the same object
        else:
            options = CallOptions(
                scale, q_offset, k_offset, backend, arch, deterministic, split_size, (), dropout_p
            )
        if (
            captures
            or operator.captures
            or autocast
            or whole is not None
            or type(h_offset) is not int
            or h_offset
            or not starts_are_ints
        ):
            operator, operands, options = Call.from_arguments(
                operator,
                self._variant,
                operands,
                options,
                captures,
                h_offset=h_offset,
                whole=whole,
                autocast=autocast,
            )
        return self._run(operator, operands, options, return_lse, traced)

    def _run(
        self,
        operator: Operator,
        operands: Operands,
        options: CallOptions,
        return_lse: bool,
        traced: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        """The results of a call by the shortest way: without Python, without the dispatcher, or
        with it where something beside autograd has to see the call."""
        q, k, v, captured, rng = operands
        if not traced:
            self._latest.used = operator
            if operator.native is not None:
                native_results: Tensor | tuple[Tensor, Tensor] | None
                native_results = operator.native.call(q, k, v, rng, captured, *options, return_lse)
                if native_results is not None:
                    return native_results
        if traced or not is_plain(q, k, v) or q.is_meta or (captured and not are_plain(captured)):
            if not traced:
                refuse_jit_trace()
            result = dispatched_call(operator, operands, options)
            return result if return_lse else result[0]
        passed_rng = rng
        if rng is None and operator.dropout:
            rng = draw_rng(options.dropout_p, q.device)
            operands = operands._replace(rng=rng)
        if (
            torch.is_grad_enabled()
            and not torch.is_inference_mode_enabled()
            and (
                q.requires_grad
                or k.requires_grad
                or v.requires_grad
                or (captured and any(tensor.requires_grad for tensor in captured))
            )
        ) or forward_ad._current_level >= 0:
            result = attend_plain(operator, options, q, k, v, rng, *captured)
        else:
            result = operator.compute(operands, options)
        if operator.native is not None:
            operator.learn(operands, options, passed_rng)
        return result if return_lse else result[0]

    def _variant(self, *fields: Any) -> Operator:
        operator: Operator = getattr(self._variants, self._name_of_variant(*fields))
        return operator

    @runs_while_traced
    def _name_of_variant(self, *fields: Any) -> str:
        """The name of a variant's operator, which becomes an attribute that Dynamo can guard."""
        operator = operator_of(_spec_of_output(program_of(self.spec).variant(Variant(*fields))))
        operator.latest = self._latest
        setattr(self._variants, operator.name, operator)
        return operator.name

    # Statistics: `flashgen.calls.ops.statistics`.

    def with_maxima(self, *operands: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and the largest score of each row, of one kernel: a call with return_lse."""
        self._make_for_maxima()
        variant = self._for_maxima
        assert variant is not None, "made above"
        results: Any = variant(*operands, return_lse=True, **options)
        if not torch.compiler.is_compiling():
            self._latest.used = variant._used
        out, lse, maxima = results
        return out, lse, maxima

    @runs_while_traced
    def _make_for_maxima(self) -> None:
        if self._for_maxima is None:
            from flashgen.spec.language.signature import returning_maxima

            self._for_maxima = attention(returning_maxima(_spec_of_output(self.spec)))

    @property
    def signature(self) -> CallSignature:
        """The arguments of calls."""
        return self._operator.signature

    def variant_of(self, *fields: Any) -> Operator:
        """The operator of a variant of the spec; without fields, that of the spec."""
        return self._variant(*fields) if fields else self._operator

    def statistic_operator(self, name: str, fields: tuple[Any, ...], columns: int = 0) -> Operator:
        """The operator that computes a statistic of a variant of the spec.

        Args:
            columns: the columns of V; 0 for the fewest.
        """
        operator_name = self._name_of_statistic(name, fields, columns)
        operator: Operator = getattr(self._variants, operator_name)
        return operator

    @runs_while_traced
    def _name_of_statistic(self, name: str, fields: tuple[Any, ...], columns: int) -> str:
        from flashgen.spec.language.signature import with_columns
        from flashgen.spec.language.statistic_specs import statistic_spec

        program = program_of(self.spec)
        spec = program.variant(Variant(*fields))
        statistic_of_variant = statistic_spec(spec, name)
        operator = operator_of(
            with_columns(statistic_of_variant, columns) if columns else statistic_of_variant
        )
        setattr(self._variants, operator.name, operator)
        return operator.name
