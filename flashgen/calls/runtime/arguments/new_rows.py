"""The arguments of `flashgen.append_kv`: new rows of keys and values, and where they go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch

from flashgen.calls.runtime.arguments.pages import with_scales
from flashgen.calls.runtime.arguments.refusals import (
    check_ascending,
    check_is_tensor,
    is_known,
    refuse,
    shape_of,
)
from flashgen.shared.dtypes import (
    CACHE_DTYPES,
    HEAD_DIM_STEP,
    INT32_MAX,
    OPERAND_DTYPES,
    dtype_name,
)
from flashgen.shared.signature import SCALE_NAMES

Tensor = torch.Tensor

MOST_ROWS = 2**30
"""The largest number of tokens times heads of a call, whose kernel counts rows in 32 bits."""


class AppendOperands(NamedTuple):
    """The tensors of a call, and whether it writes scales. `flashgen.append_kv` describes them."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor | None = None
    cache_seqlens: Tensor | None = None
    slot_mapping: Tensor | None = None
    cu_seqlens: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    write_scales: bool = False

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors by name."""
        return dict(zip(self._fields[:-1], self[:-1], strict=True))

    @property
    def quantises(self) -> bool:
        """Whether rows of floats become codes, or the call is mistaken about it."""
        scaled = self.k_scale is not None or self.v_scale is not None or self.write_scales
        return scaled or (is_coded(self.k_cache) and not is_coded(self.k))

    @property
    def sequences(self) -> int:
        """The number of sequences of the page table; 0 where slots are given."""
        return 0 if self.cache_seqlens is None else self.cache_seqlens.shape[0]

    @property
    def tokens(self) -> int:
        return self.k.shape[0] * self.k.shape[2]

    @property
    def written(self) -> tuple[str, ...]:
        """The names of the tensors that the call writes."""
        return ("k_cache", "v_cache", *(SCALE_NAMES if self.write_scales else ()))

    @property
    def writes_columns(self) -> bool:
        """Whether values are the same columns of the keys in both rows and caches, with the same
        scales, so that they are written with the keys."""
        column = _first_column(self.k, self.v)
        if column is None or column != _first_column(self.k_cache, self.v_cache):
            return False
        return not self.quantises or _first_column(self.k_scale, self.v_scale) is not None

    @property
    def distances(self) -> tuple[int | None, ...]:
        """The bytes between tensors on which `writes_columns` and `overlap` depend; None where
        their memory cannot overlap."""
        ranges = [
            (x.data_ptr(), (memory := x.untyped_storage()).data_ptr() + memory.nbytes())
            for x in self[:-1]
            if x is not None
        ]
        # k, the caches, and scales, which are the last where there are any.
        written_ranges = [ranges[0], *ranges[2:4], *(() if self.k_scale is None else ranges[-2:])]
        return tuple(
            [
                other_start - start if other_start < end and start < other_end else None
                for start, end in written_ranges
                for other_start, other_end in ranges
            ]
        )

    @property
    def overlap(self) -> tuple[str, str] | None:
        """The names of a tensor that is written and of another one with elements of it; None
        without such tensors, or where values are columns of the keys."""
        if not self.k.numel():
            return None
        columns = self.writes_columns
        tensors = self.tensors
        for name in self.written:
            for other_name, tensor in tensors.items():
                alike = columns and name[1:] == other_name[1:]
                if other_name != name and not alike and _overlap(tensors[name], tensor):
                    return name, other_name
        return None

    @property
    def is_empty(self) -> bool:
        """True where there is nothing to write."""
        no_sequence = self.slot_mapping is None and not self.sequences
        return no_sequence or not self.tokens or not self.k_cache.numel()


def _overlap(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors with memory have an element in common; interleaved views have none."""
    if a is None or b is None:
        return False
    return numpy.shares_memory(_addresses(a), _addresses(b))


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor with memory have the same address.

    The first axis along which such elements differ may be counted from the first of them.
    """
    array = _addresses(tensor)
    for _ in range(array.ndim):
        if not array.size:
            return False
        if numpy.shares_memory(array[:1], array[1:]):
            return True
        array = array[0]
    return False


def _addresses(tensor: Tensor) -> Any:
    """A numpy array at the addresses of a tensor; nothing reads its elements, maybe a GPU's."""
    size = tensor.element_size()
    interface = {
        "version": 3,
        "typestr": f"|V{size}",
        "data": (tensor.data_ptr(), False),
        "shape": tuple(tensor.shape),
        "strides": tuple(size * step for step in tensor.stride()),
    }
    return numpy.asarray(SimpleNamespace(__array_interface__=interface))


def _first_column(keys: Tensor | None, values: Tensor | None) -> int | None:
    """The column of the keys at which the values begin; None where values are not columns of the
    keys."""
    if keys is None or values is None or not (keys.data_ptr() and values.data_ptr()):
        return None
    axes = [zip(tensor.shape[:3], tensor.stride()[:3], strict=True) for tensor in (keys, values)]
    key_axes, value_axes = ([(size, step) for size, step in axis if size > 1] for axis in axes)
    column, remainder = divmod(values.data_ptr() - keys.data_ptr(), keys.element_size())
    room = math.prod(keys.shape[3:]) - math.prod(values.shape[3:])  # a scale is one column
    return column if key_axes == value_axes and not remainder and 0 <= column <= room else None


def is_coded(cache: object) -> bool:
    """Whether a cache holds codes of 8 bits."""
    return isinstance(cache, Tensor) and dtype_name(cache.dtype) in CACHE_DTYPES


def _check_coded(operands: AppendOperands) -> None:
    """Checks the dtypes of rows, caches and scales, and the shapes of scales, where rows become
    codes."""
    for name, rows, cache, scale in zip(
        "kv", *(operands[i : i + 2] for i in (0, 2, 8)), strict=True
    ):
        where = f"argument {name}_scale of append_kv"
        check_is_tensor(name, rows, f"torch.as_tensor({name})", f"argument {name} of append_kv")
        if not is_coded(cache):
            refuse(
                "scales are for caches that hold codes of 8 bits",
                where,
                f"{name}_cache is {getattr(cache, 'dtype', cache)}; codes: "
                f"{', '.join(CACHE_DTYPES)}",
                "no k_scale and v_scale, or caches of codes",
            )
        check_is_tensor(
            f"{name}_scale",
            scale,
            f"{name}_scale=torch.tensor(0.05), float32; or write_scales=True, and a scale for each "
            f"slot, {name}_scale=torch.zeros({name}_cache.shape[:3])",
            where,
        )
        if scale.dtype != torch.float32 or scale.device != cache.device:
            refuse(
                f"{name}_scale is not a float32 tensor beside its cache",
                where,
                f"{scale.dtype} on {scale.device}; {name}_cache on {cache.device}",
                f"{name}_scale.to({str(cache.device)!r}, torch.float32)",
            )
        if dtype_name(rows.dtype) not in OPERAND_DTYPES:
            refuse(
                "new rows that become codes are floats",
                f"argument {name} of append_kv",
                f"{rows.dtype}; codes have their scales already",
                f"rows of {', '.join(OPERAND_DTYPES)}; or codes, without scales and write_scales",
            )
    scales = {"k_scale": operands.k_scale, "v_scale": operands.v_scale}
    with_scales(scales, operands.k_cache, operands.v_cache)
    if operands.write_scales:
        _check_written(operands)


def _check_written(operands: AppendOperands) -> None:
    """Scales that a call writes have an element for each slot, which no other slot shares."""
    for name, cache in (("k_scale", operands.k_cache), ("v_scale", operands.v_cache)):
        scale = getattr(operands, name)
        sizes = cache.shape[:3]
        steps = zip(scale.shape, scale.stride(), strict=True)
        whole = scale.dim() == len(sizes) and not any(
            is_known(size != wanted) for size, wanted in zip(scale.shape, sizes, strict=True)
        )
        if not whole or any(is_known(size > 1) and is_known(step == 0) for size, step in steps):
            refuse(
                f"{name} is to be written, and slots share its elements",
                f"argument {name} of append_kv",
                f"shape {shape_of(scale)}, strides {tuple(scale.stride())}; {name[0]}_cache "
                f"{shape_of(cache)}. Rows that a later call adds to a page would change the scale "
                "of codes that are there",
                f"{name}=torch.zeros({name[0]}_cache.shape[:3]), a scale for each slot; or scales "
                "of your own, without write_scales",
            )


def check_append(operands: AppendOperands) -> None:
    """Checks everything but the contents of tensors, whose sizes may be symbols.

    Raises:
        InputError: for the first mistake; the error names the argument.
    """
    if not isinstance(operands.write_scales, bool):
        refuse(
            "write_scales is neither True nor False",
            "argument write_scales of append_kv",
            f"given {operands.write_scales!r:.200}",
            "write_scales=True, for k_scale and v_scale to be written by the call",
        )
    if operands.quantises:
        _check_coded(operands)
    _check_ways(operands)
    for name, tensor in operands.tensors.items():
        if tensor is not None or name in operands._fields[:4]:
            _check_kind(name, tensor, operands)
    _check_shapes(operands)
    for name, tensor in zip(operands._fields[:4], operands[:4], strict=True):
        _check_memory(name, tensor)


def _check_ways(operands: AppendOperands) -> None:
    """Checks that a call gives the slots of its rows in one way."""
    names = ("page_table", "cache_seqlens", "slot_mapping", "cu_seqlens")
    present = [name for name in names if getattr(operands, name) is not None]
    table = {"page_table", "cache_seqlens"}
    if present != ["slot_mapping"] and not (table <= set(present) <= table | {"cu_seqlens"}):
        refuse(
            "the places of the new rows are given in no way or in more than one way",
            "arguments page_table, cache_seqlens, slot_mapping and cu_seqlens of append_kv",
            f"given: {', '.join(present) or 'none of them'}",
            "page_table and cache_seqlens, with cu_seqlens where sequences are packed; or "
            "slot_mapping alone",
        )


def _check_kind(name: str, tensor: Any, operands: AppendOperands) -> None:
    k = operands.k
    where = f"argument {name} of append_kv"
    check_is_tensor(name, tensor, f"torch.as_tensor({name}), on the device of the caches", where)
    cached = operands.k_cache.dtype if operands.quantises else k.dtype
    dtypes = {
        "k": tuple(getattr(torch, dtype) for dtype in (*OPERAND_DTYPES, *CACHE_DTYPES)),
        "v": (k.dtype,),
        **dict.fromkeys(("k_cache", "v_cache"), (cached,)),
        **dict.fromkeys(SCALE_NAMES, (torch.float32,)),
        "slot_mapping": (torch.int64,),
    }.get(name, (torch.int32,))
    if tensor.dtype not in dtypes:
        refuse(
            f"{name} has a dtype that append_kv does not take",
            where,
            f"{tensor.dtype}; k is {k.dtype}",
            _way_out_of_dtype(name, tensor, dtypes),
        )
    if tensor.device != k.device or tensor.device.type not in ("cpu", "cuda", "meta"):
        refuse(
            "the tensors of a call are not on one CUDA GPU or all on the CPU",
            where,
            f"{name} is on {tensor.device}, k on {k.device}",
            "all tensors on the device of the caches",
        )


def _way_out_of_dtype(name: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> str:
    """The way out of a wrong dtype. A converted cache would be written in place of the cache."""
    if name in ("k_cache", "v_cache"):
        is_operand = dtype_name(tensor.dtype) in OPERAND_DTYPES and dtypes[0].is_floating_point
        rows = f"k.to({tensor.dtype}) and v.to({tensor.dtype}); or " if is_operand else ""
        return f"{rows}a cache that is made with dtype={dtypes[0]}"
    if len(dtypes) == 1:
        return f"{name}.to({dtypes[0]})"
    return f"one of {', '.join(OPERAND_DTYPES)}; for a cache of 8 bits, also k_scale and v_scale"


def _check_shapes(operands: AppendOperands) -> None:
    k, v, k_cache, v_cache = operands[:4]
    for name, tensor in zip(operands._fields[:4], operands[:4], strict=True):
        if tensor.dim() != 4:
            _refuse_shapes(operands, name)
    for name, tensor, axes in (
        ("v", v, ((0, k, 0), (1, k, 1), (2, k, 2))),
        ("k_cache", k_cache, ((1, k, 1), (3, k, 3))),
        ("v_cache", v_cache, ((0, k_cache, 0), (1, k, 1), (2, k_cache, 2), (3, v, 3))),
    ):
        if any(
            is_known(tensor.shape[axis] != like.shape[like_axis]) for axis, like, like_axis in axes
        ):
            _refuse_shapes(operands, name)
    for name, tensor in (("k", k), ("v", v)):
        dim = tensor.shape[3]
        if is_known(dim % HEAD_DIM_STEP != 0) or is_known(dim == 0):
            refuse(
                f"the head dim of {name} is not a multiple of {HEAD_DIM_STEP} from "
                f"{HEAD_DIM_STEP} on",
                f"argument {name} of append_kv",
                f"{name} {tuple(tensor.shape)}",
                "rows padded with zeros, as torch.nn.functional.pad makes them",
            )
    sequences = k.shape[0]
    if operands.cu_seqlens is not None:
        if is_known(k.shape[0] != 1):
            refuse(
                "packed sequences are stored one after another in one batch entry",
                "argument k of append_kv",
                f"k {tuple(k.shape)}, and cu_seqlens is given",
                "k.transpose(0, 1)[None] of k [tokens, heads, head_dim], and v likewise",
            )
        _check_index(operands, "cu_seqlens", 1, None, "[sequences + 1]: the first row of each")
        sequences = operands.cu_seqlens.shape[0] - 1
    if operands.slot_mapping is None:
        _check_index(operands, "cache_seqlens", 1, sequences, "[sequences]: the keys of each")
        _check_index(operands, "page_table", 2, sequences, "[sequences, pages of the longest]")
    else:
        tokens = k.shape[0] * k.shape[2]
        _check_index(operands, "slot_mapping", 1, tokens, "[tokens], in order of batch and rows")


def _check_index(
    operands: AppendOperands, name: str, dims: int, length: int | None, wanted: str
) -> None:
    tensor = getattr(operands, name)
    right = tensor.dim() == dims
    if right and length is None:
        right = not is_known(tensor.shape[0] == 0)
    elif right:
        right = not is_known(tensor.shape[0] != length)
    if not right:
        expected = "" if length is None else f", expected {length:,} along dimension 0"
        refuse(
            f"{name} does not fit the new rows",
            f"argument {name} of append_kv",
            f"{name} {tuple(tensor.shape)}{expected}; k {tuple(operands.k.shape)}",
            f"{name} {wanted}",
        )


def _refuse_shapes(operands: AppendOperands, name: str) -> None:
    shapes = zip(operands._fields[:4], operands[:4], strict=True)
    refuse(
        "the shapes of new rows and caches do not fit together",
        f"argument {name} of append_kv",
        ", ".join(f"{operand_name} {tuple(tensor.shape)}" for operand_name, tensor in shapes),
        "k [batch, heads, rows, d], v [batch, heads, rows, d_v], k_cache [pages, heads, page, d], "
        "v_cache [pages, heads, page, d_v]; views such as cache.transpose(1, 2) cost nothing",
    )


def _check_memory(name: str, tensor: Tensor) -> None:
    where = f"argument {name} of append_kv"
    if is_known(tensor.stride(3) != 1):
        refuse(
            f"the last dimension of {name} is not contiguous",
            where,
            f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            f"{name}.contiguous()" if name in "kv" else "a cache whose rows are contiguous",
        )
    if name in "kv":
        return
    steps = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    if any(is_known(size > 1) and is_known(step == 0) for size, step in steps):
        refuse(
            f"{name} is expanded: its rows share memory",
            where,
            f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            f"{name}.clone()",
        )


def check_limits(operands: AppendOperands) -> None:
    """Checks that the numbers of a call, which are no symbols, fit the kernel's integers, and that
    its tensors, which have memory, are not the same.

    Raises:
        InputError: there are too many rows, or too many slots; or what is written would replace
            something else.
    """
    _check_writes(operands)
    pages, heads, page, _ = operands.k_cache.shape
    if page == 0:
        refuse(
            "the pages of the caches have no slots",
            "argument k_cache of append_kv",
            f"k_cache {tuple(operands.k_cache.shape)}",
            "a page size of 1 or more",
        )
    for counted, name, count, most in (
        ("new rows", "k", operands.tokens * heads, MOST_ROWS),
        ("slots of the caches", "k_cache", pages * page, INT32_MAX),
    ):
        if count > most:
            refuse(
                f"there are too many {counted}",
                f"argument {name} of append_kv",
                f"{count:,}; at most {most:,}",
                "several calls, or several caches",
            )


def _check_writes(operands: AppendOperands) -> None:
    """Checks that no element that a call writes belongs to another argument or another slot."""
    for name in operands.written:
        if _overlaps_itself(getattr(operands, name)):
            tensor = getattr(operands, name)
            refuse(
                f"slots of {name} have elements in common",
                f"argument {name} of append_kv",
                f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                f"{name}={name}.clone(memory_format=torch.contiguous_format)",
            )
    overlapping = operands.overlap
    if overlapping is None:
        return
    name, other_name = overlapping
    if other_name in operands.written:
        columns = operands.v.shape[3]
        way_out = f"{other_name}=torch.zeros_like({other_name}), a tensor of its own"
        if overlapping == ("k_cache", "v_cache"):
            way_out += f"; or v=k[..., :{columns}], v_cache=k_cache[..., :{columns}]"
            way_out += " and v_scale=k_scale" * operands.quantises
            way_out += ", for values that are the first columns of the keys"
    else:
        way_out = f"{other_name}={other_name}.clone()"
    refuse(
        f"what is written to {name} would replace what is "
        f"{'written to' if other_name in operands.written else 'read of'} {other_name}",
        f"argument {other_name} of append_kv",
        f"{other_name} has elements of {name}",
        way_out,
    )


def slots_of(operands: AppendOperands) -> Tensor:
    """The slot of each token, counted over all pages, int64 [tokens]; -1 for none.

    It reads the contents of tensors, which are on the CPU.

    Raises:
        InputError: a length, a position, a page or a slot is impossible.
    """
    pages, _, page, _ = operands.k_cache.shape
    if operands.slot_mapping is not None:
        slots = operands.slot_mapping
        wrong = _first((slots < -1) | (slots >= pages * page))
        if wrong is not None:
            refuse(
                "a slot lies outside of the caches",
                f"argument slot_mapping of append_kv, token {wrong}",
                f"slot {int(slots[wrong]):,}; {pages:,} pages of {page:,}",
                f"{f'from 0 to {pages * page - 1:,}' if pages else 'caches with pages'}; -1 "
                "skips a token",
            )
        return slots
    table, lengths = operands.page_table, operands.cache_seqlens
    assert table is not None, "slots or a page table are given"
    assert lengths is not None, "a page table has lengths"
    token = torch.arange(operands.tokens)
    if operands.cu_seqlens is None:
        rows = operands.k.shape[2]
        ends = torch.arange(operands.sequences + 1) * rows
    else:
        ends = operands.cu_seqlens.long()
        total_text = "the number of new rows", f"{operands.tokens:,} new rows"
        where = "argument cu_seqlens of append_kv"
        check_ascending("cu_seqlens", ends.tolist(), operands.tokens, total_text, "lengths", where)
    new, lengths = ends.diff(), lengths.long()
    b = _first(lengths < new)
    if b is not None:
        refuse(
            "a sequence has fewer keys than are appended to it",
            f"argument cache_seqlens of append_kv, sequence {b}",
            f"cache_seqlens[{b}] is {int(lengths[b]):,}; {int(new[b]):,} new rows",
            "cache_seqlens counts the keys of each sequence after the call, the new ones included",
        )
    sequence = torch.searchsorted(ends, token, right=True) - 1
    inside = token < ends[-1]  # the rows behind the last sequence are of none
    token, sequence = token[inside], sequence[inside]
    position = lengths[sequence] - ends[sequence + 1] + token
    entry = position // page
    wrong = _first(entry >= table.shape[1])
    if wrong is not None:
        refuse(
            "a position lies behind the pages of the table",
            f"argument page_table of append_kv, sequence {int(sequence[wrong])}",
            f"position {int(position[wrong]):,}; {table.shape[1]:,} pages of {page:,}",
            "a page table with a column for each page of the longest sequence",
        )
    number = table[sequence, entry].long()
    wrong = _first((number < 0) | (number >= pages))
    if wrong is not None:
        b, column = int(sequence[wrong]), int(entry[wrong])
        refuse(
            "a page of a new row lies outside of the caches",
            f"argument page_table of append_kv, sequence {b}",
            f"page_table[{b}, {column}] is {int(number[wrong]):,}, for position "
            f"{int(position[wrong]):,}; {pages:,} pages of {page:,}",
            "a page of the caches for every position up to cache_seqlens",
        )
    slots = torch.full((operands.tokens,), -1, dtype=torch.int64)
    slots[inside] = number * page + position % page
    return slots


def _first(bad: Tensor) -> int | None:
    """The index of the first true element; None without one."""
    return int(bad.int().argmax()) if bool(bad.any()) else None
