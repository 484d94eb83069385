"""diffusers: models that dispatch their attention run on flashgen's kernels.

::

    from flashgen.integrations import diffusers

    diffusers.register()
    model.set_attention_backend("flashgen")

diffusers keeps a table of attention functions, its backends. `register` adds one, for plain
attention or for a spec.
"""

from __future__ import annotations

from typing import Any

from flashgen.calls.ops import Attention
from flashgen.shared.errors import InputError, called_by_users
from flashgen.spec.language.spec import AttentionSpec

__all__ = ["operators", "register", "unregister"]

NAME = "flashgen"


@called_by_users()
def register(name: str = NAME, spec: AttentionSpec | None = None, **captured: Any) -> None:
    """Adds an attention backend to diffusers.

    Then ``model.set_attention_backend(name)``, ``with diffusers.attention_backend(name)`` and
    ``attention_module.set_attention_backend(name)`` take it: masks, dropout, causality, scale and
    grouped heads of each call, forward and backward. Models whose processors call
    ``scaled_dot_product_attention`` themselves, such as UNets, have no backend.

    Args:
        name: the name of the backend: lower case, an identifier.
        spec: the variant that the backend computes; plain attention if None. Its dtype, head dims
            and dropout are those of each call, and a call's mask and causality are added to it.
        captured: the captured tensors, on the device of the models, and the scalars of ``spec``.

    Raises:
        InputError: the name is that of another backend, diffusers is missing or has no such table,
            or ``captured`` does not fit the spec.
    """
    try:
        from flashgen.frontends.diffusers import dispatcher
    except ImportError as error:
        raise InputError(
            "the integration needs diffusers",
            where="flashgen.integrations.diffusers.register",
            numbers=str(error),
            way_out='pip install "diffusers>=0.42"',
        ) from error
    from flashgen.frontends.diffusers.attention import Backend, backends, function_of

    dispatcher.check()
    if not isinstance(name, str):
        what, numbers = "a backend has a name, the first argument", f"given a {type(name).__name__}"
        _refuse(what, "name", numbers, 'register("near", spec)')
    if not name.isidentifier() or name != name.lower():
        _refuse("diffusers has names of lower case for backends", "name", repr(name), NAME)
    if name in dispatcher.names() and name not in backends:
        _refuse("diffusers has a backend of this name", "name", repr(name), NAME)
    spec = _checked(AttentionSpec(name=NAME) if spec is None else spec, captured)
    backends[name] = Backend(name, spec, captured)
    dispatcher.add(name, function_of(name))


@called_by_users()
def unregister(name: str = NAME) -> None:
    """Takes a backend out of diffusers; diffusers' default is active where it was.

    Models that were set to it need ``model.reset_attention_backend()``, else their next call is an
    InputError.

    Raises:
        InputError: `register` has not added it.
    """
    backends = _registered()
    if name not in backends:
        numbers = f"{name!r}; registered: {', '.join(map(repr, backends)) or 'none'}"
        _refuse(
            "flashgen has registered no backend of this name", "name", numbers, "register() first"
        )
    from flashgen.frontends.diffusers import dispatcher

    dispatcher.remove(name)
    del backends[name]


@called_by_users()
def operators() -> tuple[Attention, ...]:
    """The operators that models use so far, by backend and in the order of their first use.

    ``operator.spec`` is the spec of a kind of call, and ``operator.report`` describes its last
    call: backend, kernel, tile and counters.
    """
    return tuple(
        op for backend in _registered().values() for op in vars(backend.operators).values()
    )


def _registered() -> dict[str, Any]:
    from flashgen.frontends.diffusers.attention import backends

    return backends


def _checked(spec: object, captured: dict[str, Any]) -> AttentionSpec:
    if not isinstance(spec, AttentionSpec):
        numbers = f"given a {type(spec).__name__}"
        _refuse("a backend computes an AttentionSpec", "spec", numbers, "fg.AttentionSpec(...)")
    assert isinstance(spec, AttentionSpec)
    if spec.packed or spec.paged:
        kind = "packed" if spec.packed else "paged"
        _refuse(
            "models of diffusers have neither packed sequences nor paged caches",
            "spec",
            f"{kind}=True",
            f"the spec without {kind}",
        )
    needed = {capture.name for capture in (*spec.tensors, *spec.scalars)}
    if "attn_mask" in needed:
        way_out = "another name, such as bias"
        _refuse("a call's own mask has this name", "spec", "captures attn_mask", way_out)
    if needed != set(captured):
        numbers = f"given {sorted(captured)}, the spec captures {sorted(needed)}"
        way_out = "register(name, spec, tensor=...), with all that the spec captures"
        _refuse("a backend has what its spec captures", "captured", numbers, way_out)
    return spec


def _refuse(what: str, argument: str, numbers: str, way_out: str) -> None:
    raise InputError(
        what,
        where=f"argument {argument} of flashgen.integrations.diffusers",
        numbers=numbers,
        way_out=way_out,
    )
