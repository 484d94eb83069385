"""Checks of the names of arguments, and what has the effect of those of other functions."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch

from flashgen.call import CallOptions
from flashgen.dtypes import FLOAT_DTYPES
from flashgen.runtime.check_basics import refuse, runs_while_traced, shown
from flashgen.signature import (
    LAYOUT_LISTS,
    SPLIT,
    WHOLE,
    CallSignature,
    ScalarArgument,
    TensorArgument,
)

Tensor = torch.Tensor

_OPTIONS = (
    *(name for name in CallOptions._fields if name != "scalars"),
    "rng",
    "return_lse",
    "h_offset",
    "split_size",
    "whole",
)
"""The arguments of every operator that are no operands and no captures."""

_MASKED = """mask = op.spec.mask_mod or (lambda b, h, q, k: True)
op = fg.attention(op.spec.replace(mask_mod=lambda b, h, q, k: mask(b, h, q, k) & {keep}))
op(q, k, v{call})"""
_BIASED = """score = op.spec.score_mod or (lambda s, b, h, q, k: s)
op = fg.attention(op.spec.replace(score_mod=lambda s, b, h, q, k: score(s, b, h, q, k) + {added}))
op(q, k, v{call})"""
_CAUSAL = _MASKED.replace("{keep}", "(q >= k)")
_ELSEWHERE = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "mask_mod": "fg.attention(op.spec.replace(mask_mod=mask_mod))(q, k, v{call})",
    "score_mod": "fg.attention(op.spec.replace(score_mod=score_mod))(q, k, v{call})",
    "softmax_scale": "op(q, k, v{call}, scale=softmax_scale)",
    "enable_gqa": "op(q, k, v{call}): k and v with fewer heads need no argument",
}
"""What has the effect of arguments of other attention functions."""

_IN_SPEC = (
    "an AttentionSpec that has what {name} stands for: mask_mod for which scores are kept, "
    "score_mod for what changes them, sink=, packed=, block_sparse= and dropout= for the rest; "
    "{call} computes without it"
)
"""The way out for other names: a call without them would silently compute something else."""

_KINDS: dict[type, str] = {ScalarArgument: "scalar", TensorArgument: "tensor"}


def check_names(
    signature: CallSignature,
    given: Mapping[str, object],
    captures: Sequence[ScalarArgument | TensorArgument] | None = None,
) -> None:
    """Raises InputError unless ``given`` has the names of ``captures``, each once.

    Args:
        captures: the captures of the signature to check; all tensors and scalars when None.
    """
    if captures is None:
        captures = (*signature.tensors, *signature.scalars)
    kinds = {capture.name: _KINDS[type(capture)] for capture in captures}
    if len(given) != len(kinds) or any(name not in given for name in kinds):
        lists = LAYOUT_LISTS if signature.block_sparse is not None else ()
        mask = given.get("attn_mask")
        mask_of = (mask.dim(), _name_of(mask.dtype)) if isinstance(mask, Tensor) else (4, "bool")
        unset = [name for name, value in given.items() if value is None or value is False]
        computed = (*WHOLE, SPLIT, *lists)
        _refuse_names(signature.name, kinds, list(given), computed, unset, mask_of)


@runs_while_traced
def _refuse_names(
    spec: str,
    kinds: dict[str, str],
    given: list[str],
    computed: tuple[str, ...],
    unset: list[str],
    mask: tuple[int, str],
) -> NoReturn:
    """
    Args:
        spec: the name of the spec.
        kinds: "scalar" or "tensor" for each name that is expected.
        given: the names of the call.
        computed: names that the user does not give.
        unset: names whose value in the call is None or False.
        mask: the number of dimensions and the dtype of a tensor that is given as attn_mask.
    """
    missing = [name for name in kinds if name not in given]
    extra = [name for name in given if name not in kinds]
    accepted = sorted(set(kinds.values())) or ["scalar"]
    unknown = f"is not a {' or '.join(accepted)} of the spec"
    meant = {name: _nearest(name, [*missing, *_OPTIONS]) for name in extra}
    misspelled = next((name for name in extra if meant[name]), None)
    expected = [name for name in kinds if name not in computed]
    call = "".join(f", {name}=..." for name in expected)
    way_out = f"op(q, k, v{call})"
    if misspelled is not None:
        what = f"{misspelled!r} {unknown}; did you mean {meant[misspelled]!r}?"
        way_out = f"{meant[misspelled]}=... instead of {misspelled}=..."
    elif missing:
        what = f"the {kinds[missing[0]]} {missing[0]!r} of the spec is missing"
    else:
        what = f"{extra[0]!r} {unknown}"
        if extra[0] not in unset:
            way_out = _IN_SPEC.format(name=extra[0], call=way_out)
    foreign = [name for name in extra if name in _ELSEWHERE or name == "attn_mask"]
    if foreign:
        misspelled = foreign[0]
        what = f"{misspelled!r} {unknown}"
        way_out = _ELSEWHERE.get(misspelled) or _with_mask(*mask)
        if misspelled in unset:
            way_out = "op(q, k, v{call})"
        way_out = way_out.replace("{call}", call)
    refuse(
        what,
        f"argument {misspelled or (missing or extra)[0]}",
        f"spec {spec} takes: {', '.join(expected) or 'none'}; "
        f"given: {', '.join(name for name in given if name not in computed) or 'none'}",
        way_out,
    )


def _with_mask(dims: int, dtype: str) -> str:
    """The lines that capture a mask of PyTorch's attention, of this rank and dtype."""
    kept = slice(-dims if 0 < dims < 4 else None, None)
    read = f"given[{', '.join(('b', 'h', 'q', 'k')[kept])}]"
    sizes = ("batch", "heads", "seq_q", "seq_k")[kept]
    mask = "attn_mask" if dtype in ("bool", *FLOAT_DTYPES) else "attn_mask.bool()"
    if dtype in FLOAT_DTYPES:
        made, lines = f"{dtype!r}, grad=True", _BIASED.replace("{added}", read)
    else:
        made, lines = "'bool'", _MASKED.replace("{keep}", read)
    lines = lines.replace("{call}", f"{{call}}, attn_mask={mask}")
    return f'given = fg.Tensor("attn_mask", {sizes!r}, {made})\n{lines}'


def refuse_positional(value: object) -> NoReturn:
    """Raises InputError for an argument after q, k and v that is given without a name."""
    way_out = "op(q, k, v, scale=0.125), for example"
    if isinstance(value, Tensor):
        way_out = _with_mask(value.dim(), _name_of(value.dtype)).replace("{call}", "")
    refuse(
        "an operator takes q, k and v by position, and everything else by name",
        "the fourth argument",
        f"given {shown(value)}",
        way_out,
    )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """The name that a misspelled one is meant to be, if any."""
    return next(iter(difflib.get_close_matches(name, names, 1)), None)
