"""The results of operations of torch on tensors without elements, and on constants."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd import forward_ad
from torch.overrides import _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flashgen.shared.errors import SpecError
from flashgen.spec.language.user_source import user_location

Tensor = torch.Tensor

_VALUE_READERS = frozenset(
    (
        *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "nonzero", "data_ptr"),
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__array__"),
        "__contains__",
    )
)
_NAMES = (
    *("add", "sub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "rsub"),
    *("__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__rdiv__", "__and__", "__or__"),
    *("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__truediv__", "pow", "__rpow__"),
    *("lt", "le", "gt", "ge", "eq", "ne", "__eq__", "__ne__", "where", "clamp", "maximum"),
)
BY_KIND = frozenset(
    getattr(home, name) for home in (Tensor, torch) for name in _NAMES if hasattr(home, name)
)
"""Functions whose results do not depend on the values of numbers, but for the elements."""

_OF_C = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.GetSetDescriptorType),
)

TEXT = ("__repr__", "__str__")
"""Functions that show a tensor."""

NO_TENSOR = object()
"""What `inferred` returns for an operation whose result contains no tensor."""


class TensorType(NamedTuple):
    """The dtype and the shape of a tensor without elements.

    Attributes:
        learned: whether it requires gradients.
    """

    dtype: torch.dtype
    shape: Any
    learned: bool = False

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorType:
        return cls(tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


class Same(NamedTuple):
    """A result that is an operand: the index of the operand, whether it is changed, and whether it
    requires gradients then."""

    operand_index: int
    changed: bool
    learned: bool


class Views(NamedTuple):
    """Several results, or results that share the memory of operands.

    Attributes:
        leaves, tree: the results, with types in place of tensors, and their tree.
        operand_indices: the indices of the operands that share their memory with results.
    """

    leaves: list[Any]
    tree: pytree.TreeSpec
    operand_indices: tuple[int, ...]


def inferred(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operation, computed on meta tensors.

    Returns:
        A `TensorType` for a tensor; the `Same` for an operand; `Views` for several tensors and for
        those that share memory; or `NO_TENSOR`.

    Raises:
        SpecError: the operation needs the elements of a tensor.
    """
    name = checked_name(func)
    if name in TEXT:
        return NO_TENSOR
    if name in ("cpu", "cuda"):
        return TensorType.from_tensor(args[0])
    metas: dict[int, Tensor] = {}

    def meta(tensor: Tensor) -> Tensor:
        if id(tensor) not in metas:
            copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            # A copy, which an operation may change in place.
            metas[id(tensor)] = copied.requires_grad_().clone() if tensor.requires_grad else copied
        return metas[id(tensor)]

    with alone(), torch._C.DisableTorchFunction():
        args, kwargs = pytree.tree_map_only(Tensor, meta, (args, kwargs))
    try:
        if name in _VALUE_READERS:
            raise NotImplementedError
        function = element if func is Tensor.__getitem__ else func
        result, changed = run(function, *on_device(name, args, kwargs, "meta"))
    except NotImplementedError:
        refuse_value(name)
    if changed and (len(changed) > 1 or changed[0] is not result):
        refuse_write(name)
    operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    same = [index for index, tensor in enumerate(operands) if tensor is result]
    if same:
        return Same(same[0], bool(changed), result.requires_grad)
    leaves, tree = pytree.tree_flatten(result)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return NO_TENSOR
    result_memories = {_memory(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    shared = tuple(
        index for index, tensor in enumerate(operands) if _memory(tensor) in result_memories
    )
    leaves = [TensorType.from_tensor(x) if isinstance(x, Tensor) else x for x in leaves]
    return leaves[0] if isinstance(result, Tensor) and not shared else Views(leaves, tree, shared)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def is_own(func: Any) -> bool:
    """Whether a function is torch's own: no custom operator, and none that has replaced another.

    A function in Python is not where one that it names has been replaced.
    """
    if type(func) is not types.FunctionType or not _is_torchs(func):
        return _is_torchs(func)
    homes = vars(Tensor), vars(torch), func.__globals__
    named = (home[name] for name in func.__code__.co_names for home in homes if name in home)
    return all(_is_torchs(x) for x in named if callable(x) and not isinstance(x, type))


def _is_torchs(func: Any) -> bool:
    if type(func) is types.FunctionType:
        return str(func.__globals__.get("__name__")).partition(".")[0] == "torch"
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return func.__module__ in ("torch._ops.aten", "torch._ops.prims")
    return isinstance(func, _OF_C)


def checked_name(func: Any) -> str:
    """The name of an operation that a mod may apply.

    Raises:
        SpecError: it is not torch's own, so that what it computes may depend on what no record has.
    """
    if not is_own(func):
        refuse(
            "a mod applies an operation that is not torch's own: a custom operator, or a function "
            "that has replaced one of torch's",
            numbers=f"{func!r:.200}",
            way_out="the operations of torch that it consists of, in the mod; or its result, "
            "computed outside of the mod, as a captured tensor",
        )
    name = name_of(func)
    if torch.Tag.inplace_view in _tags(name):
        refuse_write(name)
    return name


@functools.lru_cache(maxsize=1 << 12)
def _tags(name: str) -> frozenset[torch.Tag]:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return frozenset()
    overloads: list[str] = packet.overloads()  # type: ignore[no-untyped-call]
    return frozenset(tag for overload in overloads for tag in getattr(packet, overload).tags)


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The result of an operation on tensors of this module, and those that it changes.

    Raises:
        SpecError: it draws random numbers, as a dropout in training does.
    """
    name = name_of(func)
    may_draw = torch.Tag.nondeterministic_seeded in _tags(name)
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    with alone(), torch._C.DisableTorchFunction():
        before = [tensor._version for tensor in tensors]
        with _WithoutDraws(name) if may_draw else contextlib.nullcontext():
            result = func(*args, **kwargs)
        pairs = zip(tensors, before, strict=True)
        changed = {id(tensor): tensor for tensor, version in pairs if tensor._version != version}
    return result, list(changed.values())


class _WithoutDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random numbers that an operation draws while it is executed.

    Args:
        name: the operation.
    """

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            refuse_random(self.name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without the modes and the transforms of torch that are active around the call."""
    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if transforms():
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())  # as within it
        yield


def is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether derivatives by a tensor may be taken, at any level of torch.func.

    In forward mode they may be by any tensor of floats.
    """
    if tensor.requires_grad or torch.compiler.is_compiling():
        return tensor.requires_grad
    if forward_ad._current_level >= 0 and tensor.is_floating_point():
        return True
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def transforms() -> int:
    """The number of transforms of torch.func around the call."""
    top = torch._C._functorch.peek_interpreter_stack()
    return 0 if top is None else int(top.level())


def on_device(name: str, args: Any, kwargs: dict[str, Any], device: str) -> tuple[Any, Any]:
    """The arguments of an operation, with ``device`` in place of the devices that they name."""
    args, kwargs = pytree.tree_map_only(
        torch.device, lambda _: torch.device(device), (args, kwargs)
    )
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": device}
    if name == "to" and len(args) > 1 and type(args[1]) in (str, int):
        args = (args[0], device, *args[2:])
    return args, kwargs


def element(tensor: Tensor, index: Any) -> Tensor:
    """``tensor[index]`` without reading the values of an index that is a tensor."""
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(items)):
        items = tuple([_listed(item) for item in items])
    tensors = [item for item in items if isinstance(item, Tensor)]
    if not tensors:
        return tensor[index]
    for item in tensors:
        if item.dtype in (torch.bool, torch.uint8):
            refuse(
                "a tensor is indexed by a mask",
                numbers=f"index of {item.dtype}, shape {tuple(item.shape)}",
                way_out="torch.where, or integer positions",
            )
    view = tensor[tuple([slice(None) if isinstance(item, Tensor) else item for item in items])]
    index_tensors: list[Tensor | None] = []
    dims = sum([item is not None and item is not Ellipsis for item in items])
    for item in items:
        if item is Ellipsis:
            index_tensors += [None] * (tensor.dim() - dims)
        elif isinstance(item, Tensor):
            index_tensors.append(item)
        elif item is None or isinstance(item, slice):
            index_tensors.append(None)
    result: Tensor = torch.ops.aten.index.Tensor(view, index_tensors)
    return result


def _listed(item: Any) -> Any:
    """A list of an index as a tensor."""
    if not isinstance(item, (list, range)):
        return item
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(list(item))):
        refuse(
            "a tensor is indexed by a list that contains tensors",
            numbers=f"a list of {len(item)}",
            way_out="torch.stack(list)",
        )
    tensor = torch.tensor(item)
    return tensor if tensor.numel() else tensor.long()  # no elements have no dtype of their own


def name_of(func: Any) -> str:
    """The name of a function of torch, or of the attribute that it reads."""
    name = func.__name__
    return str(func.__self__.__name__ if name == "__get__" else name)


def refuse_value(name: str) -> NoReturn:
    """Raises SpecError for an operation that needs the elements of a tensor."""
    refuse(
        "a mod needs the value of a tensor, which has none while the mod is recorded: if, and, "
        "or, not, int(), float(), .item(), range() and the functions of math cannot be used on "
        "it",
        numbers=f"torch.{name}",
        way_out="the tensor itself in place of its .item()"
        if name == "item"
        else "torch.where to choose, & | ~ or torch.logical_and to combine conditions, "
        "functions of torch for those of math",
    )


def refuse_random(name: str) -> NoReturn:
    """Raises SpecError for an operation that draws random numbers."""
    refuse(
        f"a mod cannot draw random numbers: torch.{name}",
        numbers="an operation of a mod",
        way_out="dropout=True of fg.AttentionSpec for dropout, and fg.rand in its mods; a "
        "captured tensor of noise",
    )


def refuse_write(name: str) -> NoReturn:
    """Raises SpecError for an operation that changes a tensor."""
    refuse(
        f"a mod writes into a tensor: torch.{name}",
        numbers="an operation in place",
        way_out="a new value, as in score = score + x",
    )


def refuse(what: str, *, numbers: str, way_out: str) -> NoReturn:
    raise SpecError(what, where=user_location(), numbers=numbers, way_out=way_out)
