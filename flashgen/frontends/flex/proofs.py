"""Mods that are proved to read nothing but numbers, tensors and such functions.

The code of such a function loads its arguments, constants, cells and global variables, calls
functions of torch and methods of tensors from a list, and changes nothing. What it computes follows
from its code, and from the values of these cells, variables and defaults, so that a mod with the
same of them need not be recorded again. Nothing is assumed of any other code.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import operator
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from flashgen.frontends.flex.operation_results import is_differentiated, is_own

Tensor = torch.Tensor

_STEPS = frozenset(
    (
        *("RESUME", "NOP", "CACHE", "PRECALL", "PUSH_NULL", "POP_TOP", "COPY", "SWAP", "DUP_TOP"),
        *("ROT_TWO", "ROT_THREE", "EXTENDED_ARG", "COPY_FREE_VARS", "KW_NAMES", "END_FOR"),
        *("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW"),
        *("LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST", "STORE_FAST_LOAD_FAST"),
        *("STORE_FAST_STORE_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_DEREF", "LOAD_GLOBAL"),
        *("BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE", "COMPARE_OP", "IS_OP", "TO_BOOL"),
        *("UNARY_NEGATIVE", "UNARY_INVERT", "UNARY_NOT", "UNARY_POSITIVE", "BUILD_TUPLE"),
        *("BUILD_SLICE", "BUILD_LIST", "UNPACK_SEQUENCE", "CALL", "CALL_FUNCTION", "CALL_METHOD"),
        *("CALL_KW", "CALL_FUNCTION_KW", "LOAD_METHOD", "LOAD_ATTR", "GET_ITER", "FOR_ITER"),
        *("RETURN_VALUE", "RETURN_CONST", "NOT_TAKEN", "POP_ITER"),
        *("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "POP_JUMP_IF_TRUE"),
        *("POP_JUMP_IF_FALSE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE"),
        *("POP_JUMP_BACKWARD_IF_TRUE", "POP_JUMP_BACKWARD_IF_FALSE", "JUMP_IF_TRUE_OR_POP"),
        *("JUMP_IF_FALSE_OR_POP", "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE"),
        *("POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE"),
        *(f"BINARY_{name}" for name in ("ADD", "SUBTRACT", "MULTIPLY", "TRUE_DIVIDE", "MODULO")),
        *(f"BINARY_{name}" for name in ("FLOOR_DIVIDE", "POWER", "AND", "OR", "XOR")),
        *("BINARY_LSHIFT", "BINARY_RSHIFT"),
    )
)
"""Instructions of CPython 3.10 to 3.14 that read and change nothing but the frame's own values."""

_METHODS = frozenset(
    (
        *("abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "ceil"),
        *("clamp", "clamp_max", "clamp_min", "cos", "detach", "div", "eq", "erf", "exp", "exp2"),
        *("expand", "flatten", "flip", "float", "floor", "floor_divide", "fmod", "ge", "gt", "int"),
        *("le", "log", "log1p", "log2", "logical_and", "logical_not", "logical_or", "logical_xor"),
        *("long", "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "new_full"),
        *("new_ones", "new_zeros", "permute", "pow", "reciprocal", "relu", "remainder", "reshape"),
        *("round", "rsqrt", "select", "shape", "sigmoid", "sign", "sin", "size", "softmax", "sqrt"),
        *("square", "squeeze", "sub", "tanh", "to", "transpose", "trunc", "unsqueeze", "view"),
        *("where", "dtype", "device", "ndim", "dim", "tan", "type_as", "expm1"),
    )
)
"""Attributes of tensors that do not change them; torch has functions of the same names."""

_OPERATORS = tuple(
    f"__{name}__"
    for name in (
        *("abs", "add", "and", "bool", "eq", "float", "floordiv", "ge", "getitem", "gt", "index"),
        *("int", "invert", "iter", "le", "len", "lshift", "lt", "mod", "mul", "ne", "neg", "or"),
        *("pos", "pow", "radd", "rand", "rfloordiv", "rlshift", "rmod", "rmul", "ror", "rpow"),
        *("rrshift", "rshift", "rsub", "rtruediv", "rxor", "sub", "truediv", "xor"),
    )
)
_PARAMETER = dict(vars(torch.nn.Parameter))

_FUNCTIONS = frozenset(
    (
        *("tensor", "full", "zeros", "ones", "arange", "zeros_like", "ones_like", "full_like"),
        *("atan2", "logical_xor", "stack", "bucketize", "searchsorted", "true_divide", "subtract"),
        *("multiply", "divide", "less", "greater", "less_equal", "greater_equal", "not_equal"),
        *("scalar_tensor", "index_select", "logsigmoid", "softplus", "leaky_relu", "elu"),
        *("gelu", "silu"),
    )
)
_BUILTINS = frozenset((abs, min, max, float, int, bool, len, range, round, pow, sum, tuple))
_MODULES = frozenset((torch, torch.nn, torch.nn.functional, math))
_TYPES = (torch.dtype, torch.device, type(None), str)
_CALLABLES = (types.BuiltinFunctionType, type)
_MOST_VALUES = 200


class Proof(NamedTuple):
    """
    Attributes:
        key: equal for mods that compute the same from their tensors, in order.
        tensors: the tensors that the mods may read, each once.
        values: the numbers, texts and the like in variables, cells and defaults.
    """

    key: Hashable
    tensors: list[Tensor]
    values: list[Any]


class _NotProvedError(Exception):
    """A mod may read or do something else."""


class _Loads(NamedTuple):
    """What a function's code loads from outside.

    Attributes:
        methods: reads the attributes and operators of a class of tensors that the code may use.
        torch_methods: the methods and operators of torch itself, which a program may replace.
        variables: global variables.
        chains: global variables with the attributes that are read of them: ("torch", "tanh").
    """

    methods: Callable[[type], tuple[Any, ...]]
    torch_methods: tuple[Any, ...]
    variables: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]


def prove(mods: Sequence[Any]) -> Proof | None:
    """The proof for the mods of a call, None entries included; None where there is none."""
    values = _Values()
    try:
        parts = tuple([values.key(mod) for mod in mods])
    except _NotProvedError:
        return None
    return Proof((parts, torch.get_default_dtype()), values.tensors, values.values)


class _Values:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.values: list[Any] = []
        self.tensor_indices: dict[int, int] = {}
        self.above: list[types.FunctionType] = []
        self.count = 0

    def key(self, value: Any) -> Hashable:
        """The key of a value that a mod may load.

        Raises:
            _NotProvedError: no kind of value that is known to be safe.
        """
        kind = type(value)
        if kind is types.FunctionType:
            return self._function(value)
        if kind is int or kind is bool:
            self.values.append(value)
            return kind, value
        if kind is float:
            self.values.append(value)
            return kind, value, math.copysign(1.0, value)
        if kind is Tensor or kind is torch.nn.Parameter:
            return self._tensor(value)
        if kind is tuple:
            return kind, *[self.key(item) for item in value]
        if kind in _TYPES:
            self.values.append(value)
            return kind, value
        if kind in _CALLABLES and value in _BUILTINS:
            return kind, value
        raise _NotProvedError

    def _tensor(self, tensor: Tensor) -> Hashable:
        index = self.tensor_indices.get(id(tensor))
        if index is None:
            index = self.tensor_indices[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            if not _METHODS.isdisjoint(tensor.__dict__) or tensor.is_nested:
                raise _NotProvedError
            if type(tensor) is torch.nn.Parameter and vars(torch.nn.Parameter) != _PARAMETER:
                raise _NotProvedError
        return index, tensor.dtype, tensor.shape, is_differentiated(tensor), tensor.device

    def _function(self, function: types.FunctionType) -> Hashable:
        self.count += 1
        if function in self.above or self.count > _MOST_VALUES or function.__dict__:
            raise _NotProvedError
        if getattr(function, "__builtins__", None) is not vars(builtins):
            raise _NotProvedError
        code = function.__code__
        loads = _loads_of(code)
        if loads is None or loads.methods(Tensor) != loads.torch_methods:
            raise _NotProvedError
        parts: list[Hashable] = [code]
        self.above.append(function)
        try:
            for cell in function.__closure__ or ():
                parts.append(self.key(cell.cell_contents))
        except ValueError:  # a variable without a value
            raise _NotProvedError from None
        if function.__defaults__ is not None:
            parts.append(self.key(function.__defaults__))
        if function.__kwdefaults__:
            parts += [(name, self.key(x)) for name, x in sorted(function.__kwdefaults__.items())]
        global_variables = function.__globals__
        for name in loads.variables:
            parts.append(
                self.key(global_variables[name] if name in global_variables else _builtin(name))
            )
        for chain in loads.chains:
            parts.append(self._attribute(global_variables, chain))
        self.above.pop()
        return tuple(parts)

    def _attribute(self, global_variables: dict[str, Any], chain: tuple[str, ...]) -> Hashable:
        """The key of an attribute that is read of a global variable."""
        value = global_variables.get(chain[0])
        for position, name in enumerate(chain[1:]):
            if type(value) is not types.ModuleType or value not in _MODULES:
                if _METHODS.issuperset(chain[position + 1 :]):
                    break
                raise _NotProvedError
            value = getattr(value, name, None)
        if type(value).__hash__ is not None and value in _pure_functions() and is_own(value):
            return id(value)  # `_pure_functions` keeps it
        value_count = len(self.values)
        key = self.key(value)
        del self.values[value_count:]  # such as math.pi and torch.float32
        return key


def _builtin(name: str) -> Any:
    return getattr(builtins, name, _NotProvedError)


@functools.cache
def _pure_functions() -> frozenset[Any]:
    homes = (torch, torch.nn.functional)
    names = _METHODS | _FUNCTIONS
    functions = [getattr(home, name) for home in homes for name in names if hasattr(home, name)]
    return frozenset(x for x in (*functions, *vars(math).values()) if is_own(x))


@functools.lru_cache(maxsize=4096)
def _loads_of(code: types.CodeType) -> _Loads | None:
    """What the code loads from outside; None for code that may do something else."""
    methods: set[str] = set()
    chains: list[list[str]] = []
    open_chain: list[str] | None = None
    for step in dis.get_instructions(code):
        in_place = step.opname == "BINARY_OP" and "=" in step.argrepr
        if step.opname not in _STEPS or in_place:
            return None
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            name = str(step.argval)
            if open_chain is not None:
                open_chain.append(name)
            elif name in _METHODS:
                methods.add(name)
            else:
                return None
            continue
        if step.opname in ("CACHE", "EXTENDED_ARG"):
            continue
        open_chain = None
        if step.opname == "LOAD_GLOBAL":
            open_chain = [str(step.argval)]
            chains.append(open_chain)
    variables = {chain[0] for chain in chains if len(chain) == 1}
    longer = {tuple(chain) for chain in chains if len(chain) > 1}
    methods |= {name for chain in longer for name in chain[1:]} & _METHODS
    reads = operator.attrgetter(*_OPERATORS, *methods)
    torch_methods = reads(Tensor)
    if not all(map(is_own, torch_methods)):
        return None
    return _Loads(reads, torch_methods, tuple(sorted(variables)), tuple(sorted(longer)))
