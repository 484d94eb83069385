"""Traced torch mods: the expressions of a spec, and where a call finds its captured tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from flashgen.calls.ops import Attention, attention
from flashgen.frontends.flex.aten import run
from flashgen.frontends.flex.operation_results import is_differentiated
from flashgen.frontends.flex.recorded_mods import Mod, Record, refuse_result
from flashgen.frontends.flex.replay import replay
from flashgen.frontends.flex.traced_array import TracedArray, condition, number
from flashgen.frontends.flex.tracer import DTYPES, CapturedTensor, Tracer
from flashgen.shared.aux_results import AuxRequest
from flashgen.shared.dtypes import HEAD_DIM_STEP, POSITION_LIMIT
from flashgen.spec.language.block_layout import BlockSparse
from flashgen.spec.language.capture_names import BUILT_IN_NAMES
from flashgen.spec.language.integer_limits import Limits, limits
from flashgen.spec.language.mod_functions import where
from flashgen.spec.language.operators import as_condition
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.spec_options import GENERIC_NAMES, as_name
from flashgen.spec.language.symbols import SCORE, B, H, K, Q, is_condition
from flashgen.spec.language.traced import Capture, Traced
from flashgen.spec.language.tracing import PickledMod, TracedMod
from flashgen.spec.language.user_source import SourceLines, code_of, lines_of, shown_path

_MOST_SIZES = 1024
"""The number of sizes of calls for which the assumptions of traced mods are known to hold."""

_TORCH_NAMES = ("or_mask", "and_mask", "noop_mask")


class CallSizes(NamedTuple):
    """The sizes of a call on which traced expressions may depend.

    Attributes:
        learned: whether scores require gradients, which a mod may read.
    """

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    device: torch.device
    learned: bool = False

    @classmethod
    def from_tensors(
        cls, query: torch.Tensor, key: torch.Tensor, device: torch.device
    ) -> CallSizes:
        """Those of a call; for a symbol the largest one, so that expressions rely on no smaller."""
        sizes = *query.shape[:3], key.shape[2]
        batch, heads, seq_q, seq_k = (x if type(x) is int else POSITION_LIMIT for x in sizes)
        learned = torch.is_grad_enabled() and (is_differentiated(query) or is_differentiated(key))
        return cls(batch, heads, seq_q, seq_k, device, learned)

    @property
    def bounds(self) -> Mapping[sympy.Symbol, Limits]:
        counts = zip((B, H, Q, K), (self.batch, self.heads, self.seq_q, self.seq_k), strict=True)
        return {symbol: (0, max(count - 1, 0)) for symbol, count in counts}


@dataclass(frozen=True)
class CaptureLocation:
    """Where a call finds a captured tensor.

    Attributes:
        tensor_index: its index among the tensors that the record of the call reads.
        created_number: its number, if the mod creates it anew for each call.
        constant: the tensor itself, if the mod creates it with the same contents at each call.
        learned: whether it has a gradient.
    """

    tensor_index: int | None
    created_number: int | None
    constant: torch.Tensor | None
    learned: bool = False

    def tensor_in(self, record: Record) -> torch.Tensor:
        if self.constant is not None:
            return self.constant
        if self.created_number is not None:
            return record.created_tensors[self.created_number]
        assert self.tensor_index is not None
        return record.tensors[self.tensor_index]

    def as_argument(
        self, record: Record, device: torch.device, constant: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        tensor = self.tensor_in(record)
        if self.tensor_index is None:
            tensor = constant(tensor)
        if not self.learned and is_differentiated(tensor):
            tensor = tensor.detach()
        return as_argument(tensor, device, self.tensor_index is None)


def as_argument(tensor: torch.Tensor, device: torch.device, follows: bool = False) -> torch.Tensor:
    """A captured tensor in a dtype that kernels read.

    A number follows the queries' device, and so does any tensor that ``follows``.
    """
    if tensor.dtype == torch.float64:
        tensor = tensor.to(torch.float32)
    if (follows or tensor.dim() == 0) and tensor.device != device:
        tensor = tensor.to(device)
    return tensor


@dataclass
class TracedMods:
    """A torch mask_mod and score_mod as mods of flashgen.

    Attributes:
        mask, score: the mods of the spec; None where the user gave none.
        mask_mod_condition: the condition of the mask_mod alone, true without one; ``mask`` is
            false also where the score_mod returns minus infinity.
        tensors: the captured tensors by their names in the spec.
        sizes: lengths of captured tensors that are run-time scalars: tensor and dimension.
        numbers: the indices of the numbers of the record that are run-time scalars.
        assumed: integer expressions that must not be negative at any position of a call.
        created: the numbers of captured tensors that the mods create anew for each call.
        shapes: the shapes of all captured tensors if the expressions depend on them, else None.
    """

    mask: PickledMod | None
    score: PickledMod | None
    mask_mod_condition: sympy.Basic
    name: str
    tensors: dict[str, CaptureLocation]
    sizes: dict[str, tuple[CaptureLocation, int]]
    numbers: dict[str, int]
    assumed: tuple[sympy.Expr, ...]
    created: tuple[int, ...]
    shapes: tuple[torch.Size, ...] | None
    _operators: dict[object, Attention] = field(default_factory=dict)
    _checked: set[CallSizes] = field(default_factory=set)

    def serves(self, sizes: CallSizes, record: Record) -> bool:
        """True if tracing for a call of these sizes would give the same expressions."""
        if self.shapes is not None and self.shapes != _shapes(record, self.created):
            return False
        if sizes not in self._checked:
            bounds = sizes.bounds
            if any(limits(expr, bounds)[0] < 0 for expr in self.assumed):
                return False
            if len(self._checked) >= _MOST_SIZES:
                self._checked.clear()
            self._checked.add(sizes)
        return True

    def operator(
        self, head_dim: int, head_dim_v: int, dtype: str, block_sparse: BlockSparse | None = None
    ) -> Attention:
        options = head_dim, head_dim_v, dtype, block_sparse
        if options not in self._operators:
            self._operators[options] = attention(self.spec(*options))
        return self._operators[options]

    def spec(
        self, head_dim: int, head_dim_v: int, dtype: str, block_sparse: BlockSparse | None = None
    ) -> AttentionSpec:
        return AttentionSpec(
            mask_mod=self.mask,
            score_mod=self.score,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=dtype,
            name=self.name,
            block_sparse=block_sparse,
        )

    def attend(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float | None,
        captures: Mapping[str, Any],
        block_sparse: BlockSparse | None = None,
        *,
        max_scores: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """out and lse of a call, and the largest score of each row where it is asked for.

        Args:
            tensors: query, key and value; key and value of batch 1 are those of all queries.
            captures: the other arguments of the operator, with a layout for a ``block_sparse``.
        """
        query, key, value = tensors
        batch, dim, dim_v = query.shape[0], query.shape[3], value.shape[3]
        if key.shape[0] != batch:
            key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
        if scale is None and dim % HEAD_DIM_STEP:
            scale = dim**-0.5
        query, key, value = padded(query), padded(key), padded(value)
        dims = int(query.shape[3]), int(value.shape[3])
        operator = self.operator(*dims, DTYPES[query.dtype], block_sparse)
        largest = None
        if max_scores:
            request = AuxRequest(lse=True, max_scores=True)
            out, aux = operator(query, key, value, scale=scale, return_aux=request, **captures)
            lse, largest = aux.lse, aux.max_scores
            assert lse is not None, "it is asked for"
        else:
            out, lse = operator(query, key, value, scale=scale, return_lse=True, **captures)
        return (out[..., :dim_v] if dim_v % HEAD_DIM_STEP else out), lse, largest

    def captures(
        self,
        record: Record,
        device: torch.device,
        constant: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> dict[str, Any]:
        """The arguments of the operator, except for a block-sparse layout.

        Args:
            constant: is applied to tensors that the mods make.
        """
        arguments: dict[str, Any] = {}
        for name, captured in self.tensors.items():
            arguments[name] = captured.as_argument(record, device, constant)
        for name, (captured, dim) in self.sizes.items():
            arguments[name] = captured.tensor_in(record).shape[dim]
        for name, index in self.numbers.items():
            arguments[name] = record.numbers[index]
        return arguments


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with contiguous rows, and with zeros up to a head dim that kernels support.

    The zeros change no product.
    """
    missing = -tensor.shape[3] % HEAD_DIM_STEP
    if missing:
        return torch.nn.functional.pad(tensor, (0, missing))
    return tensor if tensor.stride()[3] == 1 else tensor.contiguous()


def trace(
    mask_mod: Mod | None,
    score_mod: Mod | None,
    record: Record,
    bounds: Mapping[sympy.Symbol, Limits] | None = None,
    varying: frozenset[int] = frozenset(),
) -> TracedMods:
    """The mods of a record, which has notes.

    Args:
        mask_mod, score_mod: the mods, for their names and lines.
        bounds: the least and the greatest value of each position symbol, on which the expressions
            may rely; None for expressions that hold at all positions from 0 on.
        varying: the places of numbers that become run-time scalars.

    Raises:
        SpecError: kernels cannot express a mod; the message names the operation and the line.
    """
    notes = record.notes
    assert notes is not None, "lines and names are part of what is traced"
    # Numbers that a mod makes have values, also where the tensors of the call have none.
    device = record.key.device
    device = torch.device("cpu") if device.type == "meta" else device
    tracer = Tracer(device, bounds or {}, record.tensors, notes.names, run)
    with unset_fake_temporarily():
        mask, score = replay(tracer, record, varying)
    if mask is not None:
        _check_result("mask_mod", mask_mod, mask)
    if score is not None:
        _check_result("score_mod", score_mod, score)
    return _traced_mods(mask_mod, score_mod, record, tracer, mask, score)


def _traced_mods(
    mask_mod: Mod | None,
    score_mod: Mod | None,
    record: Record,
    tracer: Tracer,
    mask_array: TracedArray | None,
    score_array: TracedArray | None,
) -> TracedMods:
    mask = None if mask_array is None else mask_array.entry
    score = None if score_array is None else score_array.entry
    assert mask is None or mask.lost is None, "a condition is never minus infinity"
    mask_value = None if mask is None else condition(mask.value)
    mask_mod_condition = sympy.true if mask_value is None else mask_value.expr
    score_value = None if score is None else number(score.value)
    if score_value is not None and score is not None and score.lost is not None:
        if SCORE in score.lost.expr.free_symbols:  # no tile can be skipped by the score
            score_value = where(score.lost, -math.inf, score_value)
        else:
            mask_value = ~score.lost if mask_value is None else mask_value & ~score.lost
    captured = {
        tensor.name: _captured(source, learned)
        for source in tracer.sources
        for learned, tensor in source.spec_tensors.items()
    }
    used = {
        capture.name
        for value in (mask_value, score_value)
        if value is not None
        for capture in value.captures
    }
    created = tuple(x.created_number for x in tracer.sources if x.created_number is not None)
    lines = mask_mod if mask_mod is not None else score_mod
    return TracedMods(
        mask=_stored(mask_value, lines),
        score=_stored(score_value, score_mod),
        mask_mod_condition=mask_mod_condition,
        name=_name_of(mask_mod, score_mod),
        tensors={name: location for name, location in captured.items() if name in used},
        sizes={
            scalar.name: (_captured(source, False), dim)
            for (source, dim), scalar in tracer.sizes.items()
            if scalar.name in used
        },
        numbers={x.name: index for index, x in tracer.numbers.items() if x.name in used},
        assumed=tuple(tracer.assumed),
        created=created,
        shapes=_shapes(record, created) if tracer.rigid else None,
    )


def _shapes(record: Record, created: tuple[int, ...]) -> tuple[torch.Size, ...]:
    return tuple(t.shape for t in (*record.tensors, *(record.created_tensors[n] for n in created)))


def _captured(source: CapturedTensor, learned: bool) -> CaptureLocation:
    constant = (
        source.tensor if source.tensor_index is None and source.created_number is None else None
    )
    return CaptureLocation(source.tensor_index, source.created_number, constant, learned)


def _check_result(role: str, mod: Mod | None, array: TracedArray) -> None:
    is_mask, wrong = role == "mask_mod", ""
    if array.shape:
        wrong = f"returned a tensor of shape {array.shape}"
    elif is_mask != (array.dtype == torch.bool) and not (
        is_mask and is_condition(as_condition(array.entry.value.expr))
    ):
        wrong = f"returned a {'number' if is_mask else 'condition'}, {array.dtype}"
    if wrong:
        assert mod is not None
        refuse_result(role, mod, wrong)


def _stored(value: Traced | None, mod: Mod | None) -> PickledMod | None:
    if value is None or mod is None:
        return None
    captures: tuple[Capture, ...] = value.captures
    return PickledMod(TracedMod(value.expr, captures, _lines_of(mod, python_text(value.expr))))


def _lines_of(mod: Mod, fallback: str) -> SourceLines:
    """The user's lines of ``mod``; a mod that torch combined is shown by its expression."""
    if isinstance(lines := getattr(mod, "lines", None), SourceLines):  # of a traced graph
        return SourceLines(lines.file, lines.line, fallback)
    if not _is_torchs(mod):
        lines = lines_of(mod, fallback)
        return lines if lines.text else SourceLines(lines.file, lines.line, fallback)
    for inner in _closed_over(mod):
        code = code_of(inner)
        if code is not None and not _is_torchs(inner):
            return SourceLines(shown_path(code.co_filename), code.co_firstlineno, fallback)
    return SourceLines("<torch>", 0, fallback)


def _is_torchs(mod: Mod) -> bool:
    return str(getattr(mod, "__module__", "")).partition(".")[0] == "torch"


def _closed_over(mod: Mod) -> list[Mod]:
    """The functions in the closure of a function and, recursively, in theirs."""
    functions: list[Mod] = []
    for cell in getattr(mod, "__closure__", None) or ():
        content = cell.cell_contents
        for item in content if isinstance(content, tuple | list) else (content,):
            if callable(item):
                functions += [item, *_closed_over(item)]
    return functions


def _name_of(*mods: Mod | None) -> str:
    for mod in mods:
        inner = getattr(mod, "func", mod)
        name = str(getattr(inner, "__name__", "")).strip("_")
        is_reserved = name in GENERIC_NAMES or name in _TORCH_NAMES or name in BUILT_IN_NAMES
        if name.isidentifier() and name.isascii() and not is_reserved:
            return as_name(name)
    return "flex"
