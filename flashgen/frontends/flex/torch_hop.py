"""torch's operator of flex_attention, and all private names of torch by which its kernels change.

torch.compile makes each call of torch's flex_attention one node, a call of a higher-order operator.
Its kernels are functions in a table. Those of two dispatch keys are replaced: Autograd, which
handles all calls but those on inference tensors outside of a compiled graph, and
CompositeExplicitAutograd, which handles these. torch.export traces above all keys: its rule for
the operator is replaced too, since torch.export.save takes no program with the operator's node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from flashgen.frontends.private_names import missing_names
from flashgen.shared.errors import InputError

Kernel = Callable[..., Any]

_KEYS = ("Autograd", "CompositeExplicitAutograd")

_NAMES = (
    "torch.ops.higher_order.flex_attention.py_kernels",
    "torch.ops.higher_order.flex_attention._dispatch_cache",
    "torch.ops.higher_order.flex_attention._cacheable",
    "torch.ops.higher_order.flex_attention.python_key_table",
    "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode",
    "torch._C.DispatchKey.Autograd",
    "torch._C.DispatchKey.CompositeExplicitAutograd",
    "torch.nn.attention.flex_attention._create_empty_block_mask",
    "torch.utils._python_dispatch._disable_current_modes",
    "torch.compiler._is_compiling_flag",
    "torch.fx.experimental.symbolic_shapes.optimization_hint",
)

_OPTIONS = 6
"""The place of the kernel options among the operator's arguments."""

_former: dict[Any, Kernel] = {}
"""torch's own kernels by their keys, while they are replaced."""

_former_rule: list[Callable[..., Any]] = []
"""torch's own rule for the traces of torch.export, while it is replaced."""

_was_cacheable = True


def check() -> None:
    """Raises InputError where this torch lacks a name."""
    missing = missing_names(_NAMES)
    kernels = () if missing else torch.ops.higher_order.flex_attention.py_kernels
    missing += (
        [] if missing else [f"a kernel at {key}" for key in _KEYS if _key(key) not in kernels]
    )
    if missing:
        raise InputError(
            "this torch has no flex_attention operator of the form that flashgen knows",
            where="flashgen.integrations.torch.register_flex",
            numbers=f"torch {torch.__version__} lacks {', '.join(missing)}; known: torch 2.13",
            way_out="torch 2.13; or fg.flex_attention outside of torch.compile, or "
            "fg.attention(spec), in place of torch's function",
        )


def _key(name: str) -> Any:
    return getattr(torch._C.DispatchKey, name)


def is_replaced() -> bool:
    return bool(_former)


def replace(
    replacement: Callable[[Kernel], Kernel], exports: Callable[[dict[str, Any]], bool]
) -> None:
    """Replaces torch's kernels by those that ``replacement`` returns for each of them.

    A trace of torch.export calls the kernel where ``exports`` is true of the kernel options. It
    does not tell which dtype torch.autocast will cast operands to.

    Compiled programs that torch keeps on disk do not tell which kernel a node became, so that none
    with such a node is read or kept meanwhile.
    """
    global _was_cacheable
    _was_cacheable = torch.ops.higher_order.flex_attention._cacheable
    torch.ops.higher_order.flex_attention._cacheable = False
    for name in _KEYS:
        key = _key(name)
        _former[key] = torch.ops.higher_order.flex_attention.py_kernels[key]
        torch.ops.higher_order.flex_attention.py_kernels[key] = replacement(_former[key])
    rules = torch.ops.higher_order.flex_attention.python_key_table
    _former_rule[:] = [rules[_proxy_mode()]]
    kernel = torch.ops.higher_order.flex_attention.py_kernels[_key(_KEYS[0])]
    rules[_proxy_mode()] = _rule(kernel, exports, _former_rule[0])
    torch.ops.higher_order.flex_attention._dispatch_cache.clear()


def restore() -> None:
    torch.ops.higher_order.flex_attention.py_kernels.update(_former)
    torch.ops.higher_order.flex_attention.python_key_table[_proxy_mode()] = _former_rule.pop()
    torch.ops.higher_order.flex_attention._dispatch_cache.clear()
    torch.ops.higher_order.flex_attention._cacheable = _was_cacheable
    _former.clear()


def _proxy_mode() -> Any:
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    return ProxyTorchDispatchMode


def _rule(
    kernel: Kernel, serves: Callable[[dict[str, Any]], bool], former: Callable[..., Any]
) -> Callable[..., Any]:
    """The rule of a trace, whose mode torch has left; torch.export may call the kernel."""

    def rule(mode: Any, *arguments: Any) -> Any:
        if not (mode.pre_dispatch and serves(arguments[_OPTIONS])):
            return former(mode, *arguments)
        with mode:
            return kernel(*arguments)

    return rule


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """A context without the modes of a trace: tensors and operations in it are no part of it."""
    from torch.utils._python_dispatch import _disable_current_modes

    is_compiling = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = False
    try:
        with _disable_current_modes():
            yield
    finally:
        torch.compiler._is_compiling_flag = is_compiling


def example_of(size: int | torch.SymInt) -> int:
    """A size; the value of the traced call where it is a symbol."""
    if type(size) is int:
        return size
    from torch.fx.experimental.symbolic_shapes import optimization_hint

    return int(optimization_hint(size))


def empty_block_mask(query: torch.Tensor, key: torch.Tensor) -> Any:
    """torch's BlockMask of a call without one."""
    from torch.nn.attention import flex_attention

    return flex_attention._create_empty_block_mask(query, key)


def call(*arguments: Any) -> Any:
    """A call of the operator, as torch's function makes it while torch.compile traces."""
    return torch.ops.higher_order.flex_attention(*arguments)
