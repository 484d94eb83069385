"""The errors of flashgen. Every message has four parts: what, where, the numbers, the way out.

::

    PlanError: no tile fits in shared memory
      where    specs/softcap.py:9  softcap(head_dim=256, dtype=float32)
      numbers  needs 131,072 B at the smallest tile (block_q 64, block_k 32), limit 101,376 B
      try      dtype="float16" (65,536 B)
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

Public = TypeVar("Public", bound=Callable[..., Any])


class FlashgenError(Exception):
    """The base class of all errors that flashgen raises.

    Args:
        what: one sentence about the mistake, without a full stop.
        where: the user's file and line, the kernel and instruction, or the argument.
        numbers: the values that were given and those that are allowed: shapes, bytes, limits.
        way_out: a concrete alternative.
    """

    def __init__(self, what: str, *, where: str, numbers: str, way_out: str) -> None:
        self.what = " ".join(what.split())  # one line, also of the messages of other packages
        self.where = where
        self.numbers = numbers
        self.way_out = way_out
        super().__init__(self.what)

    def __str__(self) -> str:
        def block(label: str, text: str) -> str:
            return f"  {label:<8} " + text.replace("\n", "\n" + " " * 11)

        return "\n".join(
            [
                self.what,
                block("where", self.where),
                block("numbers", self.numbers),
                block("try", self.way_out),
            ]
        )

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled with positional arguments only.
        parts = {"where": self.where, "numbers": self.numbers, "way_out": self.way_out}
        return functools.partial(type(self), self.what, **parts), ()


class SpecError(FlashgenError):
    """The user's spec is invalid: its Python functions cannot be traced or its options used."""


class PlanError(FlashgenError):
    """No tiling satisfies the constraints of the architecture."""


class CertificateError(FlashgenError):
    """A condition that a plan or its kernels depend on could not be proved."""


class RenderError(FlashgenError):
    """A template and the plan disagree, or a committed file differs from what would be emitted."""


class CompileError(FlashgenError):
    """NVRTC is missing or rejected the source."""


class LaunchError(FlashgenError):
    """A kernel could not be loaded or launched on the device."""


class ExportError(LaunchError):
    """A folder holds no export, one of another version, or a damaged one."""


class InputError(FlashgenError):
    """An argument of the operator has the wrong shape, dtype, device, stride or name."""


class EmulatorError(FlashgenError):
    """The emulated kernel did something that PTX forbids, or used PTX that the emulator lacks."""


class FrozenError(SpecError, dataclasses.FrozenInstanceError):
    """A field of a value that does not change is set or deleted."""


class UnhashableError(SpecError, TypeError):
    """A value without a hash is a key. Helpers that remember results may then compute them."""


_PUBLIC = {
    "flashgen.frontends.distributed": "fg.distributed",
    "flashgen.frontends.flash_operators": "fg.integrations.torch",
    "flashgen.frontends.transformers": "fg.integrations.transformers",
    "ptx_emulator": "fg.emulator",
}
"""By package: how users name the module that has its public names. That of all others is fg."""


def called_by_users(
    error: type[FlashgenError] = InputError, where_of: Callable[[], str] | None = None
) -> Callable[[Public], Public]:
    """A decorator of a public function or class: wrong arguments of a call are a FlashgenError.

    Python's TypeError says neither which arguments there are nor the way out. Setting a field of a
    frozen dataclass is an error of the same kind.

    Args:
        error: the class of the error.
        where_of: a function that gives the error's "where"; by default the function is named.
    """

    def decorate(public: Public) -> Public:
        if not isinstance(public, type):
            return cast(Public, _checked(public, error, where_of))
        method = "__new__" if issubclass(public, tuple) else "__init__"
        checked_method = _checked(getattr(public, method), error, where_of, public.__qualname__)
        setattr(public, method, checked_method)
        if dataclasses.is_dataclass(public) and public.__setattr__ is not object.__setattr__:
            for method in ("__setattr__", "__delattr__"):
                setattr(public, method, _refuse_change)
        return public

    return decorate


def _checked(
    function: Callable[..., Any],
    error: type[FlashgenError],
    where_of: Callable[[], str] | None,
    name: str = "",
) -> Callable[..., Any]:
    homes = (home for package, home in _PUBLIC.items() if function.__module__.startswith(package))
    name = f"{next(homes, 'fg')}.{name or function.__qualname__}"

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as mistake:
                mismatch = str(mistake)
            else:
                raise
        bound = ("self", "cls", "_cls")
        parameters = [p for p in signature.parameters.values() if p.name not in bound]
        shown = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
        count = len(args) - (len(signature.parameters) - len(parameters))
        needed = [p.name for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
        rest = ", and others by name" if len(parameters) > len(needed) else ""
        unknown = next((name for name in kwargs if name not in signature.parameters), "")
        close_names = difflib.get_close_matches(unknown, signature.parameters, 1)
        raise error(
            f"{name} is called with other arguments than it has: {mismatch}",
            where=f"the call of {name}" if where_of is None else where_of(),
            numbers=f"{count} by position, {', '.join(kwargs) or 'none'} by name; takes {shown}",
            way_out=f"{close_names[0]}=... instead of {unknown}=..."
            if close_names
            else f"{name}({', '.join(needed)}){rest}",
        )

    return checked


def _refuse_change(self: Any, name: str, value: object = None) -> NoReturn:
    kind, options = type(self).__name__, [x.name for x in dataclasses.fields(self) if x.init]
    raise FrozenError(
        f"the fields of {kind} do not change once it is made",
        where=f"{kind}.{name}",
        numbers=f"given {value!r:.200}; made with {', '.join(options)}",
        way_out=f"spec.replace({name}=...), which returns a copy"
        if hasattr(self, "replace") and name in options
        else f"another {kind}, or a variable beside it",
    )
