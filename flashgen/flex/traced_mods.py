"""Traced torch mods: the expressions of a spec, and where a call finds its captured tensors."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from flashgen.errors import FlashgenError, SpecError
from flashgen.flex.aten import run
from flashgen.flex.mod_key import Key, ReachableValues
from flashgen.flex.traced_array import Entry, TracedArray, condition, literal, number
from flashgen.flex.tracer import CapturedTensor, TracedTensor, Tracer
from flashgen.language import SCORE, B, H, K, Q, Traced, is_condition, python_text
from flashgen.language.block_layout import BlockSparse
from flashgen.language.capture_names import BUILT_IN_NAMES
from flashgen.language.integer_limits import Limits, limits
from flashgen.language.mod_functions import where
from flashgen.language.operators import as_condition
from flashgen.language.spec import AttentionSpec
from flashgen.language.spec_options import GENERIC_NAMES
from flashgen.language.traced import Capture
from flashgen.language.tracing import PickledMod, TracedMod
from flashgen.language.user_source import SourceLines, code_of, lines_of, shown_path, user_line_in
from flashgen.ops import Attention, attention

Mod = Callable[..., Any]

_MOST_KEPT = 1024
"""The number of keys whose traced mods are kept, least recently used first to go."""

_MOST_LENGTHS = 16
"""The number of traced mods kept per key, where the expressions depend on lengths."""

_TORCH_NAMES = ("or_mask", "and_mask", "noop_mask")

_lock = threading.RLock()
_kept_mods: OrderedDict[Key, list[TracedMods]] = OrderedDict()


@dataclass(frozen=True)
class CallSizes:
    """The sizes of a call on which traced expressions may depend."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    device: torch.device

    @property
    def bounds(self) -> Mapping[sympy.Symbol, Limits]:
        counts = zip((B, H, Q, K), (self.batch, self.heads, self.seq_q, self.seq_k), strict=True)
        return {symbol: (0, max(count - 1, 0)) for symbol, count in counts}


@dataclass(frozen=True)
class CaptureLocation:
    """Where a call finds a captured tensor: its index among the reachable ones, or itself."""

    place: int | None
    held: torch.Tensor | None
    learned: bool = False

    def of(self, reach: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.held is not None:
            return self.held
        assert self.place is not None
        return reach[self.place]

    def as_argument(self, reach: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        tensor = self.of(reach)
        return as_argument(tensor if self.learned else tensor.detach(), device)


def as_argument(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A captured tensor in a dtype that kernels read; a number follows the queries' device."""
    if tensor.dtype == torch.float64:
        tensor = tensor.to(torch.float32)
    if tensor.dim() == 0 and tensor.device != device:
        tensor = tensor.to(device)
    return tensor


@dataclass
class TracedMods:
    """A torch mask_mod and score_mod as mods of flashgen.

    Attributes:
        mask, score: the mods of the spec; None where the user gave none.
        of_mask_mod: the condition of the mask_mod alone, true without one; ``mask`` is false also
            where the score_mod returns minus infinity.
        tensors: the captured tensors by their names in the spec.
        sizes: lengths of captured tensors that are run-time scalars: tensor and dimension.
        assumed: integer expressions that must not be negative at any position of a call.
        shapes: the shapes of all reachable tensors if the expressions depend on them, else None.
        lasting: whether other calls with the same key can use the expressions.
    """

    mask: PickledMod | None
    score: PickledMod | None
    of_mask_mod: sympy.Basic
    name: str
    tensors: dict[str, CaptureLocation]
    sizes: dict[str, tuple[CaptureLocation, int]]
    assumed: tuple[sympy.Expr, ...]
    shapes: tuple[torch.Size, ...] | None
    lasting: bool
    _operators: dict[object, Attention] = field(default_factory=dict)
    _checked: set[CallSizes] = field(default_factory=set)

    def serves(self, sizes: CallSizes, reach: Sequence[torch.Tensor]) -> bool:
        """True if tracing for a call of these sizes would give the same expressions."""
        if self.shapes is not None and self.shapes != tuple(t.shape for t in reach):
            return False
        if sizes not in self._checked:
            bounds = sizes.bounds
            if any(limits(expr, bounds)[0] < 0 for expr in self.assumed):
                return False
            if len(self._checked) >= _MOST_KEPT:
                self._checked.clear()
            self._checked.add(sizes)
        return True

    def operator(
        self, head_dim: int, head_dim_v: int, dtype: str, block_sparse: BlockSparse | None = None
    ) -> Attention:
        options = head_dim, head_dim_v, dtype, block_sparse
        if options not in self._operators:
            spec = AttentionSpec(
                mask_mod=self.mask,
                score_mod=self.score,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                dtype=dtype,
                name=self.name,
                block_sparse=block_sparse,
            )
            self._operators[options] = attention(spec)
        return self._operators[options]

    def captures(self, reach: Sequence[torch.Tensor], device: torch.device) -> dict[str, Any]:
        """The arguments of the operator, except for a block-sparse layout."""
        given: dict[str, Any] = {}
        for name, captured in self.tensors.items():
            given[name] = captured.as_argument(reach, device)
        for name, (captured, dim) in self.sizes.items():
            given[name] = captured.of(reach).shape[dim]
        return given


def read(
    mask_mod: Mod | None, score_mod: Mod | None, sizes: CallSizes
) -> tuple[TracedMods, list[torch.Tensor]]:
    """The traced mods, from an earlier call where possible, and the tensors that they reach.

    Raises:
        SpecError: kernels cannot express a mod; the message names the operation and the line.
    """
    reach = ReachableValues()
    key = _key_of(reach, (mask_mod, score_mod), sizes.device)
    if key is None:
        return _read(mask_mod, score_mod, sizes, reach), []
    with _lock:
        known = _kept_mods.get(key)
        if known is not None:
            _kept_mods.move_to_end(key)
            for reading in known:
                if reading.serves(sizes, reach.tensors):
                    return reading, reach.tensors
        # The second trace for one key assumes nothing about the sizes of a call.
        reading = _read(mask_mod, score_mod, sizes, reach, tight=not known)
        if reading.lasting:
            kept = _kept_mods.setdefault(key, [])
            kept.insert(0, reading)
            del kept[_MOST_LENGTHS:]
            while len(_kept_mods) > _MOST_KEPT:
                _kept_mods.popitem(last=False)
    return reading, reach.tensors


def _key_of(reach: ReachableValues, mods: Sequence[Mod | None], device: torch.device) -> Key | None:
    """None where there is no key, also if inspecting the user's objects raises an exception."""
    try:
        key = reach.key(mods), device
        hash(key)
    except Exception:
        return None
    return key


def _read(
    mask_mod: Mod | None,
    score_mod: Mod | None,
    sizes: CallSizes,
    reach: ReachableValues,
    tight: bool = True,
) -> TracedMods:
    bounds = sizes.bounds if tight else {}
    return trace(mask_mod, score_mod, sizes.device, reach.tensors, reach.names, bounds)


def trace(
    mask_mod: Mod | None,
    score_mod: Mod | None,
    device: torch.device,
    tensors: Sequence[torch.Tensor],
    names: Sequence[str],
    bounds: Mapping[sympy.Symbol, Limits] | None = None,
) -> TracedMods:
    """The traced mods, from no earlier call.

    Args:
        tensors, names: the captured tensors that later calls can find by their place here, and
            their names, which may be empty.
        bounds: the least and the greatest value of each position symbol, on which the expressions
            may rely; None for expressions that hold at all positions from 0 on.

    Raises:
        SpecError: kernels cannot express a mod; the message names the operation and the line.
    """
    tracer = Tracer(device, bounds or {}, tensors, names, run)
    mask = _traced(tracer, "mask_mod", mask_mod)
    score = _traced(tracer, "score_mod", score_mod)
    assert mask is None or mask.lost is None, "a condition is never minus infinity"
    made_mask = None if mask is None else condition(mask.value)
    of_mask_mod = sympy.true if made_mask is None else made_mask.expr
    made_score = None if score is None else number(score.value)
    if made_score is not None and score is not None and score.lost is not None:
        if SCORE in score.lost.expr.free_symbols:  # no tile can be skipped by the score
            made_score = where(score.lost, -math.inf, made_score)
        else:
            made_mask = ~score.lost if made_mask is None else made_mask & ~score.lost
    captured = {
        tensor.name: _captured(source, learned)
        for source in tracer.sources
        for learned, tensor in source.known.items()
    }
    used = {
        capture.name
        for made in (made_mask, made_score)
        if made is not None
        for capture in made.captures
    }
    lines = mask_mod if mask_mod is not None else score_mod
    return TracedMods(
        mask=_stored(made_mask, lines),
        score=_stored(made_score, score_mod),
        of_mask_mod=of_mask_mod,
        name=_name_of(mask_mod, score_mod),
        tensors={name: place for name, place in captured.items() if name in used},
        sizes={
            scalar.name: (_captured(source, False), dim)
            for (source, dim), scalar in tracer.sizes.items()
            if scalar.name in used
        },
        assumed=tuple(tracer.assumed),
        shapes=tuple(t.shape for t in tensors) if tracer.rigid else None,
        lasting=all(source.constant or source.place is not None for source in tracer.sources),
    )


def _captured(source: CapturedTensor, learned: bool) -> CaptureLocation:
    return CaptureLocation(
        source.place, None if source.place is not None else source.tensor, learned
    )


def _traced(tracer: Tracer, role: str, mod: Mod | None) -> Entry | None:
    if mod is None:
        return None
    positions = [tracer.symbol(symbol, torch.int32) for symbol in (B, H, Q, K)]
    score = [tracer.symbol(SCORE, torch.float32)] if role == "score_mod" else []
    try:
        with tracer:
            returned = mod(*score, *positions)
    except FlashgenError:
        raise
    except Exception as error:
        raise _wrapped(error, role, mod) from error
    array = _array_of(tracer, returned)
    is_mask, wrong = role == "mask_mod", ""
    if array is None:
        wrong = f"returned a {type(returned).__name__}"
    elif array.shape:
        wrong = f"returned a tensor of shape {array.shape}"
    elif is_mask != (array.dtype == torch.bool) and not (is_mask and _is_flag(array)):
        wrong = f"returned a {'number' if is_mask else 'condition'}, {array.dtype}"
    if wrong or array is None:
        example = "q_idx >= kv_idx" if is_mask else "score + bias[h, kv_idx]"
        raise SpecError(
            f"{role} must return one {'condition' if is_mask else 'number'}",
            where=str(_lines_of(mod, "")),
            numbers=wrong,
            way_out=f"a tensor without dimensions, as in return {example}",
        )
    return array.entry


def _is_flag(array: TracedArray) -> bool:
    """True for an integer that a captured tensor holds: a condition where one is expected."""
    return is_condition(as_condition(array.entry.value.expr))


def _array_of(tracer: Tracer, returned: object) -> TracedArray | None:
    if isinstance(returned, bool | int | float):
        dtype = torch.bool if isinstance(returned, bool) else torch.float32
        return TracedArray((), dtype, lambda _: literal(returned))
    if isinstance(returned, TracedTensor):
        return returned.array
    return tracer.traced(returned).array if isinstance(returned, torch.Tensor) else None


def _stored(made: Traced | None, mod: Mod | None) -> PickledMod | None:
    if made is None or mod is None:
        return None
    captures: tuple[Capture, ...] = made.captures
    return PickledMod(TracedMod(made.expr, captures, _lines_of(mod, python_text(made.expr))))


def _lines_of(mod: Mod, fallback: str) -> SourceLines:
    """The user's lines of ``mod``; a mod that torch combined is shown by its expression."""
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
    found: list[Mod] = []
    for cell in getattr(mod, "__closure__", None) or ():
        content = cell.cell_contents
        for item in content if isinstance(content, tuple | list) else (content,):
            if callable(item):
                found += [item, *_closed_over(item)]
    return found


def _wrapped(error: Exception, role: str, mod: Mod) -> SpecError:
    at = user_line_in(error)
    return SpecError(
        f"{role} raised {type(error).__name__}: {error}",
        where=str(_lines_of(mod, "")) if at is None else f"{shown_path(at[0])}:{at[1]}",
        numbers="while it was traced with symbols in place of numbers",
        way_out="a mod that torch's flex_attention runs too: functions of torch on tensors "
        "without dimensions",
    )


def _name_of(*mods: Mod | None) -> str:
    for mod in mods:
        inner = getattr(mod, "func", mod)
        name = str(getattr(inner, "__name__", "")).strip("_")
        taken = name in GENERIC_NAMES or name in _TORCH_NAMES or name in BUILT_IN_NAMES
        if name.isidentifier() and name.isascii() and not taken:
            return name
    return "flex"
