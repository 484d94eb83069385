"""The C sources of an export: the values that fill the templates in ``templates/export/``.

The launches in C are as in the runtime: the same kernel for the same call, with the same bytes of
parameters. `calls.runtime.kernel_arguments` and `shared.launch_facts` are the rules that
the templates repeat; a test compares the bytes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from flashgen.calls.exported.manifest import (
    KernelRecord,
    LayoutRecord,
    Manifest,
    Pass,
    ProgramRecord,
)
from flashgen.kernels.codegen.environment import render_template
from flashgen.kernels.codegen.expressions.cpp_text import KEYWORDS, MACRO
from flashgen.shared.arch import facts, portable, version_of
from flashgen.shared.dropout import BLOCK
from flashgen.shared.dtypes import (
    COUNT_LIMIT,
    ELEMENTS,
    FLOAT32_MAX,
    ITEMSIZE,
    OPERANDS,
    POSITION_LIMIT,
    SCALAR_LIMIT,
)
from flashgen.shared.launch_facts import SPAN, LaunchFacts, ParamFacts
from flashgen.shared.signature import CallSignature, ScalarArgument, TensorArgument, field_stem
from flashgen.spec.language.block_layout import TENSORS

Fields = dict[str, Any]

_C_TYPES = {"pointer": "CUdeviceptr", "int64": "int64_t", "int32": "int32_t", "float32": "float"}
_BOXES = ("q", "k", "v", "do")
_TENSORS = (*_BOXES, "o", "dq", "dk", "dv")
_STRIDE = re.compile(r"(\w+)_stride_([bhn])")
_CAPTURED = re.compile(r"(d?)c_(\w+)_(size|stride)_(\d+)")
_TABLE = re.compile(r"m_(\w+)_(\d+)")
_SIZES = {"batch": "batch", "heads": "heads_q", "seq_q": "seq_q", "seq_k": "seq_k"}


def why_no_sources(record: ProgramRecord) -> str:
    """Why a spec has no sources for C; "" where it has."""
    if record.signature.paged:
        return "caches with pages are for Python"
    if record.widths:
        exports = " and ".join(f"--head-dim-v {x}" for x in sorted(record.widths, reverse=True))
        return (
            f"some passes compute the columns of V in several launches; exports with {exports} "
            "have these launches for C, of which the caller adds dq and dk"
        )
    return ""


def c_sources(manifest: Manifest) -> dict[str, str]:
    """NAME.h and NAME.c of an export."""
    fields = _fields(manifest)
    name = fields["p"]
    return {
        f"{name}.{kind}": render_template(f"export/launcher.{kind}.j2", **fields)
        for kind in ("h", "c")
    }


def c_name(record: ProgramRecord) -> str:
    """The prefix of all names in C: the name of the spec."""
    return re.sub(r"\W", "_", record.signature.name, flags=re.ASCII)


def _fields(manifest: Manifest) -> Fields:
    record = manifest.programs[0]
    signature = record.signature
    captured = _captured(record)
    archs = sorted(manifest.archs, key=version_of, reverse=True)
    forms = _forms(record, archs)
    tables = _tables(manifest, archs, captured)
    used = sorted(
        {x["kernel"] for x in (*forms["forwards"], *tables)}
        | {number for x in forms["backwards"] for number in x["kernels"]}
    )
    layouts = _Layouts(captured, tuple(dict.fromkeys(x["name"] for x in tables)))
    kernels = [_kernel(manifest.kernels[number], layouts) for number in used]
    for form in (*forms["forwards"], *tables):
        form["kernel"] = used.index(form["kernel"])
    for form in forms["backwards"]:
        form["kernels"] = [used.index(number) for number in form["kernels"]]
    learned = _learned(signature, captured)
    learned_names = [tensor.name for tensor in signature.learned]
    dtype, out_dtype = signature.dtype, signature.out_dtype
    assert dtype is not None, "kernels are exported for one dtype"
    assert out_dtype is not None
    sums = OPERANDS[dtype].sums
    softmax = signature.normalize == "softmax"
    scale = signature.scale if signature.scale is not None else signature.head_dim**-0.5
    return {
        **forms,
        "p": c_name(record),
        "version": manifest.flashgen,
        "command": manifest.command,
        "name": signature.name,
        "head_dim": signature.head_dim,
        "head_dim_v": signature.head_dim_v,
        "dtype": dtype,
        "out_dtype": out_dtype,
        "itemsize": ITEMSIZE[dtype],
        "out_itemsize": ITEMSIZE[out_dtype],
        "scale": repr(float(scale)),
        "most": _MOST_FLOAT,
        "dropout": signature.dropout,
        "dropout_block": BLOCK,
        "packed": signature.packed,
        "cuda": max(manifest.kernels[number].cuda for number in used),
        "captured": [_tensor_fields(tensor) for tensor in captured],
        "most_axes": max([4, *(len(tensor.dims) for tensor in captured)]),
        "scalars": [_scalar_fields(scalar) for scalar in signature.scalars],
        "learned": learned,
        "unlearned": ", ".join(learned_names) if learned_names and not learned else "",
        "sum_dtype": sums.dtype,
        "sum_bytes": sums.itemsize,
        "backward": bool(forms["backwards"]),
        "most_launches": max((len(x["kernels"]) for x in forms["backwards"]), default=0),
        "softmax": softmax,
        # What kernels write to the place of the log-sum-exp.
        "lse": {"softmax": "natural log", "sum": "the sum of each row's weights"}.get(
            signature.normalize, "not written"
        ),
        "no_keys": "out is 0 and lse is -inf" if softmax else "out is 0",
        "tables": tables,
        "table_count": len({x["name"] for x in tables}),
        "span": SPAN,
        "kernels": kernels,
        "layouts": layouts.fields,
        "kinds": {field["kind"] for layout in layouts.fields for field in layout["fields"]},
        "most_bytes": max(layout["bytes"] for layout in layouts.fields),
        "narrow": _narrow(record),
        "archs": [_arch(arch) for arch in archs],
        **_dimensions(captured),
        "positioned": [] if signature.packed else _positioned(captured),
        "blocks": [] if signature.packed or record.layout is None else _blocks(record.layout),
        "position_limit": POSITION_LIMIT,
        "count_limit": COUNT_LIMIT,
    }


def _captured(record: ProgramRecord) -> tuple[TensorArgument, ...]:
    """The captured tensors, and the tensors of a block layout that is a function."""
    tensors = record.signature.tensors
    if record.layout is not None and record.layout.rows:
        tensors += tuple(TensorArgument(*tensor.key) for tensor in TENSORS)
    return tensors


def _learned(signature: CallSignature, captured: Sequence[TensorArgument]) -> list[Fields]:
    """The tensors whose gradients C computes: none with a learned sink, which needs host sums."""
    if signature.sink is not None and signature.sink.grad:
        return []
    return [
        {"name": tensor.name, "index": index, "rank": len(tensor.dims)}
        for index, tensor in enumerate(captured)
        if tensor.grad
    ]


def _forms(record: ProgramRecord, archs: Sequence[str]) -> Fields:
    """When each kernel serves: by architecture, with those for operands that TMA cannot copy.

    Calls name no architecture.
    """
    sink = record.signature.sink
    all_learned = sink is None or not sink.grad

    def taken_by(arch: str, pass_: Pass) -> str:
        path = record.path_of(arch, pass_, is_open=True)
        return arch if path is None else path.taken

    forwards, backwards, fallbacks = [], [], []
    for arch_index, arch in enumerate(archs):
        by_tma = facts(arch).code_path.copies_by_tma
        fallbacks.append(int(by_tma))
        for fallback in (0, 1) if by_tma else (0,):
            conditions = {"arch": arch_index, "fallback": fallback}
            for form in record.forward:
                kernel_arch = portable(arch) if fallback else taken_by(arch, Pass(form.drops))
                if form.arch == kernel_arch and form.heads == 1 and not form.few_rows:
                    forwards.append({**vars(form), **conditions})
            for backward in record.backward:
                pass_ = Pass(backward.drops, backward.learns, True, backward.deterministic)
                kernel_arch = portable(arch) if fallback else taken_by(arch, pass_)
                # Exact sums of learned tensors need steps on the host between their launches.
                exact = backward.learns and (backward.deterministic or not all_learned)
                if backward.arch == kernel_arch and not exact:
                    backwards.append({**vars(backward), **conditions})
    return {"forwards": forwards, "backwards": backwards, "fallbacks": fallbacks}


def _tables(
    manifest: Manifest, archs: Sequence[str], captured: Sequence[TensorArgument]
) -> list[Fields]:
    """The kernels of min/max tables by architecture."""
    tables = []
    names: dict[str, int] = {}
    for arch_index, arch in enumerate(archs):
        for number in manifest.programs[0].tables.get(arch, ()):
            params = manifest.kernels[number].facts.params
            name = next(p.name for p in params if _TABLE.fullmatch(p.name))
            tensor_name, _, axis = name.removeprefix("m_").rpartition("_")
            tensor_index, tensor = next(
                (i, x) for i, x in enumerate(captured) if x.name == tensor_name
            )
            tables.append(
                {
                    "name": name,
                    "kernel": number,
                    "arch": arch_index,
                    "table": names.setdefault(name, len(names)),
                    "captured": tensor_index,
                    "axis": int(axis),
                    "rank": len(tensor.dims),
                    "element_bytes": ITEMSIZE[ELEMENTS[tensor.dtype].value_dtype],
                }
            )
    return tables


class _Layouts:
    """The parameter structs of kernels, each once."""

    def __init__(self, captured: Sequence[TensorArgument], tables: Sequence[str]) -> None:
        self.fields: list[Fields] = []
        self._indices = {field_stem(x.name): index for index, x in enumerate(captured)}
        self._ranks = {field_stem(x.name): len(x.dims) for x in captured}
        self._tables = tables
        self._numbers: dict[tuple[ParamFacts, ...], int] = {}

    def number(self, record: KernelRecord) -> int:
        params = record.facts.params
        if params not in self._numbers:
            fields = [self._field(param) for param in params]
            maps = any(field["kind"] == "map" for field in fields)
            self._numbers[params] = len(self.fields)
            self.fields.append(
                {"fields": fields, "bytes": record.resources.param_bytes, "maps": maps}
            )
        return self._numbers[params]

    def _field(self, param: ParamFacts) -> Fields:
        name, ctype = param
        field: Fields = {"c_type": _C_TYPES.get(ctype, ""), "name": _c_field(name), "axis": 0}
        if ctype == "tensormap":
            return {**field, "kind": "map", "of": _c_field(name), "axis": _BOXES.index(name)}
        strides, sizes = _STRIDE.fullmatch(name), _CAPTURED.fullmatch(name)
        if sizes and sizes[2] in self._indices:
            kind = ("gradient_" if sizes[1] else "captured_") + sizes[3]
            captured_index, rank = self._indices[sizes[2]], self._ranks[sizes[2]]
            return {**field, "kind": kind, "of": captured_index, "axis": sizes[4], "rank": rank}
        if strides and strides[1] in _TENSORS:
            axis = "bhn".index(strides[2])
            return {**field, "kind": "stride", "of": _c_field(strides[1]), "axis": axis}
        if ctype == "pointer":
            return field | self._pointer(name)
        if name.startswith("d_"):
            return {**field, "kind": "multiplier", "of": name[2:]}
        if name.startswith("i_"):
            return {**field, "kind": "inverse", "of": name[2:]}
        return {**field, "kind": "number", "of": name}

    def _pointer(self, name: str) -> Fields:
        if name in _TENSORS:
            return {"kind": "tensor", "of": _c_field(name)}
        if name.startswith("c_"):
            return {"kind": "captured", "of": self._indices[name[2:]]}
        if name.startswith("dc_"):
            return {"kind": "gradient", "of": self._indices[name[3:]]}
        if name.startswith("m_"):
            return {"kind": "table", "of": self._tables.index(name)}
        return {"kind": "number", "of": name}


def _c_field(name: str) -> str:
    """The name of a field in C, where ``do`` is a keyword."""
    return re.sub(r"^do(?=_|$)", "dout", name)


_OTHER_MACROS = {
    *("I", "assert", "complex", "errno", "far", "i386", "imaginary", "linux", "near", "noreturn"),
    *("offsetof", "restrict", "small", "stderr", "stdin", "stdout", "unix"),
}


def _c_argument(name: str) -> str:
    """The field of a captured tensor or a scalar in C, ``int_value`` for "int" or a macro."""
    word = re.sub(r"(_value)+$", "", name)
    is_reserved = word in KEYWORDS or word in _OTHER_MACROS or MACRO.match(word)
    return f"{name}_value" if is_reserved else name


def _kernel(record: KernelRecord, layouts: _Layouts) -> Fields:
    facts: LaunchFacts = record.facts
    boxes, machine = dict(facts.boxes), facts.machine
    return {
        "facts": facts,
        "delta": facts.kernel == "delta",
        "file": f"kernels/{record.stem}.cubin",
        "row_bytes": facts.row_bytes,
        "sums_tile": facts.sums_tile or (0, 0),
        "grouped": any(param.name == "head_bits" for param in facts.params),
        "machine": [repr(float(value)) for value in machine],
        "boxes": [boxes.get(name, (0, 0, 0)) for name in _BOXES],
        "layout": layouts.number(record),
    }


def _arch(arch: str) -> Fields:
    major, minor, exact = version_of(arch)
    return {"name": arch, "major": major, "minor": minor, "exact": int(exact)}


def _tensor_fields(tensor: TensorArgument) -> Fields:
    dims, rank = ", ".join(map(str, tensor.dims)), len(tensor.dims)
    field, name, dtype = _c_argument(tensor.name), tensor.name, tensor.dtype
    or_one = ", or of length 1" if any(isinstance(dim, str) for dim in tensor.dims) else ""
    dtype_fields = {"dtype": dtype, "itemsize": ITEMSIZE[dtype]}
    return {"name": name, "field": field, **dtype_fields, "dims": dims, "rank": rank, "one": or_one}


_MOST_FLOAT = f"{FLOAT32_MAX!r}f"


def _scalar_fields(scalar: ScalarArgument) -> Fields:
    least, most = _bounds(scalar)
    fields = {"name": scalar.name, "field": _c_argument(scalar.name), "least": least, "most": most}
    if scalar.dtype == "float32":
        shown = ", finite" if scalar.minimum is None else f", from {least.removesuffix('f')} on"
        return {**fields, "c_type": "float", "range": shown}
    shown = f", from {least} to {most}" if least else ": 0 or 1"
    return {**fields, "c_type": "int32_t", "range": shown}


def _bounds(scalar: ScalarArgument) -> tuple[str, str]:
    """The least and the largest value that a call may give a scalar, in C; "" for a bool."""
    low = scalar.minimum
    if scalar.dtype == "bool":
        return "", ""
    if scalar.dtype == "float32":
        return f"-{_MOST_FLOAT}" if low is None else f"{float(low)!r}f", _MOST_FLOAT
    return str(-SCALAR_LIMIT if low is None else math.ceil(low)), str(SCALAR_LIMIT)


def _dimensions(captured: Sequence[TensorArgument]) -> dict[str, list[Any]]:
    """The dimensions of captured tensors that are a number, a size of the call, or have the name of
    another one."""
    sizes = {"batch": "entries", "heads": "heads", "heads_kv": "heads_kv"}
    fixed, sized, named = [], [], defaultdict[str, list[Fields]](list)
    for tensor in captured:
        for axis, dim in enumerate(tensor.dims):
            axis_fields = {"field": _c_argument(tensor.name), "axis": axis, "size": dim}
            if isinstance(dim, int):
                fixed.append(axis_fields)
            elif dim in sizes:
                sized.append({**axis_fields, "size": sizes[dim]})
            elif dim not in ("seq_q", "seq_k"):
                named[dim].append(axis_fields)
    shared = [axes for axes in named.values() if len(axes) > 1]
    return {"fixed": fixed, "sized": sized, "shared": shared}


def _positioned(captured: Sequence[TensorArgument]) -> list[Fields]:
    """The dimensions of captured tensors that have an element for each position."""
    ends = {"seq_q": "q", "seq_k": "k"}
    return [
        {"field": _c_argument(tensor.name), "axis": axis, "of": ends[str(dim)]}
        for tensor in captured
        for axis, dim in enumerate(tensor.dims)
        if dim in ends
    ]


def _blocks(layout: LayoutRecord) -> list[Fields]:
    """The dimensions of a block layout that have a block for each position."""
    return [
        {"axis": 2, "of": "q", "size": layout.block_q},
        {"axis": 3, "of": "k", "size": layout.block_k},
    ]


def _narrow(record: ProgramRecord) -> list[list[Fields]] | None:
    """The ranges for 32-bit integers, by what the ends of each name follow from."""
    if record.narrow is None:
        return None
    return [[_range(name, *ends) for name, ends in box.items()] for box in record.narrow]


def _range(name: str, least: int, most: int) -> Fields:
    fields: Fields = {"least": least, "most": most, "axis": name[0]}
    if name in _SIZES:
        return {**fields, "kind": "size", "of": _SIZES[name]}
    if name in ("b", "h"):
        return {**fields, "kind": "index", "of": {"b": "batch", "h": "heads_q"}[name]}
    if name in ("q", "q_lo", "q_hi", "k", "k_lo", "k_hi"):
        return {**fields, "kind": "position", "of": name}
    variable = name if name in ("q_offset", "k_offset") else f"s_{name}"
    return {**fields, "kind": "number", "of": variable}
