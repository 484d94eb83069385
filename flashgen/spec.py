"""An attention variant as a frozen value, checked when it is made."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import sympy

from .errors import FlashgenError, SpecError
from .expr import SCORE, Scalar, SourceLines, Tensor, trace_mask, trace_score
from .expr.digest import digest_of
from .expr.sink import sink_of
from .expr.source import shown_path, user_location
from .expr.stored import StoredMod
from .expr.trace import Trace
from .expr.traced import Capture
from .sparse import NAMES as LAYOUT_NAMES
from .sparse import TENSORS as LAYOUT_TENSORS
from .sparse import BlockSparse
from .sparse import check_names as check_layout_names

DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIM_STEP = 8
HEAD_DIM_MAX = 256

Mod = Callable[..., object]

BOUNDARIES = tuple(Tensor(f"cu_seqlens_{axis}", ("boundaries",), "int32") for axis in ("q", "k"))
"""What a spec with packed sequences captures: the first row of each, and one beyond the last."""

_GENERIC_NAMES = ("mask_mod", "score_mod", "<lambda>", "mask", "score", "mod", "__call__")


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What to compute: ``softmax(score_mod(scale * q.k) where mask_mod else -inf) . v``.

    Args:
        mask_mod: ``mask_mod(b, h, q, k)``, true where the score is kept. None keeps all.
        score_mod: ``score_mod(score, b, h, q, k)``, the new score. None changes nothing. -inf masks
            the score out, as does anything of -1e30 or less. (A row with nothing but scores of
            some -1e9 keeps too few digits of LSE for its gradients, in float32.)
        head_dim: length of q and k vectors, a multiple of 8 up to 256.
        dtype: "float16", "bfloat16" or "float32", of q, k, v and the output.
        head_dim_v: length of v vectors; head_dim when None.
        scale: factor on q.k, positive; 1 / sqrt(head_dim) when None.
        dropout: whether kernels drop elements of P; the probability is given with each call.
        packed: whether each call has several sequences of own lengths, one behind the other in one
            batch entry, with their boundaries in ``cu_seqlens_q`` and ``cu_seqlens_k``. To the
            functions b is the sequence, and positions and lengths are those within it.
        name: identifier that kernels are named by; from the file or the function when None.
        sink: a logit for each head that joins the softmax's denominator: a Tensor of floats with
            dims ("heads",), (1,) or (), given at the call like a captured one. True stands for
            ``Tensor("sink", ("heads",), "float32", grad=True)``, None and False for no sink.
        block_sparse: which blocks of scores are computed; None: all that the mask keeps. What a
            layout leaves out is masked out, whatever mask_mod says.

    Attributes:
        mask: sympy Boolean over B, H, Q, K, sizes and scalars: mask_mod, without the layout.
        keep: the same with the condition that the block is live; what scores are kept.
        score: sympy expression over SCORE and the same.
        scalars: the user's run-time numbers, sizes excluded, in order of first use.
        tensors: the tensors that a call gives: those that the functions capture, in order of first
            use; then, where sequences are packed, their boundaries; the sink, where the functions
            do not read it; and a layout that is no function.
        mask_line, score_line: the user's Python, None where no function was given.
        file: the spec file that it was loaded from, None when it was made otherwise.

    Raises:
        SpecError: for options outside these ranges and functions that cannot be read; several
            mistakes are told in one error.
    """

    mask_mod: Mod | None = None
    score_mod: Mod | None = None
    head_dim: int = 64
    dtype: str = "float16"
    head_dim_v: int | None = None
    scale: float | None = None
    dropout: bool = False
    packed: bool = False
    name: str | None = None
    sink: Any = None  # a Tensor or None once the spec is made
    block_sparse: BlockSparse | None = None

    mask: sympy.Basic = field(init=False, repr=False)
    keep: sympy.Basic = field(init=False, repr=False)
    score: sympy.Expr = field(init=False, repr=False)
    scalars: tuple[Scalar, ...] = field(init=False, repr=False)
    tensors: tuple[Tensor, ...] = field(init=False, repr=False)
    mask_line: SourceLines | None = field(init=False, repr=False)
    score_line: SourceLines | None = field(init=False, repr=False)
    named: bool = field(init=False, repr=False)
    file: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        where = user_location()
        mistakes = _option_mistakes(self, where)
        mask, score, sink = None, None, None
        try:
            sink = sink_of(self.sink)
        except SpecError as error:
            mistakes.append(error)
        try:
            mask = _traced(self.mask_mod, trace_mask)
        except SpecError as error:
            mistakes.append(error)
        try:
            score = _traced(self.score_mod, trace_score)
        except SpecError as error:
            mistakes.append(error)
        used = [c for trace in (mask, score) if trace is not None for c in trace.captures]
        used += BOUNDARIES if self.packed is True else ()
        used += [] if sink is None else [sink]
        captures, clashes = _distinct(used, where)
        sparse = self.block_sparse
        if isinstance(sparse, BlockSparse):
            try:
                check_layout_names([capture.name for capture in captures], where)
            except SpecError as error:
                mistakes.append(error)
        _raise_all(mistakes + clashes)

        kept = sympy.true if mask is None else mask.expr
        given = LAYOUT_TENSORS if sparse is not None and not sparse.is_static else ()
        derived: dict[str, Any] = {
            "mask": kept,
            "keep": kept if sparse is None else sympy.And(kept, sparse.live),
            "score": SCORE if score is None else score.expr,
            "scalars": tuple(c for c in captures if isinstance(c, Scalar) and not c.is_size),
            "tensors": (*(c for c in captures if isinstance(c, Tensor)), *given),
            "mask_line": None if mask is None else mask.lines,
            "score_line": None if score is None else score.lines,
            "named": self.name is not None,
            "head_dim_v": self.head_dim if self.head_dim_v is None else self.head_dim_v,
            "scale": None if self.scale is None else float(self.scale),
            "sink": sink,
            "name": self.name
            or _name_of(self.mask_mod, self.score_mod, getattr(sparse, "layout", None)),
        }
        for key, value in derived.items():
            object.__setattr__(self, key, value)

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        """All tensors that kernels may read: `tensors`, and a layout that is a function."""
        static = self.block_sparse is not None and self.block_sparse.is_static
        return (*self.tensors, *LAYOUT_TENSORS) if static else self.tensors

    @property
    def computes(self) -> tuple[object, ...]:
        """What the kernels compute, wherever it is written."""
        return (
            self.name,
            self.mask,
            self.score,
            tuple(scalar.key for scalar in self.scalars),
            tuple(tensor.key for tensor in self.tensors),
            self.head_dim,
            self.head_dim_v,
            self.dtype,
            self.scale,
            self.dropout,
            self.packed,
            None if self.sink is None else self.sink.name,
            self.block_sparse,
        )

    @property
    def identity(self) -> tuple[object, ...]:
        """Everything that the emitted files depend on, and nothing else."""
        return (*self.computes, self.mask_line, self.score_line, self.file)

    @property
    def digest(self) -> str:
        """A hash of what the kernels compute, the same in every process."""
        return digest_of(self.computes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionSpec) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled by what was read from the functions: lambdas and closures are fine."""
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        free = self.mask.free_symbols | self.score.free_symbols
        own = set(LAYOUT_NAMES) if self.block_sparse is not None else set()
        if self.sink is not None and self.sink.symbol not in free:
            own.add(self.sink.name)
        captures: tuple[Capture, ...]
        captures = (*self.scalars, *(t for t in self.tensors if t.name not in own))
        for mod, expr, lines in (
            ("mask_mod", self.mask, self.mask_line),
            ("score_mod", self.score, self.score_line),
        ):
            if lines is not None:
                options[mod] = StoredMod(Trace(expr, captures, lines))
        return _restored, (options, self.named, self.file)

    def replace(self, **changes: Any) -> AttentionSpec:
        """A copy with some arguments changed; the functions are read again."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        if not self.named:
            given["name"] = None
        if self.head_dim_v == self.head_dim and "head_dim" in changes:
            given["head_dim_v"] = None
        copy = AttentionSpec(**{**given, **changes})
        if not self.named and "name" not in changes:
            object.__setattr__(copy, "name", self.name)
        object.__setattr__(copy, "file", self.file)
        return copy


def _traced(mod: Mod | None, trace: Callable[[Mod], Trace]) -> Trace | None:
    if mod is None:
        return None
    return mod.trace if isinstance(mod, StoredMod) else trace(mod)


def _restored(options: dict[str, Any], named: bool, file: str | None) -> AttentionSpec:
    spec = AttentionSpec(**options)
    object.__setattr__(spec, "named", named)
    object.__setattr__(spec, "file", file)
    return spec


def _option_mistakes(spec: AttentionSpec, where: str) -> list[SpecError]:
    mistakes: list[SpecError] = []

    def mistake(what: str, numbers: str, way_out: str) -> None:
        mistakes.append(SpecError(what, where=where, numbers=numbers, way_out=way_out))

    for option, value in (("head_dim", spec.head_dim), ("head_dim_v", spec.head_dim_v)):
        if value is None and option == "head_dim_v":
            continue
        nearest = _nearest_head_dim(value)
        if value is not nearest:
            mistake(
                f"{option} is a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {HEAD_DIM_MAX}",
                f"{option} {value!r}",
                f"{option}={nearest}",
            )
    if spec.dtype not in DTYPES:
        mistake(
            "dtype is none of those that kernels are made for",
            f"dtype {str(spec.dtype)!r}; available: {', '.join(DTYPES)}",
            f'dtype="{_nearest_dtype(str(spec.dtype))}"',
        )
    scale = spec.scale
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if scale is not None and not (number and 0 < scale < 2.0**127):
        mistake(
            "scale is a positive, finite number",
            f"scale {scale!r}",
            "scale=None for 1 / sqrt(head_dim); a factor of any sign belongs in score_mod",
        )
    if not isinstance(spec.dropout, bool):
        mistake(
            "dropout says whether there is any; the probability is an argument of the call",
            f"dropout {spec.dropout!r}",
            "dropout=True, and op(..., dropout_p=0.1)",
        )
    if not isinstance(spec.packed, bool):
        mistake(
            "packed says whether sequences are packed; their boundaries are arguments of the call",
            f"packed {spec.packed!r}",
            "packed=True, and op(..., cu_seqlens_q=..., cu_seqlens_k=...)",
        )
    sparse = spec.block_sparse
    if sparse is not None and not isinstance(sparse, BlockSparse):
        mistake(
            "block_sparse says which blocks of scores are computed",
            f"given a {type(sparse).__name__}",
            "block_sparse=fg.BlockSparse(layout, block_q=64, block_k=64)",
        )
    if spec.name is not None and not _is_name(spec.name):
        mistake(
            "name is an identifier, because kernels and files are named by it",
            f"name {spec.name!r}",
            f"name={_as_name(str(spec.name))!r}",
        )
    return mistakes


def _nearest_head_dim(value: object) -> int:
    """``value`` itself when it is a head dim, else one that is."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 64
    rounded = -(-value // HEAD_DIM_STEP) * HEAD_DIM_STEP
    nearest = max(HEAD_DIM_STEP, min(HEAD_DIM_MAX, rounded))
    return value if nearest == value else nearest


def _nearest_dtype(text: str) -> str:
    short = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
    for name in ("bfloat16", "float16", "float32"):
        if name in text:
            return name
    return short.get(text, "float32" if "64" in text else "float16")


def _is_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) is not None


def _as_name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")
    return name if _is_name(name) else f"spec_{name}".rstrip("_")


def _name_of(*mods: Mod | None) -> str:
    for mod in mods:
        name = getattr(mod, "__name__", "")
        if name and name not in _GENERIC_NAMES and _is_name(name):
            return str(name)
    return "attention"


def _distinct(captures: list[Capture], where: str) -> tuple[tuple[Capture, ...], list[SpecError]]:
    """Each capture once, and a mistake for every name that stands for two different ones."""
    first: dict[str, Capture] = {}
    mistakes = []
    for capture in captures:
        known = first.setdefault(capture.name, capture)
        if known.key != capture.key:
            mistakes.append(
                SpecError(
                    f"two different captures are named {capture.name!r}",
                    where=where,
                    numbers=f"{known!r} and {capture!r}",
                    way_out=f"one fg.{type(capture).__name__}, made once and used everywhere, "
                    "or two names",
                )
            )
    return tuple(first.values()), mistakes


def _raise_all(mistakes: list[SpecError]) -> None:
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise SpecError(
            f"{len(mistakes)} mistakes in one spec: " + "; ".join(m.what for m in mistakes),
            where="\n".join(m.where for m in mistakes),
            numbers="\n".join(m.numbers for m in mistakes),
            way_out="\n".join(m.way_out for m in mistakes),
        )


def load(path: str | Path) -> AttentionSpec:
    """The spec that a file defines: ``specs/causal.py``, or ``path.py:name`` for another variable.

    A spec without a name of its own is named by its variable, or by the file when that is ``spec``.

    Raises:
        SpecError: when there is no such file or variable, or running the file fails.
    """
    text, variable = str(path), "spec"
    file, colon, after = text.rpartition(":")
    if colon and file.endswith(".py"):
        text, variable = file, after
    source = Path(text)
    if not source.is_file():
        raise SpecError(
            "there is no such spec file",
            where=text,
            numbers=_files_near(source),
            way_out="the path of a Python file that defines spec, or path.py:name",
        )
    module = _run_file(source)
    spec = module.get(variable)
    if not isinstance(spec, AttentionSpec):
        specs = [name for name, value in module.items() if isinstance(value, AttentionSpec)]
        raise SpecError(
            f"the file defines no AttentionSpec named {variable!r}",
            where=shown_path(text),
            numbers=f"specs in it: {', '.join(specs) or 'none'}",
            way_out=f"{text}:{specs[0]}" if specs else f"{variable} = fg.AttentionSpec(...)",
        )
    loaded = spec.replace()
    object.__setattr__(loaded, "file", shown_path(str(path)))
    if not spec.named:
        name = _as_name(source.stem if variable == "spec" else variable)
        object.__setattr__(loaded, "name", name)
    return loaded


def _files_near(source: Path) -> str:
    if not source.parent.is_dir():
        return f"no folder {source.parent.as_posix()}"
    near = sorted(file.name for file in source.parent.glob("*.py"))
    return f"Python files there: {', '.join(near[:20]) or 'none'}"


def _run_file(source: Path) -> dict[str, Any]:
    found = importlib.util.spec_from_file_location(f"flashgen_spec_{source.stem}", source)
    assert found is not None, "a .py file always has a module spec"
    assert found.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(found)
    keep = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # a spec folder is the user's: leave nothing in it
    try:
        found.loader.exec_module(module)
    except FlashgenError:
        raise
    except Exception as error:
        line = _line_in(error, source)
        raise SpecError(
            f"running the spec file raised {type(error).__name__}: {error}",
            where=f"{shown_path(str(source))}:{line}",
            numbers=f"file {source.name}, variable wanted: an AttentionSpec",
            way_out="a file that runs by itself: python " + source.name,
        ) from error
    finally:
        sys.dont_write_bytecode = keep
    return vars(module)


def _line_in(error: Exception, source: Path) -> int:
    if isinstance(error, SyntaxError):
        return error.lineno or 0
    line, trace = 0, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == source.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
