"""Keys of mods: a mod's code, the numbers that it can access and the tensors that it can reach.

Programs often create their mods anew for each call. Two mods with the same key trace to the same
expressions, so that the second need not be traced; they differ only in their tensors, which are
listed in the order in which they were reached.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import torch

from flashgen.language.user_source import nested_codes

Key = Hashable

_MOST_VALUES = 2000
"""A mod that reaches more values than this has no key and is traced at each call."""

_ATOMS = (str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, enum.Enum)
_BY_IDENTITY = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    np.ufunc,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "sympy", "flashgen"})
_NEVER_RUN = frozenset(
    {"__init__", "__new__", "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__"}
)


class NoKey(Exception):
    """A value in reach of a mod cannot be compared, so that the mod has no key."""


class ReachableValues:
    """The values that functions can reach.

    Attributes:
        tensors: every tensor once, in the order in which it was reached.
        names: the name of each tensor in the user's code; "" where it has none.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []  # keeps the objects alive, so that no id is reused
        self._objects: list[tuple[Any, set[str]]] = []
        self._reads: set[str] = set()
        self._values = 0

    def key(self, mods: Iterable[object]) -> Key:
        """The common key of several mods.

        Raises:
            NoKey: the mods have no key and must be traced at each call.
        """
        parts = [self._value(mod, "") for mod in mods]
        return (*parts, *self._attributes())

    def _value(self, value: Any, name: str) -> Key:
        self._values += 1
        if self._values > _MOST_VALUES:
            raise NoKey
        kind = type(value)
        if kind is float:
            return float, value.hex()
        if kind in (bool, int, complex) or isinstance(value, _ATOMS):
            return kind, value
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if isinstance(value, _BY_IDENTITY):
            if not isinstance(getattr(value, "__self__", None), types.ModuleType | type | None):
                raise NoKey  # a method of some object
            return value
        if isinstance(value, types.ModuleType) and _is_library(value.__name__):
            return kind, value.__name__
        if kind in (tuple, list, set, frozenset, torch.Size):
            items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            return kind, *(self._value(item, name) for item in items)
        if kind is slice:
            return kind, *(self._value(x, name) for x in (value.start, value.stop, value.step))
        known = self._seen.get(id(value))
        if known is not None:
            return "again", known
        self._seen[id(value)] = len(self._kept)
        self._kept.append(value)
        return self._compound(value, name)

    def _compound(self, value: Any, name: str) -> Key:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.names.append(name)
            return type(value), value.dtype, value.dim(), value.requires_grad
        if isinstance(value, dict):
            return type(value), *(
                (self._value(k, ""), self._value(v, k if isinstance(k, str) else name))
                for k, v in value.items()
            )
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return "method", self._value(value.__func__, ""), self._value(value.__self__, "")
        if isinstance(value, functools.partial):
            parts = (value.func, *value.args)
            return (
                "partial",
                *(self._value(part, "") for part in parts),
                self._value(value.keywords, ""),
            )
        if isinstance(value, property):
            return "property", self._value(value.fget, "")
        if isinstance(value, staticmethod | classmethod):
            return "method", self._value(value.__func__, "")
        return self._object(value)

    def _function(self, function: types.FunctionType) -> Key:
        code = function.__code__
        self._reads.update(_attributes_read(code))
        parts: list[Key] = [code, code.co_filename]
        for cell_name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            parts.append(self._value(content, cell_name))
        parts.append(self._value(function.__defaults__, ""))
        parts.append(self._value(function.__kwdefaults__, ""))
        if not _is_library(function.__module__):
            for read in _globals_read(code):
                if read in function.__globals__:
                    parts.append((read, self._value(function.__globals__[read], read)))
        return tuple(parts)

    def _object(self, value: Any) -> Key:
        """The key of an object without its attributes, which `_attributes` adds."""
        kind = value if isinstance(value, type) else type(value)
        if _is_library(kind.__module__) and isinstance(value, type):
            return "class", value
        module = isinstance(value, torch.nn.Module)
        for owner in _user_classes(kind):
            if "__getattribute__" in vars(owner) or ("__getattr__" in vars(owner) and not module):
                raise NoKey
        if not hasattr(value, "__dict__") and not _slots(kind):
            raise NoKey
        self._objects.append((value, set()))
        return "object", kind, len(self._objects)

    def _attributes(self) -> list[Key]:
        """The values of all attributes that reachable code names, of all reachable objects."""
        parts: list[Key] = []
        before = (-1, -1)
        while before != self._progress():
            before = self._progress()
            for number, (value, done) in enumerate(list(self._objects)):
                for name in sorted(self._reads - done):
                    done.add(name)
                    for found in _lookup(value, name):
                        parts.append((number, name, self._value(found, name)))
        return parts

    def _progress(self) -> tuple[int, int]:
        return len(self._objects), len(self._reads)


def _lookup(value: Any, name: str) -> list[Any]:
    """What ``value.name`` may be, found without running user code."""
    own = getattr(value, "__dict__", {})
    for store in (own, *(own.get(s) or {} for s in ("_parameters", "_buffers", "_modules"))):
        if isinstance(store, dict | types.MappingProxyType) and name in store:
            return [store[name]]
    for owner in _user_classes(value if isinstance(value, type) else type(value)):
        if name in vars(owner):
            found = vars(owner)[name]
            if isinstance(found, types.MemberDescriptorType):
                return [getattr(value, name)] if hasattr(value, name) else []
            return [found]
    return []


def _user_classes(kind: type) -> list[type]:
    return [owner for owner in kind.__mro__ if not _is_library(owner.__module__)]


def _slots(kind: type) -> bool:
    return any("__slots__" in vars(owner) for owner in _user_classes(kind))


def _is_library(module: str | None) -> bool:
    root = (module or "").partition(".")[0]
    return root in _LIBRARIES and root != "__main__"


@functools.lru_cache(maxsize=4096)
def _globals_read(code: types.CodeType) -> tuple[str, ...]:
    steps = (step for each in nested_codes(code) for step in dis.get_instructions(each))
    return tuple(sorted({s.argval for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME")}))


@functools.lru_cache(maxsize=4096)
def _attributes_read(code: types.CodeType) -> frozenset[str]:
    return _OPERATORS.union(*(each.co_names for each in nested_codes(code)))


# Methods that Python calls implicitly.
_OPERATORS = frozenset(
    name
    for kind in (int, list, dict, types.FunctionType)
    for name in dir(kind)
    if callable(getattr(kind, name, None)) and name.startswith("__")
) - _NEVER_RUN - set(dir(object)) | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
