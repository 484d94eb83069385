"""flex_attention under torch.compile: torch's function, and flashgen's own, on flashgen's kernels.

torch.compile has traced the mods of a call to graphs when it reaches the kernel of torch's operator
of flex_attention. The kernel here reads these graphs as flashgen's own function reads mods, and
calls the operator of the spec in place of the node, so that the rest of the compiler sees that
operator alone, with its own gradients. It runs about three times for each compiled graph, on
tensors of the trace, and once for each call that is not compiled.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from flashgen.calls.runtime.arguments.call import cast_by_autocast
from flashgen.calls.runtime.arguments.refusals import runs_while_traced, untraced
from flashgen.frontends.flash_operators import ReasonsTold
from flashgen.frontends.flex import torch_hop
from flashgen.frontends.flex.block_masks import LISTS, followed
from flashgen.frontends.flex.checks import DTYPES, LARGE_BLOCK, FlexUnsupported
from flashgen.frontends.flex.known_mods import read
from flashgen.frontends.flex.lifted_names import name_of, user_line
from flashgen.frontends.flex.operation_results import transforms
from flashgen.frontends.flex.recorded_mods import Record
from flashgen.frontends.flex.recorder import OpenFloat, OpenInt
from flashgen.frontends.flex.traced_mods import CallSizes, TracedMods
from flashgen.kernels.planner import columns_of_launch, plan, plan_backward
from flashgen.shared.arch import paths_of, portable
from flashgen.shared.dtypes import HEAD_DIM_STEP
from flashgen.shared.errors import FlashgenError, PlanError, SpecError, called_by_users
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.user_source import SourceLines, shown_path

Tensor = torch.Tensor

_MARK = "flashgen"
"""The kernel option that marks the calls of flashgen's own flex_attention."""

_LARGEST = "OUTPUT_MAX"
"""torch's kernel option that asks for the largest score of each row."""

_state = SimpleNamespace(registered=False, marked=False, follows_lists=True)
_told = ReasonsTold()


@called_by_users()
def register_flex(*, block_lists: bool = True) -> None:
    """Has flashgen compute torch's flex_attention, forward and backward, in code that is unchanged.

    Calls of ``torch.nn.attention.flex_attention.flex_attention`` that torch.compile compiles from
    now on, with any of its backends, become operators of flashgen; so do calls outside of a
    compiled function. Captured tensors have gradients, integers that change are run-time scalars,
    and lengths may be dynamic. torch's own kernels compute what flashgen does not serve, and a
    `FlashOperatorWarning` says so once for each reason: a ``BACKEND`` in the kernel options, other
    dtypes than float16, bfloat16 and float32, and mods with operations that a spec cannot express.

    Functions that are compiled already keep the kernels that they have; torch.compiler.reset()
    compiles them anew. While flashgen is registered, torch keeps no programs with flex_attention
    in its cache of compiled graphs (AOTAutograd's); that of Inductor's kernels is used.

    Args:
        block_lists: whether the lists of a BlockMask decide which blocks are computed beside its
            mask_mod, as they do in torch. They are tensors of the compiled graph, which cannot
            compare them with the mask_mod when it is traced. False promises that blocks follow from
            the mask_mod, as those of create_block_mask do: kernels then skip tiles by the mask
            alone. The lists of a BlockMask without a mask_mod are always followed.

    Raises:
        InputError: this torch lacks a private name that is needed.

    Source: `torch.nn.attention.flex_attention`.
    """
    _install()
    _state.registered, _state.follows_lists = True, block_lists


@called_by_users()
def unregister_flex() -> None:
    """Brings torch's own kernels of flex_attention back, for what is compiled from now on."""
    _state.registered, _state.follows_lists = False, True
    if torch_hop.is_replaced() and not _state.marked:
        torch_hop.restore()


def _install() -> None:
    torch_hop.check()
    if not torch_hop.is_replaced():
        torch_hop.replace(_kernel, lambda options: _MARK in options)


@runs_while_traced
def _serve_marked() -> None:
    if transforms():
        raise FlexUnsupported(
            "torch's operator of flex_attention has no rule for the transforms of torch.func",
            where="fg.flex_attention in a compiled function",
            numbers=f"{transforms()} transforms of torch.func around the call",
            way_out="fg.attention(spec), whose operator has rules; or torch.compile without "
            "fullgraph=True, which leaves the call out of its graph",
        )
    _install()
    _state.marked = True


def as_node(
    tensors: tuple[Tensor, Tensor, Tensor],
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and max_scores of a call that torch.compile traces, as one node of its graph.

    The arguments have been checked.
    """
    _serve_marked()
    query, key, value = cast_by_autocast(tensors)  # the rule of torch.export does not
    if block_mask is None:
        block_mask = torch_hop.empty_block_mask(query, key)
    if scale is None:
        scale = query.shape[3] ** -0.5
    out, lse, largest = torch_hop.call(
        query,
        key,
        value,
        _unchanged if score_mod is None else score_mod,
        block_mask.as_tuple(),
        scale,
        {"BACKEND": "AUTO", _LARGEST: max_scores, _MARK: True},
    )
    return out, lse, largest if max_scores else None


def _unchanged(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score


# ---- the kernel of torch's operator --------------------------------------------------------------


class _NotServedError(Exception):
    """A call that torch's kernel computes; its text is the reason."""


def _kernel(former: torch_hop.Kernel) -> torch_hop.Kernel:
    @untraced("the kernel of an operator")
    @functools.wraps(former)
    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Any],
        block_mask: tuple[Any, ...],
        scale: float,
        kernel_options: dict[str, Any],
        score_mod_other_buffers: tuple[Any, ...] = (),
        mask_mod_other_buffers: tuple[Any, ...] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors, lifted = (query, key, value), (score_mod_other_buffers, mask_mod_other_buffers)
        wants_largest = bool(kernel_options.get(_LARGEST))
        call_arguments = tensors, lifted, score_mod, block_mask
        if _MARK in kernel_options:
            out, lse, largest = _attend_marked(*call_arguments, float(scale), wants_largest)
            return out, lse, lse.new_empty(0) if largest is None else largest
        if _state.registered:
            try:
                number = float(scale)  # of a symbol the value, to which the graph is guarded
                _check_served(tensors, number, kernel_options)
                out, lse, largest = _attend(*call_arguments, number, wants_largest)
            except (_NotServedError, SpecError) as refused:
                _told.tell("flex_attention", *_reason(refused))
            else:
                nothing = lse.new_empty(0)
                largest = nothing if largest is None else largest / math.log(2)
                return out, lse / math.log(2), largest
        arguments = (*tensors, score_mod, block_mask, scale, kernel_options, *lifted)
        results: tuple[Tensor, Tensor, Tensor] = former(*arguments)
        return results

    return kernel


def _reason(refused: Exception) -> tuple[str, str]:
    """What is not served, and the numbers, with the place where it is written."""
    if isinstance(refused, FlashgenError):
        return refused.what, f"{refused.where}: {refused.numbers}"
    return str(refused), ""


def _check_served(tensors: Sequence[Tensor], scale: float, kernel_options: dict[str, Any]) -> None:
    query, *others = tensors
    reason = ""
    if kernel_options.get("BACKEND", "AUTO") != "AUTO":
        reason = f"its kernel options choose BACKEND {kernel_options['BACKEND']}"
    elif query.dtype not in DTYPES or any(tensor.dtype != query.dtype for tensor in others):
        reason = f"query, key and value have {', '.join(str(x.dtype) for x in tensors)}"
    elif not 0 < scale < math.inf:
        reason = f"the scale is {scale}"
    elif query.device.type not in ("cpu", "cuda"):
        reason = f"the tensors are on {query.device}"
    elif (
        query.is_cuda
        and torch.cuda.is_available()  # a trace needs no GPU
        and torch.cuda.get_device_capability(query.device) < (8, 0)
    ):
        reason = "the GPU is older than compute capability 8.0"
    elif query.is_cuda and torch.cuda.is_available():
        dims = int(query.shape[-1]), int(others[-1].shape[-1])
        reason = why_no_tile(*dims, query.dtype, torch.cuda.get_device_capability(query.device))
    if reason:
        raise _NotServedError(reason)


@functools.lru_cache
def why_no_tile(d_qk: int, d_v: int, dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """Why no tile of these head dims fits a GPU, forward or backward; "" where tiles of all columns
    of V do, or of a part of them."""
    dims = [dim + -dim % HEAD_DIM_STEP for dim in (d_qk, d_v)]
    spec = AttentionSpec(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    try:
        arch = paths_of("sm_{}{}".format(*capability))[0]
        for which, planned in (("forward", plan), ("backward", plan_backward)):
            paths = dict.fromkeys((arch, portable(arch)))
            if not any(columns_of_launch(spec, path, which).columns for path in paths):
                planned(spec, portable(arch))
    except PlanError as error:
        return f"{error.what}: {error.where}, {error.numbers.splitlines()[0]}"
    return ""


def _attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    lifted: tuple[Sequence[Any], Sequence[Any]],
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    max_scores: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The results of a call; ``lifted`` are the captures of the score_mod and of the mask_mod."""
    mods = _Mods(score_mod, block_mask[-1], *lifted)
    traced, call_record = mods.read(tensors)
    captures = mods.captures(traced, call_record, tensors[0])
    # The number of entries differs between releases of torch.
    seq_lengths, lists, block_size = block_mask[:2], block_mask[2:6], block_mask[-3:-1]
    sparse = None
    if tuple(block_size) != (LARGE_BLOCK, LARGE_BLOCK) and (
        _state.follows_lists or mods.mask is None
    ):
        named = dict(zip(LISTS, lists, strict=True))
        blocks = SimpleNamespace(seq_lengths=seq_lengths, BLOCK_SIZE=block_size, **named)
        list_layout = followed(blocks)
        sparse, captures["layout"] = list_layout.sparse, list_layout.layout
    return traced.attend(tensors, scale, captures, sparse, max_scores=max_scores)


_attend_marked = runs_while_traced(_attend)


# ---- the mods ------------------------------------------------------------------------------------


class _Mods:
    """The mods of a call, on tensors without elements in place of those that they capture.

    Attributes:
        score, mask: the functions; None for a function that changes or masks nothing.
    """

    def __init__(
        self, score: Any, mask: Any, score_captures: Sequence[Any], mask_captures: Sequence[Any]
    ) -> None:
        self._tensors: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        """The stand-in of a captured tensor by its id, with a function that returns the tensor."""
        self._stand_ins: dict[tuple[int, bool], Tensor] = {}
        with torch_hop.outside_of_traces():
            self.score = self._mod(score, score_captures, True)
            self.mask = self._mod(mask, mask_captures, False)

    def read(self, tensors: Sequence[Tensor]) -> tuple[TracedMods, Record]:
        sizes = CallSizes.from_tensors(tensors[0], tensors[1], torch.device("cpu"))
        mods = [mod for mod in (self.mask, self.score) if isinstance(mod, _GraphMod)]
        with torch_hop.outside_of_traces():
            try:
                return read(self.mask, self.score, sizes)
            except SpecError as error:  # a graph has lines of its own, which tell users nothing
                locations = [str(mod.lines) for mod in mods if mod.lines.line]
                error.where = ", ".join(locations) or error.where
                raise

    def captures(self, traced: TracedMods, call_record: Record, query: Tensor) -> dict[str, Any]:
        """The captured tensors and the scalars of this call, in the modes of a trace.

        Where the expressions hold for nothing but the traced lengths or integers, the graph is
        guarded to be that of these.
        """
        numbers = list(call_record.numbers)
        for index, number in enumerate(numbers):
            if isinstance(number, OpenInt):
                symbol = number.symbol()
                is_scalar = index in traced.numbers.values() and not traced.created
                numbers[index] = symbol if is_scalar else int(symbol)
        tensors = tuple([self._tensors[id(tensor)][1]() for tensor in call_record.tensors])
        if traced.shapes is not None:
            for size in itertools.chain(*[tensor.shape for tensor in tensors]):
                int(size)
        actual = call_record._replace(numbers=tuple(numbers), tensors=tensors)
        device = query.device
        if type(query) in (Tensor, torch.nn.Parameter):
            return traced.captures(actual, device)

        def constant(tensor: Tensor) -> Tensor:
            """The tensor as one of the graph."""
            return torch.tensor(tensor.tolist(), dtype=tensor.dtype, device=device)

        return traced.captures(actual, device, constant)

    def _mod(self, mod: Any, lifted: Sequence[Any], learned: bool) -> Callable[..., Any] | None:
        values = [self._stand_in(value, learned) for value in lifted]
        if isinstance(mod, fx.GraphModule):
            return None if _does_nothing(mod.graph) else _GraphMod(mod, values, self._tensor_of)
        return lambda *positions: mod(*positions, *values)

    def _stand_in(self, value: Any, learned: bool) -> Any:
        """A tensor without elements, or an integer with the value of the traced call."""
        if isinstance(value, torch.SymInt):
            return OpenInt.with_symbol(torch_hop.example_of(value), lambda: value)
        if not isinstance(value, Tensor):
            return value
        learned = learned and value.requires_grad
        stand_in = self._stand_ins.get((id(value), learned))
        if stand_in is None:
            shape = [torch_hop.example_of(size) for size in value.shape]
            stand_in = torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=learned)
            self._stand_ins[id(value), learned] = stand_in
            self._tensors[id(stand_in)] = stand_in, lambda: value
        return stand_in

    def _tensor_of(self, number: OpenFloat) -> Tensor:
        """A captured tensor with this number, rounded as torch rounds a number beside a float32."""
        with torch._C.DisableTorchFunction():  # which would be recorded as one of the mod
            stand_in = torch.empty((), device="meta")

        def product() -> Tensor:
            """The number as a factor: elsewhere torch.compile makes it a constant."""
            unit = torch.ones((), dtype=torch.float64)
            return torch.mul(unit, number.symbol()).float()

        self._tensors[id(stand_in)] = stand_in, product
        return stand_in


def _does_nothing(graph: fx.Graph) -> bool:
    """Whether a graph returns the score of a score_mod unchanged, or is torch's noop_mask."""
    *computed, output = [node for node in graph.nodes if node.op != "placeholder"]
    returned = pytree.tree_leaves(output.args)[0]
    if not computed:
        return returned is next(iter(graph.nodes))
    return len(computed) == 1 and computed[0].target == "new_ones"


class _GraphMod:
    """A mod that torch.compile has turned into a graph.

    Attributes:
        lines: the line of its function.
        captured_names: the user's names of captured tensors, by the ids of their stand-ins.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        lifted: Sequence[Any],
        tensor_of: Callable[[OpenFloat], Tensor],
    ) -> None:
        self.lines, self.__name__ = _source_of(module.graph)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        captured = zip(placeholders[len(placeholders) - len(lifted) :], lifted, strict=True)
        self.captured_names = {
            id(x): name_of(node) for node, x in captured if isinstance(x, Tensor)
        }
        self._module, self._lifted, self._tensor_of = module, lifted, tensor_of

    def __call__(self, *positions: Any) -> Any:
        run = _Run(self._module, self._tensor_of).run(*positions, *self._lifted)
        (result,) = pytree.tree_leaves(run)
        return result


def _source_of(graph: fx.Graph) -> tuple[SourceLines, str]:
    """The line and the name of the function whose return made the last node of a graph."""
    for node in reversed(graph.nodes):
        location = user_line(node)
        if location is not None:
            return SourceLines(shown_path(location.file), location.line, ""), location.name
    return SourceLines("<graph>", 0, ""), ""


class _Run(fx.Interpreter):
    """Runs the graph of a mod on stand-ins of its arguments.

    A Python float that changes from call to call is a tensor of which torch.compile takes the
    element; its element is the tensor itself here. What is computed with integers of which there
    are symbols alone is computed with their values, and with the symbols when it is asked for: an
    integer is a scalar of the kernel, a float the element of a tensor, and a truth a guard.

    Args:
        tensor_of: returns the stand-in of a captured tensor with such a float.
    """

    def __init__(self, module: fx.GraphModule, tensor_of: Callable[[OpenFloat], Tensor]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self._tensor_of = tensor_of

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == "item":
            return args[0]
        args, kwargs = pytree.tree_map_only(OpenFloat, self._tensor_of, (args, kwargs))
        return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "_local_scalar_dense" in str(target) or target is Tensor.item:
            return args[0]
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            args, kwargs = pytree.tree_map_only(OpenFloat, self._tensor_of, (args, kwargs))
            return super().call_function(target, args, kwargs)
        if not any(isinstance(leaf, (OpenInt, OpenFloat)) for leaf in leaves):
            # makes a constant, of any device
            options = {name: value for name, value in kwargs.items() if name != "device"}
            return super().call_function(target, args, options)

        def symbol() -> Any:
            operands = pytree.tree_map_only(
                (OpenInt, OpenFloat), lambda number: number.symbol(), (args, kwargs)
            )
            return target(*operands[0], **operands[1])

        value = target(*args, **kwargs)
        if type(value) is bool:
            with torch._C.DisableTorchFunction():
                return bool(symbol())
        if type(value) is float:
            return OpenFloat.with_symbol(value, symbol)
        if type(value) is int:
            return OpenInt.with_symbol(value, symbol)
        raise SpecError(
            "a mod computes with an integer that changes what no kernel takes as an argument",
            where="",
            numbers=f"{getattr(target, '__name__', target)}{args} is {value!r}",
            way_out="a captured tensor in place of the integer",
        )
