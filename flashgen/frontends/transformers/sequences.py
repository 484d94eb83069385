"""Packed sequences of a call of the attention function: their boundaries, and their positions.

`DataCollatorWithFlattening` packs the samples of a batch into one row. Its ``cu_seq_lens_q`` and
``cu_seq_lens_k`` reach every layer and join the mask there. Its ``position_ids`` are in the mask
already, where transformers has looked for them: not beside a cache. Models give them to their masks
or to their layers, to both or to neither, so they are looked for where every model has them.

The values of these tensors are read once for each forward pass, whose layers share them, and are
asserted on the device in a compiled graph.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from flashgen.calls.runtime.arguments.tensors import has_values
from flashgen.frontends.transformers.layers import FULL, counts_from_row
from flashgen.shared.errors import InputError

Tensor = torch.Tensor

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
_PACK = "samples of one row would attend to each other"

_cached_values: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By tensor of boundaries: the version of its contents, and its elements."""

_OF_FRAME = 3
"""The references to a dictionary that only a frame holds: its own, a name's and an argument's."""


def sequences_of(
    options: dict[str, Any], sizes: tuple[int, ...], mask: str, divided: bool
) -> tuple[Tensor, Tensor] | None:
    """The number of each row's sequence, int32 [1, seq_q] and [1, seq_k]; None without boundaries.

    Args:
        options: the further arguments of the attention function.
        sizes: batch, heads, queries and keys.
        mask: the name of the mask.
        divided: whether the sequences are divided over ranks.

    Raises:
        InputError: sequences are divided over ranks, only one of the two is given, they do not
            divide the rows of the call, or the mask counts positions from the row's first.
    """
    boundaries = [options.get(name) for name in BOUNDARIES]
    if boundaries[0] is None and boundaries[1] is None:
        return None
    if divided:
        raise InputError(
            "boundaries of sequences are not divided over the ranks",
            where="argument cu_seq_lens_q of the model, in context_parallel",
            numbers=f"they count the rows of the whole; the rank has {sizes[2]}",
            way_out="ranks.own(input_ids=..., position_ids=...) with positions that start again "
            "with each sequence, and no cu_seq_lens_q and cu_seq_lens_k",
        )
    for name, tensor in zip(BOUNDARIES, boundaries, strict=True):
        if not isinstance(tensor, Tensor):
            description = repr(tensor)
        else:
            description = f"{tensor.dtype}, shape {tuple(tensor.shape)}"
            if tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == 1 and len(tensor) > 1:
                continue
        _refuse(name, "it is no tensor of boundaries", f"given {description:.80}")
    if sizes[0] != 1:
        numbers = f"{sizes[0]} batch entries; boundaries count the rows of one"
        _refuse(BOUNDARIES[0], "boundaries of sequences need a batch of 1", numbers)
    ends_q, ends_k = boundaries
    assert isinstance(ends_q, Tensor)
    assert isinstance(ends_k, Tensor)
    if len(ends_q) > 2 and counts_from_row(mask):
        raise InputError(
            "the mask counts positions from the first one of the row, not of each sequence",
            where="arguments cu_seq_lens_q and cu_seq_lens_k of the model",
            numbers=f"{len(ends_q) - 1} sequences, mask {mask}",
            way_out="position_ids of DataCollatorWithFlattening beside them, with use_cache=False "
            "and no attention_mask; or each sample in a row of its own",
        )
    if torch.compiler.is_compiling():
        _assert_boundaries(ends_q, ends_k, sizes, mask == FULL)
    elif has_values(ends_q) and has_values(ends_k):
        _check_boundaries(ends_q, ends_k, sizes, mask == FULL)
    return _numbers(ends_q, sizes[2]), _numbers(ends_k, sizes[3])


def _numbers(ends: Tensor, length: int) -> Tensor:
    rows = torch.arange(length, device=ends.device, dtype=ends.dtype)
    return torch.bucketize(rows, ends[1:], right=True, out_int32=True)[None]


def _check_boundaries(
    ends_q: Tensor, ends_k: Tensor, sizes: tuple[int, ...], is_full: bool
) -> None:
    values = [_values(x) for x in (ends_q, ends_k)]
    for name, ends, length in zip(BOUNDARIES, values, sizes[2:], strict=True):
        if ends[0] != 0 or ends[-1] != length or sorted(ends) != list(ends):
            numbers = f"{len(ends) - 1} sequences from {ends[0]} to {ends[-1]}; {length} rows"
            _refuse(name, "the boundaries do not divide the rows of the call", numbers)
    if values[0] != values[1] and not is_full:
        numbers = f"{values[0]} and {values[1]}"
        what = "the mask depends on positions, and queries and keys have other boundaries"
        _refuse("cu_seq_lens_q", what, f"{numbers:.160}")


def _assert_boundaries(
    ends_q: Tensor, ends_k: Tensor, sizes: tuple[int, ...], is_full: bool
) -> None:
    for ends, length in ((ends_q, sizes[2]), (ends_k, sizes[3])):
        holds = (ends[0] == 0) & (ends[-1] == length) & (ends.diff() >= 0).all()
        torch._assert_async(holds, "cu_seq_lens does not divide the rows of the call")
    if ends_q is not ends_k and not is_full:
        same = ends_q.shape == ends_k.shape
        holds = (ends_q == ends_k).all() if same else torch.zeros((), dtype=torch.bool)
        torch._assert_async(holds, "cu_seq_lens_q and cu_seq_lens_k differ beside a causal mask")


def _values(tensor: Tensor) -> tuple[int, ...]:
    """The elements, read where they are new."""
    version = -1 if tensor.is_inference() else tensor._version
    cached: Any = _cached_values.get(tensor)  # type: ignore[no-untyped-call]
    if cached is None or cached[0] != version or version < 0:
        cached = _cached_values[tensor] = version, tuple(tensor.tolist())
    return cached[1]  # type: ignore[no-any-return]


def inputs_of_forward(outermost: bool = False) -> tuple[Tensor | None, Any]:
    """``position_ids`` and ``attention_mask`` of the forward pass that runs; None if unknown.

    Args:
        outermost: of the outermost model that has positions, as its user has given them. Otherwise
            of the innermost function that has them, from this one to the forward of its module.
    """
    frame: FrameType | None = sys._getframe(2)
    inputs: tuple[Tensor | None, Any] = None, None
    while frame is not None and (
        outermost or frame.f_code is not torch.nn.Module._call_impl.__code__
    ):
        code = frame.f_code
        if "position_ids" in (*code.co_varnames, *code.co_cellvars):  # a function, no module
            names = frame.f_locals
            positions, mask = names.get("position_ids"), names.get("attention_mask")
            is_model = isinstance(names.get("self"), PreTrainedModel)
            # Up to Python 3.12 a dictionary of the frame, which would keep all tensors; it is also
            # what `locals` has returned to the function.
            if isinstance(names, dict) and sys.getrefcount(names) == _OF_FRAME:
                names.clear()
            if isinstance(positions, Tensor) and (is_model or not outermost):
                inputs = positions, mask
                if not outermost:
                    break
        frame = frame.f_back
    return inputs


def check_positions(
    positions: Any,
    padding: Tensor | None,
    read: tuple[Tensor, ...],
    sizes: tuple[int, ...],
    elements: Tensor | None = None,
) -> None:
    """Refuses positions of packed sequences that the mask does not keep apart.

    Args:
        positions: ``position_ids`` of the layer: int [batch or 1, seq_q], also with axes in front,
            or anything else.
        padding: bool [batch, positions], False for padding; None without padding.
        read: the tensors that the mask reads.
        sizes: batch, heads, queries and keys.
        elements: the mask itself, where it is a tensor.

    Raises:
        InputError: the positions start again within a row, and the mask has no numbers of
            sequences, and no elements that keep them apart.
    """
    batch, _, rows, _ = sizes
    if not isinstance(positions, Tensor) or positions.dim() not in (2, 3) or rows < 2:
        return
    if positions.shape[-2] not in (1, batch) or positions.shape[-1] != rows:
        return
    if padding is not None and padding.shape[1] != rows:
        return  # a part of a sequence, whose other part is in a cache
    if not torch.compiler.is_compiling() and not has_values(positions):
        return
    # A model without positions gives the same one everywhere, as Decision Transformer, and no row
    # goes on then.
    begins = _begins(positions) & (positions != positions[..., :1]).any()
    if padding is not None:
        real = padding.to(positions.device, torch.bool)
        begins = begins & real[:, 1:] & real[:, :-1]  # positions of padding count from anywhere
    numbers_like = [x for x in read if x.dtype == torch.int64 and x.shape == (batch, rows)]
    if torch.compiler.is_compiling():
        if not numbers_like:
            torch._assert_async(~begins.any(), f"position_ids of packed sequences: {_PACK}")
        return
    if not begins.any():
        return
    if elements is not None and _keeps_apart(elements, begins, padding, sizes):
        return
    packs = [_numbers_from(begins, batch)]
    if positions.dim() == 2:  # transformers also numbers anew where positions are left out
        packs.append(_numbers_from(positions.diff(dim=-1) != 1, batch))
    apart = any(torch.equal(numbers, x) for numbers in packs for x in numbers_like)
    if padding is not None or not apart:
        raise InputError(
            "position_ids start again within a row, and the mask does not keep its samples apart",
            where="argument position_ids of the model",
            numbers=f"{int(begins.sum(-1).max()) + 1} sequences in {rows} rows: {_PACK}",
            way_out="cu_seq_lens_q and cu_seq_lens_k of DataCollatorWithFlattening for one row; or "
            "use_cache=False and no attention_mask, where the model's mask reads position_ids; or "
            "each sample in a row of its own; or an attention_mask [batch, 1, rows, rows]",
        )


def _begins(positions: Tensor) -> Tensor:
    """Whether a row is the first of a sequence, from the second on: bool [batch or 1, rows - 1].

    Positions that are left out begin none: models are trained with them for longer contexts, and
    parts of a prompt that a user has removed leave them. With several axes only a return to the
    origin begins one: those of an image go back and forth, and those of a video's frames and sound
    are taken in turns, with places that both have.

    Args:
        positions: int [batch or 1, rows], or [axes, batch or 1, rows].
    """
    if positions.dim() == 2:
        return positions.diff(dim=-1) <= 0
    return (positions[:, :, 1:] <= 0).all(0)


def _numbers_from(begins: Tensor, batch: int) -> Tensor:
    """The number of each row's sequence, int64 [batch, rows]."""
    return torch.nn.functional.pad(begins.cumsum(-1), (1, 0)).expand(batch, -1)


def _keeps_apart(
    mask: Tensor, begins: Tensor, padding: Tensor | None, sizes: tuple[int, ...]
) -> bool:
    """Whether a mask of a call without a cache lets no query attend to another sequence.

    Args:
        mask: bool or floating point, as `attention` takes it.
        begins: bool [batch or 1, rows - 1], True where a row is the first of its sequence.
        padding: the mask of padding; queries there may attend to anything.
        sizes: batch, heads, queries and keys.
    """
    if sizes[2] != sizes[3] or mask.shape[2] != sizes[2]:
        return False
    numbers = _numbers_from(begins, begins.shape[0]).to(mask.device)
    others = numbers[:, None, :, None] != numbers[:, None, None, :]
    if padding is not None:
        others = others & padding.to(mask.device, torch.bool)[:, None, :, None]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return not bool((seen[..., : sizes[3]] & others).any())


def _refuse(name: str, what: str, numbers: str) -> NoReturn:
    raise InputError(
        what,
        where=f"argument {name} of the model",
        numbers=f"{numbers}: {_PACK}",
        way_out="cu_seq_lens_q and cu_seq_lens_k of DataCollatorWithFlattening for one row without "
        "a cache, or its position_ids alone with use_cache=False",
    )
