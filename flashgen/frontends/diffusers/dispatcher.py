"""diffusers' table of attention backends, and all private names of diffusers that flashgen uses.

The names of backends are the members of an Enum, to which diffusers converts every name that it is
given. A further backend therefore needs a further member, for which there is no public way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
from diffusers.models import attention_dispatch
from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND

from flashgen.frontends.private_names import missing_names
from flashgen.shared.errors import InputError

_NAMES = (
    "AttentionBackendName._member_map_",
    "AttentionBackendName._member_names_",
    "AttentionBackendName._value2member_map_",
    "_AttentionBackendRegistry._active_backend",
    "_AttentionBackendRegistry.register",
    "_AttentionBackendRegistry.set_active_backend",
)
"""In the module diffusers.models.attention_dispatch."""


def check() -> None:
    """Raises InputError where this diffusers lacks a name."""
    missing = missing_names(f"{attention_dispatch.__name__}.{name}" for name in _NAMES)
    if missing:
        raise InputError(
            "this diffusers has no table of attention backends of the form that flashgen knows",
            where="flashgen.integrations.diffusers.register",
            numbers=f"diffusers {diffusers.__version__} lacks {', '.join(missing)}; known: 0.42",
            way_out="diffusers 0.42; or a processor that calls fg.attention(spec), by "
            "model.set_attn_processor",
        )


def names() -> set[str]:
    """The names of all backends."""
    return set(_names()._value2member_map_)


def add(name: str, function: Callable[..., Any]) -> None:
    """Adds a backend, or gives another function to one that was added.

    Args:
        function: takes what `dispatch_attention_fn` passes, by the names of its parameters.
    """
    backends, table = _names(), _table()
    if name not in backends._value2member_map_:
        key = name.upper()
        member = str.__new__(backends, name)
        member._name_, member._value_ = key, name
        type.__setattr__(backends, key, member)  # the Enum's own method refuses members
        backends._member_map_[key] = backends._value2member_map_[name] = member
        backends._member_names_.append(key)
    table.register(backends(name))(function)


def remove(name: str) -> None:
    """Removes the name of a backend that was added; diffusers' default is active where it was.

    Models that were set to the backend keep calling its function, which stays in the table.
    """
    backends, table = _names(), _table()
    member = backends(name)
    if table._active_backend is member:
        table.set_active_backend(backends(DIFFUSERS_ATTN_BACKEND))
    key = member._name_
    del backends._member_map_[key], backends._value2member_map_[name]
    backends._member_names_.remove(key)
    type.__delattr__(backends, key)


def _names() -> Any:
    return attention_dispatch.AttentionBackendName


def _table() -> Any:
    return attention_dispatch._AttentionBackendRegistry
