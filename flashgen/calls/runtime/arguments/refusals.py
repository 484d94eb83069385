"""Functions that all checks of a call use: refusals, numbers, dense tensors, and facts about sizes.

Sizes are symbols where torch.compile and torch.export trace a call.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch._guards import TracingContext

from flashgen.shared.errors import FlashgenError, InputError

Call = TypeVar("Call", bound=Callable[..., Any])


def runs_while_traced(function: Call) -> Call:
    """The function as one that Dynamo runs, with the values of a trace, instead of tracing it.

    torch.compile replaces foreign errors by its own. An error of the function is therefore of a
    kind that passes it with fullgraph=True; otherwise it breaks the graph, and the call without
    torch.compile raises the error again.
    """

    @functools.wraps(function)
    def run(*arguments: Any, **by_name: Any) -> Any:
        try:
            return function(*arguments, **by_name)
        except FlashgenError as error:
            if TracingContext.try_get() is None:
                raise
            raise _as_dynamo_error(error) from None

    # The same as torch.compiler.assume_constant_result, without the import of torch._dynamo.
    run._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cast(Call, run)


def _as_dynamo_error(error: FlashgenError) -> FlashgenError:
    """The error as an instance of its class and of Dynamo's ``Unsupported``, a RuntimeError."""
    from torch._dynamo.exc import Unsupported

    if isinstance(error, Unsupported):
        return error
    kind = type(error)
    bases = kind, Unsupported
    error_type = type(kind.__name__, bases, {"__module__": kind.__module__})
    parts = {"where": error.where, "numbers": error.numbers, "way_out": error.way_out}
    result: Any = error_type(error.what, **parts)
    if not hasattr(result, "logged"):  # a base of ``kind`` does not call those after it
        bases[1].__init__(result, error.what)
    return cast(FlashgenError, result)


@runs_while_traced
def refuse(what: str, where: str, numbers: str, way_out: str) -> NoReturn:
    """Raises an InputError with these four parts."""
    raise InputError(what, where=where, numbers=numbers, way_out=way_out)


def shape_of(value: torch.Tensor) -> tuple[Any, ...]:
    """The shape for the text of an error, in numbers where torch.compile traces symbols."""
    if value.is_nested:  # torch has no numbers for the other dimensions
        return (value.size(0), *["ragged"] * (value.dim() - 1))
    return tuple(map(operator.index, value.shape))


def shown(value: object) -> str:
    """A value that was given, for the text of an error."""
    if is_dtensor(value):
        x = cast(Any, value)
        mesh = x.device_mesh.mesh_dim_names or tuple(x.device_mesh.shape)
        return f"a DTensor of {shape_of(x)}, placements {x.placements} of the mesh {mesh}"
    if isinstance(value, torch.Tensor) and value.is_nested:
        return f"a nested tensor, {value.dtype}, on {value.device}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {shape_of(value)}, {value.dtype}, on {value.device}"
    if type(value) is int:
        value = operator.index(value)  # a number where torch.compile traces a symbol
    if isinstance(value, tuple | list) and any(isinstance(x, torch.Tensor) for x in value):
        parts = [*map(shown, value[:3]), *["..."][: len(value) > 3]]
        return f"a {type(value).__name__} of {len(value)}: {'; '.join(parts)}"
    return " ".join(line.strip() for line in repr(value).splitlines())[:200]


def whole_number(value: object) -> int | None:
    """The int that a value stands for; None for bools, tensors and values that are no integers."""
    if isinstance(value, bool | torch.Tensor):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def untraced(reason: str) -> Callable[[Call], Call]:
    """A decorator: torch.compile compiles neither the function nor those that it calls.

    A call is one break in the graph; with fullgraph=True the error gives the reason. It is the same
    as torch.compiler.disable, without the import of torch._dynamo, where torch has the means.
    """

    def decorate(function: Call) -> Call:
        frames: Any = torch._C._dynamo.eval_frame
        if not hasattr(frames, "set_code_exec_strategy"):
            return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return,no-untyped-call]
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        frames.set_code_exec_strategy(function.__code__, strategy)
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return function

    return decorate


def refuse_jit_trace() -> None:
    """Raises InputError while torch.jit.trace records a call, as sizes would become numbers."""
    if torch._C._get_tracing_state() is not None:
        _refuse_trace(
            "torch.jit.trace", "it records the sizes and options of one call as constants"
        )


def refuse_fx_trace(value: object) -> None:
    """Raises InputError for a proxy of torch.fx.symbolic_trace, which has no shape and no dtype."""
    if type(value).__module__ == "torch.fx.proxy":
        _refuse_trace("torch.fx.symbolic_trace", f"given a {type(value).__name__} for a tensor")


def _refuse_trace(tracer: str, numbers: str) -> NoReturn:
    refuse(
        f"{tracer} cannot record a call of flashgen",
        "the function that is traced",
        numbers,
        "torch.export.export or torch.compile, which record the operator as one node",
    )


def check_is_tensor(
    name: str,
    value: Any,
    way_out: str,
    where: str = "",
    more: str = "",
    dense: bool = True,
    local: bool = True,
) -> None:
    """Raises InputError for what is no tensor, and for one that `check_dense` refuses.

    Args:
        where: the place of the argument in words; "argument <name>" if "".
        more: further text for the numbers of the error.
        dense: whether the tensor must be dense.
        local: whether a DTensor is refused.
    """
    if not isinstance(value, torch.Tensor):
        refuse_fx_trace(value)
        refuse(
            f"{name} is not a torch tensor",
            where or f"argument {name}",
            f"given a {type(value).__name__}{more}",
            way_out,
        )
    if dense and (local or not is_dtensor(value)):
        check_dense(name, value)


def check_ascending(
    name: str,
    ends: list[int],
    total: int,
    what: tuple[str, str],
    steps_expression: str,
    where: str = "",
) -> list[int]:
    """Checks that lists of rows or pages follow one another from 0 on.

    Args:
        ends: where each list begins, and the end of the last one.
        total: the largest end.
        what: the total in words, in the sentence and in the numbers of the error.
        steps_expression: the lengths of the lists in the expression that computes ``ends``.
        where: the place of the argument in words; "argument <name>" if "".

    Returns:
        The lengths of the lists.
    """
    steps = [after - before for before, after in itertools.pairwise(ends)]
    least = min(steps, default=0)
    if ends[0] != 0 or ends[-1] > total or least < 0:
        refuse(
            f"{name} does not ascend from 0 to {what[0]}",
            where or f"argument {name}",
            f"from {ends[0]:,} to {ends[-1]:,}, smallest step {least:,}; {what[1]}",
            f"torch.nn.functional.pad({steps_expression}.cumsum(0, dtype=torch.int32), (1, 0))",
        )
    return steps


def is_dtensor(value: object) -> bool:
    """Whether a value is a tensor that is spread over the ranks of a device mesh."""
    return type(value).__name__ == "DTensor"  # without its import, which is slow


def check_dense(name: str, value: torch.Tensor) -> None:
    """Raises InputError for a nested, sparse, quantized or distributed tensor."""
    if is_dtensor(value):
        refuse(
            f"{name} is a DTensor",
            f"argument {name}",
            f"shape {shape_of(value)} over the ranks of a device mesh",
            f"{name}.to_local(), the part of this rank: it is attended to as it is; "
            "flashgen.distributed.attention computes a sequence that is divided over ranks",
        )
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        way_out = f"{name}.dequantize()" if value.is_quantized else f"{name}.to_dense()"
        if value.is_nested:
            way_out = f"{name}.to_padded_tensor(0), and a mask of the lengths"
        if value.layout == torch.jagged:
            way_out = (
                f"{name}.values()[None] for a spec with packed=True, and {name}.offsets().int() "
                f"as cu_seqlens_q and cu_seqlens_k; or {way_out}"
            )
        refuse(
            f"{name} is not an ordinary dense tensor",
            f"argument {name}",
            f"layout {value.layout}, dtype {value.dtype}",
            way_out,
        )


def is_known(fact: bool | torch.SymBool) -> bool:
    """True when the fact is known to hold, for symbols too; a backed symbol gets a guard."""
    if isinstance(fact, bool) and not torch.compiler.is_compiling():
        return fact  # Dynamo takes a symbol for a bool
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # a slow import

    return guard_or_false(fact)


def is_constant(fact: bool | torch.SymBool) -> bool:
    """True when the fact holds for all values of its symbols; this adds no guard."""
    if isinstance(fact, bool) and not torch.compiler.is_compiling():
        return fact
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(fact)


def constant(number: Any) -> Any:
    """A number or a truth as a constant of a compiled graph, which holds for this value alone.

    Where torch.compile makes sizes and the floats of a module dynamic, they are symbols, and so is
    what they are compared with.
    """
    if not torch.compiler.is_compiling():
        return number
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # a slow import

    return guard_scalar(number)
