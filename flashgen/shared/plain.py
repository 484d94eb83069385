"""Frozen values as JSON and back, by their type hints.

Files that hold such values may be damaged or written by someone else: whatever they hold, reading
gives a value of the type or a ValueError.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import reprlib
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """The value in the types of JSON: dataclasses and named tuples become objects."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_plain(part) for name, part in zip(value._fields, value, strict=True)}
    if isinstance(value, tuple | list):
        return [to_plain(part) for part in value]
    if isinstance(value, Mapping):
        return {key: to_plain(part) for key, part in value.items()}
    assert value is None or isinstance(value, bool | int | float | str), (
        f"no plain value: {value!r}"
    )
    return value


def parsed(data: bytes) -> Any:
    """The values of a JSON text in UTF-8.

    Raises:
        ValueError: it is no JSON, holds NaN or an infinity, or is nested too deep.
    """
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def from_plain(kind: type[T], data: Any) -> T:
    """The value of a type from what `to_plain` returned for it.

    Raises:
        ValueError: the data is not of this type; of numbers, those that are finite and of at most
            64 bits are.
    """
    try:
        return _value_of(kind, data)  # type: ignore[no-any-return]
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _value_of(kind: Any, data: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind is object:  # nested tuples of plain values
        if isinstance(data, list):
            return tuple(_value_of(object, part) for part in data)
        kind = type(data)
        _check(kind is not dict, object, data)
    if origin in (Union, types.UnionType):
        return _value_of_union(args, data)
    if origin is tuple:
        _check(isinstance(data, list), kind, data)
        if args[-1] is ...:
            return tuple(_value_of(args[0], part) for part in data)
        _check(len(args) == len(data), kind, data)
        return tuple(
            _value_of(element_kind, part) for element_kind, part in zip(args, data, strict=True)
        )
    if origin is not None and issubclass(origin, Mapping):
        _check(isinstance(data, dict), kind, data)
        return {_value_of(args[0], key): _value_of(args[1], part) for key, part in data.items()}
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = _fields(kind)
        _check(isinstance(data, dict) and set(data) == set(hints), kind, data)
        return kind(**{name: _value_of(hint, data[name]) for name, hint in hints.items()})
    fits = type(data) is kind or (kind is float and type(data) is int)
    if type(data) in (int, float):
        fits = fits and abs(data) < 2**63  # which NaN and infinity are not
    elif type(data) is str:
        data.encode()  # half of a surrogate pair is a ValueError
    _check(fits, kind, data)
    return data


def _value_of_union(kinds: tuple[Any, ...], data: Any) -> Any:
    for kind in kinds:
        try:
            return _value_of(kind, data)
        except ValueError:
            continue
    raise ValueError(f"{reprlib.repr(data):.80} is none of {kinds}")


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}
    return {name: hints[name] for name in kind._fields}


def _check(fits: bool, kind: Any, data: Any) -> None:
    if not fits:
        raise ValueError(f"{reprlib.repr(data):.80} is not a {getattr(kind, '__name__', kind)}")
