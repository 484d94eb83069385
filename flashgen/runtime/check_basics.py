"""What the checks of a call share: refusals, dense tensors, and facts about sizes.

Sizes are symbols where torch.compile and torch.export trace a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from flashgen.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])


def refuse(what: str, where: str, numbers: str, way_out: str) -> NoReturn:
    raise InputError(what, where=where, numbers=numbers, way_out=way_out)


def untraced(reason: str) -> Callable[[F], F]:
    """A decorator: torch.compile compiles neither the function nor those that it calls.

    A call is one break in the graph; with fullgraph=True the error gives the reason. It is the same
    as torch.compiler.disable, without the import of torch._dynamo, where torch has the means.
    """

    def decorate(function: F) -> F:
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


# The same as torch.compiler.disable, without the import of torch._dynamo: torch.compile leaves the
# error to Python, or reports this reason where it cannot.
refuse._torchdynamo_disable = True  # type: ignore[attr-defined]
refuse._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "an argument of a flashgen operator is wrong; without torch.compile, the error names it"
)


def refuse_jit_trace() -> None:
    """Raises InputError while torch.jit.trace records a call: it would record sizes as numbers."""
    if torch._C._get_tracing_state() is not None:
        refuse(
            "torch.jit.trace cannot record a call of flashgen",
            "the function that is traced",
            "it records the sizes and options of one call as constants",
            "torch.export.export or torch.compile, which record the operator as one node",
        )


def check_dense(name: str, value: torch.Tensor) -> None:
    """Raises InputError for a nested, sparse or quantized tensor."""
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        refuse(
            f"{name} is not an ordinary dense tensor",
            f"argument {name}",
            f"layout {value.layout}, dtype {value.dtype}",
            f"{name}.to_padded_tensor(0)" if value.is_nested else f"{name}.to_dense()",
        )


def known(fact: bool | torch.SymBool) -> bool:
    """True when the fact is known to hold, for symbols too; a backed symbol gets a guard."""
    if isinstance(fact, bool):
        return fact
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # a slow import

    return guard_or_false(fact)


def is_constant(fact: bool | torch.SymBool) -> bool:
    """True when the fact holds for all values of its symbols; this adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(fact)
