"""Ways in which a function reads a value that changes between calls.

Each makes a function that reads a number, and one that changes the number.
"""

from __future__ import annotations

import array
import atexit
import collections
import contextvars
import dataclasses
import enum
import functools
import json
import operator
import os
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

Set = Callable[[Any], None]
Get = Callable[[], Any]
Way = Callable[[], tuple[Get, Set]]

WAYS: dict[str, Way] = {}

W = 0


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


# Variables and arguments.


@way
def cell() -> tuple[Get, Set]:
    w: Any = 0

    def change(value: Any) -> None:
        nonlocal w
        w = value

    return lambda: w, change


@way
def variable_of_the_module() -> tuple[Get, Set]:
    return lambda: W, lambda value: globals().update(W=value)


@way
def globals_by_name() -> tuple[Get, Set]:
    return lambda: globals()["W"], lambda value: globals().update(W=value)


@way
def evaluated_text() -> tuple[Get, Set]:
    return lambda: eval("W + 0"), lambda value: globals().update(W=value)


@way
def executed_text() -> tuple[Get, Set]:
    def get() -> Any:
        scope: dict[str, Any] = {}
        exec("found = W", globals(), scope)
        return scope["found"]

    return get, lambda value: globals().update(W=value)


@way
def attribute_of_sys_modules() -> tuple[Get, Set]:
    return lambda: sys.modules[__name__].W, lambda value: globals().update(W=value)


@way
def default_of_an_argument() -> tuple[Get, Set]:
    def get(w: Any = 0) -> Any:
        return w

    return lambda: get(), lambda value: setattr(get, "__defaults__", (value,))


@way
def default_of_a_named_argument() -> tuple[Get, Set]:
    def get(*, w: Any = 0) -> Any:
        return w

    return lambda: get(), lambda value: get.__kwdefaults__.update(w=value)


@way
def replaced_code() -> tuple[Get, Set]:
    def get() -> Any:
        return 0

    def change(value: Any) -> None:
        get.__code__ = get.__code__.replace(co_consts=(None, value))

    return lambda: get(), change


@way
def contents_of_a_cell_from_outside() -> tuple[Get, Set]:
    w: Any = 0

    def get() -> Any:
        return w

    return lambda: get(), lambda value: setattr(get.__closure__[0], "cell_contents", value)


@way
def local_variables_of_a_frame() -> tuple[Get, Set]:
    held = [0]

    def get() -> Any:
        inside = held[0]
        return inside + 0 * sys._getframe().f_locals["inside"]

    return get, lambda value: held.__setitem__(0, value)


# Functions with a state.


@way
def attribute_of_a_function() -> tuple[Get, Set]:
    def get() -> Any:
        return get.w

    return get, lambda value: setattr(get, "w", value)


@way
def arguments_of_a_partial() -> tuple[Get, Set]:
    box: list[Any] = [0]
    get = functools.partial(lambda x: x[0], box)
    return get, lambda value: box.__setitem__(0, value)


@way
def keywords_of_a_partial() -> tuple[Get, Set]:
    get = functools.partial(lambda w: w, w=0)
    return get, lambda value: get.keywords.update(w=value)


@way
def cached_function() -> tuple[Get, Set]:
    held = [0]

    @functools.lru_cache
    def get() -> Any:
        return held[0]

    def change(value: Any) -> None:
        held[0] = value
        get.cache_clear()

    return get, change


@way
def cached_property() -> tuple[Get, Set]:
    class Cached:
        held = 0

        @functools.cached_property
        def w(self) -> Any:
            return self.held

    cached = Cached()

    def change(value: Any) -> None:
        cached.held = value
        vars(cached).pop("w", None)

    return lambda: cached.w, change


@way
def single_dispatch() -> tuple[Get, Set]:
    get = functools.singledispatch(lambda x: 0)
    return lambda: get(1), lambda value: get.register(int, lambda x: value)


@way
def attrgetter() -> tuple[Get, Set]:
    held = types.SimpleNamespace(w=0)
    get = operator.attrgetter("w")
    return lambda: get(held), lambda value: setattr(held, "w", value)


@way
def methodcaller() -> tuple[Get, Set]:
    held = {"w": 0}
    get = operator.methodcaller("get", "w")
    return lambda: get(held), lambda value: held.update(w=value)


@way
def generator() -> tuple[Get, Set]:
    held = [0]

    def run() -> Iterator[Any]:
        while True:
            yield held[0]

    running = run()
    return lambda: next(running), lambda value: held.__setitem__(0, value)


# Objects and classes.


class Holder:
    w: Any = 0

    def __init__(self) -> None:
        self.held: Any = 0

    def method(self) -> Any:
        return self.held

    @property
    def computed(self) -> Any:
        return self.held

    def __call__(self) -> Any:
        return self.held


@way
def attribute_by_getattr() -> tuple[Get, Set]:
    holder = Holder()
    name = "held"
    return lambda: getattr(holder, name), lambda value: setattr(holder, "held", value)


@way
def attribute_by_vars() -> tuple[Get, Set]:
    holder = Holder()
    return lambda: vars(holder)["held"], lambda value: setattr(holder, "held", value)


@way
def callable_object() -> tuple[Get, Set]:
    holder = Holder()
    return holder, lambda value: setattr(holder, "held", value)


@way
def bound_method() -> tuple[Get, Set]:
    holder = Holder()
    return holder.method, lambda value: setattr(holder, "held", value)


@way
def property_of_an_object() -> tuple[Get, Set]:
    holder = Holder()
    return lambda: holder.computed, lambda value: setattr(holder, "held", value)


@way
def attribute_of_a_class() -> tuple[Get, Set]:
    holder = Holder()
    return lambda: holder.w, lambda value: setattr(Holder, "w", value)


@way
def classmethod_of_a_class() -> tuple[Get, Set]:
    class Has:
        w = 0

        @classmethod
        def get(cls) -> Any:
            return cls.w

    return Has.get, lambda value: setattr(Has, "w", value)


@way
def replaced_method() -> tuple[Get, Set]:
    class Has:
        def get(self) -> Any:
            return 0

    has = Has()
    return lambda: has.get(), lambda value: setattr(Has, "get", lambda self: value)


@way
def attribute_of_a_metaclass() -> tuple[Get, Set]:
    class Meta(type):
        w = 0

    class Has(metaclass=Meta):
        pass

    return lambda: Has.w, lambda value: setattr(Meta, "w", value)


@way
def slot() -> tuple[Get, Set]:
    class Slotted:
        __slots__ = ("w",)

    slotted = Slotted()
    return lambda: slotted.w, lambda value: setattr(slotted, "w", value)


@way
def computed_attribute() -> tuple[Get, Set]:
    held = [0]

    class Computed:
        def __getattr__(self, name: str) -> Any:
            return held[0]

    computed = Computed()
    return lambda: computed.anything, lambda value: held.__setitem__(0, value)


@way
def descriptor() -> tuple[Get, Set]:
    held = [0]

    class Described:
        def __get__(self, *_: Any) -> Any:
            return held[0]

    class Has:
        w = Described()

    has = Has()
    return lambda: has.w, lambda value: held.__setitem__(0, value)


@way
def dataclass() -> tuple[Get, Set]:
    @dataclasses.dataclass
    class Options:
        w: Any = 0

    options = Options()
    return lambda: options.w, lambda value: setattr(options, "w", value)


@way
def dataclass_as_a_dict() -> tuple[Get, Set]:
    @dataclasses.dataclass
    class Options:
        w: Any = 0

    options = Options()
    return lambda: dataclasses.asdict(options)["w"], lambda value: setattr(options, "w", value)


@way
def member_of_an_enum() -> tuple[Get, Set]:
    held: list[Any] = [0]

    def change(value: Any) -> None:
        held[0] = enum.Enum("Width", {"W": value}).W

    change(0)
    return lambda: held[0].value, change


@way
def proxied_object() -> tuple[Get, Set]:
    holder = Holder()
    proxy = weakref.proxy(holder)
    return lambda: proxy.held + 0 * holder.held, lambda value: setattr(holder, "held", value)


# Containers.


class Sizes(NamedTuple):
    w: Any
    other: int


class OwnList(list):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(-1 - index)


class OwnDict(dict):
    def __missing__(self, name: Any) -> Any:
        return self["w"]


@way
def item_of_a_list() -> tuple[Get, Set]:
    held = [0]
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@way
def unpacked_namedtuple() -> tuple[Get, Set]:
    held = [Sizes(0, 1)]

    def get() -> Any:
        w, _ = held[0]
        return w

    return get, lambda value: held.__setitem__(0, Sizes(value, 1))


@way
def subclass_of_list() -> tuple[Get, Set]:
    held = OwnList([5, 0])
    return lambda: held[0], lambda value: held.__setitem__(-1, value)


@way
def subclass_of_dict() -> tuple[Get, Set]:
    held = OwnDict(w=0)
    return lambda: held["missing"], lambda value: held.update(w=value)


@way
def user_dict() -> tuple[Get, Set]:
    held = collections.UserDict(w=0)
    return lambda: held["w"], lambda value: held.update(w=value)


@way
def user_list() -> tuple[Get, Set]:
    held = collections.UserList([0])
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@way
def chain_map() -> tuple[Get, Set]:
    inner = {"w": 0}
    held = collections.ChainMap({}, inner)
    return lambda: held["w"], lambda value: inner.update(w=value)


@way
def mapping_proxy() -> tuple[Get, Set]:
    inner = {"w": 0}
    held = types.MappingProxyType(inner)
    return lambda: held["w"], lambda value: inner.update(w=value)


@way
def deque() -> tuple[Get, Set]:
    held = collections.deque([0], maxlen=1)
    return lambda: held[-1], held.append


@way
def unpacked_values() -> tuple[Get, Set]:
    held = {"w": 0}
    return lambda: (lambda w: w)(**held), lambda value: held.update(w=value)


@way
def array_of_numbers() -> tuple[Get, Set]:
    held = array.array("d", [0])
    return lambda: held[0], lambda value: held.__setitem__(0, value)


@way
def memory_view() -> tuple[Get, Set]:
    held = bytearray(1)
    view = memoryview(held)
    return lambda: view[0], lambda value: held.__setitem__(0, int(value))


@way
def array_of_numpy() -> tuple[Get, Set]:
    held = np.zeros(2)
    return lambda: held[1], lambda value: held.__setitem__(1, value)


@way
def record_of_numpy() -> tuple[Get, Set]:
    held = np.zeros(1, dtype=[("w", np.float32)])
    return lambda: held["w"][0], lambda value: held["w"].fill(value)


# The world outside.


@way
def environment() -> tuple[Get, Set]:
    def change(value: Any) -> None:
        os.environ["WIDTH_OF_A_TEST"] = str(value)

    return lambda: float(os.environ["WIDTH_OF_A_TEST"]), change


@way
def file_of_text() -> tuple[Get, Set]:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "options.json"
    return (
        lambda: json.loads(path.read_text(encoding="utf-8"))["w"],
        lambda value: path.write_text(json.dumps({"w": value}), encoding="utf-8"),
    )


@way
def context_variable() -> tuple[Get, Set]:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("width", default=0)
    return variable.get, lambda value: (variable.set(value), None)[1]


@way
def thread_local() -> tuple[Get, Set]:
    held = threading.local()
    return lambda: held.w, lambda value: setattr(held, "w", value)


@way
def decimal_number() -> tuple[Get, Set]:
    held = [Decimal(0)]
    return lambda: float(held[0]), lambda value: held.__setitem__(0, Decimal(str(value)))


class OwnInt(int):
    def __int__(self) -> int:
        return 99

    def __index__(self) -> int:
        return 99

    def __repr__(self) -> str:
        return "always the same"

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@way
def subclass_of_int() -> tuple[Get, Set]:
    held = [OwnInt(0)]
    return lambda: held[0], lambda value: held.__setitem__(0, OwnInt(value))


class OwnFloat(float):
    def __float__(self) -> float:
        return 99.0

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@way
def subclass_of_float() -> tuple[Get, Set]:
    held = [OwnFloat(0)]
    return lambda: held[0], lambda value: held.__setitem__(0, OwnFloat(value))


# torch's own.


@way
def attribute_of_a_module() -> tuple[Get, Set]:
    module = torch.nn.Module()
    return lambda: module.w, lambda value: setattr(module, "w", value)


@way
def module_list() -> tuple[Get, Set]:
    module = torch.nn.ModuleList([torch.nn.Module()])
    return lambda: module[0].w, lambda value: setattr(module[0], "w", value)


@way
def module_dict() -> tuple[Get, Set]:
    module = torch.nn.ModuleDict({"a": torch.nn.Module()})
    return lambda: module["a"].w, lambda value: setattr(module["a"], "w", value)


@way
def buffer_of_a_module() -> tuple[Get, Set]:
    module = torch.nn.Module()
    module.register_buffer("w", torch.zeros(()))
    return lambda: module.w, lambda value: setattr(module, "w", torch.tensor(float(value)))


@way
def buffer_in_place() -> tuple[Get, Set]:
    held = torch.zeros(3)
    return lambda: held[1], lambda value: (held.fill_(value), None)[1]


@way
def parameter_list() -> tuple[Get, Set]:
    held = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(()))])
    return lambda: held[0], lambda value: held[0].data.fill_(value) and None


@way
def attribute_of_a_tensor() -> tuple[Get, Set]:
    held = torch.zeros(3)
    return lambda: held.w, lambda value: setattr(held, "w", value)


@way
def length_of_a_tensor() -> tuple[Get, Set]:
    held = [torch.zeros(1)]
    return lambda: len(held[0]), lambda value: held.__setitem__(0, torch.zeros(int(value)))


@way
def tensor_made_of_numbers() -> tuple[Get, Set]:
    held = [0, 0]
    return lambda: torch.tensor(held)[1], lambda value: held.__setitem__(1, value)


@way
def value_of_a_tensor_made_of_numbers() -> tuple[Get, Set]:
    held = [0, 0]
    return lambda: torch.tensor(held)[1].item(), lambda value: held.__setitem__(1, value)


@way
def tensor_of_numpys_memory() -> tuple[Get, Set]:
    held = np.zeros(2, dtype=np.float32)
    return lambda: torch.from_numpy(held)[1], lambda value: held.fill(value)


@way
def default_dtype() -> tuple[Get, Set]:
    def change(value: Any) -> None:
        held[0] = value

    held = [0]
    return lambda: held[0] * (torch.get_default_dtype() == torch.float32), change
