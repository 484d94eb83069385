"""Renders a kernel: the fields that all templates have, and the file made of them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashgen.kernels.codegen.banner import banner
from flashgen.kernels.codegen.environment import render_template
from flashgen.kernels.codegen.functions import SpecFunctions
from flashgen.kernels.codegen.integer_ranges import AssumedBlock
from flashgen.kernels.codegen.params import (
    SINK_SUMS,
    WORK_TILES,
    head_in_whole,
    heads_of_whole,
    is_set_by_kernel,
    params_of,
)
from flashgen.kernels.codegen.readers import (
    address_of_sum,
    param_of_table,
    params_of_gradient,
    params_of_tensor,
    reader,
    type_of_sums,
)
from flashgen.kernels.codegen.source import Param, Source, kernel_name
from flashgen.kernels.codegen.spec_function import SpecFunction
from flashgen.kernels.codegen.text import DeviceFunction, within_columns
from flashgen.kernels.codegen.tidy import simplified, tidy, used
from flashgen.kernels.codegen.walk import ScoreCode, WalkCode
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.models.forward_sm80 import PANEL
from flashgen.kernels.planner.models.kernel_model import MMA_ROWS
from flashgen.kernels.planner.models.spec_terms import is_wide
from flashgen.shared.arch import version_of
from flashgen.shared.dtypes import (
    CACHE_DTYPES,
    ELEMENTS,
    OPERANDS,
    POSITION_LIMIT,
    CacheDtype,
)
from flashgen.shared.launch_facts import PAGED_KERNELS, SPAN
from flashgen.shared.signature import is_by_row
from flashgen.shared.split_choice import SPLITS_OF_GROUP
from flashgen.shared.tensormap import RAGGED_ROWS
from flashgen.spec.language.scalar import Scalar
from flashgen.spec.language.spec import BOUNDARIES, SCALES, AttentionSpec
from flashgen.spec.language.tensor import Tensor


@dataclass(frozen=True)
class KernelCode:
    """The C++ of one kernel that is made from its spec.

    Attributes:
        functions: the object that makes functions from the mask and the score.
        walk: the walk over tiles.
        score: the score of an element, and its derivative in backward kernels.
        extra_functions: functions besides the functions of walk and score.
        partials: the derivatives by learned tensors, in the kernel that sums their gradients.
        tensors: tensors that the kernel itself reads, each with the function that reads it.
    """

    functions: SpecFunctions
    walk: WalkCode
    score: ScoreCode
    extra_functions: tuple[SpecFunction, ...] = ()
    partials: object = None
    tensors: tuple[tuple[Tensor, DeviceFunction], ...] = ()

    @property
    def printed(self) -> tuple[SpecFunction, ...]:
        """All functions in the order in which the file has them."""
        return (*self.score.functions, *self.walk.functions, *self.extra_functions)


def kernel(
    template: str, spec: AttentionSpec, plan: Plan, code: KernelCode | None, **fields: Any
) -> Source:
    """One emitted file.

    Args:
        code: None for a kernel that evaluates neither mask nor score.
        fields: the fields that only this template has.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    tensors, readers = _tensors_read(spec, plan, code)
    params = _params_of_kernel(spec, plan, code, tensors)
    printed = code.printed if code else ()
    return rendered(
        template,
        spec,
        plan,
        kernel_name(spec, plan),
        params,
        spec_section=tuple(function.text for function in (*readers, *printed)),
        maps=[param.name for param in params if param.ctype == "tensormap"],
        walk=code.walk if code else None,
        score=code.score if code else None,
        partials=code.partials if code else None,
        assumptions=tuple(code.functions.printer.assumptions) if code else (),
        outlined=tuple((f.name, f.operations) for f in printed if not f.is_inlined),
        calls_sines=any(f.calls_sines for f in printed),
        **_fields_of_spec(spec, plan, evaluates=code is not None),
        **_fields_of_forward(spec, plan),
        **_fields_of_codes(spec, plan),
        **_fields_of_path(spec, plan, code),
        **fields,
    )


def _tensors_read(
    spec: AttentionSpec, plan: Plan, code: KernelCode | None
) -> tuple[tuple[Tensor, ...], tuple[DeviceFunction, ...]]:
    """The captured tensors that a kernel reads, and the functions that read elements of them."""
    tensors = code.functions.tensors if code else ()
    readers = code.functions.readers if code else ()
    for tensor, function in code.tensors if code else ():
        if function.name not in {existing.name for existing in readers}:
            tensors, readers = (*tensors, tensor), (*readers, function)
    sink = _sink_of(spec, plan)
    if sink is not None and sink.name not in {tensor.name for tensor in tensors}:
        tensors, readers = (*tensors, sink), (*readers, reader(sink))
    if _is_packed(spec, plan) and code is None:
        tensors, readers = BOUNDARIES, tuple(map(reader, BOUNDARIES))
    if plan.is_for_learned:
        sums = type_of_sums(plan)
        readers += tuple(address_of_sum(tensor, sums) for tensor in tensors if tensor.grad)
    return tensors, readers


def _params_of_kernel(
    spec: AttentionSpec, plan: Plan, code: KernelCode | None, tensors: tuple[Tensor, ...]
) -> list[Param]:
    """All parameters that the template may read; `rendered` keeps those that it does read."""
    role_params = params_of(
        spec, plan.kernel, plan.code_path, in_parts=plan.in_parts, moving=plan.moving
    )
    params = [*role_params, *WORK_TILES]
    params += [param for tensor in tensors for param in params_of_tensor(tensor)]
    tables = code.functions.tables if code else ()
    params += [param_of_table(tensor, axis) for tensor, axis in tables]
    if _codes_of(spec, plan) is not None:  # kernels copy the scales of codes with them
        params += [param for tensor in SCALES for param in params_of_tensor(tensor)]
    params.append(SINK_SUMS)
    if plan.is_for_learned:
        learned, sums = [tensor for tensor in tensors if tensor.grad], type_of_sums(plan)
        params += [param for tensor in learned for param in params_of_gradient(tensor, sums)]
    return params


def _sink_of(spec: AttentionSpec, plan: Plan) -> Tensor | None:
    """The sink, where the kernel reads it."""
    return spec.sink if plan.sink_bytes else None


def _is_packed(spec: AttentionSpec, plan: Plan) -> bool:
    """Whether blocks belong to sequences; "delta" has rows, whatever their sequence."""
    return spec.packed and plan.kernel != "delta"


def _is_paged(spec: AttentionSpec, plan: Plan) -> bool:
    return spec.paged and plan.kernel in PAGED_KERNELS


def _codes_of(spec: AttentionSpec, plan: Plan) -> CacheDtype | None:
    """The dtype of the codes that the kernel reads from a cache."""
    return CACHE_DTYPES[spec.kv_dtype] if spec.kv_dtype and _is_paged(spec, plan) else None


def _fields_of_spec(spec: AttentionSpec, plan: Plan, *, evaluates: bool) -> dict[str, Any]:
    """The fields that say what is computed.

    Args:
        evaluates: whether the kernel evaluates the mask and the score.
    """
    forward, packed, sink = plan.kernel == "forward", _is_packed(spec, plan), _sink_of(spec, plan)
    offsets = spec.offsets if evaluates else ()
    by_entry = bool(offsets) or _is_paged(spec, plan)
    has_sums = spec.sums_weights and not spec.takes_maxima
    return {
        "element": OPERANDS[plan.dtype],
        "stored": ELEMENTS[plan.dtype].stored,
        "span": SPAN,
        "position_limit": POSITION_LIMIT,
        "ragged_rows": RAGGED_ROWS,
        "PANEL": PANEL,
        "sparse": spec.block_sparse if evaluates else None,
        "dropout": spec.dropout,
        "draws": spec.draws,
        "softmax": spec.is_softmax,
        "sums_weights": spec.sums_weights,
        "sums": has_sums,  # of the weights of a row
        # The weighted sums over some of a row's keys are divided when they have been merged.
        "divides": has_sums and not (spec.adds_parts and forward),
        "takes_maxima": spec.takes_maxima,
        "rounds_sums": spec.rounds_sums and plan.dtype != "float32",
        "sink": None if sink is None else logit_of_row(spec, plan, sink),
        "row_sink": sink is not None and is_by_row(sink.dims),
        "counted_head": functools.partial(_counted_head, plan),
        "head_in_whole": head_in_whole(spec, "h"),
        "heads_of_whole": heads_of_whole(spec),
        "packed": packed,
        "paged": _is_paged(spec, plan),
        "offsets": [tensor.name for tensor in offsets],
        "by_entry": by_entry,
        "sets_length": any(
            is_set_by_kernel(spec, scalar) and reads(spec, scalar) for scalar in spec.scalars
        ),
        "parameter": _parameter(packed=packed, moves=by_entry or (spec.split and forward)),
        "fused": plan.kernel == "fused",
        "records": plan.records,
        "clusters": plan.cluster > 1,
        "one_tensor": plan.one_tensor,
    }


def _parameter(*, packed: bool, moves: bool) -> str:
    """The name of the kernel's parameter; it is "p" where blocks need no parameters of their own.

    Args:
        packed: blocks derive "p" from it by their sequence.
        moves: blocks derive "p" from it by their batch entry or their split of the keys.
    """
    if packed:
        return "packed"
    return "call" if moves else "p"


def _fields_of_forward(spec: AttentionSpec, plan: Plan) -> dict[str, Any]:
    """The fields of forward kernels: splits of the keys, and warps that share rows."""
    forward = plan.kernel == "forward"
    shares_rows = forward and plan.column_warps > 1
    wide = forward and is_wide(spec)
    return {
        "forward": forward,
        "split": spec.split and forward,
        "folds": plan.folds,
        "runs": plan.runs,
        "joins": plan.joins,
        "splits_of_group": SPLITS_OF_GROUP,
        "shares_rows": shares_rows,
        "wide": wide,
        "makes_q_again": shares_rows or wide,
        "two_shares": shares_rows and not plan.one_tensor,
        "two_parts": shares_rows and plan.one_tensor,
        "single_v": forward and plan.stages_v < plan.stages,
        "row_warpgroups": "1" if shares_rows else "CONSUMERS",
        "o_columns": "O_COLUMNS" if shares_rows else "HEAD_DIM_V",
        "row_warp": "thread / 32 % ROW_WARPS" if shares_rows else "thread / 32",
        "score_k": "SCORE_K" if plan.exchanges else "BLOCK_K",
    }


def _fields_of_codes(spec: AttentionSpec, plan: Plan) -> dict[str, Any]:
    """The fields of kernels that read codes of 8 bits from a cache."""
    codes, converts_e4m3 = _codes_of(spec, plan), version_of(plan.arch)[:2] >= (8, 9)
    in_tiles = codes is not None and plan.tiles_hold_codes
    converts = codes is not None and (
        codes.short == "int8" or (codes.short == "e4m3" and not converts_e4m3)
    )
    return {
        "codes": codes,
        "code_tiles": in_tiles,
        "ordered": plan.orders_queries,
        "small_scales": in_tiles and converts,
        "converts_e4m3": converts_e4m3,
    }


def _fields_of_path(spec: AttentionSpec, plan: Plan, code: KernelCode | None) -> dict[str, Any]:
    """The fields that only the templates of the plan's code path have."""
    if code is None or not plan.code_path.template_fields:
        return {}
    module = importlib.import_module(f"flashgen.kernels.codegen.{plan.code_path.template_fields}")
    fields: dict[str, Any] = module.fields_of(spec, plan, code.score)
    return fields


def rendered(
    template: str,
    spec: AttentionSpec,
    plan: Plan,
    name: str,
    params: Sequence[Param],
    *,
    spec_section: tuple[str, ...] = (),
    assumptions: tuple[AssumedBlock, ...] = (),
    outlined: tuple[tuple[str, int], ...] = (),
    appends: str = "",
    **fields: Any,
) -> Source:
    """The file of a template, without what its kernel does not use.

    Args:
        appends: for a kernel that appends to a paged cache, the start of the call that builds it,
            up to the architecture.

    Raises:
        RenderError: the template uses a field that is missing.
    """
    text = render_template(
        template,
        name=name,
        banner="\n".join(banner(spec, plan, template, outlined, appends)),
        plan=plan,
        float32=plan.itemsize == 4,
        grouped=plan.heads_per_tile > 1,
        equal_dims=plan.head_dim == plan.head_dim_v,
        params=params,
        struct_fields="\n".join(param.line for param in params),
        spec_section=spec_section,
        **fields,
    )
    text, used_params = used(simplified(text), params)
    text = within_columns(tidy(text))
    return Source(
        name,
        f"{name}_{plan.arch}.cu",
        text,
        used_params,
        plan,
        tuple(function for function in spec_section if function in text),
        outlined,
        assumptions=assumptions,
    )


def reads(spec: AttentionSpec, scalar: Scalar) -> bool:
    """Whether the mask or the score reads a scalar."""
    return scalar.expr in spec.mask.free_symbols | spec.score.free_symbols


def head_of(plan: Plan) -> str:
    """C++ of the query head of rows; h is the first head of the tile."""
    if plan.heads_per_lane > 1:
        return "row_head"
    return "head" if plan.heads_per_tile > 1 else "h"


def logit_of_row(spec: AttentionSpec, plan: Plan, sink: Tensor) -> str:
    """C++ of the element of a sink, or of its tangent, for a row with the number ``{row}``."""
    head = head_in_whole(spec, head_of(plan))
    index_of_dim = {"batch": "b", "heads": head, "seq_q": "p.q_offset + {row}"}
    indices = (index_of_dim.get(str(dim), "0") for dim in sink.dims)
    return f"read_{sink.name}({', '.join(['p', *indices])})"


def _counted_head(plan: Plan, first: str) -> str:
    """C++ of the head of a lane's row r in row group g, where its rows have different heads.

    `first` is its first row's head. For rows without a head it is past the last head of the tile.
    """
    terms = [first]
    for rows, index in ((MMA_ROWS, "g"), (MMA_ROWS // 2, "r")):
        heads = rows // plan.queries_per_tile
        if heads and (index == "r" or plan.row_groups > 1):
            terms.append(index if heads == 1 else f"{heads} * {index}")
    return " + ".join(terms)
