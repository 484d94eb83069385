"""torch's flash attention operators, computed by flashgen.

`torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn` send
calls in 16 bits to five operators of aten. torch.nn.attention keeps a registry of implementations,
which replace the kernels of these operators while they are active. The kernels here run below
autograd, whose formulas stay aten's, and hand calls that flashgen does not serve to the kernels
that were there before.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from flashgen.calls.ops.operator import Operator
from flashgen.calls.ops.registration import operator_of
from flashgen.calls.runtime.arguments.options import draw_rng
from flashgen.shared.call import CallOptions, Operands, OutputGradients
from flashgen.shared.dtypes import POSITION_LIMIT
from flashgen.shared.errors import InputError, called_by_users
from flashgen.spec.language.scalar import Scalar, seq_k, seq_q
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.user_source import user_frame

Tensor = torch.Tensor

NAME = "flashgen"
"""The name of the implementation in torch's registry."""

_SERVED = (torch.float16, torch.bfloat16)
_MOST_COLUMNS = 256

_FEW_ARGUMENTS = "_scaled_dot_product_flash_attention"
_MANY_ARGUMENTS = "_flash_attention"


class FlashOperatorWarning(UserWarning):
    """A call of torch's attention took the kernel that flashgen's replaces."""


class ReasonsTold:
    """The reasons for torch's own kernels that users have been warned of."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, function: str, reason: str, details: str = "") -> None:
        """Warns at the first call for each reason, at the user's line.

        Args:
            details: a text that may differ between calls of one reason, such as the line of a mod.
        """
        with self._lock:
            if reason in self._reasons:
                return
            self._reasons.add(reason)
        text = f"torch's own kernel computes {function}, because {reason}"
        text += f" ({details})" if details else ""
        frame = user_frame()
        if frame is None:
            warnings.warn(text, FlashOperatorWarning, stacklevel=2)
        else:
            location = frame.f_code.co_filename, frame.f_lineno
            warnings.warn_explicit(text, FlashOperatorWarning, *location)


@called_by_users()
def register(key: str = "CUDA") -> None:
    """Adds flashgen to torch's registry of flash attention implementations.

    Then ``torch.nn.attention.activate_flash_attention_impl("flashgen")`` makes flashgen compute
    what torch sends to its flash backend, forward and backward: float16 and bfloat16, head dims up
    to 256, causal or not, grouped heads, dropout, a scale, and packed sequences and windows of
    ``varlen_attn``. ``torch.nn.attention.restore_flash_attention_impl()`` brings the former kernels
    back. While flashgen is active, torch does not prefer cuDNN's attention.

    What flashgen does not serve is computed by the former kernels: paged caches, ``seqused_k``,
    ALiBi slopes, head dims that are no multiples of 8. A `FlashOperatorWarning` says so once for
    each reason.

    Args:
        key: the dispatch key of the kernels. With "CPU", calls of the five operators on CPU tensors
            take flashgen's CPU path, for tests: torch's own choice never takes them there.

    Raises:
        InputError: this torch has no such registry, or ``key`` is another one.

    Source: `torch.nn.attention`, "flash attention implementations".
    """
    from torch.nn import attention

    if not hasattr(attention, "register_flash_attention_impl"):
        raise InputError(
            "torch has no registry of flash attention implementations",
            where="flashgen.integrations.torch.register",
            numbers=f"torch {torch.__version__}, the registry is in 2.12 and newer",
            way_out="a newer torch, or fg.attention(spec) in place of the function",
        )
    if key not in ("CUDA", "CPU"):
        raise InputError(
            "flashgen has no kernels for a dispatch key",
            where="flashgen.integrations.torch.register, argument key",
            numbers=f"given {key!r}",
            way_out='"CUDA", or "CPU" for tests',
        )
    attention.register_flash_attention_impl(NAME, register_fn=lambda: Activation(key))


# ---- the calls of flashgen -----------------------------------------------------------------------


class _Window(NamedTuple):
    """The keys around the diagonal that a row keeps; None where a side has no limit."""

    left: int | None
    right: int | None

    @staticmethod
    def from_arguments(
        is_causal: bool, left: int | None = None, right: int | None = None
    ) -> _Window:
        """The window of a call, in which None and negative numbers stand for no limit."""
        unlimited = POSITION_LIMIT  # no two positions are farther apart
        ends = (-1 if end is None else int(end) for end in (left, right))
        limits = [end if 0 <= end < unlimited else None for end in ends]
        return _Window(limits[0], 0 if is_causal else limits[1])


@functools.lru_cache(maxsize=512)
def _operator(head_dim: int, left: bool, right: str, packed: bool, dropout: bool) -> Operator:
    """The operator of all calls with such a window.

    Args:
        left: whether the window has a limit on the left, a run-time number.
        right: "" for no limit on the right, "diagonal" for the diagonal, else "right", a number.
    """
    ends = {side: Scalar(side, "int32", minimum=0) for side in ("left", "right")}
    # The last query and the last key are on the diagonal; of a dense call q_offset says where.
    shift = seq_k - seq_q if packed else 0

    def window(b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = q + shift - k
        keeps: Any = True
        if left:
            keeps = distance <= ends["left"]
        if right:
            keeps &= -distance <= (ends["right"] if right == "right" else 0)
        return keeps

    name = "_".join(["flash", *(["left"] if left else []), *([right] if right else [])])
    mask = window if left or right else None
    return operator_of(
        AttentionSpec(
            mask_mod=mask,
            head_dim=head_dim,
            head_dim_v=head_dim,
            dtype=None,
            packed=packed,
            dropout=dropout,
            name=f"{name}_packed" if packed else name,
        )
    )


class _Call(NamedTuple):
    """A call of flashgen: q, k, v are [batch, heads, seq, head_dim], or [1, heads, total, dim]."""

    operator: Operator
    operands: Operands
    options: CallOptions

    @staticmethod
    def from_tensors(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: _Window,
        *,
        dropout_p: float,
        scale: float | None,
        rng: Tensor | None,
        boundaries: tuple[Tensor, Tensor] | None = None,
        split_size: int | None = None,
    ) -> _Call:
        right = "" if window.right is None else "right" if window.right else "diagonal"
        packed, limited = boundaries is not None, window != (None, None)
        operator = _operator(q.shape[3], window.left is not None, right, packed, dropout_p > 0)
        numbers = {"left": window.left, "right": window.right}
        start = k.shape[2] - q.shape[2] if limited and not packed else 0
        options = CallOptions(
            scale,
            q_offset=start,
            split_size=None if packed else split_size,
            scalars=tuple(numbers[name] for name in operator.scalars),
            dropout_p=dropout_p,
        )
        ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), boundaries or (), strict=False))
        captured = tuple(ends[name] for name in operator.tensors)
        return _Call(operator, Operands(q, k, v, captured, rng), options)

    def forward(self) -> tuple[Tensor, Tensor]:
        out, lse = self.operator.compute(self.operands, self.options)
        return out, lse

    def backward(self, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        gradients = OutputGradients(out, lse, dout)
        return self.operator.compute_backward(self.operands, gradients, self.options)[:3]


def _not_served(
    q: Tensor, v: Tensor, dropout_p: float, scale: float | None, unsupported: dict[str, Any]
) -> str | None:
    """Why flashgen does not compute a call; None where it does.

    Args:
        unsupported: arguments of torch that flashgen lacks; a call that sets one is not computed.
    """
    set_names = [name for name, value in unsupported.items() if value is not None]
    if set_names:
        return f"{set_names[0]} is given"
    if q.dtype not in _SERVED:
        return f"q has dtype {q.dtype}"
    if q.shape[-1] % 8 or q.shape[-1] > _MOST_COLUMNS or v.shape[-1] != q.shape[-1]:
        return f"head dims {q.shape[-1]} and {v.shape[-1]} are not equal multiples of 8 up to 256"
    if scale is not None and not 0 < scale < math.inf:
        return f"the scale is {scale}"
    if dropout_p == 1:
        return "dropout_p is 1"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def _in_order_of(result: Tensor, model: Tensor) -> Tensor:
    """``result`` with the strides that aten's shape functions promise, those of a like tensor."""
    like = torch.empty_like(model)
    return result if result.stride() == like.stride() else like.copy_(result)


def _random_state(rng: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """The two results that keep the random state; without dropout nothing reads them."""
    state = q.new_empty(2, dtype=torch.int64) if rng is None else rng
    return state.view(torch.uint64), q.new_empty((), dtype=torch.int64).view(torch.uint64)


def _kept_state(dropout_p: float, state: Tensor) -> Tensor | None:
    return state.view(torch.int64) if dropout_p > 0 else None


# ---- the kernels of aten's operators -------------------------------------------------------------


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    **unsupported: Any,
) -> tuple[Any, ...]:
    """q, k, v are [batch, heads, seq, head_dim]."""
    unsupported["return_debug_mask"] = return_debug_mask or None
    _refuse(_not_served(query, value, dropout_p, scale, unsupported))
    rng = draw_rng(dropout_p, query.device)
    window = _Window.from_arguments(is_causal)
    call = _Call.from_tensors(query, key, value, window, dropout_p=dropout_p, scale=scale, rng=rng)
    out, lse = call.forward()
    sizes = query.shape[2], key.shape[2]
    results = _in_order_of(out, query), lse, None, None, *sizes, *_random_state(rng, query)
    return *results, query.new_empty(0)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
    **unsupported: Any,
) -> tuple[Tensor, ...]:
    _refuse(_not_served(query, value, dropout_p, scale, unsupported))
    rng = _kept_state(dropout_p, philox_seed)
    window = _Window.from_arguments(is_causal)
    call = _Call.from_tensors(query, key, value, window, dropout_p=dropout_p, scale=scale, rng=rng)
    gradients = call.backward(out, logsumexp, grad_out)
    return tuple(map(_in_order_of, gradients, (query, key, value)))


def _heads_first(tensor: Tensor) -> Tensor:
    """[batch, heads, seq, dim] of [batch, seq, heads, dim], or [1, heads, total, dim] of packed."""
    return tensor.transpose(1, 2) if tensor.dim() == 4 else tensor.transpose(0, 1)[None]


def _heads_second(tensor: Tensor, like: Tensor) -> Tensor:
    result = tensor.transpose(1, 2) if like.dim() == 4 else tensor[0].transpose(0, 1)
    return _in_order_of(result, like)


def _flash_call(
    tensors: Sequence[Tensor],
    cum_seqs: tuple[Tensor | None, Tensor | None],
    window: _Window,
    num_splits: int | None = None,
    **options: Any,
) -> _Call:
    q, k, v = map(_heads_first, tensors)
    query_ends, key_ends = cum_seqs
    boundaries = (
        None if query_ends is None else (query_ends, query_ends if key_ends is None else key_ends)
    )
    split_size = 0 if num_splits == 1 else None
    return _Call.from_tensors(
        q, k, v, window, boundaries=boundaries, split_size=split_size, **options
    )


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    num_splits: int | None = None,
    **unsupported: Any,
) -> tuple[Tensor, ...]:
    """q, k, v are [batch, seq, heads, head_dim], or packed [total, heads, head_dim]."""
    unsupported["return_debug_mask"] = return_debug_mask or None
    unsupported["num_splits"] = num_splits if num_splits not in (None, 0, 1) else None
    _refuse(_not_served(query, value, dropout_p, scale, unsupported))
    rng = draw_rng(dropout_p, query.device)
    call = _flash_call(
        (query, key, value),
        (cum_seq_q, cum_seq_k),
        _Window.from_arguments(is_causal, window_size_left, window_size_right),
        num_splits,
        dropout_p=dropout_p,
        scale=scale,
        rng=rng,
    )
    out, lse = call.forward()
    lse = lse if cum_seq_q is None else lse[0]
    return _heads_second(out, query), lse, *_random_state(rng, query), query.new_empty(0)


def _flash_forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    result, lse, *_ = _flash_forward(*arguments, **options)
    out.copy_(result)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **unsupported: Any,
) -> tuple[Tensor, ...]:
    _refuse(_not_served(query, value, dropout_p, scale, unsupported))
    call = _flash_call(
        (query, key, value),
        (cum_seq_q, cum_seq_k),
        _Window.from_arguments(is_causal, window_size_left, window_size_right),
        dropout_p=dropout_p,
        scale=scale,
        rng=_kept_state(dropout_p, rng_state),
    )
    lse = logsumexp if cum_seq_q is None else logsumexp[None]
    gradients = call.backward(_heads_first(out), lse, _heads_first(grad_out))
    return tuple(map(_heads_second, gradients, (query, key, value)))


_KERNELS: dict[str, Callable[..., Any]] = {
    _FEW_ARGUMENTS: _sdpa_forward,
    f"{_FEW_ARGUMENTS}_backward": _sdpa_backward,
    f"{_MANY_ARGUMENTS}_forward": _flash_forward,
    f"{_MANY_ARGUMENTS}_forward_no_dropout_inplace": _flash_forward_into,
    f"{_MANY_ARGUMENTS}_backward": _flash_backward,
}


# ---- activation ----------------------------------------------------------------------------------


class _NotServedError(Exception):
    """A call that the former kernel computes; its text is the reason."""


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise _NotServedError(reason)


@dataclass(frozen=True)
class _Kernel:
    """flashgen's kernel of one operator, and the one that it replaces; None where there is none."""

    name: str
    compute: Callable[..., Any]
    former: Any
    warned: ReasonsTold

    def __call__(self, keyset: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return self.compute(*arguments, **options)
        except _NotServedError as refused:
            reason = str(refused)
        if self.former is None:
            raise InputError(
                f"flashgen does not compute this call of aten::{self.name}",
                where="an activated flash attention implementation",
                numbers=reason,
                way_out="torch.nn.attention.restore_flash_attention_impl(), or a spec of your own: "
                "fg.attention(spec)",
            )
        self.warned.tell(f"aten::{self.name}", reason)
        return self.former.call_boxed(keyset, *arguments, **options)


class Activation:
    """flashgen as the active implementation, until `remove`."""

    _library: Any  # torch's Library has no types

    def __init__(self, key: str) -> None:
        from torch.nn.attention import varlen  # takes seconds: it imports torch.compile

        reasons = ReasonsTold()
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            # torch warns where a kernel is replaced, which is what activation is for.
            warnings.filterwarnings("ignore", message=".*[Oo]verriding a previously registered")
            for name, compute in _KERNELS.items():
                kernel = _Kernel(name, compute, _former(name, key), reasons)
                self._library.impl(name, kernel, key, with_keyset=True)
        self._prefers_cudnn: bool = torch._C._get_cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        # From torch 2.14 on varlen_attn prefers cuDNN too, and asks no setting.
        self._varlen = varlen
        self._varlen_prefers_cudnn = varlen._should_use_cudnn
        self._varlen._should_use_cudnn = _never  # type: ignore[assignment]

    def remove(self) -> None:
        """Brings the former kernels back, and the preference of cuDNN."""
        self._library._destroy()
        torch.backends.cuda.enable_cudnn_sdp(self._prefers_cudnn)
        self._varlen._should_use_cudnn = self._varlen_prefers_cudnn


def _never(_device: int) -> bool:
    return False


def _former(name: str, key: str) -> Any:
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
        return None
    return torch.library.get_kernel(f"aten::{name}", key)
