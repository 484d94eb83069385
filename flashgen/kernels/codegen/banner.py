"""The head of an emitted file: what it is, how to make it again, the operation, the plan."""

from __future__ import annotations

from flashgen.kernels.codegen.source import WITHOUT_SPEC, options
from flashgen.kernels.codegen.text import COLUMNS, comments
from flashgen.kernels.planner import Plan, tangents_of
from flashgen.kernels.planner.formulas import counted
from flashgen.shared.launch_facts import APPEND_KERNELS, STREAMING_KERNELS
from flashgen.spec.language.lets import lets_of
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.spec import AttentionSpec
from flashgen.version import __version__

_FORWARD = "S = {score}    P = {masked}    O = {p} V    LSE = {lse}"
_SCORES = "S = {score}    P = {kept}exp(S - LSE){end}    dP = {z}dO V^T"
_DELTA = "delta = rowsum(dO * O) - dLSE"
_DS = f"{_DELTA}    dS = P * (dP - delta){{slope}}"
_OF_KEYS, _OF_QUERIES = "dV = {p}^T dO    dK = scale dS^T Q", "dQ = scale dS K"
_CAPTURED = (
    _SCORES,
    f"{_DELTA}    dT = sum of P * (dP - delta) * dscore_mod / dT, for T of {{learned}}",
)
_OF_WEIGHTS = "W = {kept}{weight}{end}    P = {share}    dP = {z}dO V^T"
_DS_OF_WEIGHTS = "{delta}dS = {above} * {name}'"
_CAPTURED_WEIGHTS = (
    _OF_WEIGHTS,
    "{delta}dT = sum of {above} * d{name} / dT, for T of {learned}",
)
_WEIGHTED = {
    "forward": ("S = {score}    W = {kept}{weight}{end}    O = {z}{share} V",),
    "delta": ("{of_rows}",),
    "dkdv": (_OF_WEIGHTS, _DS_OF_WEIGHTS, _OF_KEYS),
    "fused": (_OF_WEIGHTS, _DS_OF_WEIGHTS, f"{_OF_KEYS}    {_OF_QUERIES}"),
    "dq": (_OF_WEIGHTS, _DS_OF_WEIGHTS, _OF_QUERIES),
    "merge": ("{parts}",),
    "tangent": (
        "W = {kept}{weight}{end}    P = {share}    for tangents x' of each x:",
        "O' = {z}P' V + {z}P V'",
    ),
    "captured": _CAPTURED_WEIGHTS,
    "captured_exact": (*_CAPTURED_WEIGHTS, "sums of whole numbers: the same bits each time"),
}
"""Where weights are no exponentials."""

_FORMULAS = {
    "forward": (_FORWARD,),
    "delta": (f"{_DELTA}{{dsink}}",),
    "dkdv": (_SCORES, _DS, _OF_KEYS),
    "fused": (_SCORES, _DS, f"{_OF_KEYS}    {_OF_QUERIES}"),
    "convert_dq": ("dQ = scale * sum of dS K, rounded",),
    "convert_dk": ("dK = scale * sum of dS^T Q, rounded",),
    "convert_dv": ("dV = scale * sum of P^T dO, rounded",),
    "dq": (_SCORES, _DS, _OF_QUERIES),
    "merge": (
        "LSE = log(sum of exp(LSE_s))    O = sum of exp(LSE_s - LSE) O_s",
        "for parts s with LSE_s > -inf and, as a part whose O_s is 0, the sink",
    ),
    "append_kv": (
        "k_cache[page, h, slot] = k[b, h, row]    v_cache[page, h, slot] = v[b, h, row]",
        "with page and slot of each token from slot_mapping, or from page_table and cache_seqlens",
    ),
    "append_codes": (
        "k_cache[page, h, slot] = code of k[b, h, row] / k_scale[page, h, slot]    v likewise",
        "with page and slot of each token from slot_mapping, or from page_table and cache_seqlens",
    ),
    "add_rows": ("sums[block] += rows[order[n]] for n from starts[block] up to starts[block + 1]",),
    "minmax_table": ("table = the minimum and the maximum of every range of spans",),
    "tangent": (
        "S = {score}    P = {kept}exp(S - LSE){end}    for tangents x' of each x:",
        "O' = {z}P (S' - LSE') V + {p} V'    LSE' = rowsum(P S')",
    ),
    "captured": _CAPTURED,
    "captured_exact": (*_CAPTURED, "sums of whole numbers: the same bits each time"),
}


def banner(
    spec: AttentionSpec,
    plan: Plan,
    template: str,
    outlined: tuple[tuple[str, int], ...],
    appends: str,
) -> list[str]:
    """The first lines of an emitted file: C++ comments of at most 100 columns.

    ``outlined`` are the functions that are not inlined, with their instructions.

    The banners of the kernels that specs share name no spec.
    """
    shared = plan.kernel in WITHOUT_SPEC
    if plan.kernel == "merge":
        splits = ", splits=True" if plan.of_splits else ""
        of_out = f'{plan.head_dim_v}, "{plan.dtype}", "{plan.arch}"{splits}'
        again = f"flashgen.kernels.pipeline.build_merge({of_out})"
    elif plan.kernel == "add_rows":
        again = f'flashgen.kernels.pipeline.build_add_rows("{plan.dtype}", "{plan.arch}")'
    elif appends:
        again = f'flashgen.kernels.append_pipeline.{appends}, "{plan.arch}")'
    elif shared:
        again = f"flashgen emit SPEC --arch {plan.arch}, with any spec of this dtype and head dim"
    elif plan.heads_per_tile > 1 or plan.partial or spec.split:
        loaded = "spec" if spec.file is None else f'flashgen.load("{spec.file}")'
        if plan.partial or spec.split:
            joins = "folded" if spec.folds else "in_runs" if spec.runs else "split"
            variant = joins if spec.split else "partial"
            loaded = f"flashgen.spec.language.signature.{variant}({loaded})"
        heads = f", heads_per_tile={plan.heads_per_tile}" if plan.heads_per_tile > 1 else ""
        again = f'flashgen.emit({loaded}, arch="{plan.arch}"{heads})'
    elif plan.kernel == "tangent" and (plan.tangents != tangents_of(spec) or spec.file is None):
        loaded = "spec" if spec.file is None else f'flashgen.load("{spec.file}")'
        again = f'flashgen.emit({loaded}, arch="{plan.arch}").tangent({plan.tangents!r})'
    elif spec.file is not None:
        again = f"flashgen emit {spec.file} --arch {plan.arch}"
    else:
        again = f'flashgen.emit(spec, arch="{plan.arch}")'
    dims = f"head_dim {plan.head_dim}"
    if plan.kernel in ("delta", "merge"):
        dims = f"head_dim_v {plan.head_dim_v}"
    elif plan.head_dim_v != plan.head_dim:
        dims += f"  head_dim_v {plan.head_dim_v}"
    of = f"dtype {plan.dtype}  {dims}"
    if plan.kernel in ("append_codes", "add_rows"):
        of = f"dtype {plan.dtype}  any head dim"
    elif plan.kernel == "append_kv":
        of = f"any dtype and head dim, {plan.access_bytes} B at once"
    origin = spec.file or spec.mask_line or spec.score_line or "made in Python"
    alone = plan.kernel in ("forward", "tangent", "minmax_table", "merge", *APPEND_KERNELS)
    what = plan.kernel if alone else f"backward, {plan.kernel}"
    how = {"forward": '"plan"', "tangent": '"plan --tangent"'}.get(plan.kernel, "")
    if plan.kernel == "tangent" and "(" in again:
        how = ""
    if not alone and not shared:
        exact = plan.kernel in ("dkdv", "dq", "captured_exact")  # all of the deterministic scheme
        how = f'"plan --backward{exact * " --deterministic"}"'
        if "(" in again:
            how = f'"kernels.planner.plan_backward"{exact * " and deterministic=True"}'
    lines = [
        f"GENERATED by flashgen {__version__}. Do not edit: change the spec or the template, then",
        f"  {again}",
        *([f'With {how} in place of "emit" it derives the numbers of the plan.'] if how else []),
        "",
        *([] if shared else [f"spec      {spec.name}, {origin}"]),
        f"template  templates/{template}",
        f"target    {plan.arch}  {of}  {what}",
        *(f"compile   {option}" for option in options(plan)),
        *(["integers  64 bits, for calls beyond int32"] if plan.integer_bits == 64 else []),
        "",
        *(f"  {line}" for line in formulas(spec, plan.kernel)),
    ]
    if not shared:
        if spec.score_line is not None and spec.is_softmax:
            lines.append(f"  score_mod = {python_text(spec.score)}")
        if not spec.is_softmax:
            lines.append(f"  weight of a score = {python_text(spec.score)}")
        if spec.mask_line is not None:
            lines.append(f"  mask_mod  = {python_text(spec.mask)}")
        if spec.block_sparse is not None:
            lines.append(f"  layout    = {spec.block_sparse.described}")
    axis, block, heads = ("q", plan.queries_per_tile, "heads_q")
    if plan.heads_per_tile > 1:
        heads += f" / {plan.heads_per_tile}"
    if plan.owns_keys:
        axis, block, heads = ("k", plan.block_k, "heads_kv")
    merged = spec.split and not spec.folds and plan.kernel == "forward"
    entries = "batch * splits" if merged else "batch"
    grid = f"ceil(seq_{axis} / {block}), {heads}, {entries}"
    if spec.packed and plan.kernel != "delta":  # the delta kernel reads rows of one batch entry
        grid = f"seq_{axis} / {block} + batch, {heads}, 1"
    if plan.kernel == "minmax_table":
        grid = "lines of the tensor"
    if plan.kernel in APPEND_KERNELS:
        rows = "tokens * heads_kv" + " * 2" * (plan.kernel == "append_codes")
        grid = f"ceil({rows} / rows per block)"
    if plan.kernel == "add_rows":
        grid = "ceil(keys / rows per block)"
    launch = []
    if plan.is_persistent:
        launch.append(f"tiles     ({grid}), drawn from a counter in global memory")
        grid = "blocks"
    sizes = f"block {plan.threads}  dynamic shared memory {plan.smem_bytes:,} B"
    launch.append(f"launch    grid ({grid})  {sizes}")
    if len(f"// {launch[-1]}") > COLUMNS:
        launch[-1:] = [f"launch    grid ({grid})", f"          {sizes}"]
    if lets_of(spec.mask) and not shared:
        launch.append(
            "mask      its large parts are not analysed: tiles are skipped by the others only"
        )
    launch += [
        f"calls     {name}, about {count:,} instructions: too large to be inlined,"
        " so that registers are kept on a stack around each call"
        for name, count in outlined
    ]
    return comments([*lines, "", *_choice(plan), *launch])


def _choice(plan: Plan) -> list[str]:
    """The tile, what limits it, and what kept larger ones away, without the model's clocks."""
    lines = [f"plan      {plan.choice}"]
    limits = [
        f"{line.name} {counted(line.value)} of {counted(line.limit)}"
        + (" (binds)" if line.binding else "")
        for line in plan.derivation
        if line.limit is not None
    ]
    if limits:
        lines.append(f"limits    {', '.join(limits)}")
    for refusal in plan.refused:
        why = "is slower by the model" if refusal.needs >= refusal.limit else "another rule chose"
        other = f"{refusal.change}: fits, but {why}"
        lines.append(f"refused   {other if refusal.quantity == 'cost' else refusal}")
    return lines


def formulas(spec: AttentionSpec, kernel: str) -> list[str]:
    """What the kernel computes, in the paper's symbols; Z is dropout's mask, scaled."""
    parts = ("mask_mod", spec.mask_line), ("layout", spec.block_sparse)
    conditions = " && ".join(name for name, part in parts if part is not None)
    masked = bool(conditions)
    words = {
        "score": "score_mod(scale Q K^T)" if spec.score_line is not None else "scale Q K^T",
        "masked": f"softmax({conditions} ? S : -inf)" if masked else "softmax(S)",
        "p": "(P * Z)" if spec.dropout else "P",
        "z": "Z * " if spec.dropout else "",
        "kept": f"{conditions} ? " if masked else "",
        "end": " : 0" if masked else "",
        "slope": " * score_mod'" if spec.score_line is not None else "",
    }
    words |= {"lse": "log(sum(exp(S)))", "dsink": ""}
    if spec.sink is not None and (spec.folds or not spec.split):
        name = spec.sink.name
        words["masked"] = "{kept}exp(S - LSE){end}".format(**words)
        words["lse"] = f"log(exp({name}) + sum(exp(S)))"
        if spec.sums_sink:
            words["dsink"] = f"    d{name} = -sum of exp({name} - LSE) * delta"
    read = spec.score.free_symbols
    learned = [tensor.name for tensor in spec.tensors if tensor.grad and tensor.symbol in read]
    words["learned"] = ", ".join(learned)
    of_kernel = _FORMULAS[kernel]
    if not spec.is_softmax:
        words |= _words_of_weights(spec)
        of_kernel = _WEIGHTED.get(kernel, of_kernel)
    lines = [line.format(**words) for line in of_kernel]
    if spec.packed and kernel not in ("delta", "minmax_table"):
        lines.append(
            "for each sequence b alone: rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], keys likewise"
        )
    if spec.partial and kernel == "forward":
        lines.append("O in float32: a partial result, to be merged with those over other keys")
    if spec.takes_maxima and kernel == "forward":
        lines[0] = lines[0].partition("    O =")[0].replace(" : 0", " : -inf")
        lines.append("the largest W of each row; O has no meaning")
    if spec.folds and kernel == "forward":
        lines.append("in splits of the keys, whose results are joined in order, as a merge does")
    elif spec.split and kernel == "forward":
        keys = "run of splits" if spec.runs else "split"
        lines.append(
            f"for the keys of each {keys}: O in float32 and LSE without a sink, to be merged"
            if spec.is_softmax
            else f"for the keys of each {keys}: O in float32, which is not divided, to be added up"
        )
    if spec.offsets and kernel not in STREAMING_KERNELS:
        begin = " and ".join(f"{x.name[0]} from {x.name}[b]" for x in spec.offsets)
        lines.append(f"positions of batch entry b count {begin}")
    if spec.dropout and kernel not in STREAMING_KERNELS:
        lines.append("Z = kept(seed, offset, b, h, q, k) / keep probability")
    return lines


def _words_of_weights(spec: AttentionSpec) -> dict[str, str]:
    name = "weight_mod" if spec.weight_line is not None else "score_mod"
    divided = spec.sums_weights and not spec.takes_maxima
    return {
        "weight": "weight_mod(S)" if spec.weight_line is not None else "S",
        "name": name,
        "share": "W / rowsum(W)" if divided and not spec.adds_parts else "W",
        "above": "(dP - delta) / rowsum(W)" if divided else "dP",
        "delta": "delta = rowsum(dO * O)    " if divided else "",
        "of_rows": "delta = rowsum(dO * O)" if divided else "zeros in the sums of dQ",
        "parts": "O = sum of O_s / sum of rowsum(W)_s" if divided else "O = sum of O_s",
    }
