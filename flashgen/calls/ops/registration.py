"""Registers operators with torch: name, schema, kernels, fake kernels, gradients and vmap.

The first arguments of an operator are tensors, with the captured tensors after q, k and v. Keyword
arguments follow, including the run-time scalars that are integers. backend, arch and deterministic
are arguments too: a compiled graph holds them as constants. Floats (the run-time scalars among
them, the scale and the probability of dropout) are CPU tensors of one float64, because
torch.compile makes one graph per value of a Python float, but only one graph for all values of a
tensor.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import config as functorch_config
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils.checkpoint import CheckpointPolicy

from flashgen.calls.ops import dtensors
from flashgen.calls.ops.autograd import (
    apply_push,
    apply_push_gradients,
    attend,
    differentiate,
    differentiate_native,
)
from flashgen.calls.ops.flops import register_flops
from flashgen.calls.ops.operator import FLOATS, NEEDED, Operator
from flashgen.calls.ops.vmap import map_call
from flashgen.calls.runtime.arguments.call import check_traced
from flashgen.calls.runtime.arguments.options import check_rng, refuse_dropout, refuse_no_rng
from flashgen.calls.runtime.arguments.refusals import refuse, runs_while_traced
from flashgen.calls.runtime.arguments.tensors import check_learned
from flashgen.calls.runtime.memory_layout import empty_rows
from flashgen.calls.runtime.programs import CallProgram, program_of
from flashgen.shared.call import Operands, OutputGradients, ResultTangents, Tangents
from flashgen.shared.dtypes import SCALAR_DTYPES
from flashgen.shared.errors import SpecError
from flashgen.shared.signature import CallSignature

if TYPE_CHECKING:
    from flashgen.spec.language.spec import AttentionSpec

Tensor = torch.Tensor

_SCHEMA = {
    "q_offset": "SymInt q_offset=0",
    "k_offset": "SymInt k_offset=0",
    "backend": "str? backend=None",
    "arch": "str? arch=None",
    "deterministic": "bool? deterministic=None",
    "split_size": "SymInt? split_size=None",
}
_library: Any = None  # torch's Library has no types
_OTHERS = ("append_kv", "append_kv_writing_scales")
"""The operators of torch.ops.flashgen that are made from no spec."""

_names: set[str] = {*_OTHERS}
_operators: dict[AttentionSpec | CallProgram, Operator] = {}
_lock = threading.RLock()


def operator_of(spec: AttentionSpec | CallProgram) -> Operator:
    """The operator of a spec, registered at the first call; equal specs share one."""
    with _lock:
        operator = _operators.get(spec)
        if operator is None:
            operator = _operators[spec] = Operator(spec, free_name(spec))
            register(operator)
        return operator


def register_hashed_name(spec: AttentionSpec | CallProgram) -> None:
    """Registers the operator of a spec under its name with a hash too.

    A process in which another spec has the name calls it so, and its exported programs with it.
    """
    program = program_of(spec)
    with _lock:
        name = f"{program.signature.name}_{program.digest[:8]}"
        if operator_of(spec).name != name and not _is_used(name):
            _names.update(_family(name))
            register(Operator(spec, name))


def free_name(spec: AttentionSpec | CallProgram) -> str:
    """The spec's name, followed by a hash of the spec where another spec has that name.

    The hash is the same in every process, so that exported programs find their operator.
    """
    program = program_of(spec)
    name = program.signature.name
    if _is_used(name):
        digest = program.digest
        hashed = (
            f"{program.signature.name}_{digest[:length]}" for length in range(8, len(digest) + 1)
        )
        name = next(name for name in hashed if not _is_used(name))
    _names.update(_family(name))
    return name


def _family(name: str) -> tuple[str, ...]:
    """The names of the operators of one spec."""
    return name, f"{name}_backward", f"{name}_tangent", f"{name}_backward_tangent"


def _is_used(name: str) -> bool:
    """Whether an operator has this name, or torch.ops.flashgen has an attribute of its own."""
    other_attribute = hasattr(torch.ops.flashgen, name) and name not in _names
    return other_attribute or not _names.isdisjoint(_family(name))


def register(operator: Operator) -> None:
    """Defines the operators of a spec in torch, and sets the overloads of ``operator``."""
    global _library
    if _library is None:
        _library = torch.library.Library("flashgen", "FRAGMENT")  # type: ignore[no-untyped-call]
    signature, name = operator.signature, operator.name
    _define(operator)

    def kernel(*tensors: Any, **by_name: Any) -> Any:
        operands, _, floats = _values(operator, tensors)
        options = operator.numbers_in(operator.options(by_name, floats))
        return operator.compute(operands, options)

    def kernel_backward(*tensors: Any, **by_name: Any) -> Any:
        operands, gradients, floats = _values(operator, tensors, 4)
        options = operator.numbers_in(operator.options(by_name, floats))
        return operator.compute_backward(operands, gradients, options, _needed(operator, by_name))

    def autograd(*tensors: Any, **by_name: Any) -> Any:
        (q, k, v, captured, rng), _, floats = _values(operator, tensors)
        if captured and torch.is_grad_enabled():
            check_learned(signature, captured)
        if rng is not None:
            _save_for_backward(rng)
        return attend(operator, operator.options(by_name, floats), q, k, v, rng, *captured)

    def autograd_backward(*tensors: Any, **by_name: Any) -> Any:
        (q, k, v, captured, rng), gradients, floats = _values(operator, tensors, 4)
        options, needed = operator.options(by_name, floats), _needed(operator, by_name)
        return differentiate(operator, options, needed, q, k, v, *gradients, rng, *captured)

    def fake(*tensors: Any, **by_name: Any) -> Any:
        operands, _, floats = _values(operator, tensors)
        q = operands.q
        _check_traced_dropout(signature, operands.rng, floats[0], q.device)
        check_traced(signature, operands, operator.options(by_name, floats).scalars)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        dtype = None if signature.out_dtype is None else getattr(torch, signature.out_dtype)
        maxima = [torch.empty_like(lse)] if signature.returns_maxima else []
        return empty_rows(q, signature.head_dim_v, dtype), lse, *maxima

    def fake_backward(*tensors: Any, **by_name: Any) -> Any:
        operands, _, floats = _values(operator, tensors, 4)
        check_traced(signature, operands, operator.options(by_name, floats).scalars)
        captured = operands.captured
        learned = zip(operator.learned, _needed(operator, by_name), strict=True)
        return (
            *(empty_rows(tensor, tensor.shape[3]) for tensor in operands[:3]),
            *(captured[i].new_empty(captured[i].shape if wanted else 0) for i, wanted in learned),
        )

    overload = _implement(name, kernel, autograd, fake)
    overload_backward = _implement(
        f"{name}_backward", kernel_backward, autograd_backward, fake_backward
    )
    operator.kernels = kernel, kernel_backward
    operator.differentiate = functools.partial(differentiate_native, operator)

    _map_over(operator, overload, 0)
    _map_over(operator, overload_backward, 4, gives_gradients=True)
    operator.overload, operator.overload_backward = overload, overload_backward
    _register_tangents(operator)
    tangents = operator.overload_tangent, operator.overload_backward_tangent
    overloads = overload, overload_backward, *tangents
    register_flops(signature, *(registered.overloadpacket for registered in overloads))
    if "torch.distributed.tensor" in sys.modules:
        serve_dtensors(operator)


def _implement(name: str, kernel: Any, autograd: Any, fake: Any) -> Any:
    """Registers what an operator that is defined computes, and returns its overload."""
    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    _library.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"flashgen::{name}", fake, lib=_library)
    return getattr(torch.ops.flashgen, name).default


def _register_tangents(operator: Operator) -> None:
    """Defines the operators of the tangent passes, from which all other derivatives are made.

    These operators take the tangents of q, k, v and of the learned tensors as one list, and out and
    lse with their gradients and tangents as another one.
    """
    signature = operator.signature

    def arguments_of(tensors: Any, by_name: Any) -> tuple[Operands, Any, Tangents, Any]:
        operands, (operand_tangents, results), floats = _values(operator, tensors, 2)
        q_tangent, k_tangent, v_tangent, *learned = operand_tangents
        moving = Tangents(q_tangent, k_tangent, v_tangent, tuple(learned))
        return operands, tuple(results), moving, operator.options(by_name, floats)

    def kernel(*tensors: Any, **by_name: Any) -> Any:
        operands, results, moving, options = arguments_of(tensors, by_name)
        options = operator.numbers_in(options)
        return operator.compute_tangent(operands, results, moving, options)

    def kernel_backward(*tensors: Any, **by_name: Any) -> Any:
        operands, results, moving, options = arguments_of(tensors, by_name)
        gradients, result_tangents = OutputGradients(*results[:4]), ResultTangents(*results[4:])
        options = operator.numbers_in(options)
        return operator.compute_backward_tangent(
            operands, gradients, moving, result_tangents, options
        )

    def autograd_by(function: Any) -> Any:
        def autograd(*tensors: Any, **by_name: Any) -> Any:
            (q, k, v, captured, rng), results, moving, options = arguments_of(tensors, by_name)
            arguments = (*results, rng, q, k, v, *captured, *moving[:3], *moving.captured)
            return function(operator, options, *arguments)

        return autograd

    def fake(*tensors: Any, **by_name: Any) -> Any:
        operands, _, _, options = arguments_of(tensors, by_name)
        check_traced(signature, operands, options.scalars)
        q = operands.q
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        return empty_rows(q, signature.head_dim_v), lse

    def fake_backward(*tensors: Any, **by_name: Any) -> Any:
        operands = arguments_of(tensors, by_name)[0]
        rows = (empty_rows(tensor, tensor.shape[3]) for tensor in operands[:3])
        learned = operator.select_learned(operands.captured)
        return *fake(*tensors, **by_name), *rows, *(x.new_empty(x.shape) for x in learned)

    operators = (
        ("tangent", kernel, autograd_by(apply_push), fake, 2),
        ("backward_tangent", kernel_backward, autograd_by(apply_push_gradients), fake_backward, 8),
    )
    for suffix, compute, autograd, meta, results in operators:
        overload = _implement(f"{operator.name}_{suffix}", compute, autograd, meta)
        setattr(operator, f"overload_{suffix}", overload)
        _map_over(operator, overload, results, in_lists=True, gives_gradients=results > 2)


def _map_over(
    operator: Operator,
    overload: Any,
    results: int,
    *,
    in_lists: bool = False,
    gives_gradients: bool = False,
) -> None:
    """Registers the rule of torch.vmap of one of the operators of a spec.

    Args:
        results: the number of results of the forward call, with their gradients and the tangents of
            both.
        in_lists: whether the tangents of the operands and the results are two lists.
        gives_gradients: whether the operator returns gradients or their tangents.
    """
    count, tensors_end = len(operator.floats), len(operator.floats) + len(operator.tensors)
    operands = 3 + 3 * in_lists + results
    # Results with batch entries: of the forward call, then of q, k and v.
    mapped = 2 + 3 * gives_gradients if in_lists else 3

    def flat(arguments: Any) -> tuple[Any, ...]:
        values = _sorted(operator, arguments, 2 if in_lists else results)
        if not in_lists:
            return values
        q, k, v, operand_tangents, result_values, *remaining = values
        if operand_tangents is None:
            operand_tangents = (None,) * (3 + len(operator.learned))
        result_values = (None,) * results if result_values is None else result_values
        return (q, k, v, *operand_tangents[:3], *result_values, *remaining, *operand_tangents[3:])

    def batched(info: Any, in_dims: Any, /, *tensors: Any, **by_name: Any) -> Any:
        def call(*arguments: Any) -> Any:
            rows: Any = arguments[3:operands]
            optional, remaining = arguments[operands : operands + 3], arguments[operands + 3 :]
            floats, captured = remaining[:count], remaining[count:tensors_end]
            if in_lists:
                rows = [*rows[:3], *remaining[tensors_end:]], list(rows[3:])
            return overload(*arguments[:3], *captured, *floats, *rows, *optional, **by_name)

        learns = gives_gradients and any(_needed(operator, by_name))
        dims, values = flat(in_dims), flat(tensors)
        return map_call(
            operator.signature, call, info.batch_size, dims, values, operands, learns, mapped
        )

    torch.library.register_vmap(overload, batched, lib=_library)


@runs_while_traced
def serve_dtensors(operator: Operator) -> None:
    """Registers how an operator computes DTensors, before the first call that has some.

    A process that does not use them does not import them.
    """
    if not operator.serves_dtensors:
        operator.serves_dtensors = True
        dtensors.serve(operator, _library, operator_of)


MOST_ARGUMENTS = 64
"""Arguments of an operator of torch."""


def _define(operator: Operator) -> None:
    """Defines the schemas: captured tensors follow q, k and v, their gradients dq, dk and dv."""
    name, signature = operator.name, operator.signature
    floats = [operator.arguments[index] for index in operator.floats]
    tensors = ("q", "k", "v", *operator.tensors, *floats)
    operands = ", ".join(f"Tensor {tensor}" for tensor in tensors)
    learned = [f"d_{tensor.name}" for tensor in signature.learned]
    # The gradient of a tensor "ef" is not named "def", which torch reads as a keyword.
    gradients = ", ".join(f"Tensor {result}" for result in ("dq", "dk", "dv", *learned))
    numbers = ", ".join(_SCHEMA[number] for number in operator.numbers) + "".join(
        f", {SCALAR_DTYPES[scalar.dtype].schema} {name}"
        for scalar, name in zip(signature.scalars, operator.arguments, strict=True)
        if name not in floats
    )
    numbers_backward = numbers + (f", bool[]? {NEEDED}=None" if learned else "")
    optional = "Tensor? rng=None, Tensor? dropout_p=None, Tensor? scale=None"
    results = "Tensor out, Tensor lse, Tensor dout, Tensor? dlse=None"
    arguments_backward = f"{operands}, {results}, {optional}, *, {numbers_backward}"
    count = arguments_backward.count(",")  # the star is no argument
    if count > MOST_ARGUMENTS:
        raise SpecError(
            "a spec captures more tensors and scalars than an operator of torch can take",
            where=name,
            numbers=f"{len(signature.tensors)} tensors and {len(signature.scalars)} scalars make "
            f"{count} arguments of the backward operator; limit {MOST_ARGUMENTS}",
            way_out="one tensor with a further dimension for several of the same shape, as in "
            "table[i, h, k]",
        )
    returned = "Tensor out, Tensor lse" + ", Tensor max_scores" * signature.returns_maxima
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    _library.define(f"{name}({operands}, {optional}, *, {numbers}) -> ({returned})", tags=tags)
    _library.define(f"{name}_backward({arguments_backward}) -> ({gradients})", tags=tags)
    moving = f"{operands}, Tensor?[] tangents, Tensor?[] results, {optional}, *, {numbers}"
    result_tangents = "Tensor out_tangent, Tensor lse_tangent"
    _library.define(f"{name}_tangent({moving}) -> ({result_tangents})", tags=tags)
    _library.define(
        f"{name}_backward_tangent({moving}) -> ({result_tangents}, {gradients})", tags=tags
    )


def _values(
    operator: Operator, tensors: tuple[Any, ...], results: int = 0
) -> tuple[Operands, Any, tuple[Tensor | None, ...]]:
    """The operands, the results with their gradients and the floats from positional arguments.

    Args:
        results: 4 in the backward operator; with 0, the second value has nothing. 2 in the
            operators of tangent passes, whose two lists are returned as they are.
    """
    q, k, v, *values = _sorted(operator, tensors, results)
    gradients, (rng, *values) = values[:results], values[results:]
    count = len(FLOATS) + len(operator.floats)
    operands = Operands(q, k, v, tuple(values[count:]), rng)
    output_gradients: Any = gradients
    if results != 2:
        output_gradients = OutputGradients._make(gradients or (None,) * 4)
    return operands, output_gradients, tuple(values[:count])


def _sorted(operator: Operator, arguments: tuple[Any, ...], results: int) -> tuple[Any, ...]:
    """Positional arguments in another order: rng, the floats and the captured tensors at the end.

    torch omits arguments that have their default value, which is None for tensors.

    Args:
        arguments: q, k, v, the captured tensors, the scalars that are floats, ``results`` tensors,
            and at most rng, dropout_p and scale.
    """
    captured = 3 + len(operator.tensors)
    floats = captured + len(operator.floats)
    arguments += (None,) * (floats + results + 3 - len(arguments))
    return (
        *arguments[:3],
        *arguments[floats:],
        *arguments[captured:floats],
        *arguments[3:captured],
    )


def _needed(operator: Operator, by_name: Mapping[str, Any]) -> tuple[bool, ...]:
    needed = by_name.get(NEEDED)
    return (True,) * len(operator.learned) if needed is None else tuple(needed)


def _save_for_backward(rng: Tensor) -> None:
    """While AOTAutograd traces, has the graph save the random state: both passes drop alike.

    With an activation_memory_budget below 1 it recomputes random operations in the backward pass,
    and they draw other numbers there.

    Raises:
        InputError: with a budget of 0, which recomputes whatever is marked.
    """
    mode = get_proxy_mode()
    if mode is None:
        return
    inner = torch._from_functional_tensor(rng.elem) if isinstance(rng, FunctionalTensor) else rng
    slot = get_proxy_slot(inner, mode.tracer, None)
    if slot is None:
        return
    node = slot.proxy.node
    if node.op != "placeholder" and functorch_config.activation_memory_budget == 0:
        refuse(
            "with an activation_memory_budget of 0 the backward pass would drop other elements",
            "argument rng",
            "torch._functorch.config.activation_memory_budget is 0, and the random state is made "
            "inside the compiled function",
            "a budget above 0, or rng=torch.randint(2**63 - 1, (2,), device=q.device) as an "
            "argument of the compiled function",
        )
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _check_traced_dropout(signature: CallSignature, rng: Any, p: Any, device: torch.device) -> None:
    if not signature.dropout and (p is not None or rng is not None):
        refuse_dropout(signature, "rng" if p is None else "dropout_p", p)
    if p is not None and rng is None:
        refuse_no_rng("dropout", f"dropout_p {p}, ")
    check_rng(rng, device)
