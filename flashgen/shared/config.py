"""The environment variables that flashgen reads, and the only place that reads the environment.

====================  ==========================================================================
variable              meaning
====================  ==========================================================================
FLASHGEN_ARCH         architecture to emit and compile for when a command or call names none:
                      a name of `flashgen.shared.arch.known_archs`, such as sm_80 or sm_90a
FLASHGEN_BACKEND      backend of calls without the argument: "gpu", "emulator" (or "emulator:7", the
                      emulator with the order drawn from 7) or "tiled"
                      (unset: CUDA tensors on their GPU, CPU tensors by the tiled algorithms)
FLASHGEN_BATCH_INVARIANT
                      whether calls are batch-invariant where neither they nor the program say so:
                      "1" or "0" (unset: "0")
FLASHGEN_CACHE_DIR    folder of the kernel cache; "off" keeps nothing on disk
FLASHGEN_CHECK_READS  whether calls refuse an index outside of a captured tensor whose element is
                      used: "1" on GPUs too, where they then wait for the device, "0" nowhere
                      (unset: for CPU tensors alone)
FLASHGEN_DEBUG        level of messages on stderr; each level adds to those before it:
                      0 nothing, 1 plan, 2 timings and cache, 3 analysis, 4 CUDA, 5 PTX
FLASHGEN_EMULATOR_ORDER
                      a whole number, from which the emulator draws the order of blocks, warps and
                      copies (unset: the order of their numbers)
FLASHGEN_EMULATOR_SUMS
                      how tensor cores add in the emulator: "hardware", as those of the
                      architecture do, or "rounded", once to nearest (unset: "hardware")
FLASHGEN_NATIVE       "0": calls are made in Python where `flashgen build-native` has been run too
                      (unset or "1": by the native part, where it is built)
FLASHGEN_OVERRIDE     an edited .cu file, compiled as it stands in place of the emitted file
                      that has the same name
FLASHGEN_TRUST        which code paths are taken on a GPU: "check" those that passed a trial there
                      or that a record proves (the default), "always" the fastest one without a
                      trial, "never" only one that a record proves. It is read at the first call
                      on each GPU.
====================  ==========================================================================

An empty variable counts as unset. Variables are read when their value is needed, not at import, so
that the running program can change them. The default cache folder also follows
``XDG_CACHE_HOME`` on Linux and ``LOCALAPPDATA`` on Windows.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from flashgen.shared.dtypes import number_of_digits
from flashgen.shared.errors import FlashgenError, called_by_users

BACKENDS = ("gpu", "emulator", "tiled")
"""The backends. "emulator:7" is the emulator with the ``order_seed`` 7, see `split_backend`."""
EMULATOR_SUMS = ("hardware", "rounded")
TRUST = ("check", "always", "never")
DEBUG_STEPS = ("nothing", "plan", "timings", "analysis", "CUDA", "PTX")

_debug_override: ContextVar[int | None] = ContextVar("flashgen_debug", default=None)
_batch_invariant: ContextVar[bool | None] = ContextVar("flashgen_batch_invariant", default=None)
_batch_invariant_of_program: bool | None = None


def is_any_set_for_calls() -> bool:
    """Whether a variable is set that each call of an operator follows, empty ones included."""
    return not os.environ._data.keys().isdisjoint(_OF_CALLS)  # type: ignore[attr-defined]


_OF_CALLS = frozenset(
    map(os.environ.encodekey, ("FLASHGEN_BACKEND", "FLASHGEN_ARCH", "FLASHGEN_OVERRIDE"))
)


def _read(name: str) -> str | None:
    """Value of an environment variable without surrounding blanks; None when unset or empty."""
    # Operators read variables at every call: this test of an unset one raises no exception inside.
    if os.environ.encodekey(name) not in os.environ._data:  # type: ignore[attr-defined]
        return None
    return os.environ.get(name, "").strip() or None


def _refuse(name: str, value: str, expected: str) -> FlashgenError:
    return FlashgenError(
        f"the environment variable {name} has a value that flashgen does not accept",
        where=f"environment, {name}",
        numbers=f"given {value!r}; expected {expected}",
        way_out=f"set {name} to one of these, or unset it",
    )


def _path(name: str, value: str) -> Path:
    """The path that a variable gives, which may begin with "~" or "~user"."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        expected = "a path that does not begin with '~', because that user has no home folder"
        raise _refuse(name, value, expected) from None


def _one_of(name: str, accepted: tuple[str, ...]) -> str:
    """The value of a variable that has one of some values; the first of them when it is unset."""
    value = _read(name) or accepted[0]
    if value not in accepted:
        raise _refuse(name, value, " or ".join(map(repr, accepted)))
    return value


def _switch(name: str) -> bool | None:
    """Whether a variable that is 0 or 1 is 1; None when it is unset."""
    value = _read(name)
    if value not in (None, "0", "1"):
        raise _refuse(name, str(value), "0 or 1")
    return None if value is None else value == "1"


def arch() -> str | None:
    """FLASHGEN_ARCH, such as "sm_90a", or None.

    Only the form is checked here; the planner checks that there is such an architecture.

    Raises:
        FlashgenError: the value is not of the form sm_NN or sm_NNa.
    """
    value = _read("FLASHGEN_ARCH")
    if value is not None and not re.fullmatch(r"sm_\d{2,3}[af]?", value):
        raise _refuse("FLASHGEN_ARCH", value, "a name such as sm_80, sm_90a or sm_120")
    return value


def backend() -> str | None:
    """FLASHGEN_BACKEND, one of `BACKENDS` or an emulator with its order, or None.

    Raises:
        FlashgenError: another value.
    """
    value = _read("FLASHGEN_BACKEND")
    if value is not None and split_backend(value) is None:
        raise _refuse("FLASHGEN_BACKEND", value, " or ".join(repr(name) for name in BACKENDS))
    return value


def split_backend(name: object) -> tuple[str, int | None] | None:
    """The backend and the ``order_seed`` of a name such as "emulator:7"; None if there is none."""
    kind, colon, seed = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in BACKENDS or not colon:
        return (kind, None) if kind in BACKENDS else None
    order = _order(seed)
    return None if kind != "emulator" or order is None else (kind, order)


def _order(text: str) -> int | None:
    """A seed of 32 bits; None if it is not one."""
    number = number_of_digits(text, 10)
    return number if number is not None and number < 1 << 32 else None


def emulator_sums() -> str:
    """FLASHGEN_EMULATOR_SUMS, one of `EMULATOR_SUMS`: `ptx_emulator.launch` explains them.

    Raises:
        FlashgenError: another value.
    """
    return _one_of("FLASHGEN_EMULATOR_SUMS", EMULATOR_SUMS)


def emulator_order() -> int | None:
    """FLASHGEN_EMULATOR_ORDER, the ``order_seed`` of `ptx_emulator.launch`, or None.

    Raises:
        FlashgenError: it is not a whole number from 0 to 2^32 - 1.
    """
    value = _read("FLASHGEN_EMULATOR_ORDER")
    if value is None:
        return None
    order = _order(value)
    if order is None:
        raise _refuse("FLASHGEN_EMULATOR_ORDER", value, "a whole number from 0 to 4294967295")
    return order


def trust() -> str:
    """FLASHGEN_TRUST, one of `TRUST`; the first of them when it is unset.

    Raises:
        FlashgenError: another value.
    """
    return _one_of("FLASHGEN_TRUST", TRUST)


def child_environment() -> dict[str, str]:
    """The environment of a child process that runs flashgen's own problems.

    It imports what this process imports. An edited kernel does not replace one of the problems'.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "FLASHGEN_OVERRIDE"}
    return {**inherited, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}


def override() -> Path | None:
    """FLASHGEN_OVERRIDE, an edited .cu file that exists, or None.

    Raises:
        FlashgenError: there is no such file.
    """
    value = _read("FLASHGEN_OVERRIDE")
    if value is None:
        return None
    path = _path("FLASHGEN_OVERRIDE", value)
    try:
        exists = path.is_file()
    except OSError:
        exists = False
    if not exists:
        raise _refuse("FLASHGEN_OVERRIDE", value, "the path of an existing .cu file")
    return path


def check_reads() -> bool | None:
    """FLASHGEN_CHECK_READS: whether calls check the indices of captured tensors; None when unset.

    Raises:
        FlashgenError: the value is neither 0 nor 1.
    """
    return _switch("FLASHGEN_CHECK_READS")


def batch_invariant() -> bool:
    """Whether calls that do not say so are batch-invariant.

    `batch_invariant_mode`, then `set_batch_invariant_mode`, then FLASHGEN_BATCH_INVARIANT decides.

    Raises:
        FlashgenError: the value of the variable is neither 0 nor 1.
    """
    mode = _batch_invariant.get()
    mode = _batch_invariant_of_program if mode is None else mode
    if mode is not None:
        return mode
    return _switch("FLASHGEN_BATCH_INVARIANT") is True


def native() -> bool:
    """FLASHGEN_NATIVE: whether calls may use the native part.

    Raises:
        FlashgenError: the value is neither 0 nor 1.
    """
    return _switch("FLASHGEN_NATIVE") is not False


class VariablesOfCalls(NamedTuple):
    """The environment variables that native calls look up and follow, as calls in Python do.

    Attributes:
        environment: the variables, which Python changes in place.
        in_python: the names of variables with which calls are made in Python.
        switch, on: the name of FLASHGEN_NATIVE, and its values with which there are native calls.
    """

    environment: dict[Any, Any]
    in_python: list[Any]
    switch: Any
    on: frozenset[Any]


def variables_of_calls() -> VariablesOfCalls:
    key: Any = os.environ.encodekey
    names = [*_OF_CALLS, key("FLASHGEN_CHECK_READS")]
    data: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
    on = frozenset(map(os.environ.encodevalue, ("", "1")))
    return VariablesOfCalls(data, names, key("FLASHGEN_NATIVE"), on)


def cxx() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The C++ compiler of the variable CXX with its arguments, and the flags of CXXFLAGS."""
    compiler, flags = (tuple(os.environ.get(name, "").split()) for name in ("CXX", "CXXFLAGS"))
    return compiler, flags


def cache_dir() -> Path | None:
    """Folder of the kernel cache, which need not exist yet; None when caching on disk is off.

    Raises:
        FlashgenError: it begins with the home folder of a user who has none, or it is unset and
            this user has none.
    """
    value = _read("FLASHGEN_CACHE_DIR")
    if value is None:
        return _default_cache_dir()
    if value.lower() == "off":
        return None
    return _path("FLASHGEN_CACHE_DIR", value).absolute()


def _default_cache_dir() -> Path:
    try:
        home = Path.home()
    except RuntimeError:
        raise FlashgenError(
            "there is no folder for the kernel cache",
            where="environment, FLASHGEN_CACHE_DIR",
            numbers="it is unset, and this user has no home folder to hold a default",
            way_out="set FLASHGEN_CACHE_DIR to a folder that can be written, or to off",
        ) from None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "flashgen"
    variable, fallback = "XDG_CACHE_HOME", home / ".cache"
    if sys.platform == "win32":
        variable, fallback = "LOCALAPPDATA", home / "AppData" / "Local"
    base = Path(_read(variable) or fallback)
    # The XDG rule: a relative path is invalid and counts as unset.
    return (base if base.is_absolute() else fallback) / "flashgen"


def debug_level() -> int:
    """The level of messages on stderr: an index into `DEBUG_STEPS`.

    Raises:
        FlashgenError: FLASHGEN_DEBUG is not a whole number in that range.
    """
    forced = _debug_override.get()
    if forced is not None:
        return forced
    value = _read("FLASHGEN_DEBUG")
    if value is None:
        return 0
    number = number_of_digits(value)
    if number is None or number >= len(DEBUG_STEPS):
        steps = ", ".join(f"{step} {name}" for step, name in enumerate(DEBUG_STEPS))
        raise _refuse("FLASHGEN_DEBUG", value, steps)
    return number


@called_by_users()
@contextmanager
def debug(level: int) -> Iterator[None]:
    """Sets the level of FLASHGEN_DEBUG within a ``with`` block.

    Raises:
        FlashgenError: the level is not an index into `DEBUG_STEPS`.
    """
    if level not in range(len(DEBUG_STEPS)):
        raise FlashgenError(
            "there is no such debug level",
            where="flashgen.debug",
            numbers=f"given {level!r}; levels are 0 to {len(DEBUG_STEPS) - 1}",
            way_out="choose " + ", ".join(f"{i} {name}" for i, name in enumerate(DEBUG_STEPS)),
        )
    token = _debug_override.set(level)
    try:
        yield
    finally:
        _debug_override.reset(token)


@called_by_users()
@contextmanager
def batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    """Makes the calls within a ``with`` block batch-invariant, or with False those that are not.

    The bits of a row of their results depend on its query, its keys and its position alone, and
    gradients have the same bits in every run: docs/batch_invariance.md. The mode is that of the
    context (`contextvars`): other threads do not have it. Gradients are computed in the mode of
    their forward call, wherever ``backward`` is called.

    Raises:
        FlashgenError: ``enabled`` is no bool.
    """
    token = _batch_invariant.set(_checked_mode(enabled, "flashgen.batch_invariant_mode"))
    try:
        yield
    finally:
        _batch_invariant.reset(token)


@called_by_users()
def set_batch_invariant_mode(enabled: bool) -> None:
    """Makes the calls of all threads batch-invariant, or not, outside of `batch_invariant_mode`.

    Raises:
        FlashgenError: ``enabled`` is no bool.
    """
    global _batch_invariant_of_program
    where = "flashgen.set_batch_invariant_mode"
    _batch_invariant_of_program = _checked_mode(enabled, where)


def _checked_mode(enabled: object, where: str) -> bool:
    if isinstance(enabled, bool):
        return enabled
    raise FlashgenError(
        "calls are batch-invariant or not",
        where=where,
        numbers=f"given {enabled!r:.200}",
        way_out="True or False",
    )


def log(level: int, text: str) -> None:
    """Writes text to stderr when the debug level is at least ``level``."""
    if debug_level() >= level:
        print(text, file=sys.stderr, flush=True)
