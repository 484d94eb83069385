"""Equality and pickling of functions of integers, such as the function of a block layout.

A block layout's function cannot be traced, since it may branch on its arguments. It is identified
by its code and the values that the code can access, unless other processes can import it by name.
"""

from __future__ import annotations

import inspect
import marshal
import sys
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from flashgen.errors import SpecError
from flashgen.language.user_source import lines_of, nested_codes

Function = Callable[..., object]


def identity_of(value: Any, above: tuple[object, ...] = ()) -> Hashable:
    """A value that is equal for two functions with the same code over the same values.

    A spec file may be loaded twice, which makes two functions of each definition.

    Args:
        above: the functions that enclose this one.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return type(value), repr(value)
    if type(value) in (tuple, frozenset):
        parts = sorted(value, key=repr) if type(value) is frozenset else value
        return type(value), tuple(identity_of(part, above) for part in parts)
    if isinstance(value, types.ModuleType):
        return types.ModuleType, value.__name__
    if not isinstance(value, types.FunctionType) or _is_importable(value):
        return _Same(value)
    if value in above:
        return "again", above.index(value)
    above = (*above, value)
    cells, outer = _seen(value)
    defaults = (
        identity_of(value.__defaults__, above),
        identity_of(_pairs(value.__kwdefaults__), above),
    )
    return value.__code__, defaults, identity_of(cells, above), identity_of(_pairs(outer), above)


class _Same:
    """An object that is equal only to itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class _Module:
    name: str


@dataclass(frozen=True)
class _Again:
    """A reference to an enclosing function, by its position among those that enclose it."""

    place: int


@dataclass(frozen=True)
class _Code:
    """A function as picklable parts: its code and the values that it accesses."""

    python: str
    where: str
    code: bytes
    name: str
    module: str
    defaults: tuple[Any, ...]
    named: dict[str, Any]  # defaults of arguments by name
    cells: tuple[Any, ...]
    outer: dict[str, Any]


def to_parts(value: Any, above: tuple[object, ...] = ()) -> Any:
    """A picklable form of ``value``; for a function that cannot be imported, its code."""
    if isinstance(value, types.ModuleType):
        return _Module(value.__name__)
    if not isinstance(value, types.FunctionType) or _is_importable(value):
        return value
    if value in above:
        return _Again(above.index(value))
    above = (*above, value)
    cells, outer = _seen(value)
    return _Code(
        python=str(sys.implementation.cache_tag),
        where=str(lines_of(value, "")),
        code=marshal.dumps(value.__code__),
        name=value.__name__,
        module=value.__module__,
        defaults=tuple(to_parts(each, above) for each in value.__defaults__ or ()),
        named={n: to_parts(each, above) for n, each in (value.__kwdefaults__ or {}).items()},
        cells=tuple(to_parts(cell, above) for cell in cells),
        outer={name: to_parts(each, above) for name, each in outer.items()},
    )


def from_parts(part: Any, above: tuple[object, ...] = ()) -> Any:
    """The inverse of `to_parts`.

    Raises:
        SpecError: the code is from another version of Python, which this version cannot run.
    """
    if isinstance(part, _Module):
        return __import__(part.name, fromlist=["*"])
    if isinstance(part, _Again):
        return above[part.place]
    if not isinstance(part, _Code):
        return part
    if part.python != sys.implementation.cache_tag:
        raise SpecError(
            "a block layout that was pickled as code runs only in the same version of Python",
            where=part.where,
            numbers=f"pickled in {part.python}, this is {sys.implementation.cache_tag}",
            way_out="def it at the top level of a module that both can import",
        )
    seen: dict[str, Any] = {"__builtins__": __builtins__, "__name__": part.module}
    cells = tuple(types.CellType() for _ in part.cells)
    made = types.FunctionType(marshal.loads(part.code), seen, part.name, None, cells)
    above = (*above, made)
    made.__defaults__ = tuple(from_parts(each, above) for each in part.defaults) or None
    made.__kwdefaults__ = {n: from_parts(each, above) for n, each in part.named.items()} or None
    for cell, content in zip(cells, part.cells, strict=True):
        cell.cell_contents = from_parts(content, above)
    seen |= {name: from_parts(each, above) for name, each in part.outer.items()}
    return made


def _seen(function: types.FunctionType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The values in a function's closure, and those of its module that it names."""
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    known = function.__globals__
    return cells, {name: known[name] for name in _names(function.__code__) if name in known}


def _names(code: types.CodeType) -> list[str]:
    """Every global name that the code, nested code included, may read, in a fixed order."""
    return sorted({name for each in nested_codes(code) for name in each.co_names})


def _pairs(named: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple((named or {}).items())


def _is_importable(function: Any) -> bool:
    """Whether other processes can import the function by name."""
    found: Any = inspect.getmodule(function)
    if found is None or found.__name__ == "__main__":
        return False
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function
