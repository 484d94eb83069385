"""Scalars and options: their names, the scale, run-time scalars, dropout and `deterministic`."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from flashgen.calls.runtime.arguments.refusals import refuse, runs_while_traced, shown
from flashgen.shared.call import INVARIANT, CallOptions, CheckedCall
from flashgen.shared.dropout import kept_levels
from flashgen.shared.dtypes import (
    FLOAT_DTYPES,
    SCALAR_DTYPES,
    SCALAR_LIMIT,
    SCALE_LIMIT,
    TENSOR_DTYPES,
    Number,
    dtype_name,
    real_number,
)
from flashgen.shared.signature import (
    BOUNDARIES,
    LAYOUT,
    LAYOUT_LISTS,
    LISTS,
    PAGE_NAMES,
    SPLIT,
    WHOLE,
    CallSignature,
    ScalarArgument,
)

if TYPE_CHECKING:
    from flashgen.spec.language.scalar import Scalar

Tensor = torch.Tensor

# ---- names ---------------------------------------------------------------------------------------

_OPTIONS = (
    *(name for name in CallOptions._fields if name != "scalars"),
    "rng",
    "return_lse",
    "h_offset",
    "split_size",
    "batch_invariant",
    "whole",
)
"""The arguments of every operator that are no operands and no captures."""

_MASKED = """mask = op.spec.mask_mod or (lambda b, h, q, k: True)
op = fg.attention(op.spec.replace(mask_mod=lambda b, h, q, k: mask(b, h, q, k) & {keep}))
op(q, k, v{call})"""
_BIASED = """score = op.spec.score_mod or (lambda s, b, h, q, k: s)
op = fg.attention(op.spec.replace(score_mod=lambda s, b, h, q, k: score(s, b, h, q, k) + {added}))
op(q, k, v{call})"""
_CAUSAL = _MASKED.replace("{keep}", "(q >= k)")
_CODES = (
    'op.spec.replace(paged=True, kv_dtype="int8"), whose calls take the scales of 8-bit codes; '
    "op(q, k, v{call}) for keys and values of q's dtype"
)
_ELSEWHERE = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "mask_mod": "fg.attention(op.spec.replace(mask_mod=mask_mod))(q, k, v{call})",
    "score_mod": "fg.attention(op.spec.replace(score_mod=score_mod))(q, k, v{call})",
    "softmax_scale": "op(q, k, v{call}, scale=softmax_scale)",
    "enable_gqa": "op(q, k, v{call}): k and v with fewer heads need no argument",
    "kv": "op(q, k, v{call}), by position",
    "k_scale": _CODES,
    "v_scale": _CODES,
}
"""What has the effect of arguments of other attention functions."""

_IN_SPEC = (
    "an AttentionSpec that has what {name} stands for: mask_mod for which scores are kept, "
    "score_mod for what changes them, sink=, block_sparse= and dropout= for the rest; "
    "{call} computes without it"
)
"""The way out for other names: a call without them would silently compute something else."""


def check_names(signature: CallSignature, captures: Mapping[str, object]) -> None:
    """Raises InputError unless ``captures`` has the names of the signature's captures."""
    wrong = len(captures) != len(signature.tensors) + len(signature.scalars)
    for tensor in signature.tensors:
        wrong = wrong or tensor.name not in captures
    for scalar in signature.scalars:
        wrong = wrong or scalar.name not in captures
    if wrong:
        kinds = {tensor.name: "tensor" for tensor in signature.tensors}
        kinds |= {scalar.name: "scalar" for scalar in signature.scalars}
        lists = LAYOUT_LISTS if signature.block_sparse is not None else ()
        if LAYOUT not in captures and signature.choice is not None and captures.keys() >= {*LISTS}:
            # The user gives both as one layout.
            kinds = {LAYOUT: "tensor"} | {x: kinds[x] for x in kinds if x not in LISTS}
            others = {x: captures[x] for x in captures if x not in LISTS}
            captures = {LAYOUT: captures[LISTS[0]], **others}
        mask = captures.get("attn_mask")
        mask_of = (mask.dim(), dtype_name(mask.dtype)) if isinstance(mask, Tensor) else (4, "bool")
        unset = [name for name, value in captures.items() if value is None or value is False]
        computed = (*WHOLE, SPLIT, *lists)
        operands = "q, kv" if signature.shared_kv else "q, k, v"
        _refuse_names(signature.name, kinds, list(captures), computed, unset, mask_of, operands)


@runs_while_traced
def _refuse_names(
    spec: str,
    kinds: dict[str, str],
    names: list[str],
    computed: tuple[str, ...],
    unset: list[str],
    mask: tuple[int, str],
    operands: str,
) -> NoReturn:
    """
    Args:
        spec: the name of the spec.
        kinds: "scalar" or "tensor" for each name that is expected.
        names: the names of the call.
        computed: names that the user does not give.
        unset: names whose value in the call is None or False.
        mask: the number of dimensions and the dtype of a tensor that is given as attn_mask.
        operands: the positional arguments of a call.
    """
    missing = [name for name in kinds if name not in names]
    extra = [name for name in names if name not in kinds]
    accepted = sorted(set(kinds.values())) or ["scalar"]
    unknown = f"is not a {' or '.join(accepted)} of the spec"
    options = [name for name in extra if name in _OPTIONS]  # that only op itself takes
    nearest = {
        name: None if name in options else _nearest(name, [*missing, *_OPTIONS]) for name in extra
    }
    misspelled = next((name for name in extra if nearest[name]), None)
    expected = [name for name in kinds if name not in computed]
    call = "".join(f", {name}=..." for name in expected)
    way_out = f"op(q, k, v{call})"
    if misspelled is not None:
        what = f"{misspelled!r} {unknown}; did you mean {nearest[misspelled]!r}?"
        way_out = f"{nearest[misspelled]}=... instead of {misspelled}=..."
    elif missing:
        what = f"the {kinds[missing[0]]} {missing[0]!r} of the spec is missing"
    else:
        what = f"{extra[0]!r} {unknown}"
        if options:
            misspelled = options[0]
            what = f"{misspelled!r} is an argument of op that this function does not have"
            way_out = f"the call without {misspelled}="
        elif extra[0] not in unset:
            way_out = _IN_SPEC.format(name=extra[0], call=way_out)
    foreign = [x for x in (*PAGE_NAMES, *BOUNDARIES, *_ELSEWHERE, "attn_mask") if x in extra]
    if foreign:
        misspelled = foreign[0]
        what = f"{misspelled!r} {unknown}"
        if misspelled in unset:
            way_out = "op(q, k, v{call})"
        elif misspelled in (*PAGE_NAMES, *BOUNDARIES):
            way_out = _paged_or_packed_call(kinds, names, expected)
        else:
            way_out = _ELSEWHERE.get(misspelled) or _with_mask(*mask)
        way_out = way_out.replace("{call}", call)
    refuse(
        what,
        f"argument {misspelled or (missing or extra)[0]}",
        f"spec {spec} takes: {', '.join(expected) or 'none'}; "
        f"given: {', '.join(name for name in names if name not in computed) or 'none'}",
        way_out.replace("q, k, v", operands),
    )


def _paged_or_packed_call(kinds: Mapping[str, str], names: list[str], expected: list[str]) -> str:
    """The call of a spec with pages, or of one with packed sequences where no pages are given.

    Args:
        kinds, names: as in `_refuse_names`.
        expected: the names that calls of the spec give.
    """
    paged = any(name in names for name in PAGE_NAMES)
    # The keys of pages have the lengths `cache_seqlens`.
    served_names, unused_names = (PAGE_NAMES, BOUNDARIES[1:]) if paged else (BOUNDARIES, PAGE_NAMES)
    passed_names = [x for x in names if x in (*PAGE_NAMES, *BOUNDARIES) and x not in expected]
    call = [f", {x}=..." for x in expected if x not in unused_names]
    call += [f", {x}={x}" for x in passed_names if x not in unused_names]
    option, other_option = ("paged", "packed") if paged else ("packed", "paged")
    changed = f"{option}=True" + f", {other_option}=False" * (unused_names[0] in kinds)
    op = "op" if {*served_names} <= {*kinds} else f"fg.attention(op.spec.replace({changed}))"
    return f"{op}(q, k, v{''.join(call)})"


def _with_mask(dims: int, dtype: str) -> str:
    """The lines that capture a mask of PyTorch's attention, of this rank and dtype."""
    axes = slice(-dims if 0 < dims < 4 else None, None)
    read = f"given[{', '.join(('b', 'h', 'q', 'k')[axes])}]"
    sizes = ("batch", "heads", "seq_q", "seq_k")[axes]
    mask = "attn_mask" if dtype in ("bool", *FLOAT_DTYPES) else "attn_mask.bool()"
    if dtype in FLOAT_DTYPES:
        tensor_options, lines = f"{dtype!r}, grad=True", _BIASED.replace("{added}", read)
    else:
        tensor_options, lines = "'bool'", _MASKED.replace("{keep}", read)
    lines = lines.replace("{call}", f"{{call}}, attn_mask={mask}")
    return f'given = fg.Tensor("attn_mask", {sizes!r}, {tensor_options})\n{lines}'


def refuse_positional(value: object) -> NoReturn:
    """Raises InputError for an argument after q, k and v that is given without a name."""
    way_out = "op(q, k, v, scale=0.125), for example"
    if isinstance(value, Tensor):
        way_out = _with_mask(value.dim(), dtype_name(value.dtype)).replace("{call}", "")
    refuse(
        "an operator takes q, k and v by position, and everything else by name",
        "the fourth argument",
        f"given {shown(value)}",
        way_out,
    )


def _nearest(name: str, names: list[str]) -> str | None:
    """The name that a misspelled one is meant to be, if any."""
    return next(iter(difflib.get_close_matches(name, names, 1)), None)


# ---- numbers -------------------------------------------------------------------------------------


def scale_of(signature: CallSignature, scale: object) -> float:
    """The factor on q.k: the call's, else the spec's, else 1 / sqrt(head_dim).

    Raises:
        InputError: the value is not a positive number below `SCALE_LIMIT`.
    """
    value = scale if scale is not None else signature.scale
    if value is None:
        return 1 / math.sqrt(signature.head_dim)
    value = value.item() if isinstance(value, np.generic) else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < SCALE_LIMIT:  # type: ignore[operator]
        refuse(
            "scale is not a positive number below 2^127",
            "argument scale",
            f"given {shown(value)}; a float32 above 0",
            ("scale=float(scale), a Python number; " if isinstance(value, Tensor) else "")
            + "scale=None for 1 / sqrt(head_dim); a factor of any sign belongs in score_mod",
        )
    return float(value)  # type: ignore[arg-type]


def scalar_value(scalar: Scalar | ScalarArgument, value: object) -> Number:
    """The Python number for a value that is given for a scalar.

    Raises:
        InputError: the value has another type, is out of range or below the scalar's minimum.
    """
    dtype = SCALAR_DTYPES[scalar.dtype]
    number = None if isinstance(value, Tensor) else dtype.convert(value)
    if number is None:
        way_out = f"{scalar.name}={_example(scalar)}"
        if scalar.dtype == "int32" and isinstance(value, int) and not isinstance(value, bool):
            nearest = SCALAR_LIMIT if value > 0 else -SCALAR_LIMIT
            way_out = f"{scalar.name}={nearest}, the nearest number that kernels hold"
        if isinstance(value, Tensor):
            way_out = _captured(scalar, value)
        elif isinstance(value, float) and scalar.dtype == "int32" and abs(value) < SCALAR_LIMIT:
            way_out = f"{scalar.name}={round(value)}"
        refuse(
            f"the scalar {scalar.name!r} cannot take this value",
            f"argument {scalar.name}",
            f"given {shown(value)}; {scalar.dtype}: {dtype.accepted}",
            way_out,
        )
    if scalar.minimum is not None and number < scalar.minimum:
        refuse(
            f"the scalar {scalar.name!r} is below the minimum that its spec promises",
            f"argument {scalar.name}",
            f"given {value!r}; minimum {scalar.minimum}",
            f"{scalar.name}={scalar.minimum} or more, or fg.Scalar without this minimum",
        )
    return number


def _captured(scalar: Scalar | ScalarArgument, value: Tensor) -> str:
    """The way out where a tensor is given for a scalar."""
    name = scalar.name
    value_dtype = dtype_name(value.dtype)
    dtype = value_dtype if value_dtype in TENSOR_DTYPES else scalar.dtype
    if value.numel() != 1:
        dims = tuple(f"n{axis}" for axis in range(value.dim()))
        return f"fg.Tensor({name!r}, {dims!r}, {dtype!r}) in the spec, whose elements its mods read"
    is_whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    number = f"{name}.item()"
    if scalar.dtype != "float32" and not (is_whole and scalar.dtype == "int32"):
        number = f"{scalar.dtype.removesuffix('32')}({number})"
    elif value.dtype == torch.bool:
        number = f"float({number})"
    shape = "" if value.dim() == 0 else f" and {name}.squeeze() in the call"
    captured = f"fg.Tensor({name!r}, (), {dtype!r}) in the spec{shape}, a number in a tensor"
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # one for each sample of a vmap
        return captured
    return f"{number}, a Python number; or {captured}"


def _example(scalar: Scalar | ScalarArgument) -> str:
    low = scalar.minimum if scalar.minimum is not None else 1
    return {"bool": "True", "int32": str(int(low))}.get(scalar.dtype, str(float(low)))


def dropout_of(signature: CallSignature, p: object, rng: object, device: torch.device) -> float:
    """The probability of dropping an element, with its random state checked.

    The seed and the offset are not read, which on a GPU would need a device synchronisation.

    Args:
        p: a number in [0, 1), or a CPU tensor of one such number.
        rng: int64 [2] on ``device``, seed and offset; None when nothing is dropped.

    Raises:
        InputError: p or rng is wrong, or the spec has no dropout.
    """
    probability = probability_of(p)
    if not signature.dropout and (probability or rng is not None):
        refuse_dropout(signature, "dropout_p" if probability else "rng", probability)
    check_rng(rng, device)
    if probability and rng is None:
        refuse_no_rng("dropout", f"dropout_p {probability}, ")
    return probability


def refuse_dropout(signature: CallSignature, argument: str, p: object) -> NoReturn:
    leave = "leave dropout_p and rng out"
    refuse(
        "the spec was made without dropout",
        f"argument {argument}",
        f"dropout_p {p}; spec {signature.name} has dropout=False",
        f"{leave}: lists exclude it"
        if signature.choice
        else f"spec.replace(dropout=True), or {leave}",
    )


def refuse_no_rng(what: str, numbers: str = "") -> NoReturn:
    refuse(
        f"{what} needs a random state",
        "argument rng",
        f"{numbers}rng None",
        "rng=torch.tensor([seed, offset]); fg.attention(spec) draws one where rng is None",
    )


def probability_of(p: object) -> float:
    """``dropout_p`` as a float, from a number, a NumPy number or a CPU tensor of one number.

    Raises:
        InputError: the value is not a number in [0, 1).
    """
    if type(p) is not float:
        if isinstance(p, Tensor):
            p = number_in("dropout_p", p)
        number = real_number(p)
        p = p if number is None else number
    kept_levels(p)  # type: ignore[arg-type]
    return p  # type: ignore[return-value]


check_probability = runs_while_traced(probability_of)


def number_in(name: str, value: Tensor) -> float:
    """The number in a float tensor of no dimensions on the CPU."""
    if value.dim() == 0 and value.device.type == "cpu" and value.is_floating_point():
        return float(value)
    refuse(
        f"{name} is not a number",
        f"argument {name}",
        f"given {shown(value)}",
        "a Python number, or a floating-point tensor of no dimensions on the CPU",
    )


def check_rng(rng: object, device: torch.device) -> None:
    """Raises InputError when ``rng`` is neither None nor an int64 [2] on ``device``."""
    if rng is None:
        return
    way_out = f"torch.tensor([seed, offset], device={str(device)!r})"
    if not isinstance(rng, Tensor):
        refuse("rng is not a torch tensor", "argument rng", f"given {rng!r}", way_out)
    if rng.dtype != torch.int64 or rng.dim() != 1 or rng.shape[0] != 2 or rng.device != device:
        refuse(
            "rng is not a seed and an offset",
            "argument rng",
            f"given {shown(rng)}; expected shape (2,), torch.int64, on {device}",
            way_out,
        )


def state_of(rng: Tensor | None, q: object) -> Tensor:
    """The captured tensor that fg.rand reads: the halves of the seed and of the offset.

    Args:
        q: the queries, on whose device they are.

    Raises:
        InputError: rng is not given, or is no seed and offset.
    """
    if rng is None:
        refuse_no_rng("fg.rand")
    check_rng(rng, q.device if isinstance(q, Tensor) else torch.device("cpu"))
    return rng.contiguous().view(torch.int32)


def draw_rng(dropout_p: object, device: torch.device) -> Tensor | None:
    """A seed and an offset from torch's generator of the device; None when nothing is dropped.

    They stay on the device: a call needs no device synchronisation, and a CUDA graph draws new
    ones at every replay.

    Returns:
        int64 [2], from 0 to below 2^63 - 1.

    Raises:
        InputError: dropout_p is not a number in [0, 1).
    """
    if not isinstance(dropout_p, Tensor) and probability_of(dropout_p) == 0:
        return None
    return new_rng(device)


def new_rng(device: torch.device) -> Tensor:
    """A seed and an offset from torch's generator of the device."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def refuse_return_lse(value: object) -> NoReturn:
    if value is True:
        refuse(
            "weights that are no exponentials have no log-sum-exp",
            "argument return_lse",
            'given True, of a spec whose normalize is not "softmax"',
            "return_lse=False",
        )
    refuse(
        "return_lse is neither True nor False",
        "argument return_lse",
        f"given {shown(value)}",
        "return_lse=True for a tuple (out, lse)",
    )


def refuse_two_requests() -> NoReturn:
    refuse(
        "return_lse and return_aux cannot be given together",
        "argument return_aux",
        "return_lse True",
        "return_aux=fg.AuxRequest(lse=True, ...), which returns the log-sum-exp too",
    )


def refuse_exported_statistics() -> NoReturn:
    refuse(
        "an exported operator has no kernels of statistics",
        "argument return_aux",
        "the export holds the kernels of the output and of its gradients",
        "flashgen.attention(spec) with the compiler; return_lse=True needs no other kernel",
    )


def invariant_options(
    batch_invariant: object, split_size: Any, deterministic: bool | None
) -> tuple[int, bool]:
    """split_size and deterministic of a batch-invariant call.

    Raises:
        InputError: the argument is not True, or the call gives others.
    """
    if batch_invariant is not True:
        refuse(
            "batch_invariant is neither True, False nor None",
            "argument batch_invariant",
            f"given {batch_invariant!r:.200}",
            "None, to follow flashgen.batch_invariant_mode",
        )
    if split_size is not None or deterministic not in (None, True):
        refuse(
            "all batch-invariant calls have the same splits, and deterministic gradients",
            "batch_invariant=True",
            f"given split_size={split_size!r:.200}, deterministic={deterministic!r:.200}",
            "the call without these arguments; or batch_invariant=False, with one split_size in "
            "all calls",
        )
    return INVARIANT, True


def is_deterministic(deterministic: bool | None) -> bool:
    """Whether gradients must have the same bits in every run; None follows torch's switch.

    Raises:
        InputError: the argument is neither None nor a bool.
    """
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if isinstance(deterministic, bool):
        return deterministic
    refuse(
        "deterministic is neither True, False nor None",
        "argument deterministic",
        f"given {deterministic!r}",
        "None, to follow torch.use_deterministic_algorithms",
    )


# ---- divisions by 0 ------------------------------------------------------------------------------


def check_divisors(signature: CallSignature, call: CheckedCall) -> None:
    """Raises InputError where the mask or the score of the call would divide integers by 0."""
    if not signature.zero_divisions:
        return
    values = {**call.named_sizes, **call.scalars}
    for division in signature.zero_divisions:
        if 0 not in (call.seq_q, call.seq_k) and _value(division.reached, values):
            numbers = ", ".join(f"{name}={values[name]}" for name in division.names)
            refuse(
                f"spec {signature.name} divides by 0 in this call",
                f"argument {division.names[0]}",
                f"{division.text} with {numbers}",
                "other values, or a divisor of fg.maximum(..., 1) in the spec",
            )


def _value(expr: object, values: Mapping[str, Any]) -> Any:
    if isinstance(expr, str):
        return values[expr]
    if not isinstance(expr, tuple):
        return expr
    name, *args = expr
    return _FUNCTIONS[name](*(_value(arg, values) for arg in args))


def _choice(*cases: tuple[Any, bool]) -> Any:
    return next(value for value, chosen in cases if chosen)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda *args: sum(args),
    "Mul": lambda *args: math.prod(args),
    "Pow": operator.pow,
    "Abs": abs,
    "sign": lambda x: (x > 0) - (x < 0),
    "FloorDiv": lambda a, b: a // b if b else 0,
    "FloorMod": lambda a, b: a % b if b else 0,
    "Minimum": min,
    "Maximum": max,
    "Piecewise": _choice,
    "ExprCondPair": lambda value, chosen: (value, chosen),
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "And": lambda *args: all(args),
    "Or": lambda *args: any(args),
    "Not": operator.not_,
}
