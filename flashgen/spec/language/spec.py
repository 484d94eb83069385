"""AttentionSpec: an attention variant as a frozen value, checked at construction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import sympy

from flashgen.shared.dtypes import dtype_name
from flashgen.shared.errors import SpecError
from flashgen.shared.random_numbers import RANDOM_STATE
from flashgen.shared.signature import BOUNDARIES as BOUNDARY_NAMES
from flashgen.shared.signature import (
    LAYOUT_NAMES,
    LISTS,
    OFFSETS,
    PAGE_NAMES,
    SCALE_DIMS,
    SCALE_NAMES,
    WHOLE,
    is_by_row,
)
from flashgen.spec.language.block_layout import TENSORS as LAYOUT_TENSORS
from flashgen.spec.language.block_layout import BlockSparse
from flashgen.spec.language.block_layout import check_names as check_layout_names
from flashgen.spec.language.float_operations import FloatQuotient
from flashgen.spec.language.lets import Let, lets_of
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.spec_options import check_options, name_of, option_mistakes
from flashgen.spec.language.statistics import statistics_of
from flashgen.spec.language.symbols import SCORE, H
from flashgen.spec.language.tensor import Tensor, divisor_of, element_of_row, sink_of
from flashgen.spec.language.traced import Capture
from flashgen.spec.language.tracing import (
    PickledMod,
    TracedMod,
    trace_mask,
    trace_score,
    trace_weight,
    weighed,
)
from flashgen.spec.language.user_source import SourceLines, in_specs, user_location

Mod = Callable[..., object]

BOUNDARIES = tuple(Tensor(name, ("boundaries",), "int32") for name in BOUNDARY_NAMES)
"""The tensors of a spec with packed sequences: the first row of each sequence, and the end."""

PAGES = tuple(
    Tensor(name, dims, "int32")
    for name, dims in zip(PAGE_NAMES, (("batch", "max_pages"), ("batch",)), strict=True)
)
"""The tensors of a spec with a paged cache: the pages and the number of keys of each sequence."""


SCALES = tuple(Tensor(name, SCALE_DIMS, "float32") for name in SCALE_NAMES)
"""The tensors of a spec whose paged cache has codes: the factors of the codes of K and of V."""


@in_specs
@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """An attention variant: ``softmax(score_mod(scale * q.k) where mask_mod else -inf) . v``.

    With a weight_mod it is ``sum(weight_mod(score_mod(scale * q.k)) * v) / n`` over the keys that
    mask_mod keeps, with n = 1 or the sum of the weights.

    Mods have the signatures of FlexAttention (Dong et al., 2024). They are called once, with
    symbols, when the spec is made.

    Args:
        mask_mod: ``mask_mod(b, h, q, k)``, true where the score is kept; None keeps all scores.
        score_mod: ``score_mod(score, b, h, q, k)``, the new score; None leaves scores as they are.
            A score of -inf is removed, and so is a literal of -1e30 or less that it returns or
            adds, such as the lowest float. Other scores are never removed, however low they are.
            (If all scores of a row are near -1e9, its float32 LSE has too few digits for accurate
            gradients.)
        head_dim: length of the rows of q and k, a multiple of 8 from 8 to 576. Calls on the
            CPU compute all of them; on a GPU, the planner refuses those of which no tile fits
            (in float32, from about 500 on, or 296 on some GPUs; docs/planner.md).
        dtype: "float16", "bfloat16" or "float32", or torch's object of that name: of q, k, v and
            the output. Sums are float32. None: each call has the dtype of its q; plans and files
            are made for one dtype, by ``spec.replace(dtype=...)``.
        head_dim_v: length of the rows of v and the output; head_dim if None.
        scale: positive factor on q.k; 1 / sqrt(head_dim) if None.
        dropout: whether kernels can drop elements of P; each call gives the probability.
        packed: whether a call has several sequences of different lengths, one after another in one
            batch entry, with their boundaries in ``cu_seqlens_q`` and ``cu_seqlens_k``. Mods see
            the number of the sequence as b, and positions and lengths within the sequence.
        name: identifier, of at most 80 ASCII characters, after which kernels and files are named;
            that of the file or the function if None.
        sink: a logit of each head, or of each row, that joins the softmax's denominator: a
            floating-point Tensor, given with each call, whose dims are (1,), or among "batch",
            "heads" and "seq_q", in this order. It is read at the b, h and q that mods see. True
            stands for ``Tensor("sink", ("heads",), "float32", grad=True)``; None and False for no
            sink.
        block_sparse: which blocks of scores are computed (Algorithm 5 of FlashAttention, Dao et
            al., 2022); if None, all that the mask keeps. Scores outside the block layout are masked
            out, whatever mask_mod returns.
        weight_mod: ``weight_mod(score, b, h, q, k)``, the weight of a kept key, of the score that
            score_mod returns, in place of exp; weights may be negative. It is not evaluated where
            the score is removed, whose weight is 0. Weights are rounded to the dtype of v: float16
            holds those from 6e-5 to 65,504 with all digits, bfloat16 those of any size. None with
            ``normalize="softmax"``; with another one, None stands for the score itself.
        normalize: what the weighted sum of v is divided by: "softmax"; "none" for nothing; "sum"
            for the sum of the row's weights; or a floating-point `Tensor` whose dims are among
            "batch", "heads" and "seq_q", in this order, for its element at the row. A row whose
            weights sum to 0 has an output of 0 and gradients of 0 with "sum". Sums of weights of
            both signs may cancel: the quotient is then ill-conditioned.
        statistics: sums and maxima that calls with ``return_aux`` return beside the output, by
            name, from `flashgen.sum_over_keys`, `sum_over_queries` and `max_over_keys`. Kernels of
            the output do not depend on them. Calls give the tensors and scalars that they read.
        paged: whether keys and values are in the pages of a cache, with ``page_table`` and
            ``cache_seqlens`` in each call. Mods see the number of the sequence as b, positions in
            the sequence, and its number of keys as ``fg.seq_k``. For inference.
        kv_dtype: "float8_e4m3fn", "float8_e5m2" or "int8", or torch's object of that name: the
            dtype of the codes in a paged cache, which calls scale by ``k_scale`` and ``v_scale``.
            An element is the float32 product of the code's number and its scale, rounded to the
            dtype of q, in which products are computed. None: caches have the dtype of q.

        shared_kv: whether keys and values are one tensor, as in multi-head latent attention:
            ``op(q, kv)`` has keys of head_dim columns, of which the first head_dim_v are the
            values. The gradients of both uses are added.

    Attributes:
        mask: sympy Boolean over B, H, Q, K, sizes and scalars: mask_mod without the block layout.
        score: sympy expression over SCORE and the same symbols, what kernels compute of each
            score: score_mod, or weight_mod of it.
        modified, weight: score_mod alone; weight_mod alone, over SCORE in place of its result.
        divided_weight: ``weight``, divided by the element of the row where ``normalize`` is a
            Tensor.
        scalars: the run-time scalars, sizes excluded, in the order of their first use.
        tensors: the tensors that each call gives: captured tensors in the order of their first use,
            then the boundaries of packed sequences, the page table and the lengths of a paged
            cache, the scales of its codes, the sink unless mods read it, q_offset and
            k_offset where calls give them as tensors (`spec.language.signature.at_offsets`),
            and a block layout that is not a function.
        mask_line: the Python lines of mask_mod; None without one.
        score_line: the Python lines of score_mod; None without one.
        weight_line: the Python lines of weight_mod; None without one.
        file: the spec file that it was loaded from; None if it was made otherwise.
        partial: whether out is float32, to be merged with the results over other keys
            (`flashgen.spec.language.signature.partial`).
        split: whether the keys of a call are split, and the results over each split merged
            (`flashgen.spec.language.signature.split`).
        folds: whether a thread block has all splits of its rows, and joins their results in order
            (`flashgen.spec.language.signature.folded`).
        runs: whether a thread block has some neighbouring splits, whose joined results are a part
            (`flashgen.spec.language.signature.in_runs`).
        returns_maxima: whether the forward kernel writes the largest score of each row beside LSE
            (`flashgen.spec.language.signature.returning_maxima`).

    Raises:
        SpecError: an option is outside its range, or a mod cannot be traced. One error reports
            several mistakes.
    """

    mask_mod: Mod | None = None
    score_mod: Mod | None = None
    head_dim: int = 64
    dtype: Any = "float16"  # a name or None once the spec is made
    head_dim_v: int | None = None
    scale: float | None = None
    dropout: bool = False
    packed: bool = False
    name: str | None = None
    sink: Any = None  # a Tensor or None once the spec is made
    block_sparse: BlockSparse | None = None
    paged: bool = False
    weight_mod: Mod | None = None
    normalize: Any = "softmax"  # a name or a Tensor
    statistics: Any = None  # pairs of a name and a Statistic once the spec is made
    kv_dtype: Any = None  # a name or None once the spec is made
    shared_kv: bool = False

    mask: sympy.Basic = field(init=False, repr=False)
    score: sympy.Expr = field(init=False, repr=False)
    modified: sympy.Expr = field(init=False, repr=False)
    weight: sympy.Expr = field(init=False, repr=False)
    divided_weight: sympy.Expr = field(init=False, repr=False)
    scalars: tuple[Scalar, ...] = field(init=False, repr=False)
    tensors: tuple[Tensor, ...] = field(init=False, repr=False)
    mask_line: SourceLines | None = field(init=False, repr=False)
    score_line: SourceLines | None = field(init=False, repr=False)
    weight_line: SourceLines | None = field(init=False, repr=False)
    named: bool = field(init=False, repr=False)
    file: str | None = field(init=False, repr=False, default=None)
    partial: bool = field(init=False, repr=False, default=False)
    split: bool = field(init=False, repr=False, default=False)
    folds: bool = field(init=False, repr=False, default=False)
    runs: bool = field(init=False, repr=False, default=False)
    returns_maxima: bool = field(init=False, repr=False, default=False)

    def __new__(cls, *positional: object, **options: object) -> AttentionSpec:
        """An empty spec. Unknown options are refused here: Python's error has no way out."""
        accepted = [option.name for option in fields(cls) if option.init]
        check_options(accepted, len(positional), options, user_location())
        return object.__new__(cls)

    def __post_init__(self) -> None:
        where = user_location()
        mistakes = option_mistakes(self, where)

        def attempt(make: Callable[..., Any], *arguments: object) -> Any:
            try:
                return make(*arguments)
            except SpecError as error:
                mistakes.append(error)
                return None

        sink = attempt(sink_of, self.sink)
        mask = attempt(_traced, self.mask_mod, trace_mask)
        score = attempt(_traced, self.score_mod, trace_score)
        weight = attempt(_traced, self.weight_mod, trace_weight)
        divisor = attempt(divisor_of, self.normalize)
        statistics = attempt(statistics_of, self.statistics) or ()
        traces = mask, score, weight, divisor, *(statistic for _, statistic in statistics)
        used = [c for trace in traces if trace is not None for c in trace.captures]
        used += BOUNDARIES if self.packed is True else ()
        used += PAGES if self.paged is True else ()
        used += SCALES if self.kv_dtype is not None else ()
        used += [] if sink is None else [sink]
        captures, clashes = _distinct(used, where)
        sparse = self.block_sparse
        if isinstance(sparse, BlockSparse):
            attempt(check_layout_names, [capture.name for capture in captures], where)
        _raise_all(mistakes + clashes)

        layout_tensors = () if sparse is None else sparse.tensors
        modified = SCORE if score is None else score.expr
        weight_expr = SCORE if weight is None else weight.expr
        divided = weight_expr
        if isinstance(self.normalize, Tensor):
            divided = FloatQuotient(weight_expr, element_of_row(self.normalize))
        derived: dict[str, Any] = {
            "mask": sympy.true if mask is None else mask.expr,
            "score": modified if self.is_softmax else weighed(modified, divided),
            "modified": modified,
            "weight": weight_expr,
            "divided_weight": divided,
            "scalars": tuple(c for c in captures if isinstance(c, Scalar) and not c.is_size),
            "tensors": (*(c for c in captures if isinstance(c, Tensor)), *layout_tensors),
            "mask_line": None if mask is None else mask.lines,
            "score_line": None if score is None else score.lines,
            "weight_line": None if weight is None else weight.lines,
            "named": self.name is not None,
            "head_dim_v": self.head_dim if self.head_dim_v is None else self.head_dim_v,
            "scale": None if self.scale is None else float(self.scale),
            "sink": sink,
            "statistics": statistics,
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
            "kv_dtype": None if self.kv_dtype is None else dtype_name(self.kv_dtype),
            "name": self.name
            or name_of(
                self.weight_mod, self.mask_mod, self.score_mod, getattr(sparse, "layout", None)
            ),
        }
        for key, value in derived.items():
            object.__setattr__(self, key, value)

    @property
    def head(self) -> sympy.Expr:
        """The number of the query head that mods see, made of its number in the call."""
        first = [scalar.expr for scalar in self.scalars if scalar.name == WHOLE[0]]
        return sympy.Add(H, *first)

    @property
    def chooses(self) -> bool:
        """Whether queries choose their keys, by lists of blocks in each call."""
        return self.block_sparse is not None and self.block_sparse.chooses

    @property
    def keep(self) -> sympy.Basic:
        """The mask and the condition that the score's block is live."""
        sparse = self.block_sparse
        return self.mask if sparse is None else sympy.And(self.mask, sparse.live_at(self.head))

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        """All tensors that kernels may read: `tensors`, and a static block layout's."""
        static = self.block_sparse is not None and self.block_sparse.is_static
        return (*self.tensors, *LAYOUT_TENSORS) if static else self.tensors

    @property
    def offsets(self) -> tuple[Tensor, ...]:
        """q_offset and k_offset where calls give them as tensors."""
        return tuple(tensor for tensor in self.tensors if tensor.name in OFFSETS)

    @property
    def is_softmax(self) -> bool:
        """Whether weights are exponentials, divided by their sum."""
        return self.normalizer == "softmax"

    @property
    def normalizer(self) -> str:
        """``normalize``; "none" for a Tensor, by which the weights themselves are divided."""
        return self.normalize if isinstance(self.normalize, str) else "none"

    @property
    def sums_weights(self) -> bool:
        """Whether kernels sum the weights of each row, or take their maximum."""
        return self.normalizer != "none"

    @property
    def row_results(self) -> tuple[str, ...]:
        """The results of forward kernels for each row beside the output."""
        return ("lse",) if self.is_softmax else ("sums",) if self.sums_weights else ()

    @property
    def draws(self) -> bool:
        """Whether the mods call fg.rand."""
        return any(tensor.name == RANDOM_STATE for tensor in self.tensors)

    @property
    def rounds_sums(self) -> bool:
        """Whether the weights of a row are summed as they are rounded for the product with v, so
        that they are shares of 1: where the sum divides the output, and not for a statistic."""
        return self.normalizer == "sum"

    @property
    def takes_maxima(self) -> bool:
        """Whether kernels take the largest weight of each row in place of the sum, for a
        statistic; the output has no meaning then."""
        return self.normalizer == "max"

    @property
    def sums_sink(self) -> bool:
        """Whether the backward kernels sum the gradient of the sink: for a sink of heads."""
        return self.sink is not None and self.sink.grad and not is_by_row(self.sink.dims)

    @property
    def adds_parts(self) -> bool:
        """Whether the output is a sum over some of a row's keys, which is not divided."""
        return (self.partial or self.split) and not self.is_softmax

    @property
    def is_served(self) -> bool:
        """Whether calls have split keys or pages: a row then has the same bits in all of them."""
        return self.split or self.paged

    @property
    def out_dtype(self) -> Any:
        """The dtype of the output; None where it is the dtype of q."""
        return "float32" if self.partial else self.dtype

    @property
    def computes(self) -> tuple[object, ...]:
        """Everything that determines the kernels' results, without source locations."""
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
            *(("partial",) if self.partial else ()),
            *(("split",) if self.split else ()),
            *(("folds",) if self.folds else ()),
            *(("runs",) if self.runs else ()),
            *(("returns_maxima",) if self.returns_maxima else ()),
            *(("paged",) if self.paged else ()),
            *(() if self.kv_dtype is None else (("kv_dtype", self.kv_dtype),)),
            *(("shared_kv",) if self.shared_kv else ()),
            *(() if self.is_softmax else (self.normalizer,)),
        )

    @property
    def identity(self) -> tuple[object, ...]:
        """Everything that determines the emitted files: `computes` and the source locations."""
        lines = self.mask_line, self.score_line, self.weight_line
        return (
            *self.computes,
            *lines,
            self.file,
            *((name, *statistic.key) for name, statistic in self.statistics),
        )

    @property
    def digest(self) -> str:
        """A hash of `computes` that is the same in every process."""
        return digest_of(self.computes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionSpec) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __copy__(self) -> AttentionSpec:
        """A copy that has the functions themselves; `__reduce__` would replace them."""
        copied = object.__new__(AttentionSpec)
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles the traced expressions instead of the functions, which may be lambdas."""
        derived = ("mask", "score")
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in derived}
        free = self.mask.free_symbols | self.score.free_symbols
        hidden = {*LAYOUT_NAMES, *LISTS} if self.block_sparse is not None else set()
        if self.sink is not None and self.sink.symbol not in free:
            hidden.add(self.sink.name)
        captures: tuple[Capture, ...]
        hidden.update(OFFSETS)
        captures = (*self.scalars, *(t for t in self.tensors if t.name not in hidden))
        for mod, expr, lines in (
            ("mask_mod", self.mask, self.mask_line),
            ("score_mod", self.score if self.is_softmax else self.modified, self.score_line),
            ("weight_mod", self.weight, self.weight_line),
        ):
            if lines is not None:
                state[mod] = PickledMod(TracedMod(expr, captures, lines))
        # Each Let before those that use it: the depth of a pickle does not grow with their number.
        lets = lets_of(self.mask, self.modified, self.weight, self.score)
        return _restored, (lets, state, None if self.is_softmax else self.score)

    @in_specs
    def replace(self, **changes: Any) -> AttentionSpec:
        """Returns a copy with some arguments changed; the mods are traced again.

        Args:
            changes: arguments of AttentionSpec by name.

        Raises:
            SpecError: as for AttentionSpec.
        """
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        if not self.named:
            options["name"] = None
        if self.head_dim_v == self.head_dim and "head_dim" in changes:
            options["head_dim_v"] = None
        copy = AttentionSpec(**{**options, **changes})
        if not self.named and "name" not in changes:
            object.__setattr__(copy, "name", self.name)
        object.__setattr__(copy, "file", self.file)
        object.__setattr__(copy, "partial", self.partial)
        return copy


def digest_of(parts: Sequence[object]) -> str:
    """SHA-256 in hex of ``parts`` as text: sympy expressions in full, anything else by repr."""
    content = [sympy.srepr(part) if isinstance(part, sympy.Basic) else part for part in parts]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _traced(mod: Mod | None, trace: Callable[[Mod], TracedMod]) -> TracedMod | None:
    if mod is None:
        return None
    return mod.trace if isinstance(mod, PickledMod) else trace(mod)


def _restored(
    lets: tuple[Let, ...], state: dict[str, Any], weighed: sympy.Expr | None
) -> AttentionSpec:
    """A pickled spec, whose expressions share ``lets``."""
    spec = object.__new__(AttentionSpec)
    traces = {"mask": (state["mask_mod"], sympy.true), "score": (state["score_mod"], SCORE)}
    exprs = {name: x if mod is None else mod.trace.expr for name, (mod, x) in traces.items()}
    if weighed is not None:
        exprs["score"] = weighed
    for name, value in {**state, **exprs}.items():
        object.__setattr__(spec, name, value)
    return spec


def _distinct(captures: list[Capture], where: str) -> tuple[tuple[Capture, ...], list[SpecError]]:
    """Each capture once, and an error for every name that two different captures have."""
    first: dict[str, Capture] = {}
    mistakes = []
    for capture in captures:
        earlier = first.setdefault(capture.name, capture)
        if earlier.key != capture.key:
            mistakes.append(
                SpecError(
                    f"two different captures are named {capture.name!r}",
                    where=where,
                    numbers=f"{earlier!r} and {capture!r}",
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
            f"{len(mistakes)} mistakes in one spec: " + "; ".join(error.what for error in mistakes),
            where="\n".join(error.where for error in mistakes),
            numbers="\n".join(error.numbers for error in mistakes),
            way_out="\n".join(error.way_out for error in mistakes),
        )
