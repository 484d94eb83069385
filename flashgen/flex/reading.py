"""Mods written for torch, read: what a spec is made of, and where each call finds its captures."""

from __future__ import annotations

import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

import flashgen.expr as fg
from flashgen.errors import FlashgenError, SpecError
from flashgen.expr import SourceLines, Traced, shown
from flashgen.expr.limits import Limits, limits
from flashgen.expr.names import BUILT_IN_NAMES
from flashgen.expr.source import code_of, is_library, lines_of, shown_path
from flashgen.expr.stored import StoredMod
from flashgen.expr.trace import Trace
from flashgen.expr.traced import Capture
from flashgen.flex.array import Array, Entry, condition, literal, number
from flashgen.flex.key import Key, Reach
from flashgen.flex.tracer import DTYPES, Source, TracedTensor, Tracer
from flashgen.ops import Attention, attention
from flashgen.sparse import BlockSparse
from flashgen.spec import AttentionSpec

Mod = Callable[..., Any]

_MOST_READINGS = 1024
"""Readings kept in mind; beyond that the one unused for longest is forgotten."""

_MOST_LENGTHS = 16
"""The same for one key, where a reading depends on lengths."""

_GENERIC = ("mask_mod", "score_mod", "<lambda>", "mask", "score", "mod", "__call__")
_TORCH_NAMES = ("or_mask", "and_mask", "noop_mask")

_lock = threading.RLock()
_readings: OrderedDict[Key, list[Reading]] = OrderedDict()


@dataclass(frozen=True)
class Sizes:
    """What a reading may depend on beside the mods."""

    batch: int
    heads: int
    seq_q: int
    seq_k: int
    device: torch.device

    @property
    def bounds(self) -> Mapping[sympy.Symbol, Limits]:
        return {
            fg.B: (0, max(self.batch - 1, 0)),
            fg.H: (0, max(self.heads - 1, 0)),
            fg.Q: (0, max(self.seq_q - 1, 0)),
            fg.K: (0, max(self.seq_k - 1, 0)),
        }


@dataclass(frozen=True)
class Captured:
    """Where a call finds a captured tensor: its place in the reach of the mods, or the tensor."""

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
        if not self.learned:
            tensor = tensor.detach()
        if tensor.dtype == torch.float64:
            tensor = tensor.to(torch.float32)
        if tensor.dim() == 0 and tensor.device != device:
            tensor = tensor.to(device)
        return tensor


@dataclass
class Reading:
    """A mask_mod and a score_mod as flashgen's.

    Attributes:
        of_mask_mod: what the mask_mod alone keeps, true where there is none; ``mask`` is also false
            where the score_mod gives minus infinity.
        tensors: the captured tensors by the names that the spec has for them.
        sizes: the lengths of captured tensors that it is given as numbers: tensor and dimension.
        assumed: integer expressions that must not be negative at the positions of a call.
        shapes: of all tensors in reach, where the reading depends on them; else None.
        lasting: whether it serves other calls with the same key.
    """

    mask: StoredMod | None
    score: StoredMod | None
    of_mask_mod: sympy.Basic
    name: str
    tensors: dict[str, Captured]
    sizes: dict[str, tuple[Captured, int]]
    assumed: tuple[sympy.Expr, ...]
    shapes: tuple[torch.Size, ...] | None
    lasting: bool
    _operators: dict[object, Attention] = field(default_factory=dict)
    _checked: set[Sizes] = field(default_factory=set)

    def serves(self, sizes: Sizes, reach: Sequence[torch.Tensor]) -> bool:
        """True when a call of other sizes would be read the same way."""
        if self.shapes is not None and self.shapes != tuple(t.shape for t in reach):
            return False
        if sizes not in self._checked:
            bounds = sizes.bounds
            if any(limits(expr, bounds)[0] < 0 for expr in self.assumed):
                return False
            if len(self._checked) >= _MOST_READINGS:
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
        """The arguments of the operator, but for a layout."""
        given: dict[str, Any] = {}
        for name, captured in self.tensors.items():
            given[name] = captured.as_argument(reach, device)
        for name, (captured, dim) in self.sizes.items():
            given[name] = captured.of(reach).shape[dim]
        return given


def read(
    mask_mod: Mod | None, score_mod: Mod | None, sizes: Sizes
) -> tuple[Reading, list[torch.Tensor]]:
    """The reading of some mods, an earlier one where that serves, and the tensors in their reach.

    Raises:
        SpecError: one of them cannot be expressed; it names the operation and the user's line.
    """
    reach = Reach()
    key = _key_of(reach, (mask_mod, score_mod), sizes.device)
    if key is None:
        return _read(mask_mod, score_mod, sizes, reach), []
    with _lock:
        known = _readings.get(key)
        if known is not None:
            _readings.move_to_end(key)
            for reading in known:
                if reading.serves(sizes, reach.tensors):
                    return reading, reach.tensors
        # The second reading makes no use of the sizes of one call.
        reading = _read(mask_mod, score_mod, sizes, reach, tight=not known)
        if reading.lasting:
            kept = _readings.setdefault(key, [])
            kept.insert(0, reading)
            del kept[_MOST_LENGTHS:]
            while len(_readings) > _MOST_READINGS:
                _readings.popitem(last=False)
    return reading, reach.tensors


def _key_of(reach: Reach, mods: Sequence[Mod | None], device: torch.device) -> Key | None:
    """None where there is no key, whatever the user's objects do when they are looked at."""
    try:
        key = reach.key(mods), device
        hash(key)
    except Exception:
        return None
    return key


def _read(
    mask_mod: Mod | None, score_mod: Mod | None, sizes: Sizes, reach: Reach, tight: bool = True
) -> Reading:
    tracer = Tracer(sizes.device, sizes.bounds if tight else {}, reach.tensors, reach.names)
    mask = score = None
    if mask_mod is not None:
        mask = _traced(tracer, "mask_mod", mask_mod)
    if score_mod is not None:
        score = _traced(tracer, "score_mod", score_mod)
    made_mask = None if mask is None else condition(_finite(mask.value, mask))
    of_mask_mod = sympy.true if made_mask is None else made_mask.expr
    made_score = None if score is None else number(score.value)
    if score is not None and score.lost is not None:
        _check_lost(score.lost, score_mod)
        made_mask = ~score.lost if made_mask is None else made_mask & ~score.lost
    tensors = {
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
    return Reading(
        mask=_stored(made_mask, lines),
        score=_stored(made_score, score_mod),
        of_mask_mod=of_mask_mod,
        name=_name_of(mask_mod, score_mod),
        tensors={name: captured for name, captured in tensors.items() if name in used},
        sizes={
            name: (_captured(source, False), dim)
            for name, (source, dim) in tracer.sizes.items()
            if name in used
        },
        assumed=tuple(tracer.assumed),
        shapes=tuple(t.shape for t in reach.tensors) if tracer.rigid else None,
        lasting=all(source.constant or source.place is not None for source in tracer.sources),
    )


def _captured(source: Source, learned: bool) -> Captured:
    return Captured(source.place, None if source.place is not None else source.tensor, learned)


def _traced(tracer: Tracer, role: str, mod: Mod) -> Entry:
    positions = [tracer.symbol(symbol, torch.int32) for symbol in (fg.B, fg.H, fg.Q, fg.K)]
    score = [tracer.symbol(fg.SCORE, torch.float32)] if role == "score_mod" else []
    try:
        with tracer:
            returned = mod(*score, *positions)
    except FlashgenError:
        raise
    except Exception as error:
        raise _wrapped(error, role, mod) from error
    array = _array_of(tracer, returned)
    wrong = None
    if array is None:
        wrong = f"returned a {type(returned).__name__}"
    elif array.shape:
        wrong = f"returned a tensor of shape {array.shape}"
    elif role == "mask_mod" and array.dtype != torch.bool:
        wrong = f"returned a number, {array.dtype}"
    elif role == "score_mod" and array.dtype == torch.bool:
        wrong = "returned a condition, torch.bool"
    if wrong is not None or array is None:
        raise SpecError(
            f"{role} returns something else than one {_KINDS[role]}",
            where=str(_lines_of(mod, "")),
            numbers=wrong or "",
            way_out=f"a tensor without dimensions, as in return {_EXAMPLES[role]}",
        )
    return array.entry


_KINDS = {"mask_mod": "condition", "score_mod": "number"}
_EXAMPLES = {"mask_mod": "q_idx >= kv_idx", "score_mod": "score + bias[h, kv_idx]"}


def _array_of(tracer: Tracer, returned: object) -> Array | None:
    if isinstance(returned, bool | int | float):
        dtype = torch.bool if isinstance(returned, bool) else torch.float32
        return Array((), dtype, lambda _: literal(returned))
    if isinstance(returned, TracedTensor):
        return returned.array
    return tracer.traced(returned).array if isinstance(returned, torch.Tensor) else None


def _finite(value: Traced, entry: Entry) -> Traced:
    assert entry.lost is None  # conditions are never minus infinity
    return value


def _check_lost(lost: Traced, mod: Mod | None) -> None:
    assert mod is not None
    if fg.SCORE in lost.expr.free_symbols:
        raise SpecError(
            "whether a score becomes minus infinity depends on the score",
            where=str(_lines_of(mod, "")),
            numbers=f"minus infinity where {shown(lost.expr)}",
            way_out="a condition of b, h, q_idx and kv_idx, or a large negative number",
        )


def _stored(made: Traced | None, mod: Mod | None) -> StoredMod | None:
    if made is None or mod is None:
        return None
    captures: tuple[Capture, ...] = made.captures
    return StoredMod(Trace(made.expr, captures, _lines_of(mod, shown(made.expr))))


def _lines_of(mod: Mod, fallback: str) -> SourceLines:
    """Where the user wrote ``mod``; what torch combined is shown by what it came to."""
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
    """The functions that a function combines, those of combinations within it too."""
    found: list[Mod] = []
    for cell in getattr(mod, "__closure__", None) or ():
        content = cell.cell_contents
        for item in content if isinstance(content, tuple | list) else (content,):
            if callable(item):
                found += [item, *_closed_over(item)]
    return found


def _wrapped(error: Exception, role: str, mod: Mod) -> SpecError:
    steps = traceback.walk_tb(error.__traceback__)
    users = [(frame, line) for frame, line in steps if not is_library(frame)]
    where = str(_lines_of(mod, ""))
    if users:
        frame, line = users[-1]
        where = f"{shown_path(frame.f_code.co_filename)}:{line}"
    return SpecError(
        f"{role} raised {type(error).__name__}: {error}",
        where=where,
        numbers="while it was read with symbols in place of numbers",
        way_out="a mod that torch's flex_attention runs too: functions of torch on tensors "
        "without dimensions",
    )


def _name_of(*mods: Mod | None) -> str:
    for mod in mods:
        inner = getattr(mod, "func", mod)
        name = str(getattr(inner, "__name__", "")).strip("_")
        taken = name in _GENERIC or name in _TORCH_NAMES or name in BUILT_IN_NAMES
        if name.isidentifier() and name.isascii() and not taken:
            return name
    return "flex"


__all__ = ["DTYPES", "Reading", "Sizes", "read"]
