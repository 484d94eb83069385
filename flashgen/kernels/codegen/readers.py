"""The functions that read captured tensors, one for each tensor that a kernel reads."""

from __future__ import annotations

from flashgen.kernels.codegen.source import Param
from flashgen.kernels.codegen.text import COLUMNS, DeviceFunction, comment
from flashgen.kernels.planner import Plan
from flashgen.shared.dtypes import ELEMENTS, OPERANDS
from flashgen.shared.signature import field_stem
from flashgen.spec.language.tensor import Tensor

# The names of the index parameters, one per dimension, in order.
INDICES = "ijklmnrs"

EXACT_SUM = "unsigned long long"


def type_of_sums(plan: Plan) -> str:
    """The C++ type of the sums to which a kernel for the gradients of learned tensors adds."""
    if plan.kernel == "captured_exact":
        return EXACT_SUM
    return OPERANDS[plan.dtype].sums.stored


def reader(tensor: Tensor) -> DeviceFunction:
    """``read_bias(p, i, j)``: the element at the nearest index inside the tensor."""
    element = ELEMENTS[tensor.dtype]
    why = f"The spec's {tensor.name}"
    if tensor.dims:
        why += ": an index outside it means its nearest element"
    address, before = _address("c", tensor)
    return DeviceFunction(
        name=f"read_{tensor.name}",
        returns=element.value,
        parameters=_parameters(tensor),
        comment=tuple(comment(f"{why}.")),
        body=(*before, f"return {element.conversion.format(f'__ldg({address})')};"),
    )


def address_of_sum(tensor: Tensor, kind: str) -> DeviceFunction:
    """``sum_of_bias(p, i, j)``: the address of the gradient of ``read_bias(p, i, j)``.

    Args:
        kind: the type of the sum, from `type_of_sums`.
    """
    address, before = _address("dc", tensor)
    return DeviceFunction(
        name=f"sum_of_{tensor.name}",
        returns=f"{kind}*",
        parameters=_parameters(tensor),
        comment=tuple(comment(f"The address at which the gradient of {tensor.name} is summed.")),
        body=(*before, f"return {address};"),
    )


def extreme(tensor: Tensor, axis: int, least: bool) -> DeviceFunction:
    """``least_ids_1(p, lo, hi, i)``: a bound of the elements lo to hi along an axis.

    The function reads the min/max table. The indices on the other axes, in order, come last.
    """
    kind, pick = ("least", "min") if least else ("greatest", "max")
    name, returns = tensor.name, ELEMENTS[tensor.dtype].value
    size = f"p.c_{field_stem(name)}_size_{axis}"
    others = [other for other in range(len(tensor.dims)) if other != axis]
    indices = INDICES[: len(others)]
    line, lines = _line(name, others, indices)
    description = (
        f"The {kind} element of {name} from lo to hi along {tensor.dims[axis]}, in whole spans."
    )
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
    return DeviceFunction(
        name=f"{kind}_{name}_{axis}",
        returns=returns,
        parameters=("const Params& p", "int lo", "int hi", *(f"int {i}" for i in indices)),
        comment=tuple(comment(description)),
        body=tuple(body),
    )


def _line(name: str, others: list[int], indices: str) -> tuple[str, str]:
    """C++ of the number of a line, counted over the other axes, and of the number of lines."""
    line, lines = "", ""
    for i, other in zip(indices, others, strict=True):
        length = f"p.c_{field_stem(name)}_size_{other}"
        clamped = f"inside({i}, {length})"
        line = f"({line}) * {length} + {clamped}" if line else clamped
        lines = f"{lines} * {length}" if lines else length
    return line or "0", lines or "1"


def param_of_table(tensor: Tensor, axis: int, *, written: bool = False) -> Param:
    """The field that points to the min/max table of a tensor along an axis."""
    const = "" if written else "const "
    return Param(
        f"m_{tensor.name}_{axis}",
        f"{const}{ELEMENTS[tensor.dtype].value}*",
        f"[levels, 2, lines, entries]: min, max of {tensor.name} along {tensor.dims[axis]}",
    )


def _parameters(tensor: Tensor) -> tuple[str, ...]:
    return ("const Params& p", *(f"int {i}" for i in INDICES[: len(tensor.dims)]))


def _address(prefix: str, tensor: Tensor) -> tuple[str, list[str]]:
    """C++ of an element's address in the field ``p.<prefix>_<stem>``, and the statements before."""
    stem = field_stem(tensor.name)
    field = f"{prefix}_{stem}"
    if not tensor.dims:
        return f"p.{field}", []
    terms = (
        f"inside({i}, p.c_{stem}_size_{axis}) * p.{field}_stride_{axis}"
        for axis, i in enumerate(INDICES[: len(tensor.dims)])
    )
    return f"p.{field} + offset", [f"const long long offset = {' + '.join(terms)};"]


def params_of_tensor(tensor: Tensor) -> list[Param]:
    """The fields of ``struct Params`` for a captured tensor: its address, sizes and strides."""
    name, stored = f"c_{field_stem(tensor.name)}", ELEMENTS[tensor.dtype].stored
    pointer = Param(name, f"const {stored}*", f"{_shape(tensor)}, the spec's {tensor.name}")
    if len(pointer.line) > COLUMNS:
        pointer = Param(name, f"const {stored}*", _shape(tensor))
    sizes = (Param(f"{name}_size_{axis}", "int", str(dim)) for axis, dim in enumerate(tensor.dims))
    return [pointer, *_strides(name, tensor), *sizes]


def params_of_gradient(tensor: Tensor, kind: str) -> list[Param]:
    """The fields for the gradient of a learned tensor; ``kind`` is the type of the sums."""
    name = f"dc_{field_stem(tensor.name)}"
    meaning = f"{_shape(tensor)}, zeros before the launch"
    params = [Param(name, f"{kind}*", meaning), *_strides(name, tensor)]
    if kind == EXACT_SUM:
        meaning = "bits of the largest |x| that is added, 0 before the launch"
        params.append(Param(f"greatest_{tensor.name}", "unsigned*", meaning))
        meaning = "square root of the number of units in 1; null: not computed yet"
        params.append(Param(f"root_{tensor.name}", "const float*", meaning))
    return params


def _strides(field: str, tensor: Tensor) -> list[Param]:
    return [
        Param(
            f"{field}_stride_{axis}",
            "long long",
            f"elements to the next along {dim}" if isinstance(dim, str) else "",
        )
        for axis, dim in enumerate(tensor.dims)
    ]


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.dims))}]" if tensor.dims else "one number"
