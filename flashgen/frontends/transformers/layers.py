"""The operators of a model's layers: one for each kind of mask and score, kept for all calls.

torch.compile treats the functions of this module as constants of a graph: their arguments are
numbers and names, never tensors.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from flashgen.calls.ops import attention
from flashgen.frontends.flex.operation_results import name_of
from flashgen.frontends.flex.recorded_mods import POSITIONS, Notes, record
from flashgen.frontends.flex.recorder import ModRecorder
from flashgen.frontends.flex.traced_mods import TracedMods, trace
from flashgen.frontends.score_tensors import (
    GivenTensor,
    Start,
    dtype_name,
    element,
    from_start,
)
from flashgen.shared.errors import InputError, SpecError
from flashgen.spec.language import mod_functions
from flashgen.spec.language.distances import is_of_distances
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.spec_options import as_name
from flashgen.spec.language.symbols import B, H, K, Q
from flashgen.spec.language.tensor import Tensor

_lock = threading.RLock()
_masks: dict[str, TracedMods] = {}
_names_of_masks: dict[Hashable, str] = {}  # by what has been recorded
_rigid: set[Hashable] = set()  # records of masks whose expressions depend on lengths of tensors
_names: dict[Hashable, str] = {}  # of operators

operators = SimpleNamespace()
"""All operators by name, in the order in which they were made.

They are attributes, because torch.compile copies a dict when it first reads it, and would not find
those that are made for a graph's later layers.
"""

FULL, CAUSAL = "full", "causal"
"""The names of masks that no function describes."""


class LayerKind(NamedTuple):
    """All that determines the operator of a layer besides its mask, in constants.

    Attributes:
        sink: the dtype of the sinks, and whether they are learned; None without sinks.
        score_tensors: the tensors of the call that have an element for each score.
        start: where their indices begin; positions themselves begin at the offsets of the call.
        packs: whether the call has the number of each row's sequence, and keeps sequences apart.
    """

    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    dropout: bool
    softcap: float | None
    sink: tuple[torch.dtype, bool] | None
    score_tensors: tuple[GivenTensor, ...]
    start: Start
    packs: bool

    @classmethod
    def from_fields(cls, *fields: Any) -> LayerKind:
        """A kind of layer from its fields as plain tuples."""
        plain = cls(*fields)
        score_tensors = tuple(GivenTensor(*tensor) for tensor in plain.score_tensors)
        return plain._replace(score_tensors=score_tensors, start=Start(*plain.start))


MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""A mask of the batch entry, the head, the query and the key."""


class RecordedMask(NamedTuple):
    """
    Attributes:
        key: the operations and numbers; equal for functions that compute the same from tensors of
            the same kinds, in a call and while torch.compile traces one.
        tensors: the tensors that the function reads.
    """

    key: Hashable
    tensors: tuple[torch.Tensor, ...]


def record_mask(function: MaskFunction, device: torch.device) -> RecordedMask:
    """Executes a mask function once and records its operations; torch.compile can trace it.

    A model makes its mask function anew for each forward pass, from closures over tensors of that
    pass.

    Args:
        device: the device of the queries.
    """
    recorder = ModRecorder(device)
    positions = recorder.arguments(POSITIONS)
    with recorder:
        result = function(*positions)
    returned = recorder.noted(result)
    operations = [(name_of(x[0]), x[1], x[2]) for x in recorder.operations]
    reads = [(x[0], str(x[1]), x[2], x[3]) for x in recorder.reads]
    key = tuple(operations), tuple(recorder.numbers), tuple(reads), returned
    return RecordedMask(key, tuple(recorder.read))


def name_of_mask(recorded: RecordedMask, function: MaskFunction, device: torch.device) -> str:
    """The name under which the expression of a mask function is kept; traces it if it is new.

    torch.compile breaks its graph where the mask is new.

    Raises:
        SpecError: kernels cannot express the mask.
    """
    key = recorded.key
    if depends_on_lengths(key):
        key = key, _lengths(recorded)
    return known_name(key) or _name_of_new(recorded, function, device)


def _traced_name(recorded: RecordedMask, function: MaskFunction, device: torch.device) -> str:
    with _lock:
        key, by_lengths = recorded.key, (recorded.key, _lengths(recorded))
        # A compiled graph keeps its break after the mask has been traced.
        earlier_name = known_name(key) or known_name(by_lengths)
        if earlier_name:
            return earlier_name
        notes = Notes()
        again = record(function, None, device, notes)
        notes.names = [f"{n}_of_mask" if n in _OWN_NAMES else n for n in notes.names]
        assert len(again.tensors) == len(recorded.tensors), "a mask function computes the same"
        traced = trace(function, None, again)
        if traced.shapes is not None:
            _rigid.add(key)
            key = by_lengths
        name = CAUSAL if traced.mask_mod_condition == (K <= Q) else _free_name(_name_of(function))
        if name != CAUSAL:
            _masks[name] = traced
        _names_of_masks[key] = name
    return name


_disable: Any = torch.compiler.disable  # torch's has no types
_name_of_new: Callable[..., str] = _disable(
    _traced_name,
    reason="torch.compile meets a mask that has not been traced to an expression yet; with "
    "fullgraph=True, as in torch.export with strict=True, it needs one call of the model that is "
    "not compiled, with the same inputs: padding or none, a cache or none, packed sequences or "
    "none",
)


def _free_name(wanted: str) -> str:
    """The wanted name, with a number where it belongs to another mask."""
    numbered = (f"{wanted}_{number}" for number in itertools.count(2))
    names = itertools.chain([wanted], numbered)
    return next(name for name in names if name not in (*_masks, FULL, CAUSAL))


def _lengths(recorded: RecordedMask) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(tensor.shape) for tensor in recorded.tensors])


def depends_on_lengths(key: Hashable) -> bool:
    return key in _rigid


def known_name(key: Hashable) -> str:
    """The name of a mask that has been traced; "" for a new one."""
    return _names_of_masks.get(key, "")


def captures_of(mask: str) -> tuple[tuple[str, int | None, int | None], ...]:
    """What a mask captures: name in the spec, index in `RecordedMask.tensors`, and a dimension.

    The index is None for a tensor that the mask function creates, see `created_tensor`. The
    dimension is None for the tensor itself, else the length of that dimension is captured.
    """
    if mask in (FULL, CAUSAL):
        return ()
    traced = _masks[mask]
    tensors = [(name, location.tensor_index, None) for name, location in traced.tensors.items()]
    lengths = [(name, location.tensor_index, dim) for name, (location, dim) in traced.sizes.items()]
    return (*tensors, *lengths)


def created_tensor(mask: str, name: str) -> torch.Tensor:
    """A tensor that a mask function creates, with the same contents at each call."""
    tensor = _masks[mask].tensors[name].constant
    assert tensor is not None, "it has no place among the tensors that the function reads"
    return tensor


def reads(mask: str) -> tuple[bool, bool, bool, bool]:
    """Whether a mask depends on the batch entry, the head, the query and the key."""
    if mask in (FULL, CAUSAL):
        return False, False, mask == CAUSAL, mask == CAUSAL
    symbols = _masks[mask].mask_mod_condition.free_symbols
    return B in symbols, H in symbols, Q in symbols, K in symbols


def counts_from_row(mask: str) -> bool:
    """Whether a mask depends on where the row begins, and not on elements of tensors alone.

    Causal masks and windows depend on distances, which packed sequences have too; chunks and
    prefixes are counted from the first position.
    """
    return mask not in (FULL, CAUSAL) and not is_of_distances(_masks[mask].mask_mod_condition)


def operator_name(mask: str, layer: tuple[Any, ...]) -> str:
    """The name in `operators` of the operator of a layer, which is made at the first call.

    Args:
        layer: the fields of a `LayerKind` as plain tuples, which torch.compile takes as constants.

    Raises:
        InputError: no spec can have these options, such as a head dim above 576.
    """
    key = mask, layer
    name = _names.get(key)
    if name is None:
        with _lock:
            operator = attention(_checked_spec(mask, LayerKind.from_fields(*layer)))
            setattr(operators, operator.name, operator)
            name = _names[key] = operator.name
    return name


for _constant in (
    known_name,
    depends_on_lengths,
    captures_of,
    created_tensor,
    reads,
    counts_from_row,
    operator_name,
):
    # The same as torch.compiler.assume_constant_result, without the import of torch._dynamo.
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010


# From a mask function to expressions.


_OWN_NAMES = (
    *("position_bias", "attention_mask", "sink", "q_start", "k_start"),
    *("sequences_q", "sequences_k"),
)


def _name_of(function: MaskFunction) -> str:
    """The names of the functions that a mask is composed of, without their common endings."""
    inner = [inner for _, inner in closure(function, FunctionType)]
    parts: list[str] = []
    for named in inner or [function]:
        name = str(getattr(named, "__qualname__", "mask")).partition(".")[0]
        name = re.sub(r"(_mask)?(_function|_overlay|_fn)$", "", name).strip("_")
        if name not in ("and_masks", "or_masks", *parts) and re.fullmatch("[A-Za-z]\\w*", name):
            parts.append(name)
    return "_".join(parts) or "mask"


def closure(function: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """Values of a type in the closures of a function and of functions there, with their names."""
    cells = getattr(function, "__closure__", None) or ()
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, cells, strict=False):
        content = cell.cell_contents
        for item in content if isinstance(content, tuple | list) else (content,):
            if isinstance(item, kind):
                yield name, item
            if callable(item):
                yield from closure(item, kind)


# From expressions to a spec.


def _checked_spec(mask: str, layer: LayerKind) -> AttentionSpec:
    try:
        return _spec(mask, layer)
    except SpecError as error:
        raise InputError(
            f"no kernel computes the attention of this layer: {error.what}",
            where="attn_implementation of the model's configuration",
            numbers=error.numbers,
            way_out='attn_implementation="eager" for this model, or for this part of it by a '
            "dictionary",
        ) from error


def _spec(mask: str, layer: LayerKind) -> AttentionSpec:
    sink = None
    if layer.sink is not None:
        dtype, learned = layer.sink
        sink = Tensor("sink", ("heads",), dtype_name(dtype), grad=learned)
    return AttentionSpec(
        mask_mod=_mask_mod(mask, layer),
        score_mod=_score_mod(layer),
        head_dim=layer.head_dim,
        head_dim_v=layer.head_dim_v,
        dtype=dtype_name(layer.dtype),
        dropout=layer.dropout,
        sink=sink,
        name=_name_of_layer(mask, layer),
    )


def _mask_mod(mask: str, layer: LayerKind) -> Callable[..., Any] | None:
    whole = _mask_of_row(mask, layer)
    if not layer.packs:
        return whole
    numbers = [Tensor(f"sequences_{axis}", (1, f"sequences_{axis}_rows"), "int32") for axis in "qk"]

    def in_sequence(b: Any, h: Any, q: Any, k: Any) -> Any:
        query_sequence = numbers[0][0, from_start("q_start", layer.start.q, q)]
        together = query_sequence == numbers[1][0, from_start("k_start", layer.start.k, k)]
        return together if whole is None else whole(b, h, q, k) & together

    return in_sequence


def _mask_of_row(mask: str, layer: LayerKind) -> Callable[..., Any] | None:
    parts = [
        element(tensor, layer.start) for tensor in layer.score_tensors if tensor.dtype == torch.bool
    ]
    if mask == CAUSAL:
        parts.append(lambda b, h, q, k: k <= q)
    elif mask != FULL and (mask_mod := _masks[mask].mask) is not None:
        parts.append(mask_mod)
    if len(parts) < 2:
        return parts[0] if parts else None
    return lambda b, h, q, k: functools.reduce(operator.and_, [part(b, h, q, k) for part in parts])


def _score_mod(layer: LayerKind) -> Callable[..., Any] | None:
    softcap = layer.softcap
    added = [element(x, layer.start) for x in layer.score_tensors if x.dtype != torch.bool]
    if softcap is None and not added:
        return None

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if softcap is not None:
            score = softcap * mod_functions.tanh(score / softcap)
        for bias in added:
            score = score + bias(b, h, q, k)
        return score

    return score_mod


def _name_of_layer(mask: str, layer: LayerKind) -> str:
    """A name for the variant of a layer, such as ``sliding_window_causal_softcap``."""
    parts = [mask, *(tensor.name for tensor in layer.score_tensors)]
    parts += ["softcap"] if layer.softcap is not None else []
    parts += ["sink"] if layer.sink is not None else []
    parts += ["packed"] if layer.packs else []
    return as_name("_".join(parts))
