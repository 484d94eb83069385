"""Gradients: the operator as an autograd.Function, and its backward as a second one.

The second one exists to be differentiated, which it refuses: without it a gradient of a gradient
would come out wrong and not say so. The same holds for forward mode, where torch's default for an
operator is a tangent of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from flashgen.errors import InputError
from flashgen.ops import mapped

if TYPE_CHECKING:
    from flashgen.ops.operator import Operator

Tensor = torch.Tensor

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_C = torch._C
# Also true for what torch.func.vjp leaves behind when it is over.
_is_wrapped = _C._functorch.is_functorch_wrapped_tensor


def are_plain(tensors: Sequence[Any]) -> bool:
    """What `is_plain` asks of its arguments, for any number of them."""
    return not tensors or all(type(t) in _PLAIN and not _is_wrapped(t) for t in tensors)


def is_plain(q: Any, k: Any, v: Any) -> bool:
    """True when nobody watches: ordinary tensors, no tracing, no transform and no mode active.

    Then a call need not go through torch's dispatcher.
    """
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not (_is_wrapped(q) or _is_wrapped(k) or _is_wrapped(v))
        and not _C._are_functorch_transforms_active()
        and not _C._len_torch_dispatch_stack()
        and not _C._len_torch_function_stack()
        and _C._get_tracing_state() is None
    )


def _save(ctx: Any, operator: Operator, dropout_p: Any, numbers: Any, *tensors: Any) -> None:
    is_tensor = isinstance(dropout_p, Tensor)
    ctx.operator = operator
    ctx.numbers = numbers
    ctx.dropout_p = None if is_tensor else dropout_p
    ctx.save_for_backward(*tensors, dropout_p if is_tensor else None)
    # None for a gradient of zeros: lse has one in most calls, and a kernel can do without.
    ctx.set_materialize_grads(False)


class Attend(torch.autograd.Function):
    """out and lse of one operator."""

    @staticmethod
    def forward(
        operator: Operator,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None,
        dropout_p: float | Tensor | None,
        numbers: tuple[Any, ...],
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            numbers: scale, q_offset, k_offset, backend, arch, deterministic, then the scalars.
            captured: for each of the spec's tensors.
        """
        if is_plain(q, k, v) and are_plain(captured) and not q.is_meta:
            return operator.compute(q, k, v, rng, dropout_p, numbers, captured)
        with _C._AutoDispatchBelowAutograd():
            return operator.dispatch(q, k, v, rng, dropout_p, numbers, captured)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        operator, q, k, v, rng, dropout_p, numbers, *captured = inputs
        _save(ctx, operator, dropout_p, numbers, q, k, v, *output, rng, *captured)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, rng, *captured, dropout_p = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        operator, numbers = ctx.operator, ctx.numbers
        given = (q, k, v, out, lse, dout, dlse, rng)
        p = ctx.dropout_p if dropout_p is None else dropout_p
        _, need_q, need_k, need_v, _, _, _, *needs = ctx.needs_input_grad
        needed = tuple([needs[place] for place in operator.learned]) if needs else ()
        if (
            not torch.is_grad_enabled()
            and is_plain(q, k, v)
            and is_plain(out, lse, dout)
            and are_plain(captured)
        ):
            gradients = operator.compute_backward(*given, p, numbers, needed, captured)
        else:
            gradients = Differentiate.apply(operator, *given, p, numbers, needed, *captured)  # type: ignore[no-untyped-call]
        dq, dk, dv, *rest = gradients
        asked = (dq if need_q else None, dk if need_k else None, dv if need_v else None)
        if not needs:
            return (None, *asked, None, None, None)
        learned = dict(zip(operator.learned, rest, strict=True))
        of_captures = [learned[i] if need else None for i, need in enumerate(needs)]
        return (None, *asked, None, None, None, *of_captures)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        operator, *tensors, numbers = arguments[:7]
        captured = arguments[7:]
        dims = (*in_dims[1:6], *in_dims[7:])

        def call(*tensors: Any) -> Any:
            return Attend.apply(operator, *tensors[:5], numbers, *tensors[5:])  # type: ignore[no-untyped-call]

        return mapped.forward(operator.spec, call, info.batch_size, dims, (*tensors, *captured))


class AttendPlain(torch.autograd.Function):
    """The same for tensors that `is_plain` is true of: transforms need not find their way in."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rng: Tensor | None,
        dropout_p: float | Tensor | None,
        numbers: tuple[Any, ...],
        *captured: Tensor,
    ) -> tuple[Tensor, Tensor]:
        results = operator.compute(q, k, v, rng, dropout_p, numbers, captured)
        _save(ctx, operator, dropout_p, numbers, q, k, v, *results, rng, *captured)
        return results

    backward = Attend.backward
    jvp = Attend.jvp


class Differentiate(torch.autograd.Function):
    """dq, dk, dv and the gradients of captured tensors of one operator."""

    @staticmethod
    def forward(
        operator: Operator,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        rng: Tensor | None,
        dropout_p: float | Tensor | None,
        numbers: tuple[Any, ...],
        needed: tuple[bool, ...],
        *captured: Tensor,
    ) -> tuple[Tensor, ...]:
        """
        Args:
            needed: for each captured tensor with grad=True, whether its gradient is.
        """
        given = (q, k, v, out, lse, dout, dlse, rng, dropout_p, numbers, needed, captured)
        plain = is_plain(q, k, v) and is_plain(out, lse, dout) and are_plain(captured)
        if plain and not q.is_meta:
            return operator.compute_backward(*given)
        with _C._AutoDispatchBelowAutograd():
            return operator.dispatch_backward(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise InputError(
            "a gradient of attention cannot be differentiated again",
            where="backward of a backward",
            numbers="create_graph=True, torch.func.grad of grad, hessian and the like",
            way_out="first derivatives only; torch's scaled_dot_product_attention with the backend "
            "torch.nn.attention.SDPBackend.MATH has second ones",
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        operator, *tensors, numbers, needed = arguments[:12]
        captured = arguments[12:]
        dims = (*in_dims[1:10], *in_dims[12:])

        def call(*tensors: Any) -> Any:
            rest = (numbers, needed, *tensors[9:])
            return Differentiate.apply(operator, *tensors[:9], *rest)  # type: ignore[no-untyped-call]

        given = (*tensors, *captured)
        return mapped.backward(operator.spec, call, info.batch_size, dims, given, any(needed))


# Function.apply looks for transforms of torch.func first, which takes several times as long as all
# else. These are for callers that know of none, or that torch calls for one level of them.
attend: Any = super(torch.autograd.Function, Attend).apply
attend_plain: Any = super(torch.autograd.Function, AttendPlain).apply
differentiate: Any = super(torch.autograd.Function, Differentiate).apply


def refuse_forward_mode() -> NoReturn:
    raise InputError(
        "attention has no forward-mode derivative",
        where="torch.func.jvp or torch.autograd.forward_ad",
        numbers="q, k, v or a captured tensor carries a tangent",
        way_out="reverse mode: backward(), torch.autograd.grad or torch.func.grad",
    )
