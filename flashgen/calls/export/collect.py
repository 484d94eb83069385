"""The kernels of an export: every kernel that its calls can take, compiled once."""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from flashgen.calls.exported.manifest import (
    KERNELS,
    LAYOUT_TABLE,
    RUNS_OF_PROGRAMS,
    BackwardRecord,
    ForwardRecord,
    KernelRecord,
    LayoutRecord,
    Pass,
    PathRecord,
    ProgramRecord,
)
from flashgen.calls.runtime.backends import gpu_of
from flashgen.calls.runtime.programs import SpecProgram, Variant
from flashgen.kernels.built_kernel import Build
from flashgen.kernels.codegen import beyond_int32
from flashgen.kernels.codegen.text import printable
from flashgen.kernels.pipeline import build_backward, build_merge, build_minmax_tables, built
from flashgen.kernels.planner.duration import decoding_tile
from flashgen.kernels.planner.requests import PlanRequest
from flashgen.kernels.planner.schedule import counts_of_few_rows, why_walks_differ
from flashgen.kernels.planner.split_keys import compares_positions
from flashgen.shared.arch import facts, portable
from flashgen.shared.call import DEFAULT_LAUNCH, CallRanges
from flashgen.shared.dtypes import COUNT_LIMIT, ITEMSIZE, POSITION_LIMIT, SCALAR_LIMIT
from flashgen.shared.errors import InputError, PlanError, SpecError
from flashgen.shared.launch_facts import LaunchFacts, fits_rows
from flashgen.shared.signature import OFFSETS, SPLIT, WHOLE, CallSignature
from flashgen.spec.language.signature import (
    joining,
    learning,
    refuse_backward,
    signature_of,
    with_columns,
    without_dropout,
)
from flashgen.spec.language.spec import AttentionSpec

_OFFSETS = tuple(f"{name}:{dtype}" for name in OFFSETS for dtype in ("int32", "int64"))
_CALLS = (SPLIT, "whole", "cu_seqlens_q", *_OFFSETS)


_SIZES = {"batch": COUNT_LIMIT, "heads": COUNT_LIMIT}
_SIZES |= {"seq_q": POSITION_LIMIT, "seq_k": POSITION_LIMIT}
_POSITIONS = ("q", "k", "q_lo", "q_hi", "k_lo", "k_hi", "q_offset", "k_offset", "seq_q", "seq_k")
_COUNTS = ("b", "batch", "h", "heads")
_MOST_BITS = 30
_MOST_BLOCKS = 2**30  # of the table of a layout that is a function
_LEAST_BITS = 11  # of positions: threads compute some past the end of their tile

Ranges = dict[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The spec, architectures and calls of an export.

    Attributes:
        spec: the spec.
        archs: the architectures.
        backward: whether to export the backward kernels too.
        calls: variants of the spec, each as names of `_CALLS` joined by "+".
        heads_per_tile: numbers of query heads that share a tile, 1 among them.
        positions: positions up to which a block layout that is a function is tabulated.
        command: the command that makes the export.

    Raises:
        InputError: the spec cannot be exported, or the table of its layout would be too large.
    """

    spec: AttentionSpec
    archs: tuple[str, ...]
    backward: bool = False
    calls: tuple[str, ...] = ()
    heads_per_tile: tuple[int, ...] = (1,)
    positions: int = 16_384
    command: str = "flashgen export"

    def __post_init__(self) -> None:
        # The manifest, comments and errors show it in a line.
        object.__setattr__(self, "command", printable(self.command))
        if self.spec.chooses:
            raise InputError(
                "calls in which queries choose their keys are not exported",
                where=f"spec {self.spec.name}",
                numbers=f"{self.spec.block_sparse!r}: several calls compute one",
                way_out="fg.attention(spec), which compiles it; or a block layout without lists: "
                "fg.BlockSparse(None, block_q=..., block_k=...)",
            )
        if self.spec.kv_dtype is not None:
            raise InputError(
                "kernels for caches of 8 bits are not exported",
                where=f"spec {self.spec.name}",
                numbers=f"kv_dtype {self.spec.kv_dtype!r}",
                way_out="spec.replace(kv_dtype=None); or fg.attention(spec), which compiles it",
            )
        sparse = self.spec.block_sparse
        if sparse is not None and sparse.is_static:
            rows, columns = sparse.blocks(self.positions, self.positions)
            if rows * columns > _MOST_BLOCKS:
                # The last block of each axis may have some of its positions alone.
                most = math.isqrt(_MOST_BLOCKS * sparse.block_q * sparse.block_k)
                most -= max(sparse.block_q, sparse.block_k)
                raise InputError(
                    "the table of this block layout is too large for an export",
                    where="option --positions",
                    numbers=f"{self.positions:,} positions: {rows:,} x {columns:,} blocks, a byte "
                    f"for each; at most {_MOST_BLOCKS:,} B",
                    way_out=f"--positions {most}, or fg.BlockSparse() without a function, "
                    "and layout= with each call",
                )

    def variants(self) -> Iterator[Variant]:
        """The spec itself, then its variants.

        Raises:
            InputError: a call has an unknown argument.
        """
        yield Variant()
        calls = list(self.calls)
        if self.spec.paged:  # calls without split_size have the planned one
            with_split = (call if SPLIT in call else f"{call}+{SPLIT}" for call in self.calls)
            calls = [SPLIT, *with_split, *calls]
        # A call splits its keys where its other arguments have been sorted: it needs both variants.
        without_split = ("+".join(x for x in call.split("+") if x != SPLIT) for call in calls)
        for call in dict.fromkeys([*calls, *filter(None, without_split)]):
            names = call.split("+")
            unknown = [name for name in names if name not in _CALLS]
            if unknown:
                raise InputError(
                    "there is no such argument of calls",
                    where="option --call",
                    numbers=f"given {unknown[0]!r}; known: {', '.join(_CALLS)}",
                    way_out=f"--call {SPLIT}, or several that a call has together, joined by +",
                )
            by_argument = {name.partition(":")[0]: name for name in names}
            if len(by_argument) < len(names):
                separately = "; another dtype in a --call of its own"
                raise InputError(
                    "a call has each of its arguments once",
                    where="option --call",
                    numbers=f"given {call!r}",
                    way_out=f"--call {'+'.join(by_argument.values())}"
                    + (separately if len(by_argument) < len(set(names)) else ""),
                )
            if "cu_seqlens_q" in names and not self.spec.paged:
                raise InputError(
                    "packed queries alone are those of a paged cache",
                    where="option --call",
                    numbers=f"given {call!r}; spec {self.spec.name} has paged=False",
                    way_out="a spec with packed=True, whose calls have cu_seqlens_q and "
                    "cu_seqlens_k without this option",
                )
            offsets = tuple(
                (name, dtype)
                for name, _, dtype in (name.partition(":") for name in names)
                if name in OFFSETS
            )
            part = (*WHOLE, SPLIT) if SPLIT in names else WHOLE if "whole" in names else ()
            offsets = tuple(sorted(offsets, key=lambda pair: OFFSETS.index(pair[0])))
            yield Variant(None, offsets, part, "cu_seqlens_q" in names)


@dataclass
class Collection:
    """The kernels of an export, each once, with the files that belong to them."""

    request: ExportRequest
    records: list[KernelRecord] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    _numbers: dict[tuple[str, LaunchFacts], int] = field(default_factory=dict)
    _stems: dict[str, str] = field(default_factory=dict)

    def add(self, build: Build) -> int:
        """The number of a kernel in the manifest.

        Kernels of one binary can have different launches: the delta kernel fills sums of dQ that
        have the tiles of another kernel.
        """
        key = build.binary.key, build.facts
        if key not in self._numbers:
            self._numbers[key] = len(self.records)
            stem, resources = self._stem(build), build.binary.resources
            self.records.append(KernelRecord(build.facts, stem, resources, build.binary.cuda))
        return self._numbers[key]

    def _stem(self, build: Build) -> str:
        """The name of the files of a binary, which are added once."""
        key = build.binary.key
        if key not in self._stems:
            first, used_stems = build.source.filename.removesuffix(".cu"), set(self._stems.values())
            names = (first if n == 1 else f"{first}_{n}" for n in range(1, len(used_stems) + 2))
            stem = self._stems[key] = next(name for name in names if name not in used_stems)
            files = {"cu": build.source.text.encode(), "ptx": build.ptx.encode()}
            files["cubin"] = _without_folder(build)
            self.files |= {f"{KERNELS}/{stem}.{kind}": data for kind, data in files.items()}
        return self._stems[key]

    def programs(self) -> tuple[ProgramRecord, ...]:
        """The kernels of the spec and of its variants, and of launches for some columns of V."""
        variants = [
            (variant, run)
            for variant in self.request.variants()
            for run in (RUNS_OF_PROGRAMS if SPLIT in variant.part else (1,))
        ]
        programs = [self._program(*variant) for variant in variants]
        new_programs, parts = programs, defaultdict[int, set[Pass]](set)
        while True:
            for columns, passes in (x for program in new_programs for x in program.widths.items()):
                parts[columns].update(passes)
            if not parts:
                return tuple(programs)
            columns = max(parts)  # as the passes of fewer columns may be parts of these
            needed = parts.pop(columns)
            new_programs = [self._program(*variant, columns, needed) for variant in variants]
            programs += new_programs

    def _program(
        self, variant: Variant, run: int, columns: int = 0, passes: Set[Pass] | None = None
    ) -> ProgramRecord:
        """The kernels of the spec, or of a variant of it.

        Args:
            run: as in `ProgramRecord`.
            columns: the columns of V of launches that compute a part of them; 0 for all.
            passes: the passes that have such launches; None for all.
        """
        request = self.request
        spec = SpecProgram(request.spec).variant(variant)
        if columns:
            spec = with_columns(spec, columns)
        spec = joining(spec, run)
        signature = signature_of(spec)
        no_backward = _why_no_backward(spec, request)
        paths: list[PathRecord] = []
        forward: list[ForwardRecord] = []
        backward: list[BackwardRecord] = []
        builds: list[Build] = []
        for pass_, used in _passes(spec, backward=not no_backward):
            if passes is not None and pass_ not in passes:
                continue
            pass_paths = [path for arch in request.archs for path in _paths(pass_, used, arch)]
            whole = _archs_of_whole(pass_paths, request.archs, signature.head_dim_v)
            if pass_.backward:
                backward += self._backward(pass_, used, whole, builds)
            else:
                forward += self._forward(pass_, used, whole, builds)
            paths += pass_paths
        tables = {
            arch: tuple(map(self.add, build_minmax_tables(spec, arch))) for arch in request.archs
        }
        merge = {}
        if spec.split and not spec.folds:
            assert signature.out_dtype is not None  # kernels are made for one dtype
            dim, dtype = signature.head_dim_v, signature.out_dtype
            normalize = signature.normalize
            merge = {
                arch: self.add(build_merge(dim, dtype, arch, splits=True, normalize=normalize))
                for arch in request.archs
            }
        return ProgramRecord(
            offsets=variant.offsets,
            part=variant.part,
            packs=variant.packs,
            run=run,
            columns=columns,
            digest=SpecProgram(spec).digest,
            signature=replace(signature, block_sparse=None),
            layout=self._layout(spec),
            forward=tuple(forward),
            backward=tuple(backward),
            narrow=narrow_ranges(builds, signature),
            tables={arch: numbers for arch, numbers in tables.items() if numbers},
            merge=merge,
            no_backward=no_backward,
            paths=tuple(paths),
            by_position=compares_positions(spec),
        )

    def _forward(
        self, pass_: Pass, spec: AttentionSpec, whole: frozenset[str], builds: list[Build]
    ) -> Iterator[ForwardRecord]:
        """The kernels of a forward pass, which are added to ``builds``.

        Args:
            whole: the architectures on which calls need the kernel of all columns.
        """
        forms = [(16, heads) for heads in self._heads(spec)] + [(ITEMSIZE[spec.dtype], 1)]
        ranges = widest(signature_of(spec))
        archs = _with_fallbacks(self.request.archs)
        for arch, (access, heads) in itertools.product(archs, dict.fromkeys(forms)):
            request = PlanRequest(spec, arch, access_bytes=access, heads_per_tile=heads)
            with _unless_needed(arch in whole and access == 16):
                few = self._few_rows(spec, built(request)[0]) if access == 16 else ()
                for rows in (0, *few):
                    few_rows_request = replace(request, few_rows=rows)
                    (narrow,), (wide,) = built(few_rows_request), built(few_rows_request, ranges)
                    builds.append(narrow)
                    for is_wide, build in ((False, narrow), (True, wide)):
                        if build is narrow and is_wide:
                            continue  # no call needs it
                        key = (pass_.drops, arch, access, heads, is_wide)
                        cost = build.plan.cost
                        tile = decoding_tile(build.plan, cost, cost) if spec.split else None
                        yield ForwardRecord(*key, self.add(build), tile, rows)

    def _few_rows(self, spec: AttentionSpec, any_rows: Build) -> Iterator[int]:
        """The numbers of rows that have kernels of their own, on the requested architectures.

        Args:
            any_rows: the kernel of calls with any number of rows.
        """
        if any_rows.plan.arch in self.request.archs:
            for rows in counts_of_few_rows(spec, any_rows.plan):
                if fits_rows(rows, any_rows.plan.heads_per_tile, 1):
                    yield rows

    def _heads(self, spec: AttentionSpec) -> tuple[int, ...]:
        heads = tuple(sorted({1, *self.request.heads_per_tile}))
        obstacle = why_walks_differ(spec)
        if len(heads) > 1 and obstacle:
            raise InputError(
                "heads of this spec cannot share a tile",
                where="option --heads-per-tile",
                numbers=f"given {heads[-1]}; {obstacle}",
                way_out="no --heads-per-tile",
            )
        return heads

    def _backward(
        self, pass_: Pass, spec: AttentionSpec, whole: frozenset[str], builds: list[Build]
    ) -> Iterator[BackwardRecord]:
        """The kernels of a backward pass; arguments as of `_forward`."""
        fixed, ranges = pass_.deterministic, widest(signature_of(spec))
        for arch in _with_fallbacks(self.request.archs):
            with _unless_needed(arch in whole):
                narrow = build_backward(spec, arch, deterministic=fixed)
                wide = build_backward(spec, arch, deterministic=fixed, ranges=ranges)
                builds += narrow
                for is_wide, pass_builds in ((False, narrow), (True, wide)):
                    if pass_builds is narrow and is_wide:
                        continue  # no call needs it
                    key = (pass_.drops, pass_.learns, arch, fixed, is_wide)
                    yield BackwardRecord(*key, tuple(map(self.add, pass_builds)))

    def _layout(self, spec: AttentionSpec) -> LayoutRecord | None:
        sparse = spec.block_sparse
        if sparse is None:
            return None
        if not sparse.is_static:
            return LayoutRecord(sparse.block_q, sparse.block_k)
        if sparse.by_head:
            raise SpecError(
                "a block layout that differs between heads cannot be exported",
                where=sparse.where,
                numbers="layout(b, h, i, j): its table depends on batch and heads of a call",
                way_out="fg.BlockSparse() without a function, and layout= with each call; or a "
                "layout(i, j) with the heads in mask_mod",
            )
        rows, columns = sparse.blocks(self.request.positions, self.request.positions)
        self.files[LAYOUT_TABLE] = sparse.table(1, 1, rows, columns)
        return LayoutRecord(sparse.block_q, sparse.block_k, rows, columns, LAYOUT_TABLE)


def _without_folder(build: Build) -> bytes:
    """The cubin with another name for the folder of the cache in its line information.

    The name has the same length, so that all offsets in the file stay.
    """
    folder = b"" if build.binary.folder is None else os.fsencode(build.binary.folder)
    if len(folder) < len(KERNELS):
        return build.cubin
    return build.cubin.replace(folder, KERNELS.encode().ljust(len(folder), b"/"))


def _with_and_without_dropout(spec: AttentionSpec) -> tuple[tuple[bool, AttentionSpec], ...]:
    plain = (False, without_dropout(spec))
    return (plain, (True, spec)) if spec.dropout else (plain,)


def _with_fallbacks(archs: Sequence[str]) -> tuple[str, ...]:
    """The architectures, and those whose kernels read operands over which TMA does not step."""
    fallbacks = (portable(arch) for arch in archs if facts(arch).code_path.copies_by_tma)
    return tuple(dict.fromkeys((*archs, *fallbacks)))


# ---- the passes of a program, and which kernels they take ---------------------------------------


def _passes(spec: AttentionSpec, *, backward: bool) -> Iterator[tuple[Pass, AttentionSpec]]:
    """The passes of all calls, each with the spec whose kernels compute it."""
    used = _with_and_without_dropout(spec)
    for drops, pass_spec in used:
        yield Pass(drops), pass_spec
    learned = tuple(tensor.name for tensor in signature_of(spec).learned)
    for drops, pass_spec in used if backward else ():
        for names in dict.fromkeys((learned, ())):
            for fixed in (False, True):
                yield Pass(drops, names, True, fixed), learning(pass_spec, frozenset(names))


def _paths(pass_: Pass, spec: AttentionSpec, arch: str) -> Iterator[PathRecord]:
    """The choices of the runtime for a pass of calls on an architecture."""
    program, columns = SpecProgram(spec), spec.head_dim_v
    assert columns is not None, "that of an export"
    default = PathRecord(arch, False, pass_, arch, columns, "")
    records = []
    for is_open in (True, False):
        target = gpu_of(arch, open_path=is_open)
        path = program.path_of_pass(target, pass_.name)
        at_once = program.columns_of_launch(target, DEFAULT_LAUNCH, pass_.name)
        records.append(PathRecord(arch, is_open, pass_, path.arch, at_once, path.why))
    by_default, named = records
    if replace(by_default, is_open=False) != named:
        yield by_default
    if named != default:
        yield named


def _archs_of_whole(
    paths: Sequence[PathRecord], archs: Iterable[str], columns: int
) -> frozenset[str]:
    """The architectures whose kernels compute all columns of V in some calls of a pass."""
    computing_all = {path.taken for path in paths if path.columns == columns}
    named = {path.arch for path in paths if not path.is_open}
    return frozenset(computing_all | (set(archs) - named))


@contextmanager
def _unless_needed(needed: bool) -> Iterator[None]:
    """Kernels that some calls need, or that no tile of all columns of V is for: calls then have
    others, but for those with operands that these cannot read."""
    try:
        yield
    except PlanError:
        if needed:
            raise


def _why_no_backward(spec: AttentionSpec, request: ExportRequest) -> tuple[str, ...]:
    """The four parts of the error of a backward pass without kernels; () where there are some."""
    try:
        refuse_backward(spec)
    except SpecError as error:
        return error.what, error.where, error.numbers, error.way_out
    if request.backward:
        return ()
    return (
        "the export has no backward kernels",
        f"spec {spec.name}",
        "exported without --backward, and a gradient is required",
        f"{request.command} with --backward, or torch.no_grad()",
    )


# ---- the ranges for which kernels with 32-bit integers serve ------------------------------------

# They are found by trial: every call inside of one set of them keeps all assumed expressions within
# int32. A call outside of all of them may too, and then takes the wider kernel all the same.


def widest(signature: CallSignature) -> CallRanges:
    """The ranges of all calls that are accepted."""
    scalars = {x.name: 0 for x in signature.scalars if x.dtype != "float32"}
    sequences_vary = signature.packed or signature.paged
    offsets: dict[str, int | None] = {"q_offset": None, "k_offset": None}
    limits = CallRanges.from_call(_SIZES, offsets, scalars, sequences_vary)
    ends = dict(zip(limits.names, limits.ends, strict=True))
    ends |= {name: (0, most) for name, most in _SIZES.items()}
    ends |= dict.fromkeys(scalars, (-SCALAR_LIMIT, SCALAR_LIMIT))
    return CallRanges(tuple(ends), tuple(ends.values()))


def narrow_ranges(builds: Iterable[Build], signature: CallSignature) -> tuple[Ranges, ...] | None:
    """Sets of ranges in which kernels keep their integers within int32; None where all calls do.

    Each set has other limits of scalars, and the longest sequences that they leave.
    """
    blocks = [block for build in builds for block in build.source.assumptions if block.assumes]
    all_calls = widest(signature)
    if not blocks or not beyond_int32(blocks, all_calls):
        return None
    most = dict(zip(all_calls.names, all_calls.ends, strict=True))
    most |= {offset: (0, most[offset][1]) for block in blocks for offset in block.natural}

    def ranges(positions: int, counts: int, scalars: int) -> Ranges:
        bits = dict.fromkeys(most, scalars)
        bits |= dict.fromkeys(_POSITIONS, positions) | dict.fromkeys(_COUNTS, counts)
        return {
            name: (max(low, -(1 << bits[name])), min(high, 1 << bits[name]))
            for name, (low, high) in most.items()
        }

    def fits(positions: int, counts: int, scalars: int) -> bool:
        ends = ranges(positions, counts, scalars)
        return not beyond_int32(blocks, CallRanges(tuple(ends), tuple(ends.values())))

    sets: list[tuple[int, int, int]] = []
    for scalars in range(_MOST_BITS, -1, -1):
        for counts in (20, 10):  # as many as are accepted, and fewer
            bits = range(_MOST_BITS, _LEAST_BITS - 1, -1)
            longest = next((n for n in bits if fits(n, counts, scalars)), 0)
            inside = any(longest <= p and counts <= c and scalars <= s for p, c, s in sets)
            if longest and not inside:
                sets.append((longest, counts, scalars))
    return tuple(ranges(*bits) for bits in sets)
