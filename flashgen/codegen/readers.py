"""The functions that read captured tensors, one for each tensor that a kernel reads."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.codegen.source import Param
from flashgen.codegen.text import COLUMNS, comment, function_text, wrap_code
from flashgen.language import Tensor

# The names of the index parameters, one per dimension, in order.
INDICES = "ijklmnrs"

# For each dtype: the C++ type of an element in memory, the type of the value that a reader returns,
# and the conversion. 16-bit floats are read as integers, because their types need headers.
_TYPES = {
    "float32": ("float", "float", "{}"),
    "float16": ("unsigned short", "float", "half_to_float({})"),
    "bfloat16": ("unsigned short", "float", "__uint_as_float(unsigned({}) << 16)"),
    "int64": ("long long", "long long", "{}"),
    "int32": ("int", "int", "{}"),
    "int16": ("short", "int", "{}"),
    "int8": ("signed char", "int", "{}"),
    "uint8": ("unsigned char", "int", "{}"),
    "bool": ("unsigned char", "int", "{}"),
}

# The types of the sums to which the kernels for the gradients of learned tensors add.
EXACT_SUM = "unsigned long long"
SUMS = {"captured": "float", "captured_exact": EXACT_SUM}


@dataclass(frozen=True)
class Reader:
    """A device function that reads a captured tensor or its min/max table or finds an address."""

    tensor: Tensor
    returns: str
    comment: tuple[str, ...]
    signature: str
    body: tuple[str, ...]

    @property
    def text(self) -> str:
        return function_text(self.comment, self.signature, self.body)


def reader(tensor: Tensor) -> Reader:
    """``read_bias(p, i, j)``: the element at the nearest index inside the tensor."""
    _, returns, convert = _TYPES[tensor.dtype]
    why = f"The spec's {tensor.name}"
    if tensor.dims:
        why += ": an index outside it means its nearest element"
    place, before = _place(f"c_{tensor.name}", tensor)
    return Reader(
        tensor=tensor,
        returns=returns,
        comment=tuple(comment(f"{why}.")),
        signature=_signature(returns, f"read_{tensor.name}", tensor),
        body=(*before, f"return {convert.format(f'__ldg({place})')};"),
    )


def place_of_sum(tensor: Tensor, kind: str) -> Reader:
    """``sum_of_bias(p, i, j)``: the address of the gradient of ``read_bias(p, i, j)``.

    Args:
        kind: the type of the sum, one of SUMS.
    """
    place, before = _place(f"dc_{tensor.name}", tensor)
    return Reader(
        tensor=tensor,
        returns=f"{kind}*",
        comment=tuple(comment(f"The address at which the gradient of {tensor.name} is summed.")),
        signature=_signature(f"{kind}*", f"sum_of_{tensor.name}", tensor),
        body=(*before, f"return {place};"),
    )


def extreme(tensor: Tensor, axis: int, least: bool) -> Reader:
    """``least_ids_1(p, lo, hi, i)``: a bound of the elements lo to hi along an axis.

    The function reads the min/max table. The indices on the other axes, in order, come last.
    """
    kind, pick = ("least", "min") if least else ("greatest", "max")
    name, returns = tensor.name, _TYPES[tensor.dtype][1]
    size = f"p.c_{name}_size_{axis}"
    others = [other for other in range(len(tensor.dims)) if other != axis]
    indices = INDICES[: len(others)]
    line, lines = _line(name, others, indices)
    parameters = ["const Params& p", "int lo", "int hi", *(f"int {i}" for i in indices)]
    what = f"The {kind} element of {name} from lo to hi along {tensor.dims[axis]}, in whole spans."
    body = [
        f"const int first = inside(lo, {size}) / SPAN;",
        f"const int last = max(first, inside(hi, {size}) / SPAN);",
        "const int level = 31 - __clz(last - first + 1);  // two of its entries cover the range",
        f"const int entries = ({size} + SPAN - 1) / SPAN;",
        f"const long long lines = {lines};",
        f"const {returns}* table = p.m_{name}_{axis}"
        f" + ((2 * level + {0 if least else 1}) * lines + {line}) * entries;",
        f"return {pick}(__ldg(table + first), __ldg(table + last + 1 - (1 << level)));",
    ]
    return Reader(
        tensor=tensor,
        returns=returns,
        comment=tuple(comment(what)),
        signature=f"__device__ __forceinline__ {returns} {kind}_{name}_{axis}"
        f"({', '.join(parameters)}) {{",
        body=tuple(line for text in body for line in wrap_code(text, indent=2)),
    )


def _line(name: str, others: list[int], indices: str) -> tuple[str, str]:
    """C++ of the number of a line, counted over the other axes, and of the number of lines."""
    line, lines = "", ""
    for i, other in zip(indices, others, strict=True):
        length = f"p.c_{name}_size_{other}"
        here = f"inside({i}, {length})"
        line = f"({line}) * {length} + {here}" if line else here
        lines = f"{lines} * {length}" if lines else length
    return line or "0", lines or "1"


def param_of_table(tensor: Tensor, axis: int, *, written: bool = False) -> Param:
    """The field that points to the min/max table of a tensor along an axis."""
    const = "" if written else "const "
    return Param(
        f"m_{tensor.name}_{axis}",
        "pointer",
        f"{const}{_TYPES[tensor.dtype][1]}* m_{tensor.name}_{axis};",
        f"[levels, 2, lines, entries]: min, max of {tensor.name} along {tensor.dims[axis]}",
    )


def stored_and_read(tensor: Tensor) -> tuple[str, str]:
    """The C++ types of an element in memory and of the value that its reader returns."""
    return _TYPES[tensor.dtype][:2]


def _signature(returns: str, name: str, tensor: Tensor) -> str:
    parameters = ["const Params& p", *(f"int {i}" for i in INDICES[: len(tensor.dims)])]
    head, tail = f"__device__ __forceinline__ {returns} {name}(", f"{', '.join(parameters)}) {{"
    return head + tail if len(head + tail) <= COLUMNS else f"{head}\n    {tail}"


def _place(field: str, tensor: Tensor) -> tuple[str, list[str]]:
    """C++ of an element's address in ``p.<field>``, and of the statements before it."""
    if not tensor.dims:
        return f"p.{field}", []
    terms = (
        f"inside({i}, p.c_{tensor.name}_size_{axis}) * p.{field}_stride_{axis}"
        for axis, i in enumerate(INDICES[: len(tensor.dims)])
    )
    return f"p.{field} + offset", wrap_code(
        f"const long long offset = {' + '.join(terms)};", indent=2
    )


def params_of_tensor(tensor: Tensor) -> list[Param]:
    """The fields of ``struct Params`` for a captured tensor: its address, sizes and strides."""
    name, stored = tensor.name, _TYPES[tensor.dtype][0]
    declaration, what = f"const {stored}* c_{name};", f"{_shape(tensor)}, the spec's {name}"
    if len(f"  {declaration}  // {what}") > COLUMNS:
        what = _shape(tensor)
    pointer = Param(f"c_{name}", "pointer", declaration, what)
    return [
        pointer,
        *_strides(f"c_{name}", tensor),
        *(
            Param(f"c_{name}_size_{axis}", "int32", f"int c_{name}_size_{axis};", str(dim))
            for axis, dim in enumerate(tensor.dims)
        ),
    ]


def params_of_gradient(tensor: Tensor, kind: str) -> list[Param]:
    """The fields for the gradient of a learned tensor; ``kind`` is the type of the sums."""
    name = f"dc_{tensor.name}"
    what = f"{_shape(tensor)}, zeros before the launch"
    params = [Param(name, "pointer", f"{kind}* {name};", what), *_strides(name, tensor)]
    if kind == EXACT_SUM:
        greatest, root = f"greatest_{tensor.name}", f"root_{tensor.name}"
        what = "bits of the largest |x| that is added, 0 before the launch"
        params.append(Param(greatest, "pointer", f"unsigned* {greatest};", what))
        what = "square root of the number of units in 1; null: not computed yet"
        params.append(Param(root, "pointer", f"const float* {root};", what))
    return params


def _strides(field: str, tensor: Tensor) -> list[Param]:
    return [
        Param(
            f"{field}_stride_{axis}",
            "int64",
            f"long long {field}_stride_{axis};",
            f"elements to the next along {dim}" if isinstance(dim, str) else "",
        )
        for axis, dim in enumerate(tensor.dims)
    ]


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.dims))}]" if tensor.dims else "one number"
