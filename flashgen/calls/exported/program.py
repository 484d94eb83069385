"""The program of an export: the runtime takes kernels from its folder and compiles nothing."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from flashgen.calls.exported.folder import ExportedKernel, Folder, open_folder
from flashgen.calls.exported.manifest import (
    ForwardRecord,
    LayoutRecord,
    Pass,
    PathRecord,
    ProgramRecord,
)
from flashgen.calls.launch import gpu_facts
from flashgen.calls.ops.api import Attention
from flashgen.calls.ops.registration import register_hashed_name
from flashgen.calls.runtime.backends import DEFAULTS, Target, choose, index_of, order_of
from flashgen.calls.runtime.programs import CallProgram, ForwardRequest, Variant
from flashgen.calls.trust import Decision
from flashgen.shared import config
from flashgen.shared.arch import DEFAULT_ARCH, GpuMemory, facts
from flashgen.shared.call import CallRanges, CheckedCall, LaunchOptions
from flashgen.shared.errors import ExportError, InputError, SpecError, called_by_users
from flashgen.shared.launch_facts import (
    LaunchFacts,
    Sizes,
    fits_rows,
    heads_of_fewest_rows,
    mean_length,
)
from flashgen.shared.signature import LAYOUT, SPLIT, WHOLE, CallSignature
from flashgen.shared.split_choice import (
    ALL_SPLITS,
    RUNS,
    choose_split,
    fastest_run,
    times_of_runs,
    usual_heads_kv,
)


@dataclass(frozen=True)
class ExportedLayout:
    """A block layout: one that calls give, or a table of a function of block coordinates."""

    record: LayoutRecord
    live: bytes
    command: str
    # Calls with lists, and layouts that depend on the batch entry or the head, are not exported.
    chooses: ClassVar[bool] = False
    by_head: ClassVar[bool] = False

    @property
    def block_q(self) -> int:
        return self.record.block_q

    @property
    def block_k(self) -> int:
        return self.record.block_k

    @property
    def is_static(self) -> bool:
        """Whether the layout was a function, so that calls give no blocks."""
        return self.record.rows > 0

    def shape(self, batch: int, heads: int, q_end: int, k_end: int) -> tuple[int, int, int, int]:
        """The shape of the table for global positions below the ends."""
        return 1, 1, max(1, -(-q_end // self.block_q)), max(1, -(-k_end // self.block_k))

    def table(self, batch: int, heads: int, rows: int, columns: int) -> bytes:
        """The table of the first rows and columns of blocks.

        Raises:
            InputError: the export has fewer.
        """
        record = self.record
        if rows > record.rows or columns > record.columns:
            needed = max(rows * record.block_q, columns * record.block_k)
            raise InputError(
                "the positions of the call are beyond the block layout of the export",
                where="arguments q, k, q_offset and k_offset",
                numbers=f"{rows} x {columns} blocks; the export has {record.rows} x "
                f"{record.columns}, of {record.block_q} queries and {record.block_k} keys",
                way_out=f"{self.command} with --positions {needed}",
            )
        starts = range(0, rows * record.columns, record.columns)
        return b"".join(self.live[start : start + columns] for start in starts)


@dataclass(frozen=True, eq=False)
class ExportedProgram(CallProgram):
    """The kernels of one record of a manifest.

    Attributes:
        drops: whether calls drop elements of P, where the spec has dropout.
        learns: the learned tensors whose gradients are computed; None for all.
    """

    folder: Folder
    record: ProgramRecord
    drops: bool
    learns: frozenset[str] | None = None

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExportedProgram) and self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        return self.folder.digest, self.record.key, self.drops, self.learns

    @property
    def digest(self) -> str:
        return self.record.digest

    @functools.cached_property
    def signature(self) -> CallSignature:
        signature, layout = self.record.signature, self.record.layout
        if layout is not None:
            live = self.folder.read(layout.table) if layout.table else b""
            sparse = ExportedLayout(layout, live, self._command)
            signature = replace(signature, block_sparse=sparse)
        if self.learns is None:
            return signature
        tensors = tuple(
            replace(x, grad=x.grad and x.name in self.learns) for x in signature.tensors
        )
        sink = next((x for x in tensors if signature.sink and x.name == signature.sink.name), None)
        return replace(signature, tensors=tensors, sink=sink)

    @property
    def _command(self) -> str:
        return self.folder.manifest.command

    def target(self, backend: str | None, arch: str | None, device: torch.device) -> Target:
        if backend is None and config.backend() is None:
            backend = {**DEFAULTS, "cpu": "emulator"}.get(device.type)
        chosen = choose(backend, device)
        if chosen == "tiled":
            raise InputError(
                "an export has no tiled algorithms",
                where="argument backend" if backend else "environment, FLASHGEN_BACKEND",
                numbers=f"given 'tiled'; {self.folder.path} holds kernels",
                way_out="backend=None or backend='emulator' for CPU tensors; fg.attention(spec) "
                "computes tiles in PyTorch",
            )
        archs = self.folder.manifest.archs
        wanted, why = (arch, "argument arch") if arch else (config.arch(), "FLASHGEN_ARCH")
        if chosen == "gpu":
            index = index_of(device)
            gpu_arch = self.folder.check_gpu(gpu_facts(index))
            wanted, why = (wanted, why) if wanted else (gpu_arch, "the export's for the GPU")
        else:
            index = 0
            first = DEFAULT_ARCH if DEFAULT_ARCH in archs else archs[0]
            wanted, why = (wanted, why) if wanted else (first, f"the backend {chosen!r}")
        if wanted not in archs:
            raise InputError(
                "the export has no kernels for this architecture",
                where=why,
                numbers=f"given {wanted!r}; exported for {', '.join(archs)}",
                way_out=f"{self._command} with --arch {wanted}, or one of these",
            )
        open_path = chosen == "gpu" and arch is None and config.arch() is None
        order = order_of(backend)
        return Target(chosen, wanted, device, index, why, order_seed=order, open_path=open_path)

    def without_dropout(self) -> CallProgram:
        return replace(self, drops=False)

    def learning(self, names: frozenset[str]) -> CallProgram:
        all_learned = frozenset(tensor.name for tensor in self.record.signature.learned)
        return replace(self, learns=all_learned if names else frozenset())

    def refuse_backward(self, *, alone: str = "") -> None:
        if alone:
            raise SpecError(
                f"an export has no kernels for the gradients of {alone} alone",
                where=f"the export of {self.signature.name}",
                numbers="its backward kernels compute all gradients",
                way_out="the spec itself, where flashgen can compile kernels",
            )
        if not self.record.no_backward:
            return
        what, where, numbers, way_out = self.record.no_backward
        raise SpecError(what, where=where, numbers=numbers, way_out=way_out)

    def variant(self, variant: Variant) -> CallProgram:
        dtype, offsets, part, packs = variant
        exported_dtype = self.record.signature.dtype
        names = [f"{name}:{offset_dtype}" for name, offset_dtype in offsets]
        names += [part[-1] if part[-1] == "split_size" else "whole"] if part else []
        names += ["cu_seqlens_q"] if packs else []
        if dtype is not None and str(dtype) != f"torch.{exported_dtype}":
            raise InputError(
                "the export has no kernels for the dtype of autocast",
                where="torch.autocast",
                numbers=f"autocast to {dtype}; exported for torch.{exported_dtype}",
                way_out="torch.autocast(..., enabled=False) around the call, or an export with "
                f"--dtype {str(dtype).removeprefix('torch.')}",
            )
        program = self._with_key(offsets, part, packs, 1, self.record.columns)
        if program is not None:
            return program
        raise InputError(
            "the export has no kernels for a call with these arguments",
            where="arguments " + ", ".join(name.partition(":")[0] for name in names),
            numbers=f"exported for calls with {self._calls()}",
            way_out=f"{self._command} with --call {'+'.join(names)}",
        )

    def _with_key(self, *key: object) -> ExportedProgram | None:
        """The program of the record with this key."""
        for record in self.folder.manifest.programs:
            if record.key == key:
                return ExportedProgram(self.folder, record, record.signature.dropout)
        return None

    def _calls(self) -> str:
        calls = []
        for record in self.folder.manifest.programs:
            if not record.is_called:
                continue
            names = [name for name, _ in record.offsets] + list(record.part)
            names += ["cu_seqlens_q"] if record.packs else []
            calls.append("+".join(names) or "none of them")
        return ", or ".join(calls)

    def split(self) -> CallProgram:
        return self.variant(Variant(None, self.record.offsets, (*WHOLE, SPLIT), self.record.packs))

    def run_of(self, target: Target, call: CheckedCall) -> int:
        sizes = call.sizes[:4], call.splits, int(call.scalars[SPLIT])
        return fastest_run(_times_of_runs(self, target, target.sms, *sizes))

    def joining(self, run: int) -> CallProgram:
        record, exported_run = self.record, run if run in (1, ALL_SPLITS) else RUNS[-1]
        program = self._with_key(
            record.offsets, record.part, record.packs, exported_run, record.columns
        )
        assert program is not None, "a manifest with split keys has their runs"
        return program if self.drops else program.without_dropout()

    def planned_split(self, target: Target, call: CheckedCall) -> int:
        """0 also where the export has no kernels with split keys for such a call."""
        record = self.record
        if self._with_key(record.offsets, (*WHOLE, SPLIT), record.packs, 1, record.columns) is None:
            return 0
        rules = self._facts_of_split(target)
        sms = target.sms or rules.machine.sms
        chosen = choose_split(rules, max(call.heads_kv, 1), sms)
        return chosen.size_of(call, paged=self.signature.paged)

    def invariant_split(self, target: Target) -> int:
        rules = self._facts_of_split(target)
        heads_kv = usual_heads_kv(one_tensor=rules.one_tensor)
        return choose_split(rules, heads_kv, rules.machine.sms, invariant=True).size

    def _facts_of_split(self, target: Target) -> LaunchFacts:
        """The facts of the forward kernel with split keys and one query head in a tile.

        Raises:
            InputError: the export has none.
        """
        split = self.split().without_dropout()
        assert isinstance(split, ExportedProgram), "a variant of an export"
        path = split._path(target, "forward")
        if path is not None and path.columns < split.record.signature.head_dim_v:
            split = split.with_columns(path.columns)
        arch = target.arch if path is None else path.taken
        form = (arch, 1, 0)
        records = (r for r in split.record.forward if (r.arch, r.heads, r.few_rows) == form)
        return self.folder.kernel(min(records, key=lambda r: r.drops).kernel).facts

    def _path(self, target: Target, pass_name: str) -> PathRecord | None:
        backward = pass_name != "forward"
        learns = tuple(tensor.name for tensor in self.signature.learned) if backward else ()
        pass_ = Pass(self.drops, learns, backward, pass_name == "deterministic")
        return self.record.path_of(target.arch, pass_, is_open=target.open_path)

    def path_of_pass(
        self, target: Target, pass_name: str, tangents: tuple[str, ...] = ()
    ) -> Decision:
        path = self._path(target, pass_name)
        return Decision(target.arch, "") if path is None else Decision(path.taken, path.why)

    def columns_of_launch(
        self, target: Target, launch: LaunchOptions, pass_name: str, tangents: tuple[str, ...] = ()
    ) -> int:
        path = self._path(target, pass_name)
        return self.signature.head_dim_v if path is None else path.columns

    def with_columns(self, columns: int) -> ExportedProgram:
        record = self.record
        program = self._with_key(record.offsets, record.part, record.packs, record.run, columns)
        assert program is not None, "a manifest with such launches has their kernels"
        return program

    def tuned(self, pass_name: str, arch: str, call: CheckedCall, index: int) -> Mapping[str, Any]:
        return {}

    def forward(self, request: ForwardRequest) -> tuple[ExportedKernel, str]:
        self._refuse_options(request.launch)
        wide = self._is_wide(request.ranges)
        fitting = self._by_heads(request.arch, request.access_bytes, wide=wide)
        if not fitting:
            self._refuse_missing("forward kernel", request.arch, request.access_bytes, wide)
        layout = request.captured.get(LAYOUT)
        by_head = layout is not None and layout.shape[1] > 1
        call = request.call
        record, reason = self._fitting_heads(fitting, *call.sizes[:4], by_head=by_head)
        queries = call.queries_of_each(packed=self.signature.packed)
        return self.folder.kernel(self._fitting_rows(record, queries).kernel), reason

    def _by_heads(self, arch: str, access_bytes: int, *, wide: bool) -> dict[int, ForwardRecord]:
        """The forward kernels for these calls, by query heads per tile."""
        key = self.drops, arch, access_bytes, wide
        return {
            x.heads: x
            for x in self.record.forward
            if (x.drops, x.arch, x.access_bytes, x.wide) == key and not x.few_rows
        }

    def _fitting_rows(self, any_rows: ForwardRecord, seq_q: int) -> ForwardRecord:
        """The kernel of the smallest tile in which the queries of a call fit; or that of all."""
        fitting = [
            x
            for x in self.record.forward
            if replace(x, kernel=any_rows.kernel, tile=any_rows.tile, few_rows=0) == any_rows
            and (not x.few_rows or fits_rows(x.few_rows, x.heads, seq_q))
        ]
        return min(fitting, key=lambda x: x.few_rows or math.inf)

    def _fitting_heads(
        self,
        fitting: Mapping[int, ForwardRecord],
        batch: int,
        heads_q: int,
        heads_kv: int,
        seq_q: int,
        *,
        by_head: bool = False,
    ) -> tuple[ForwardRecord, str]:
        """The kernel whose heads per tile leave the fewest rows, of those that were exported.

        Args:
            by_head: whether heads have block layouts of their own, so that none share a tile.
        """
        group = heads_q // heads_kv
        usable = [heads for heads in sorted(fitting) if group % heads == 0 and not by_head]
        if len(usable) < 2:
            reason = f"of {group} that share K and V: as exported" if group > 1 else ""
            return fitting[1], reason
        rules = {heads: self.folder.kernel(fitting[heads].kernel).facts for heads in usable}
        rows = {heads: rules[heads].block_q for heads in usable}
        if self.signature.packed:
            seq_q = mean_length(seq_q, batch)
        sizes = batch, heads_q, heads_kv, seq_q, 1
        tiles = {heads: math.prod(rules[heads].grid(*sizes)) for heads in usable}
        chosen = heads_of_fewest_rows(rows, tiles, self.folder.manifest.heads_gain)
        reason = f"of {group} that share K and V, among the exported {', '.join(map(str, usable))}"
        return fitting[chosen], reason

    def backward(
        self,
        arch: str,
        deterministic: bool,
        launch: LaunchOptions,
        ranges: CallRanges,
        sizes: Sizes,
        memory: GpuMemory | None,
    ) -> tuple[ExportedKernel, ...]:
        self._refuse_options(launch)
        wide = self._is_wide(ranges)
        learns = tuple(tensor.name for tensor in self.signature.learned)
        for record in self.record.backward:
            if (record.drops, record.learns, record.arch, record.deterministic, record.wide) == (
                *(self.drops, learns, arch, deterministic, wide),
            ):
                return tuple(map(self.folder.kernel, record.kernels))
        self._refuse_missing("backward kernels", arch, 16, wide)

    def tangent(
        self, arch: str, names: tuple[str, ...], launch: LaunchOptions, ranges: CallRanges
    ) -> ExportedKernel:
        raise InputError(
            "an export has no kernel of tangents",
            where=str(self.folder.path),
            numbers=f"asked for the tangents of {', '.join(names)}",
            way_out="the operator of the spec itself: flashgen.attention(spec)",
        )

    def minmax_tables(self, arch: str) -> tuple[ExportedKernel, ...]:
        return tuple(map(self.folder.kernel, self.record.tables.get(arch, ())))

    def merge(self, arch: str) -> ExportedKernel:
        return self.folder.kernel(self.record.merge[arch])

    def _is_wide(self, ranges: CallRanges) -> bool:
        """Whether a call is outside of all ranges for which 32-bit integers serve."""
        if self.record.narrow is None:
            return False
        ends = dict(zip(ranges.names, ranges.ends, strict=True))
        return not any(
            all(low <= ends[n][0] and ends[n][1] <= high for n, (low, high) in box.items())
            for box in self.record.narrow
        )

    def _refuse_options(self, launch: LaunchOptions) -> None:
        if not launch.plans_itself:
            raise InputError(
                "the kernels of an export are planned already",
                where="arguments sram and tiles",
                numbers=f"given sram {launch.sram!r} and tiles {dict(launch.tiles)!r}",
                way_out="neither of them, or fg.attention(spec)",
            )

    def _refuse_missing(self, what: str, arch: str, access_bytes: int, wide: bool) -> NoReturn:
        raise InputError(
            f"the export has no {what} for this call",
            where=str(self.folder.path),
            numbers=f"for {arch}, {access_bytes} B per access, {64 if wide else 32}-bit integers",
            way_out="operands whose addresses and strides are multiples of 16 B and not 0: "
            f"x.contiguous(); or export again with this release: {self._command}",
        )


@functools.lru_cache(maxsize=4096)
def _times_of_runs(
    program: ExportedProgram,
    target: Target,
    sms: int | None,
    sizes: tuple[int, int, int, int],
    splits: int,
    size: int,
) -> Mapping[int, float]:
    """The predicted times of a call, as `split_choice.times_of_runs`.

    There are no times where the columns of V are computed in parts: each part decides.
    """
    path = program._path(target, "forward")
    if path is not None and path.columns < program.signature.head_dim_v:
        return {}
    arch = target.arch if path is None else path.taken
    any_rows, _ = program._fitting_heads(program._by_heads(arch, 16, wide=False), *sizes)
    batch, *_, seq_q = sizes
    queries = mean_length(seq_q, batch) if program.signature.packed else seq_q
    record = program._fitting_rows(any_rows, queries)
    assert record.tile is not None, "a manifest with split keys has their tiles"
    return times_of_runs(
        program.folder.kernel(record.kernel).facts,
        record.tile,
        sms or facts(arch).sms,
        *(sizes, splits, size),
        packed=program.signature.packed,
        by_position=program.record.by_position,
    )


class ExportedAttention(Attention):
    """The callable of an export: `flashgen.calls.ops.Attention`, with kernels from a folder.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        folder = open_folder(path)
        record, *_ = folder.manifest.programs
        super().__init__(ExportedProgram(folder, record, record.signature.dropout))
        self.path = folder.path
        # Programs of torch.export look operators up by their names.
        for program_record in folder.manifest.programs:
            if not program_record.is_called:
                continue
            register_hashed_name(
                ExportedProgram(folder, program_record, program_record.signature.dropout)
            )

    def __repr__(self) -> str:
        return f"flashgen.load_export({str(self.path)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return load_export, (str(self.path),)


@called_by_users()
def load_export(folder: str | os.PathLike[str]) -> ExportedAttention:
    """The callable of a spec that ``flashgen export`` wrote to a folder.

    It has the arguments and results of `flashgen.attention`, for calls that were exported, and
    needs neither sympy nor jinja2 nor NVRTC. CUDA tensors run on their GPU, CPU tensors in the
    emulator. It registers the operator under the name that it has in the process that exported it,
    ``torch.ops.flashgen.<name>``, so that programs of torch.export which hold it can be loaded.

    Args:
        folder: the folder that holds manifest.json.

    Returns:
        A callable; `calls.ops.Attention.__call__` lists its arguments. ``backend="tiled"``,
        another ``arch``, and arguments whose kernels were not exported raise InputError.

    Raises:
        ExportError: there is no export, it has another version, or a file is missing, changed or
            outside of the folder.
        LaunchError: of a call: no kernel is for the GPU, or its driver is older than the compiler.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ExportError(
            "the folder of an export is a path",
            where="argument folder of load_export",
            numbers=f"given {folder!r:.200}",
            way_out='fg.load_export("build/causal"), the folder of flashgen export -o',
        )
    return ExportedAttention(Path(folder))
