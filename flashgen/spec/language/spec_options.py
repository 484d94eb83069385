"""Checks of an AttentionSpec's options, and the names that specs get from functions and files."""

from __future__ import annotations

import difflib
import numbers
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from flashgen.shared.dtypes import (
    CACHE_DTYPES,
    HEAD_DIM_MAX,
    HEAD_DIM_STEP,
    OPERAND_DTYPES,
    OPERANDS,
    SCALE_LIMIT,
    dtype_name,
    is_bool,
)
from flashgen.shared.errors import SpecError
from flashgen.spec.language.block_layout import BlockSparse
from flashgen.spec.language.capture_names import MOST_LETTERS, is_part_of_names

if TYPE_CHECKING:
    from flashgen.spec.language.spec import AttentionSpec

GENERIC_NAMES = (
    *("mask_mod", "score_mod", "weight_mod", "<lambda>", "mask", "score", "weight", "mod"),
    "__call__",
)


Mistake = tuple[str, str, str]
"""What is wrong with a spec, the numbers, and the way out."""

_ELSEWHERE = {
    "causal": "mask_mod=lambda b, h, q, k: q >= k",
    "is_causal": "mask_mod=lambda b, h, q, k: q >= k",
    "window": "mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 1024)",
    "window_size": "mask_mod=lambda b, h, q, k: (q >= k) & (q - k < 1024)",
    "softcap": "score_mod=lambda score, b, h, q, k: 50 * fg.tanh(score / 50)",
    "block_mask": "mask_mod=lambda b, h, q, k: q >= k: the tiles follow from it",
    "dropout_p": "dropout=True, and op(q, k, v, dropout_p=0.1)",
}
"""What has the effect of options of other attention functions."""


_SWITCHES = (
    ("dropout", "the probability is an argument", "dropout_p=0.1"),
    (
        "packed",
        "the boundaries of the sequences are arguments",
        "cu_seqlens_q=..., cu_seqlens_k=...",
    ),
    ("paged", "the page table and the lengths are arguments", "page_table=..., cache_seqlens=..."),
    ("shared_kv", "the tensor of keys and values is an argument", "kv"),
)
"""Options that are on or off, what belongs to them, and how calls give it."""


def check_options(
    accepted: Sequence[str], positional: int, options: Mapping[str, object], where: str
) -> None:
    """Raises SpecError for options that AttentionSpec does not have, or has twice."""
    names = [*accepted[:positional], *options]
    unknown = next((name for name in options if name not in accepted), None)
    if unknown is not None:
        closest = next(iter(difflib.get_close_matches(unknown, accepted, 1)), None)
        way_out = _ELSEWHERE.get(unknown)
        question = f"; did you mean {closest!r}?" if closest and way_out is None else ""
        raise SpecError(
            f"{unknown!r} is not an option of an AttentionSpec{question}",
            where=where,
            numbers=f"options: {', '.join(accepted)}",
            way_out=way_out or f"{closest or accepted[0]}=...",
        )
    if positional > len(accepted) or len(set(names)) < len(names):
        raise SpecError(
            "an AttentionSpec is given an option twice, or more than there are",
            where=where,
            numbers=f"{positional} by position and {', '.join(options) or 'none'} by name",
            way_out="fg.AttentionSpec(mask_mod, score_mod, head_dim=64), the others by name too",
        )


def option_mistakes(spec: AttentionSpec, where: str) -> list[SpecError]:
    return [
        SpecError(what, where=where, numbers=numbers, way_out=way_out)
        for what, numbers, way_out in _mistakes(spec)
    ]


def _mistakes(spec: AttentionSpec) -> Iterator[Mistake]:
    for option, value in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if value is None and option == "head_dim_v":
            continue
        nearest = _nearest_head_dim(value)
        if value is not nearest:
            yield (
                f"{option} is a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {HEAD_DIM_MAX}",
                f"{option} {value!r}",
                f"{option}={nearest}",
            )
    if spec.dtype is not None and dtype_name(spec.dtype) not in OPERAND_DTYPES:
        yield (
            "kernels do not support this dtype",
            f"dtype {str(spec.dtype)!r}; available: {', '.join(OPERAND_DTYPES)}",
            f'dtype="{_nearest_dtype(str(spec.dtype))}"',
        )
    scale = spec.scale
    number = isinstance(scale, numbers.Real) and not is_bool(scale)
    if scale is not None and not (number and 0 < scale < SCALE_LIMIT):
        yield (
            "scale is a positive number below 2^127",
            f"scale {scale!r}",
            "scale=None for 1 / sqrt(head_dim); a factor of any sign belongs in score_mod",
        )
    for option, given_with_calls, arguments in _SWITCHES:
        value = getattr(spec, option)
        if not isinstance(value, bool):
            what = f"{option} is True or False; {given_with_calls} of the call"
            yield what, f"{option} {value!r}", f"{option}=True, and op(..., {arguments})"
    if spec.paged is True and (spec.packed is True or spec.dropout is True):
        option = "packed" if spec.packed is True else "dropout"
        yield (
            f"a spec with paged=True cannot have {option}=True",
            f"paged {spec.paged!r}, packed {spec.packed!r}, dropout {spec.dropout!r}",
            "packed queries are an argument of the call: op(..., cu_seqlens_q=...)"
            if option == "packed"
            else "dropout=False: paged caches are for inference",
        )
    if spec.kv_dtype is not None:
        yield from _mistakes_of_codes(spec)
    if spec.shared_kv is True:
        yield from _mistakes_of_shared(spec)
    if spec.weight_mod is not None and spec.is_softmax:
        yield (
            "a weight_mod stands in place of the softmax's exponential",
            "weight_mod is given, normalize 'softmax'",
            'normalize="none", normalize="sum", or a Tensor with a divisor for each row',
        )
    if spec.sink is not None and spec.sink is not False and not spec.is_softmax:
        yield (
            "a sink is a logit of the softmax, which weights of another kind do not have",
            f"sink {spec.sink!r}, normalize {spec.normalize!r}",
            'sink=None, or normalize="softmax" without a weight_mod',
        )
    sparse = spec.block_sparse
    if sparse is not None and not isinstance(sparse, BlockSparse):
        yield (
            "block_sparse is a BlockSparse layout or None",
            f"given a {type(sparse).__name__}",
            "block_sparse=fg.BlockSparse(layout, block_q=64, block_k=64)",
        )
    elif sparse is not None and sparse.chooses:
        for option in ("packed", "dropout", "kv_dtype"):
            if getattr(spec, option):
                yield (
                    f"queries that choose their keys cannot have {option}",
                    f"block_sparse {sparse!r}, {option} {getattr(spec, option)!r}",
                    f"{option}={False if option != 'kv_dtype' else None}; or a block layout "
                    "without lists: fg.BlockSparse(None, block_q=..., block_k=...)",
                )
    if spec.name is not None and not _is_name(spec.name):
        yield (
            f"name is not an identifier of at most {MOST_LETTERS} characters, from which kernels "
            "and files are named",
            f"name {spec.name!r}",
            f"name={as_name(str(spec.name))!r}",
        )


def _mistakes_of_codes(spec: AttentionSpec) -> Iterator[Mistake]:
    """Why the caches of a spec cannot have codes of its kv_dtype."""
    kv_dtype = repr(str(spec.kv_dtype))
    if dtype_name(spec.kv_dtype) not in CACHE_DTYPES:
        yield (
            "caches do not hold codes of this dtype",
            f"kv_dtype {kv_dtype}; available: {', '.join(CACHE_DTYPES)}",
            f'kv_dtype="{next(iter(CACHE_DTYPES))}"; or None for the dtype of q',
        )
    if spec.paged is not True:
        yield (
            "keys and values of 8 bits are those of a paged cache",
            f"kv_dtype {kv_dtype}, paged {spec.paged!r}",
            "paged=True: keys [batch, heads, seq, head_dim] are the pages of a cache too, with "
            "page_table=torch.arange(batch, dtype=torch.int32)[:, None]",
        )
    if spec.dtype is not None and dtype_name(spec.dtype) == "float32":
        yield (
            "codes of 8 bits are multiplied as elements of 16 bits",
            f"dtype 'float32', kv_dtype {kv_dtype}",
            'dtype="bfloat16" or dtype="float16"',
        )


def _mistakes_of_shared(spec: AttentionSpec) -> Iterator[Mistake]:
    """Why keys and values of a spec cannot be one tensor."""
    dims = spec.head_dim, spec.head_dim_v
    if all(type(dim) is int for dim in dims) and dims[1] > dims[0]:  # type: ignore[operator]
        yield (
            "the values of shared_kv are the first columns of the keys, which are fewer",
            f"head_dim {dims[0]}, head_dim_v {dims[1]}",
            f"head_dim_v={dims[0]}, or shared_kv=False and two tensors",
        )
    if spec.kv_dtype is not None:
        yield (
            "codes of 8 bits have scales of their own as keys and as values",
            f"shared_kv True, kv_dtype {str(spec.kv_dtype)!r}",
            "kv_dtype=None; or shared_kv=False with op(q, cache, cache[..., :"
            f"{dims[1] or dims[0]}], k_scale=..., v_scale=...)",
        )


def _nearest_head_dim(value: object) -> int:
    """``value`` itself if it is a valid head dim, else the nearest valid one."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 64
    rounded = -(-value // HEAD_DIM_STEP) * HEAD_DIM_STEP
    nearest = max(HEAD_DIM_STEP, min(HEAD_DIM_MAX, rounded))
    return value if nearest == value else nearest


def _nearest_dtype(text: str) -> str:
    short = {dtype.short: name for name, dtype in OPERANDS.items()} | {"half": "float16"}
    for name in sorted(OPERANDS, key=len, reverse=True):
        if name in text:
            return name
    return short.get(text, "float32" if "64" in text else "float16")


def _is_name(name: object) -> bool:
    return is_part_of_names(name) and not str(name).startswith("_")


def as_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")[:MOST_LETTERS]
    return name if _is_name(name) else f"spec_{name}"[:MOST_LETTERS].rstrip("_")


def name_of(*mods: Callable[..., object] | None) -> str:
    for mod in mods:
        name = str(getattr(mod, "__name__", ""))[:MOST_LETTERS]
        if name not in GENERIC_NAMES and _is_name(name):
            return name
    return "attention"
