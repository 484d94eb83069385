"""Checks that the values of a manifest fit together, beyond their types.

A damaged manifest is refused when it is loaded, so that no call meets a kernel that is not there, a
size that is none, or a name that torch does not take.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from flashgen.calls.exported.manifest import (
    FORMAT,
    KERNELS,
    RUNS_OF_PROGRAMS,
    KernelRecord,
    Manifest,
    Pass,
    ProgramRecord,
)
from flashgen.shared.arch import portable
from flashgen.shared.call import CallRanges
from flashgen.shared.dtypes import OPERAND_DTYPES, SCALAR_DTYPES, TENSOR_DTYPES
from flashgen.shared.launch_facts import KEY_KERNELS, STREAMING_KERNELS, LaunchFacts
from flashgen.shared.paths import PATHS
from flashgen.shared.signature import OFFSETS, PAGE_NAMES, SPLIT, WHOLE, CallSignature
from flashgen.shared.split_choice import ALL_SPLITS

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ARCH = re.compile(r"sm_\d{2,3}[af]?", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_KERNELS = {"forward", "dq", "captured", "captured_exact", *KEY_KERNELS, *STREAMING_KERNELS}
_PARAMS = {"pointer", "int64", "int32", "float32", "tensormap"}
_OPERANDS = {"q", "k", "v", "do"}
_UNUSED = {
    **dict.fromkeys(STREAMING_KERNELS, ("block_k",)),
    "minmax_table": ("block_q", "block_k", "head_dim", "head_dim_v"),
}
"""The sizes of kernels that have none."""
_SIZES = ("batch", "heads", "seq_q", "seq_k")


def checked(manifest: Manifest) -> Manifest:
    """The manifest.

    Raises:
        ValueError: a value is none that an export writes.
    """
    lines = (manifest.flashgen, manifest.nvrtc, manifest.command)
    _require(all(map(str.isprintable, lines)), f"versions and command are lines of text: {lines}")
    archs = manifest.archs
    _require(_are_unique(archs) and all(map(_ARCH.fullmatch, archs)), f"architectures: {archs}")
    _require(manifest.heads_gain >= 1, f"heads_gain {manifest.heads_gain}: it is 1 or more")
    for name, file in manifest.files.items():
        _require(bool(_DIGEST.fullmatch(file.sha256)) and file.bytes >= 0, f"the record of {name}")
    for kernel in manifest.kernels:
        _check_kernel(kernel, manifest)
    keys = [program.key for program in manifest.programs]
    _require(_are_unique(keys), f"{len(keys)} programs: each is for another call")
    _require(keys[0] == ((), (), False, 1, 0), "the first program is for calls without options")
    for program in manifest.programs:
        _check_program(program, manifest)
    for program in manifest.programs:
        if SPLIT in program.part:
            runs = {replace(program, run=run).key for run in RUNS_OF_PROGRAMS}
            _require(runs <= set(keys), f"splits without a kernel for each run: {program.key}")
    _check_parts(manifest)
    return manifest


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"format {FORMAT} does not allow {what:.200}")


def _are_unique(values: Iterable[object]) -> bool:
    """Whether there are some and none twice."""
    items = list(values)
    return bool(items) and len(set(items)) == len(items)


def _check_kernel(kernel: KernelRecord, manifest: Manifest) -> None:
    facts = kernel.facts
    for suffix in ("cu", "ptx", "cubin"):
        file = f"{KERNELS}/{kernel.stem}.{suffix}"
        _require(file in manifest.files, f"a kernel without the file {file!r}")
    _require(kernel.cuda >= 1, f"CUDA {kernel.cuda}")
    _require(min(vars(kernel.resources).values()) >= 0, f"the resources of {kernel.stem}")
    words = (
        (facts.name, bool(_NAME.fullmatch(facts.name))),
        (facts.kernel, facts.kernel in _KERNELS),
        (facts.arch, bool(_ARCH.fullmatch(facts.arch))),
        (facts.path, facts.path in PATHS),
        (facts.dtype, facts.dtype in OPERAND_DTYPES),
        *((param.name, bool(_NAME.fullmatch(param.name))) for param in facts.params),
        *((param.ctype, param.ctype in _PARAMS) for param in facts.params),
        *((name, name in _OPERANDS) for name, _ in facts.boxes),
        *((term.summed_over, term.tensor != "") for term in facts.terms),
    )
    for word, is_known in words:
        _require(is_known, f"{word!r} in the facts of kernel {kernel.stem}")
    _require(_are_unique(facts.params), f"the parameters of kernel {kernel.stem}")
    for name, number in _counts(facts):
        least = 0 if name in _UNUSED.get(facts.kernel, ()) else 1
        _require(number >= least, f"{name} {number} of kernel {kernel.stem}")
    _require(facts.smem_bytes >= 0, f"smem_bytes {facts.smem_bytes} of kernel {kernel.stem}")
    _require(facts.threads % 32 == 0 and facts.threads <= 1024, f"{facts.threads} threads")
    _require(facts.integer_bits in (32, 64), f"integers of {facts.integer_bits} bits")
    _require(facts.access_bytes in (2, 4, 8, 16), f"{facts.access_bytes} B per access")
    heads = facts.heads_per_tile if facts.block_q else 0
    _require(facts.block_q >= heads, f"{heads} heads in {facts.block_q} rows")
    _require(min(facts.of_gpu) >= 0, f"the GPU of kernel {kernel.stem}: {facts.of_gpu}")


def _counts(facts: LaunchFacts) -> list[tuple[str, int]]:
    names = ("itemsize", "head_dim", "head_dim_v", "block_q", "block_k", "warps", "blocks_per_sm")
    counts = [(name, getattr(facts, name)) for name in (*names, "heads_per_tile", "threads")]
    counts += [("sms", facts.of_gpu.sms)]
    counts += [("sums_tile", size) for size in facts.sums_tile or ()]
    return counts + [(f"box of {name}", size) for name, box in facts.boxes for size in box]


def _check_program(program: ProgramRecord, manifest: Manifest) -> None:
    signature = program.signature
    _check_signature(signature)
    _require(bool(_DIGEST.fullmatch(program.digest)), f"the digest {program.digest!r} of a spec")
    _require(
        all(name in OFFSETS and dtype in ("int32", "int64") for name, dtype in program.offsets),
        f"offsets {program.offsets}",
    )
    parts = ((), WHOLE, (*WHOLE, SPLIT))
    _require(program.part in parts, f"part {program.part}")
    runs = RUNS_OF_PROGRAMS if SPLIT in program.part else (1,)
    _require(program.run in runs, f"a run of {program.run} splits")
    joins = signature.folds == (program.run == ALL_SPLITS)
    _require(joins, f"the signature of a run of {program.run} splits")
    _require(len(program.no_backward) in (0, 4), "no_backward without the four parts of an error")
    archs = {*manifest.archs, *(portable(arch) for arch in manifest.archs)}
    drops = {False, signature.dropout}
    for forward in program.forward:
        _check_kernels((forward.kernel,), forward.arch, manifest)
        _require(forward.arch in archs and forward.drops in drops, f"{forward}")
        facts = manifest.kernels[forward.kernel].facts
        call_form = forward.heads, forward.access_bytes, 64 if forward.wide else facts.integer_bits
        kernel_form = facts.heads_per_tile, facts.access_bytes, facts.integer_bits
        _require(
            call_form == kernel_form and facts.kernel == "forward", f"{forward} for {facts.name}"
        )
        _require(0 <= forward.few_rows <= facts.block_q, f"{forward} for {facts.name}")
        for tile in (forward.tile, facts.decoding) if signature.split else ():
            _require(tile is not None, f"no tile of {facts.name}, whose keys are split")
            assert tile is not None
            counts = len(tile.clocks), *tile.clocks, tile.rows, tile.key_bytes
            is_one = min(*counts, tile.cost, tile.least_cost) > 0
            _require(is_one, f"the tile of {facts.name}: {tile}")
        shape = facts.dtype, facts.head_dim, facts.head_dim_v
        _require(
            shape == (signature.dtype, *_dims(signature)), f"{facts.name} for {signature.name}"
        )
    for backward in program.backward:
        _check_kernels(backward.kernels, backward.arch, manifest)
        _require(bool(backward.kernels), "a backward pass without kernels")
        _require(backward.arch in archs and backward.drops in drops, f"{backward}")
    _check_paths(program, manifest)
    for arch in {record.arch for record in program.forward}:
        has_one_head = any((x.arch, x.heads, x.few_rows) == (arch, 1, 0) for x in program.forward)
        _require(has_one_head, f"a program without kernels of one head for {arch}")
    for arch, numbers in program.tables.items():
        _check_kernels(numbers, arch, manifest)
    for arch, number in program.merge.items():
        _check_kernels((number,), arch, manifest)
    merged = set(manifest.archs) if signature.split and not signature.folds else set()
    _require(set(program.merge) == merged, f"kernels that merge for {sorted(program.merge)}")
    _check_layout(program, manifest)
    names = _names_of_ranges(signature)
    for box in program.narrow or ():
        fits = set(box) == names and all(low <= high for low, high in box.values())
        _require(fits, f"the ranges {box}")


def _check_parts(manifest: Manifest) -> None:
    """Whether launches for some columns of V have programs, of all variants of the spec."""
    whole = {
        program.key[:-1]: program.signature for program in manifest.programs if not program.columns
    }
    for program in manifest.programs:
        call_signature = whole.get(program.key[:-1])
        _require(
            call_signature is not None, f"a part of no program: {program.columns} columns of V"
        )
        assert call_signature is not None
        dim, shared_kv = call_signature.head_dim_v, call_signature.shared_kv
        whole_signature = replace(program.signature, head_dim_v=dim, shared_kv=shared_kv)
        _require(
            whole_signature == call_signature, f"{program.columns} columns of V of another call"
        )
    for columns in {width for program in manifest.programs for width in program.widths}:
        parts = {program.key[:-1] for program in manifest.programs if program.columns == columns}
        _require(parts == set(whole), f"launches of {columns} columns of V without kernels")


def _check_paths(program: ProgramRecord, manifest: Manifest) -> None:
    """Whether each pass of all calls has kernels of one launch, or several compute it."""
    dim, drops = program.signature.head_dim_v, {False, program.signature.dropout}
    _require(program.columns in (0, dim), f"a program of {program.columns} of {dim} columns")
    choices = [(path.arch, path.is_open, path.of) for path in program.paths]
    _require(len(set(choices)) == len(choices), f"two of the {len(choices)} choices of paths")
    for path in program.paths:
        arch = path.arch
        _require(arch in manifest.archs and path.taken in (arch, portable(arch)), f"{path}")
        _require(1 <= path.columns <= dim and path.why.isprintable(), f"{path}")
    passes = {Pass(drop) for drop in drops}
    if not program.no_backward:
        learns = {(), tuple(x.name for x in program.signature.learned)}
        passes |= {Pass(*fields) for fields in product(drops, learns, (True,), (False, True))}
    _require(passes >= {path.of for path in program.paths}, "a choice for a pass of no call")
    any_rows = [x for x in program.forward if x.heads == 1 and not x.few_rows]
    computed = {(x.arch, Pass(x.drops)) for x in any_rows}
    computed |= {(x.arch, Pass(x.drops, x.learns, True, x.deterministic)) for x in program.backward}
    if program.columns:
        passes &= {x for whole in manifest.programs for x in whole.widths.get(program.columns, ())}
    for arch, is_open, pass_ in product(manifest.archs, (False, True), passes):
        chosen = program.path_of(arch, pass_, is_open=is_open)
        if chosen is None or chosen.columns == dim:
            kernel_arch = arch if chosen is None else chosen.taken
            _require(
                (kernel_arch, pass_) in computed, f"a program without kernels for {kernel_arch}"
            )


def _check_kernels(numbers: Iterable[int], arch: str, manifest: Manifest) -> None:
    for number in numbers:
        _require(0 <= number < len(manifest.kernels), f"kernel {number} of {len(manifest.kernels)}")
        kernel_arch = manifest.kernels[number].facts.arch
        _require(
            kernel_arch == arch, f"kernel {number} for {kernel_arch} where one for {arch} is named"
        )


def _check_layout(program: ProgramRecord, manifest: Manifest) -> None:
    layout = program.layout
    if layout is None:
        return
    _require(min(layout.block_q, layout.block_k) >= 1, f"{layout}")
    _require(min(layout.rows, layout.columns) >= 0, f"{layout}")
    table_bytes = manifest.files[layout.table].bytes if layout.table in manifest.files else 0
    _require(
        table_bytes == layout.rows * layout.columns, f"{layout}: the table has {table_bytes:,} B"
    )
    _require(bool(layout.table) == bool(table_bytes), f"{layout}")


def _check_signature(signature: CallSignature) -> None:
    names = [scalar.name for scalar in signature.scalars]
    names += [tensor.name for tensor in signature.tensors]
    _require(bool(_NAME.fullmatch(signature.name)), f"the name {signature.name!r} of a spec")
    _require(len(set(names)) == len(names) and all(map(_NAME.fullmatch, names)), f"names {names}")
    dtypes = signature.dtype, signature.out_dtype
    _require(set(dtypes) <= set(OPERAND_DTYPES), f"dtypes {dtypes}")
    _require(signature.kv_dtype is None, f"codes of dtype {signature.kv_dtype!r} in a cache")
    _require(min(_dims(signature)) >= 1, f"head dims {_dims(signature)}")
    for scalar in signature.scalars:
        _require(scalar.dtype in SCALAR_DTYPES, f"{scalar}")
    for tensor in signature.tensors:
        named = all(d >= 1 if isinstance(d, int) else d.isidentifier() for d in tensor.dims)
        learnable = not tensor.grad or "float" in tensor.dtype
        _require(named and learnable and tensor.dtype in TENSOR_DTYPES, f"{tensor}")
    paged = PAGE_NAMES if signature.paged else ()
    _require(
        {*signature.boundaries, *paged} <= set(names), f"a call without {paged or 'cu_seqlens'}"
    )
    sink = signature.sink
    _require(sink is None or sink in signature.tensors, f"the sink {sink}")
    _require(signature.block_sparse is None, "a block layout in a signature")
    _require(set(signature.offsets) <= {*OFFSETS, *names}, f"offsets {signature.offsets}")


def _dims(signature: CallSignature) -> tuple[int, int]:
    return signature.head_dim, signature.head_dim_v


def _names_of_ranges(signature: CallSignature) -> set[str]:
    """The names whose ranges a call has."""
    offsets: dict[str, int | None] = dict.fromkeys(OFFSETS)
    scalars = {x.name: 0 for x in signature.scalars if x.dtype != "float32"}
    sequences_vary = signature.packed or signature.paged
    return set(
        CallRanges.from_call(dict.fromkeys(_SIZES, 0), offsets, scalars, sequences_vary).names
    )
