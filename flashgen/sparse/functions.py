"""Functions of ints as values: when two are equal, and how one is pickled.

A layout's function cannot be traced: it may branch on its arguments in any way. What stands for it
is its code and the values that the code can see, unless another process can import it by its name.
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
from flashgen.expr.source import lines_of

Function = Callable[..., object]


def meaning(value: Any, above: tuple[object, ...] = ()) -> Hashable:
    """Equal for two functions of the same code over the same values: a file may be loaded twice.

    Args:
        above: the functions that lead to this one.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return type(value), repr(value)
    if type(value) in (tuple, frozenset):
        parts = sorted(value, key=repr) if type(value) is frozenset else value
        return type(value), tuple(meaning(part, above) for part in parts)
    if isinstance(value, types.ModuleType):
        return types.ModuleType, value.__name__
    if not isinstance(value, types.FunctionType) or _is_importable(value):
        return _Same(value)
    if value in above:
        return "again", above.index(value)
    above = (*above, value)
    cells, outer = _seen(value)
    defaults = meaning(value.__defaults__, above), meaning(_pairs(value.__kwdefaults__), above)
    return value.__code__, defaults, meaning(cells, above), meaning(_pairs(outer), above)


class _Same:
    """An object whose meaning cannot be looked into: equal to itself alone."""

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
    """A function inside itself: the one at this place of those that lead to it."""

    place: int


@dataclass(frozen=True)
class _Code:
    """A function taken apart, with what it sees."""

    python: str
    where: str
    code: bytes
    name: str
    module: str
    defaults: tuple[Any, ...]
    named: dict[str, Any]  # defaults of arguments by name
    cells: tuple[Any, ...]
    outer: dict[str, Any]


def taken_apart(value: Any, above: tuple[object, ...] = ()) -> Any:
    """A form of ``value`` that pickle takes: of a function its code, where no name leads to it."""
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
        defaults=tuple(taken_apart(each, above) for each in value.__defaults__ or ()),
        named={n: taken_apart(each, above) for n, each in (value.__kwdefaults__ or {}).items()},
        cells=tuple(taken_apart(cell, above) for cell in cells),
        outer={name: taken_apart(each, above) for name, each in outer.items()},
    )


def put_together(part: Any, above: tuple[object, ...] = ()) -> Any:
    """What `taken_apart` was given.

    Raises:
        SpecError: code of another version of Python, which this one cannot run.
    """
    if isinstance(part, _Module):
        return __import__(part.name, fromlist=["*"])
    if isinstance(part, _Again):
        return above[part.place]
    if not isinstance(part, _Code):
        return part
    if part.python != sys.implementation.cache_tag:
        raise SpecError(
            "a layout that was pickled as code runs in the same version of Python alone",
            where=part.where,
            numbers=f"pickled in {part.python}, this is {sys.implementation.cache_tag}",
            way_out="def it at the top level of a module that both can import",
        )
    seen: dict[str, Any] = {"__builtins__": __builtins__, "__name__": part.module}
    cells = tuple(types.CellType() for _ in part.cells)
    made = types.FunctionType(marshal.loads(part.code), seen, part.name, None, cells)
    above = (*above, made)
    made.__defaults__ = tuple(put_together(each, above) for each in part.defaults) or None
    made.__kwdefaults__ = {n: put_together(each, above) for n, each in part.named.items()} or None
    for cell, content in zip(cells, part.cells, strict=True):
        cell.cell_contents = put_together(content, above)
    seen |= {name: put_together(each, above) for name, each in part.outer.items()}
    return made


def _seen(function: types.FunctionType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The values in a function's closure, and those of its module that it names."""
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    known = function.__globals__
    return cells, {name: known[name] for name in _names(function.__code__) if name in known}


def _names(code: types.CodeType) -> list[str]:
    """Every name that the code, and code inside it, may read of its module, in one order."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return sorted({*code.co_names, *(name for each in inner for name in _names(each))})


def _pairs(named: dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    return tuple((named or {}).items())


def _is_importable(function: Any) -> bool:
    """Whether a name leads to the function, in other processes too."""
    found: Any = inspect.getmodule(function)
    if found is None or found.__name__ == "__main__":
        return False
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function
