"""What mods compute, as a key: the operations of torch that they apply to positions and tensors.

A mod may read values in any way that Python has, so that no inspection of objects tells what it
will compute. It is executed at each call instead, on tensors without elements that stand for the
score and the positions, and each operation of torch is noted with its operands. Mods with the same
record compute the same from the tensors that they read. Expressions are traced from a record and
never from a mod, once for each record.

torch.compile can trace a `ModRecorder` too, where it cannot inspect a closure. The operations
themselves are executed then.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from flashgen.calls.runtime.arguments.refusals import untraced
from flashgen.frontends.flex.operation_results import (
    BY_KIND,
    NO_TENSOR,
    TEXT,
    Same,
    TensorType,
    checked_name,
    element,
    inferred,
    is_differentiated,
    name_of,
    on_device,
    refuse,
    refuse_write,
    run,
    transforms,
)

if TYPE_CHECKING:
    from flashgen.frontends.flex.recorded_mods import Notes

Tensor = torch.Tensor

_FUNCTIONS = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]
"""How tensors take part in functions of torch that mean the same for all of them."""

_PLAIN = (type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)


_NAMED = ("add", "sub", "mul", "matmul", "neg", "abs", "lt", "le", "gt", "ge", "ne")
_DUNDER = ("getitem", "floordiv", "and_", "or_", "xor", "invert", "lshift", "rshift", "pow", "eq")

OF_OPERATORS: dict[Any, Callable[..., Any]] = {
    **{getattr(operator, name): getattr(Tensor, name) for name in _NAMED},
    **{getattr(operator, n): getattr(Tensor, f"__{n.removesuffix('_')}__") for n in _DUNDER},
    operator.truediv: Tensor.div,
    operator.mod: Tensor.remainder,
    operator.pos: Tensor.positive,
}
"""The functions that torch applies for Python's operators, which are passed in their place in
torch.export with strict=True."""

_MOST_RESULTS = 1 << 14
"""The number of operations of which the shapes of the results are kept."""

_results: dict[Any, Any] = {}
"""What `inferred` returns, by the operation, the types of its operands and the default dtype."""


class OpenInt(int):
    """An integer of a call that torch.compile traces, of which the graph holds no value.

    It has the value of the traced call. Among the numbers of a record it stands for a run-time
    scalar.

    Attributes:
        symbol: makes the symbol that torch.compile traces.
    """

    symbol: Callable[[], Any]

    @classmethod
    def with_symbol(cls, value: int, symbol: Callable[[], Any]) -> OpenInt:
        number = cls(value)
        number.symbol = symbol
        return number


class OpenFloat(float):
    """A float that a mod computes from an `OpenInt`; its ``symbol`` is made in the same way."""

    symbol: Callable[[], Any]

    @classmethod
    def with_symbol(cls, value: float, symbol: Callable[[], Any]) -> OpenFloat:
        number = cls(value)
        number.symbol = symbol
        return number


class StandIn(Tensor):
    """A tensor without elements, in place of an argument of a mod or of what follows from it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        refuse(
            "a mod applies an operation that cannot be recorded: it runs outside of Python, or "
            "uses a value of an earlier call",
            numbers=str(func),
            way_out="functions of torch itself, in place of those made by torch.jit, torch.compile "
            "or torch.vmap, and no value of one call that is kept for another",
        )


StandIn.__name__ = "Tensor"  # in errors of Python about operands


def _is_torchs_or_none(grad_fn: Any) -> bool:
    """Whether torch derives the derivative of a result from the operations that made it.

    Of torch's own functions it is: torch.export has one for an index.
    """
    made_by = getattr(grad_fn, "_forward_cls", None)
    return grad_fn is None or str(getattr(made_by, "__module__", "")).startswith("torch.")


class Operation(NamedTuple):
    """A function of torch and its operands.

    Tensors are integers, their numbers in the order of appearance. "int" and "float" stand for
    numbers, which are listed apart.

    Attributes:
        results: how many tensors it returns.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: int


class Reading(NamedTuple):
    """A tensor that a mod reads: its number, and all of it on which kernels depend."""

    number: int
    dtype: torch.dtype
    dims: int
    learned: bool


class ModRecorder(TorchFunctionMode):
    """Notes each operation of torch, with its operands by their numbers.

    Args:
        device: the device of the queries.
        notes: is called with the recorder after each operation.
        learned: whether scores require gradients.

    Attributes:
        operations, numbers, created_tensors: as in a `Record`.
        read: the tensors that are read.
    """

    def __init__(
        self, device: torch.device, notes: Notes | None = None, learned: bool = False
    ) -> None:
        super().__init__()
        self.device = device
        self.notes = notes
        self.learned = learned
        self.operations: list[Operation] = []
        self.numbers: list[int | float] = []
        self.read: list[Tensor] = []
        self.reads: list[Reading] = []
        self.created_tensors: dict[int, Tensor] = {}
        self._executes = torch.compiler.is_compiling()
        self._tensors: list[Tensor] = []  # arguments, tensors that are read, and results
        self._types: list[TensorType] = []  # of each
        self._constants: set[int] = set()  # those that depend on no argument and no such tensor
        self._operands: list[int] = []  # of the operation that is being noted
        self._shared: set[int] = set()  # tensors of which another has the memory
        self._number: dict[int, int] = {}  # by id, which `_tensors` keeps from being reused
        self._default_dtype = torch.get_default_dtype()
        self._learns = torch.is_grad_enabled()
        self._level = 0 if self._executes else transforms()

    def arguments(self, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """The arguments of a mod."""
        if self._executes:
            tensors = [torch.zeros((), dtype=dtype, device=self.device) for dtype in dtypes]
            self._tensors.extend(tensors)
            return tensors
        learned = [self.learned and dtype.is_floating_point for dtype in dtypes]
        return [self._stand_in(TensorType(x, (), y)) for x, y in zip(dtypes, learned, strict=True)]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._executes:
            return self._noted_operation(func, args, kwargs or {})
        return self._apart(func, args, kwargs or {})

    @untraced("it runs below functions of torch.compile that a mod calls")
    def _apart(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return self._noted_operation(func, args, kwargs)

    def _noted_operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        func = OF_OPERATORS.get(func, func)
        self._operands = []
        number_count, tensor_count = len(self.numbers), len(self._tensors)
        noted_operands = self.noted(args), self.noted(kwargs) if kwargs else ("dict",)
        read_count = len(self._tensors) - tensor_count
        if self._executes:
            result = self._executed(func, args, kwargs)
        else:
            takes_numbers = len(self.numbers) > number_count and func not in BY_KIND
            numbers = tuple(self.numbers[number_count:]) if takes_numbers else ()
            result = self._result((func, noted_operands, numbers), args, kwargs)
        results = len(self._tensors) - tensor_count - read_count
        if results or (func is torch._C._set_grad_enabled and self._learns):
            self.operations.append(Operation(func, *noted_operands, results))
            if self.notes is not None:
                self.notes.add(self)
        else:  # such as a device or a length, which is an operand of what follows
            del self.numbers[number_count:]
        return result

    def noted(self, value: Any) -> Hashable:
        """A value as a part of the key."""
        kind = type(value)
        if kind is tuple:  # the arguments of most operations
            return ("tuple", *[self.noted(item) for item in value])
        if kind is StandIn or isinstance(value, Tensor):
            return self._number_of(value)
        if kind is int or kind is OpenInt:
            self.numbers.append(value)
            return "int"
        if kind is float:
            if not math.isfinite(value) or (value == 0 and str(value) == "-0.0"):
                return "fixed", "float", repr(value)
            self.numbers.append(value)
            return "float"
        if kind is bool or kind is str:
            return "fixed", kind.__name__, repr(value)
        if isinstance(value, (tuple, list)):
            name = "list" if isinstance(value, list) else "tuple"
            return (name, *[self.noted(item) for item in value])
        if kind is dict:
            return ("dict", *[(name, self.noted(item)) for name, item in value.items()])
        if kind is slice:
            return ("slice", *[self.noted(x) for x in (value.start, value.stop, value.step)])
        if isinstance(value, _PLAIN) or kind is type:
            return "plain", value
        if isinstance(value, int):  # a subclass, whose methods torch does not call
            return self.noted(int.__getnewargs__(value)[0])
        if isinstance(value, float):
            return self.noted(float.__getnewargs__(value)[0])
        if isinstance(value, str):
            return self.noted(str.__str__(value))
        if isinstance(value, complex):
            return "fixed", "complex", repr(complex(value))
        if kind is range:
            return "fixed", "range", repr(value)
        if kind.__module__ == "numpy" and hasattr(value, "tobytes"):
            if value.shape == () and kind.__name__ != "ndarray":
                return self.noted(value.item())
            return "array", str(value.dtype), str(value.shape), value.tobytes()
        refuse(
            "an operand of torch in a mod cannot be recorded",
            numbers=f"a {kind.__module__}.{kind.__qualname__}",
            way_out="tensors, numbers, and lists of them",
        )

    def _number_of(self, tensor: Tensor) -> int:
        if self._executes:
            for number, other in enumerate(self._tensors):
                if other is tensor:
                    return number
            return self._read(tensor)
        number = self._number.get(id(tensor), -1)
        if number < 0:
            number = self._read(tensor)
        elif type(tensor) is StandIn and not _is_torchs_or_none(tensor.grad_fn):
            refuse(
                "a mod applies a torch.autograd.Function, whose backward kernels cannot contain",
                numbers=type(tensor.grad_fn).__name__,
                way_out="the operations of its forward, which are differentiated",
            )
        self._operands.append(number)
        return number

    def _read(self, tensor: Tensor) -> int:
        """The number of a tensor that no recorded operation has made."""
        number = len(self._tensors)
        if tensor.is_nested:
            refuse(
                "a mod reads a nested tensor, whose rows have lengths of their own",
                numbers=f"layout {tensor.layout}",
                way_out="tensor.to_padded_tensor(0.0) outside of the mod, as a captured tensor",
            )
        if not self._executes:
            if type(tensor) is StandIn:
                StandIn.__torch_dispatch__("a tensor of an earlier call", ())
            if transforms() != self._level:
                StandIn.__torch_dispatch__("torch.func inside of a mod", ())
            function = type(tensor).__torch_function__
            if getattr(function, "__func__", function) not in _FUNCTIONS:
                StandIn.__torch_dispatch__(f"operations of a {type(tensor).__name__}", ())
            self._types.append(TensorType.from_tensor(tensor))
            self._number[id(tensor)] = number
        self._tensors.append(tensor)
        self.read.append(tensor)
        self.reads.append(Reading(number, tensor.dtype, tensor.dim(), is_differentiated(tensor)))
        return number

    def _executed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of the operation itself."""
        run = element if func is Tensor.__getitem__ else func
        result = run(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        tensors = [item for item in results if isinstance(item, Tensor)]
        self._tensors.extend(tensors)
        return result

    def _result(self, operation: tuple[Any, ...], args: Any, kwargs: dict[str, Any]) -> Any:
        """A result whose tensors have no elements, unless they are constants."""
        func = operation[0]
        if self._constants.issuperset(self._operands):
            return self._computed(func, args, kwargs)
        if type(func) is FunctionType:  # one in Python, which calls others
            checked_name(func)
        types = tuple([self._types[number] for number in self._operands])
        signature = operation, types, self._default_dtype, torch.is_grad_enabled()
        outcome = _results.get(signature)
        if outcome is None:
            try:
                outcome = inferred(func, args, kwargs)
            except RuntimeError:  # also of operations without a slope, such as sums of integers
                with torch.no_grad():
                    outcome = inferred(func, args, kwargs)
            if len(_results) >= _MOST_RESULTS:
                _results.clear()
            _results[signature] = outcome
        if type(outcome) is TensorType:
            return self._stand_in(outcome)
        if outcome is NO_TENSOR:
            if name_of(func) in TEXT and type(args[0]) is StandIn:
                return f"<{', '.join(map(str, types))} in a mod>"
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if type(outcome) is Same:
            number = self._operands[outcome.operand_index]
            is_fixed = type(self._tensors[number]) is not StandIn or number in self._shared
            if outcome.changed and is_fixed:
                refuse_write(name_of(func))
            if outcome.changed and outcome.learned:
                self._tensors[number].requires_grad_()
                self._types[number] = self._types[number]._replace(learned=True)
            if number in self._constants:
                self._constants.add(len(self._tensors))
            self._tensors.append(self._tensors[number])
            self._types.append(self._types[number])
            return self._tensors[number]
        before = len(self._tensors)
        leaves = [
            self._stand_in(leaf) if type(leaf) is TensorType else leaf for leaf in outcome.leaves
        ]
        if outcome.operand_indices:
            self._shared.update([self._operands[index] for index in outcome.operand_indices])
            self._shared.update(range(before, len(self._tensors)))
        return pytree.tree_unflatten(leaves, outcome.tree)

    def _stand_in(self, tensor_type: TensorType) -> Tensor:
        dtype, shape, learned = tensor_type
        stand_in: Tensor = Tensor._make_wrapper_subclass(
            StandIn,
            shape,
            dtype=dtype,
            device=self.device,
            requires_grad=learned,
        )
        self._number[id(stand_in)] = len(self._tensors)
        self._tensors.append(stand_in)
        self._types.append(tensor_type)
        return stand_in

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation on nothing but constants, computed on the CPU."""
        name = checked_name(func)
        result, changed = run(func, *on_device(name, args, kwargs, "cpu"))
        if changed:
            refuse_write(name)
        if isinstance(result, np.ndarray):  # the memory of a constant, which stays as it is noted
            result.flags.writeable = False
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            number = len(self._tensors)
            self._number.setdefault(id(tensor), number)
            self._constants.add(number)
            self.created_tensors[number] = tensor
            self._tensors.append(tensor)
            self._types.append(TensorType.from_tensor(tensor))
        return result
