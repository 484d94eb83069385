"""Gradients: the operator as an autograd.Function, and its backward pass as a second one.

The second function raises an error when it is differentiated: without it a gradient of a gradient
would be wrong without an error. Forward mode raises an error too, because torch's default is a
tangent of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from flashgen.calls.ops.operator import Operator
from flashgen.calls.ops.vmap import map_call
from flashgen.shared.call import DEFAULT_OPTIONS, CallOptions, Operands, OutputGradients
from flashgen.shared.errors import InputError

Tensor = torch.Tensor

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_C = torch._C
# Also true for tensors that outlive the torch.func.vjp that wrapped them.
_is_wrapped = _C._functorch.is_functorch_wrapped_tensor
_is_batched_grad = _C._functorch.is_legacy_batchedtensor
_transforms_are_active = _C._are_functorch_transforms_active
_dispatch_modes = _C._len_torch_dispatch_stack
_function_modes = _C._len_torch_function_stack
_tracing_state = _C._get_tracing_state


def are_plain(tensors: Sequence[Any]) -> bool:
    """True if all tensors are ordinary tensors; the other conditions of `is_plain` are omitted."""
    return not tensors or all(type(t) in _PLAIN and not _is_wrapped(t) for t in tensors)


def is_plain(q: Any, k: Any, v: Any) -> bool:
    """True for ordinary tensors while no tracing, no transform and no torch mode is active.

    Such a call can bypass torch's dispatcher.
    """
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not (_is_wrapped(q) or _is_wrapped(k) or _is_wrapped(v))
        and not _transforms_are_active()
        and not _dispatch_modes()
        and not _function_modes()
        and _tracing_state() is None
    )


def _save(ctx: Any, operator: Operator, options: CallOptions, *tensors: Any) -> None:
    """Saves the inputs of the backward pass; floats that are tensors are saved as tensors."""
    if options is not DEFAULT_OPTIONS:
        floats = operator.floats_of(options)
        saved = [value if isinstance(value, Tensor) else None for value in floats]
    else:
        saved = []
    if saved.count(None) < len(saved):
        numbers = [None if isinstance(value, Tensor) else value for value in floats]
        options, tensors = operator.with_floats(options, numbers), (*tensors, *saved)
    ctx.operator = operator
    ctx.options = options
    ctx.save_for_backward(*tensors)
    # None stands for a gradient of zeros: most calls have no gradient of lse, which kernels skip.
    ctx.set_materialize_grads(False)


def gradients_of(
    operator: Operator,
    options: CallOptions,
    operands: Operands,
    results: OutputGradients,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and of each captured tensor; None for those that are not needed.

    Args:
        options: floats may be tensors.

    Raises:
        InputError: the gradients are those of several outputs at once.
    """
    q, k, v, captured, rng = operands
    need_q, need_k, need_v, *of_captured = needs
    needed = tuple([of_captured[index] for index in operator.learned])
    if torch.compiler.is_compiling():  # by compiled autograd
        gradients = operator.dispatch_backward(operands, results, options, needed)
    elif any(_is_batched_grad(gradient) for gradient in results[2:] if gradient is not None):
        _refuse_batched()
    elif (
        not torch.is_grad_enabled()
        and is_plain(q, k, v)
        and not q.is_meta
        and is_plain(*results[:3])
        and are_plain(captured)
    ):
        if any(isinstance(value, Tensor) for value in operator.floats_of(options)):
            options = operator.numbers_in(options)
        gradients = operator.compute_backward(operands, results, options, needed)
    else:
        tensors = (q, k, v, *results, rng, *captured)
        gradients = Differentiate.apply(operator, options, needed, *tensors)  # type: ignore[no-untyped-call]
    dq, dk, dv, *rest = gradients
    wanted = (dq if need_q else None, dk if need_k else None, dv if need_v else None)
    if not captured:
        return wanted
    learned = dict(zip(operator.learned, rest, strict=True))
    return (*wanted, *[learned[i] if need else None for i, need in enumerate(of_captured)])


def _refuse_batched() -> NoReturn:
    raise InputError(
        "attention takes the gradients of several outputs at once from torch.func alone",
        where="the backward pass",
        numbers="is_grads_batched=True, or a jacobian or hessian with vectorize=True",
        way_out="torch.func.jacrev, or torch.func.vmap(torch.func.vjp(op, q, k, v)[1])(gradients)",
    )


def differentiate_native(
    operator: Operator,
    options: CallOptions,
    tensors: tuple[Any, ...],
    needs: tuple[bool, ...],
    learn: bool,
) -> tuple[tuple[Tensor | None, ...], Any]:
    """The backward pass of a native call that has no plan for it.

    Args:
        tensors: q, k, v, out, lse, dout, dlse, rng and the captured tensors.
        needs: for q, k, v and each captured tensor, whether its gradient is needed.
        learn: whether to make a plan.

    Returns:
        The gradients, and the plan or None.
    """
    q, k, v, *of_out, rng = tensors[:8]
    operands = Operands(q, k, v, tensors[8:], rng)
    results = OutputGradients(*of_out)
    found = gradients_of(operator, options, operands, results, needs)
    made = operator.backward_plan(operands, results, options, needs) if learn else None
    return found, made


class Attend(torch.autograd.Function):
    """out and lse of one operator. The tensors are q, k, v, rng and the captured tensors."""

    @staticmethod
    def forward(
        operator: Operator,
        options: CallOptions,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        operands = Operands(q, k, v, captured, rng)
        if is_plain(q, k, v) and are_plain(captured) and not q.is_meta:
            return operator.compute(operands, operator.numbers_in(options))
        with _C._AutoDispatchBelowAutograd():
            return operator.dispatch(operands, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        operator, options, q, k, v, rng, *captured = inputs
        _save(ctx, operator, options, q, k, v, *output, rng, *captured)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, rng, *captured = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        operator: Operator = ctx.operator
        options: CallOptions = ctx.options
        saved = captured[len(operator.tensors) :]
        if saved:
            del captured[len(operator.tensors) :]
            floats = zip(saved, operator.floats_of(options), strict=True)
            options = operator.with_floats(options, [x if t is None else t for t, x in floats])
        _, _, need_q, need_k, need_v, _, *needs = ctx.needs_input_grad
        operands = Operands(q, k, v, tuple(captured), rng)
        results = OutputGradients(out, lse, dout, dlse)
        needs = need_q, need_k, need_v, *needs
        found = gradients_of(operator, options, operands, results, needs)
        return (None, None, *found[:3], None, *found[3:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise InputError(
            "attention has no forward-mode derivative",
            where="torch.func.jvp or torch.autograd.forward_ad",
            numbers="q, k, v or a captured tensor carries a tangent",
            way_out="reverse mode: backward(), torch.autograd.grad or torch.func.grad",
        )


class AttendPlain(torch.autograd.Function):
    """`Attend` for tensors that are plain by `is_plain`, without support for transforms."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        options: CallOptions,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        results = operator.compute(Operands(q, k, v, captured, rng), options)
        _save(ctx, operator, options, q, k, v, *results, rng, *captured)
        return results

    backward = Attend.backward
    jvp = Attend.jvp


class Differentiate(torch.autograd.Function):
    """dq, dk, dv and the gradients of learned tensors of one operator.

    The tensors are q, k, v, out, lse, dout, dlse, rng and the captured tensors.
    """

    @staticmethod
    def forward(
        operator: Operator, options: CallOptions, needed: tuple[bool, ...], *tensors: Any
    ) -> tuple[Tensor, ...]:
        """
        Args:
            needed: for each learned tensor, whether its gradient is needed.
        """
        q, k, v, out, lse, dout, dlse, rng, *captured = tensors
        operands = Operands(q, k, v, tuple(captured), rng)
        results = OutputGradients(out, lse, dout, dlse)
        plain = is_plain(q, k, v) and is_plain(out, lse, dout) and are_plain(captured)
        if plain and not q.is_meta:
            options = operator.numbers_in(options)
            return operator.compute_backward(operands, results, options, needed)
        with _C._AutoDispatchBelowAutograd():
            return operator.dispatch_backward(operands, results, options, needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise InputError(
            "a gradient of attention cannot be differentiated again",
            where="backward of a backward",
            numbers="create_graph=True, torch.func.grad of grad, hessian and the like",
            way_out="first derivatives only; torch's scaled_dot_product_attention has second "
            "derivatives with the backend torch.nn.attention.SDPBackend.MATH",
        )

    jvp = Attend.jvp

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        """The tensors are mapped, with floats that may be tensors."""
        operator, options, needed, *tensors = arguments
        dims = list(in_dims[3:])
        operands = 7
        start = operands + 1  # the floats are after rng
        floats = operator.floats_of(options)
        stop = start + len(floats)

        def call(*sample: Any) -> Any:
            of_sample = operator.with_floats(options, sample[start:stop])
            rest = (*sample[:start], *sample[stop:])
            return Differentiate.apply(operator, of_sample, needed, *rest)  # type: ignore[no-untyped-call]

        tensors[start:start] = floats
        dims[start:start] = operator.floats_of(in_dims[1])
        size, learns = info.batch_size, any(needed)
        return map_call(operator.signature, call, size, dims, tensors, operands, learns)


# Function.apply first looks for transforms of torch.func, which takes several times as long as the
# rest of the call. The functions below are for calls without transforms, or at one level of them.
attend: Any = super(torch.autograd.Function, Attend).apply
attend_plain: Any = super(torch.autograd.Function, AttendPlain).apply
differentiate: Any = super(torch.autograd.Function, Differentiate).apply
