"""Copies, equality and pickling of functions of integers, such as that of a block layout.

A block layout's function cannot be traced, since it may branch on its arguments. It is copied with
the values that its code can reach, and identified by the code and these values.
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from flashgen.shared.errors import SpecError
from flashgen.spec.language.user_source import lines_of, nested_codes

Function = Callable[..., object]


def bound(function: Any) -> Any:
    """A copy of a function with all values that it can reach, as they are now.

    Cells, defaults, global variables that its code names, and the objects in them are copied, so
    that later changes have no effect. Classes and modules are not: `outside` tells whether they
    have changed.

    Raises:
        SpecError: the function can reach a value that cannot be copied, such as a generator.
    """
    data, objects = _pickled(function)
    return _Unpickler(io.BytesIO(data), objects).load()


def identity_of(function: Any) -> Hashable:
    """A value that is equal for two functions with the same code over the same values.

    A spec file may be loaded twice, which makes two functions of each definition.
    """
    return _identity(function, ())


def outside(function: Any) -> Hashable:
    """The data attributes of the user's classes and modules that a function can reach."""
    _, objects = _pickled(function)
    owners = [owner for owner in objects if isinstance(owner, type | types.ModuleType)]
    codes = [code for code in objects if isinstance(code, types.CodeType)]
    named = set[str]().union(*map(_names_in_code, codes))
    attributes: list[Hashable] = []
    for owner in owners:
        for holder in owner.__mro__ if isinstance(owner, type) else (owner,):
            if not _is_library(getattr(holder, "__module__", None) or holder.__name__):
                values = [(n, x) for n, x in sorted(vars(holder).items()) if n in named]
                attributes += [(holder.__name__, n, _identity(x, ())) for n, x in values]
    return tuple(attributes)


def _identity(value: Any, above: tuple[object, ...]) -> Hashable:
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return type(value), repr(value)
    if type(value) in (tuple, frozenset):
        parts = sorted(value, key=repr) if type(value) is frozenset else value
        return type(value), tuple(_identity(part, above) for part in parts)
    if isinstance(value, types.ModuleType):
        return types.ModuleType, value.__name__
    if isinstance(value, types.FunctionType) and not _is_library(value.__module__):
        if value in above:
            return "again", above.index(value)
        above = (*above, value)
        cells, outer = _reached_values(value)
        defaults = value.__defaults__, _pairs(value.__kwdefaults__)
        parts = (defaults, cells, _pairs(outer), _pairs(value.__dict__))
        return value.__code__, _identity(parts, above)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return _Same(value)
    data, objects = _pickled(value)
    return data, tuple(x if isinstance(x, types.CodeType) else _Same(x) for x in objects)


class _Same:
    """An object that is equal only to itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


# Copies in the same process.


class _Pickler(pickle.Pickler):
    """Pickles functions by their values; code, classes and modules stay as they are."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.objects: list[Any] = []
        self.indices: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        plain = isinstance(value, type | types.ModuleType | types.CodeType | enum.Enum)
        if not plain and isinstance(value, types.FunctionType):
            plain = _is_library(value.__module__)
        if not plain:
            return None
        if id(value) not in self.indices:
            self.indices[id(value)] = len(self.objects)
            self.objects.append(value)
        return self.indices[id(value)]

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            cells, outer = _reached_values(value)
            state = cells, outer, value.__defaults__, value.__kwdefaults__, value.__dict__
            arguments = (value.__code__, value.__name__, value.__module__)
            return _empty_function, arguments, state, None, None, _fill_function
        if isinstance(value, functools._lru_cache_wrapper):  # it returns what its function does
            return _unchanged, (value.__wrapped__,)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, objects: list[Any]) -> None:
        super().__init__(file)
        self.objects = objects

    def persistent_load(self, index: int) -> Any:
        return self.objects[index]


def _pickled(value: Any) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except Exception as error:
        raise SpecError(
            "a block layout can reach a value that cannot be copied when the spec is made",
            where=str(lines_of(value, "")) if callable(value) else "unknown",
            numbers=f"{type(error).__name__}: {error}"[:200],
            way_out="a function of numbers, lists and plain objects; or layout=None and the tensor "
            "with each call",
        ) from error
    return file.getvalue(), pickler.objects


def _unchanged(value: Any) -> Any:
    return value


def _empty_function(code: types.CodeType, name: str, module: str) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in code.co_freevars)
    seen = {"__builtins__": builtins, "__name__": module}
    return types.FunctionType(code, seen, name, None, cells)


def _fill_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    cells, outer, defaults, named, attributes = state
    for cell, content in zip(function.__closure__ or (), cells, strict=True):
        cell.cell_contents = content
    function.__globals__.update(outer)
    function.__defaults__, function.__kwdefaults__ = defaults, named
    function.__dict__.update(attributes)


# Pickles for other processes.


@dataclass(frozen=True)
class _Module:
    """A module, by its name."""

    name: str


@dataclass(frozen=True)
class _Code:
    """The code of a function as `marshal` has it, for one version of Python."""

    python: str
    where: str
    code: bytes


@dataclass(frozen=True)
class _Parts:
    """A function by value: its pickle, and the objects that other processes import for it."""

    data: bytes
    objects: tuple[Any, ...]


def to_parts(function: Any) -> Any:
    """A picklable form of a function that cannot be imported, with the values that it can reach."""
    data, objects = _pickled(function)
    where = str(lines_of(function, "")) if callable(function) else "unknown"

    def portable(value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return _Module(value.__name__)
        if isinstance(value, types.CodeType):
            return _Code(str(sys.implementation.cache_tag), where, marshal.dumps(value))
        return value

    return _Parts(data, tuple(map(portable, objects)))


def from_parts(part: Any) -> Any:
    """The inverse of `to_parts`; another value is returned as it is.

    Raises:
        SpecError: the code is from another version of Python, which this version cannot run.
    """
    if isinstance(part, _Module):
        return __import__(part.name, fromlist=["*"])
    if isinstance(part, _Parts):
        return _Unpickler(io.BytesIO(part.data), list(map(from_parts, part.objects))).load()
    if not isinstance(part, _Code):
        return part
    if part.python != sys.implementation.cache_tag:
        raise SpecError(
            "a block layout that was pickled as code runs only in the same version of Python",
            where=part.where,
            numbers=f"pickled in {part.python}, this is {sys.implementation.cache_tag}",
            way_out="def it at the top level of a module that both can import, with nothing that "
            "it reads from outside",
        )
    return marshal.loads(part.code)


def _reached_values(function: types.FunctionType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The values in a function's closure, and the values of its module that it names."""
    cells = tuple(map(_content, function.__closure__ or ()))
    module_values = function.__globals__
    names = sorted(_names_in_code(function.__code__) & module_values.keys())
    return cells, {name: module_values[name] for name in names}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return None


def _names_in_code(code: types.CodeType) -> set[str]:
    """Names and texts by which the code, nested code included, may read a variable."""
    codes = list(nested_codes(code))
    texts = {x for nested in codes for x in nested.co_consts if isinstance(x, str)}
    return texts.union(*(nested.co_names for nested in codes))


def _pairs(named: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple((named or {}).items())


def _is_library(module: str | None) -> bool:
    """Whether a module belongs to Python or an installed package, whose values do not change."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names:
        return root != "__main__"
    file = str(getattr(sys.modules.get(root), "__file__", None) or "")
    return root == "flashgen" or "site-packages" in file


def is_the_same_everywhere(function: Any) -> bool:
    """Whether other processes can import the function by name and it reads no values there."""
    if isinstance(function, types.FunctionType):
        cells, outer = _reached_values(function)
        if cells or outer or function.__defaults__ or function.__kwdefaults__:
            return False
    elif not isinstance(function, types.BuiltinFunctionType):
        return False
    value: Any = inspect.getmodule(function)
    if value is None or value.__name__ == "__main__":
        return False
    for name in function.__qualname__.split("."):
        value = getattr(value, name, None)
    return value is function
