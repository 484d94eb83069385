"""Derivatives: the operator, and the three passes that its derivatives consist of, as functions.

    function        computes                       its backward           its jvp
    Attend          out, lse                       Differentiate          Push
    Differentiate   the gradients                  PushGradients          PushGradients
    Push            the tangents of out and lse    PushGradients and      refused
                                                   Differentiate
    PushGradients   the tangents of gradients      refused                refused

Second derivatives are symmetric. The gradients by the inputs of `Differentiate`, for cotangents g
of its outputs, are therefore the tangents of its outputs along g, and the gradient by dout is the
tangent of out along g. The gradients of `Push` are the tangents of gradients whose dout is the
cotangent of the tangent of out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from flashgen.calls.ops.operator import Operator
from flashgen.calls.ops.vmap import map_call
from flashgen.calls.runtime.arguments.refusals import is_dtensor
from flashgen.calls.runtime.arguments.tensors import check_moving
from flashgen.shared.call import (
    DEFAULT_OPTIONS,
    CallOptions,
    Operands,
    OutputGradients,
    ResultTangents,
    Tangents,
)
from flashgen.shared.errors import InputError
from flashgen.shared.signature import ROWS

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


@contextlib.contextmanager
def _below_autograd() -> Iterator[None]:
    """Calls go to the keys below autograd, and there to the outer transforms of torch.func.

    `Function.apply` turns both kinds of derivatives off, which outer transforms may need.
    """
    with contextlib.ExitStack() as modes:
        if _transforms_are_active():
            modes.enter_context(torch.enable_grad())
            modes.enter_context(forward_ad._set_fwd_grad_enabled(True))
        modes.enter_context(_C._AutoDispatchBelowAutograd())
        yield


def _save(
    ctx: Any, operator: Operator, options: CallOptions, *tensors: Any, forward: bool = True
) -> None:
    """Saves what derivatives need; floats that are tensors are saved as tensors.

    Args:
        forward: whether forward mode may need it, before the call returns.
    """
    ctx.count = len(tensors)
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
    if forward:
        ctx.save_for_forward(*tensors)
    # None stands for a gradient of zeros: most calls have no gradient of lse, which kernels skip.
    ctx.set_materialize_grads(False)


def _saved(ctx: Any) -> tuple[CallOptions, list[Any]]:
    """The options and the tensors that `_save` was given."""
    operator: Operator = ctx.operator
    options: CallOptions = ctx.options
    tensors = list(ctx.saved_tensors)
    saved = tensors[ctx.count :]
    if saved:
        floats = zip(saved, operator.floats_of(options), strict=True)
        options = operator.with_floats(options, [x if t is None else t for t, x in floats])
    return options, tensors[: ctx.count]


def _saved_backward(ctx: Any) -> tuple[CallOptions, Operands, OutputGradients]:
    """The options, operands and results with their gradients of a backward pass."""
    options, (q, k, v, out, lse, dout, dlse, rng, *captured) = _saved(ctx)
    operands = Operands(q, k, v, tuple(captured), rng)
    return options, operands, OutputGradients(out, lse, dout, dlse)


def _primal(tensor: Any) -> Any:
    return None if tensor is None else forward_ad.unpack_dual(tensor).primal  # type: ignore[no-untyped-call]


def gradients_of(
    operator: Operator,
    options: CallOptions,
    operands: Operands,
    results: OutputGradients,
    needs: Sequence[bool],
    *,
    one_tensor: bool = False,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and of each captured tensor; None for those that are not needed.

    Args:
        options: floats may be tensors.
        one_tensor: whether v is a view of k's first columns, whose gradient may be added to that of
            k in place, with None for v: autograd would fill the other columns with zeros first.

    Raises:
        InputError: there are gradients of several outputs at once.
    """
    q, k, v, captured, rng = operands
    need_q, need_k, need_v, *need_captured = needs
    needed = tuple([need_captured[index] for index in operator.learned])
    if torch.compiler.is_compiling():  # by compiled autograd
        gradients = operator.dispatch_backward(operands, results, options, needed)
    elif any(_is_batched_grad(gradient) for gradient in results[2:] if gradient is not None):
        _refuse_batched()
    elif (
        not torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and is_plain(q, k, v)
        and not q.is_meta
        and is_plain(*results[:3])
        and are_plain(captured)
    ):
        if any(isinstance(value, Tensor) for value in operator.floats_of(options)):
            options = operator.numbers_in(options)
        gradients = operator.compute_backward(operands, results, options, needed)
        if one_tensor and need_k and need_v:
            _, dk, dv, *_ = gradients
            dk[..., : dv.shape[3]] += dv
            need_v = False
    else:
        tensors = (q, k, v, *results, rng, *captured)
        gradients = Differentiate.apply(operator, options, needed, *tensors)  # type: ignore[no-untyped-call]
    dq, dk, dv, *learned_gradients = gradients
    wanted = (dq if need_q else None, dk if need_k else None, dv if need_v else None)
    if not captured:
        return wanted
    learned = dict(zip(operator.learned, learned_gradients, strict=True))
    return (*wanted, *[learned[i] if need else None for i, need in enumerate(need_captured)])


def _refuse_batched() -> NoReturn:
    raise InputError(
        "attention takes several gradients or tangents at once from torch.func alone",
        where="a derivative of attention",
        numbers="is_grads_batched=True, or a jacobian or hessian with vectorize=True",
        way_out="torch.func.jacrev, jacfwd or hessian, or "
        "torch.func.vmap(torch.func.vjp(op, q, k, v)[1])(gradients)",
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
    q, k, v, *output_tensors, rng = tensors[:8]
    operands = Operands(q, k, v, tensors[8:], rng)
    results = OutputGradients(*output_tensors)
    gradients = gradients_of(operator, options, operands, results, needs)
    plan = operator.backward_plan(operands, results, options, needs) if learn else None
    return gradients, plan


class Attend(torch.autograd.Function):
    """The results of one operator. The tensors are q, k, v, rng and the captured tensors.

    A third result, the largest score of each row, has no derivatives.
    """

    @staticmethod
    def forward(
        operator: Operator,
        options: CallOptions,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None,
        *captured: Tensor,
    ) -> tuple[Tensor, ...]:
        operands = Operands(q, k, v, captured, rng)
        if is_plain(q, k, v) and are_plain(captured) and not q.is_meta:
            return operator.compute(operands, operator.numbers_in(options))
        with _below_autograd():
            return operator.dispatch(operands, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        operator, options, q, k, v, rng, *captured = inputs
        _save(ctx, operator, options, q, k, v, *output[:2], rng, *captured)
        ctx.one_tensor = False  # torch.ops takes any v
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    def backward(
        ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        operator: Operator = ctx.operator
        options, (q, k, v, out, lse, rng, *captured) = _saved(ctx)
        if dout is None:
            dout = torch.zeros_like(out)
        _, _, need_q, need_k, need_v, _, *needs = ctx.needs_input_grad
        operands = Operands(q, k, v, tuple(captured), rng)
        results = OutputGradients(out, lse, dout, dlse)
        needs = need_q, need_k, need_v, *needs
        gradients = gradients_of(
            operator, options, operands, results, needs, one_tensor=ctx.one_tensor
        )
        return (None, None, *gradients[:3], None, *gradients[3:])

    @staticmethod
    def jvp(
        ctx: Any, _operator: Any, _options: Any, q: Any, k: Any, v: Any, _rng: Any, *captured: Any
    ) -> tuple[Tensor | None, ...]:
        operator: Operator = ctx.operator
        options, tensors = _saved(ctx)
        # Without their tangents: the function of the tangents is differentiated by itself.
        q_primal, k_primal, v_primal, out, lse, rng, *captured_primals = map(_primal, tensors)
        operands = Operands(q_primal, k_primal, v_primal, tuple(captured_primals), rng)
        check_moving(operator.signature, captured)
        moving = Tangents(q, k, v, operator.select_learned(captured))
        no_more = (None,) * operator.signature.returns_maxima
        return (*push(operator, options, operands, (out, lse), moving), *no_more)


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
    ) -> tuple[Tensor, ...]:
        results = operator.compute(Operands(q, k, v, captured, rng), options)
        dual = forward_ad._current_level >= 0
        _save(ctx, operator, options, q, k, v, *results[:2], rng, *captured, forward=dual)
        ctx.mark_non_differentiable(*results[2:])
        ctx.one_tensor = operator.signature.shared_kv
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
        with _below_autograd():
            return operator.dispatch_backward(operands, results, options, needed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        operator, options, needed, *tensors = inputs
        _save(ctx, operator, options, *tensors)
        ctx.needed = needed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        operator: Operator = ctx.operator
        options, operands, results = _saved_backward(ctx)
        pairs = zip(ctx.needed, gradients[3:], strict=True)
        learned_gradients = tuple(x if needed else None for needed, x in pairs)
        dq_gradient, dk_gradient, dv_gradient = gradients[:3]
        moving = Tangents(dq_gradient, dk_gradient, dv_gradient, learned_gradients)
        tangents = push_gradients(operator, options, operands, results, moving)
        out_tangent, lse_tangent, dq, dk, dv, *learned = tangents
        captured = operator.among_captured(learned)
        outputs = out_tangent, None if results.dlse is None else lse_tangent
        # What out and lse depend on is inside the tangents of the gradients.
        return (None, None, None, dq, dk, dv, None, None, *outputs, None, *captured)

    @staticmethod
    def jvp(ctx: Any, _operator: Any, _options: Any, _needed: Any, *tangents: Any) -> Any:
        operator: Operator = ctx.operator
        options, operands, results = _saved_backward(ctx)
        q_tangent, k_tangent, v_tangent = tangents[:3]
        moving = Tangents(q_tangent, k_tangent, v_tangent, operator.select_learned(tangents[8:]))
        result_tangents = ResultTangents(*tangents[3:7])
        all_tangents = push_gradients(operator, options, operands, results, moving, result_tangents)
        dq, dk, dv, *learned = all_tangents[2:]
        shown = zip(ctx.needed, learned, strict=True)
        return (dq, dk, dv, *(x if wanted else x.new_empty(0) for wanted, x in shown))

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
            sample_options = operator.with_floats(options, sample[start:stop])
            sample_tensors = (*sample[:start], *sample[stop:])
            return Differentiate.apply(operator, sample_options, needed, *sample_tensors)  # type: ignore[no-untyped-call]

        tensors[start:start] = floats
        dims[start:start] = operator.floats_of(in_dims[1])
        size, learns = info.batch_size, any(needed)
        return map_call(operator.signature, call, size, dims, tensors, operands, learns)


class Push(torch.autograd.Function):
    """The tangents of out and lse of one operator.

    The tensors are out, lse, rng, the operands and their tangents: q, k, v and all captured tensors
    of the former, q, k, v and the learned tensors of the latter, where None stands for zeros.
    """

    @staticmethod
    def forward(operator: Operator, options: CallOptions, *tensors: Any) -> tuple[Tensor, Tensor]:
        operands, (out, lse), moving = _push_arguments(operator, tensors, 2)
        if _are_plain_operands(tensors, operands.q):
            options = operator.numbers_in(options)
            return operator.compute_tangent(operands, (out, lse), moving, options)
        with _below_autograd():
            return operator.dispatch_tangent(operands, (out, lse), moving, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        operator, options, *tensors = inputs
        _save(ctx, operator, options, *tensors, *output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        """For cotangents of the tangents of out and lse."""
        needs = ctx.needs_input_grad
        if dout is None and dlse is None:
            return (None,) * len(needs)
        operator: Operator = ctx.operator
        options, (*tensors, out_tangent, lse_tangent) = _saved(ctx)
        operands, (out, lse), moving = _push_arguments(operator, tuple(tensors), 2)
        dout = torch.zeros_like(out) if dout is None else dout
        results = OutputGradients(out, lse, dout, dlse)
        count = 3 + len(operator.tensors)
        by_operands: Sequence[Any] = (None,) * count
        if any(needs[5 : 5 + count]):
            result_tangents = ResultTangents(out_tangent, lse_tangent)
            tangents = push_gradients(operator, options, operands, results, moving, result_tangents)
            by_operands = (*tangents[2:5], *operator.among_captured(tangents[5:]))
        by_tangents: Sequence[Any] = (None,) * (3 + len(operator.learned))
        if any(needs[5 + count :]):
            need_q, need_k, need_v, *learned = needs[5 + count :]
            wanted = (bool(need) for need in operator.among_captured(learned))
            gradients = gradients_of(
                operator, options, operands, results, (need_q, need_k, need_v, *wanted)
            )
            by_tangents = (*gradients[:3], *operator.select_learned(gradients[3:]))
        return (None,) * 5 + (*by_operands, *by_tangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise InputError(
            "attention has no forward mode over forward mode",
            where="torch.func.jvp of jvp, jacfwd of jacfwd and the like",
            numbers="a tangent of attention's results carries a tangent itself",
            way_out="forward mode over reverse mode: torch.func.jvp(torch.func.grad(f), ...), "
            "torch.func.hessian; or reverse mode over forward mode",
        )


class PushGradients(torch.autograd.Function):
    """The tangents of out, lse and of all gradients of one operator.

    The tensors are out, lse, dout, dlse, the tangents of these four, rng, the operands and their
    tangents as in `Push`. The tangents of out and lse are computed where they are None.
    """

    @staticmethod
    def forward(operator: Operator, options: CallOptions, *tensors: Any) -> tuple[Tensor, ...]:
        operands, results, moving = _push_arguments(operator, tensors, 8)
        gradients, result_tangents = OutputGradients(*results[:4]), ResultTangents(*results[4:])
        arguments = operands, gradients, moving, result_tangents
        if _are_plain_operands(tensors, operands.q):
            return operator.compute_backward_tangent(*arguments, operator.numbers_in(options))
        with _below_autograd():
            return operator.dispatch_backward_tangent(*arguments, options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise InputError(
            "a second derivative of attention cannot be differentiated again",
            where="a third derivative",
            numbers="a gradient of a gradient of a gradient, as in torch.autograd.functional.hvp, "
            "or forward mode over such",
            way_out="torch.func.jvp of grad, or torch.autograd.functional.vhp; torch's "
            "scaled_dot_product_attention has third derivatives with SDPBackend.MATH",
        )

    jvp = backward


def push(
    operator: Operator,
    options: CallOptions,
    operands: Operands,
    results: tuple[Tensor, Tensor],
    moving: Tangents,
) -> tuple[Tensor, ...]:
    """The tangents of out and lse; differentiable."""
    tensors = _for_push(operands, results, moving)
    if _are_plain_operands(tensors, operands.q):
        tangents: tuple[Tensor, ...] = apply_push(operator, options, *tensors)
        return tangents
    _refuse_dtensors(operands.q)
    return operator.dispatch_tangent(operands, results, moving, options)


def push_gradients(
    operator: Operator,
    options: CallOptions,
    operands: Operands,
    gradients: OutputGradients,
    moving: Tangents,
    result_tangents: ResultTangents = ResultTangents(),  # noqa: B008
) -> tuple[Tensor, ...]:
    """The tangents of out, lse, dq, dk, dv and of the gradients of learned tensors."""
    if ROWS[1] in operator.tensors:
        _refuse_entropy()
    tensors = _for_push(operands, (*gradients, *result_tangents), moving)
    if _are_plain_operands(tensors, operands.q):
        tangents: tuple[Tensor, ...] = apply_push_gradients(operator, options, *tensors)
        return tangents
    _refuse_dtensors(operands.q)
    return operator.dispatch_backward_tangent(operands, gradients, moving, result_tangents, options)


def _for_push(operands: Operands, results: Sequence[Any], moving: Tangents) -> tuple[Any, ...]:
    """The tensors of `Push`, or with eight results the tensors of `PushGradients`.

    Raises:
        InputError: there are several tangents at once.
    """
    q, k, v, captured, rng = operands
    tangents = (*results[2:], *moving[:3], *moving.captured)
    if any(_is_batched_grad(tensor) for tensor in tangents if tensor is not None):
        _refuse_batched()
    return (*results, rng, q, k, v, *captured, *moving[:3], *moving.captured)


def _push_arguments(
    operator: Operator, tensors: tuple[Any, ...], count: int
) -> tuple[Operands, tuple[Any, ...], Tangents]:
    """The arguments of `_for_push` with ``count`` results."""
    results, rng, (q, k, v, *inputs) = tensors[:count], tensors[count], tensors[count + 1 :]
    captured = tuple(inputs[: len(operator.tensors)])
    q_tangent, k_tangent, v_tangent, *learned = inputs[len(operator.tensors) :]
    moving = Tangents(q_tangent, k_tangent, v_tangent, tuple(learned))
    return Operands(q, k, v, captured, rng), results, moving


def _are_plain_operands(tensors: Sequence[Any], q: Tensor) -> bool:
    present = [tensor for tensor in tensors if tensor is not None]
    return is_plain(q, q, q) and are_plain(present) and not q.is_meta


def _refuse_entropy() -> NoReturn:
    raise InputError(  # the gradient's call takes LSE and the entropy for constants
        "the entropy has no second derivatives",
        where="a derivative of a gradient of AuxOutput.entropy",
        numbers="create_graph=True, torch.func.grad of grad, or jvp of grad",
        way_out="first derivatives of the entropy; second derivatives of out and lse",
    )


def _refuse_dtensors(q: Any) -> None:
    if is_dtensor(q):
        raise InputError(
            "DTensors have no tangents and no second derivatives of attention",
            where="a derivative of a call of DTensors",
            numbers=f"q is a {type(q).__name__}",
            way_out="first derivatives in reverse mode, or local tensors",
        )


def _at_one_level(function: Any) -> Any:
    """What applies a function for torch's dispatcher, once for each level of torch.func.

    `Function.apply` gives each call to all transforms at once. A function that is no subclass of
    torch.autograd.Function is left to the level that calls it.
    """
    plain = super(torch.autograd.Function, function).apply
    methods = ("forward", "setup_context", "backward", "jvp")
    level: Any = type(
        function.__name__,
        (_SingleLevelFunction,),
        {method: getattr(function, method) for method in methods},
    )

    def apply(*arguments: Any) -> Any:
        if not _transforms_are_active():
            return plain(*arguments)
        from torch._functorch.utils import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return level.apply(*arguments)

    return apply


attend = _at_one_level(Attend)
# Until torch 2.13 `Function.apply` is written in Python, and looks for transforms in several times
# the time of the rest of a call. Plain tensors have none.
attend_plain: Any = super(torch.autograd.Function, AttendPlain).apply
differentiate = _at_one_level(Differentiate)
apply_push = _at_one_level(Push)
apply_push_gradients = _at_one_level(PushGradients)
