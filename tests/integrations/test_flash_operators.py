"""torch's flash attention operators on flashgen: the registry, the results, what is not served.

On CPU tensors torch's own choice never takes these operators, and has no kernels of them: the tests
call the operators themselves, and `varlen_attn`, with flashgen's kernels at the CPU key.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention as registry
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import flashgen as fg
from flashgen.integrations.torch import FlashOperatorWarning, register

Tensor = torch.Tensor
SDPA = "aten::_scaled_dot_product_flash_attention"
LENGTHS_Q, LENGTHS_K = (5, 19, 1), (9, 21, 1)


@pytest.fixture
def active() -> Iterator[None]:
    register("CPU")
    registry.activate_flash_attention_impl("flashgen")
    yield
    registry.restore_flash_attention_impl(_raise_warn=False)


def drawn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, p: float = 0.0) -> Tensor:
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, p, is_causal, False, scale=0.2
    )[0]
    return out


def expected(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=is_causal, scale=0.2, enable_gqa=True
    )


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]


def check(computed: Attention, reference: Attention, inputs: Inputs) -> None:
    """Compares results and gradients with those of float64."""
    out, exact = computed(*inputs), reference(*inputs)
    torch.testing.assert_close(out.double(), exact, atol=4e-3, rtol=4e-3)
    dout = torch.randn(exact.shape, generator=torch.Generator().manual_seed(3)).half()
    found = torch.autograd.grad(out, inputs, dout)
    wanted = torch.autograd.grad(exact, inputs, dout.double())
    for gradient, of_float64 in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, of_float64, atol=8e-3, rtol=8e-3)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sdpa_and_its_gradients_are_those_of_float64(
    active: None, is_causal: bool, compiled: bool
) -> None:
    inputs = drawn(2, 4, 50, 32), drawn(2, 2, 50, 32), drawn(2, 2, 50, 32)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(q, k, v, is_causal)

    made = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    check(made, lambda q, k, v: expected(q, k, v, is_causal), inputs)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_kernels_compute_what_torch_sends(
    active: None, monkeypatch: pytest.MonkeyPatch, is_causal: bool, arch: str
) -> None:
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
    monkeypatch.setenv("FLASHGEN_ARCH", arch)
    inputs = drawn(1, 2, 70, 64), drawn(1, 1, 70, 64), drawn(1, 1, 70, 64)
    check(
        lambda q, k, v: flash(q, k, v, is_causal),
        lambda q, k, v: expected(q, k, v, is_causal),
        inputs,
    )


def test_dropout_is_that_of_a_spec_and_its_state_reaches_the_gradients(active: None) -> None:
    q, k, v = inputs = drawn(1, 2, 40, 32), drawn(1, 2, 40, 32), drawn(1, 2, 40, 32)
    results = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.5, True, False)
    out, state = results[0], results[6]
    assert state.dtype == torch.uint64

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k

    op = fg.attention(fg.AttentionSpec(mask_mod=causal, head_dim=32, dtype=None, dropout=True))
    same = op(q, k, v, dropout_p=0.5, rng=state.view(torch.int64))
    assert torch.equal(out, same)
    dout = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(each, inputs, dout) for each in (out, same))
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(out, flash(q, k, v, True))


def packed_reference(q: Tensor, k: Tensor, v: Tensor, left: int, right: int) -> Tensor:
    parts, lengths = [], ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K))
    for each in zip(*(torch.split(t, list(of)) for t, of in lengths), strict=True):
        one_q, one_k, one_v = (t.double().transpose(0, 1) for t in each)
        group = one_q.shape[0] // one_k.shape[0]
        one_k, one_v = (t.repeat_interleave(group, 0) for t in (one_k, one_v))
        scores = one_q @ one_k.mT * q.shape[2] ** -0.5
        seq_q, seq_k = scores.shape[1:]
        distance = torch.arange(seq_q)[:, None] + (seq_k - seq_q) - torch.arange(seq_k)
        kept = torch.ones(seq_q, seq_k, dtype=torch.bool)
        if left >= 0:
            kept &= distance <= left
        if right >= 0:
            kept &= -distance <= right
        parts.append((scores.masked_fill(~kept, -torch.inf).softmax(-1) @ one_v).transpose(0, 1))
    return torch.cat(parts)


def boundaries(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def packed(q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:
    out, lse = varlen_attn(
        *(q, k, v, boundaries(LENGTHS_Q), boundaries(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)),
        window_size=window,
        return_aux=AuxRequest(lse=True),
        enable_gqa=True,
    )
    assert lse.shape == q.shape[1::-1]
    return out


def of_packed() -> Inputs:
    return drawn(25, 4, 32), drawn(31, 2, 32), drawn(31, 2, 32)


@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (3, 0), (2, 5), (-1, 4), (6, -1), (2**31 - 1, 0), (3, 2**40)]
)
def test_packed_sequences_and_windows_are_those_of_float64(
    active: None, window: tuple[int, int]
) -> None:
    check(
        lambda q, k, v: packed(q, k, v, window),
        lambda q, k, v: packed_reference(q, k, v, *window),
        of_packed(),
    )


@pytest.mark.slow
def test_packed_sequences_compile_to_one_graph(active: None) -> None:
    compiled = torch.compile(lambda q, k, v: packed(q, k, v, (3, 0)), fullgraph=True)
    check(compiled, lambda q, k, v: packed_reference(q, k, v, 3, 0), of_packed())


def test_packed_results_can_be_written_to_a_given_tensor(active: None) -> None:
    q, k, v = (each.detach() for each in of_packed())
    out = torch.empty_like(q)
    limits = boundaries(LENGTHS_Q), boundaries(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)
    varlen_attn_out(out, q, k, v, *limits, window_size=(-1, 0), enable_gqa=True)
    assert torch.equal(out, packed(q, k, v, (-1, 0)))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)])
def test_results_have_the_strides_that_compiled_graphs_rely_on(
    active: None, order: tuple[int, ...]
) -> None:
    dense = drawn(2, 24, 4, 32).detach().permute(order)
    for q in (dense, torch.cat([dense, dense], -1)[..., :32]):
        out = flash(q, q, q)
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(q)
            promised = flash(fake, fake, fake)
        assert out.stride() == promised.stride()


def has_kernel(key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(SDPA, key)


def test_restoring_brings_back_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch._C._get_cudnn_sdp_enabled()
    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda _: True)  # as on a Hopper GPU
    kernels = has_kernel("CUDA"), has_kernel("CPU")
    register()
    assert "flashgen" in registry.list_flash_attention_impls()
    registry.activate_flash_attention_impl("flashgen")
    assert registry.current_flash_attention_impl() == "flashgen"
    assert has_kernel("CUDA")
    assert not torch._C._get_cudnn_sdp_enabled()
    assert not varlen._should_use_cudnn(0)
    registry.restore_flash_attention_impl()
    assert (has_kernel("CUDA"), has_kernel("CPU")) == kernels
    assert torch._C._get_cudnn_sdp_enabled() == before
    assert varlen._should_use_cudnn(0)


def test_what_is_not_served_takes_the_former_kernel_with_one_warning() -> None:
    calls: list[torch.dtype] = []

    def former(q: Tensor, k: Tensor, v: Tensor, *more: Any, **named: Any) -> Any:
        calls.append(q.dtype)
        zero = torch.zeros((), dtype=torch.uint64)
        return torch.zeros_like(q), q.new_zeros(q.shape[:3]), None, None, 1, 1, zero, zero, zero

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_scaled_dot_product_flash_attention", former, "CPU")
    q = drawn(1, 2, 16, 32).detach()
    try:
        register("CPU")
        registry.activate_flash_attention_impl("flashgen")
        assert flash(q, q, q).any()
        assert calls == []
        with pytest.warns(FlashOperatorWarning, match="q has dtype torch.float32") as told:
            flash(q.float(), q.float(), q.float())
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flash(q.float(), q.float(), q.float())
        short = q[..., :12]
        with pytest.warns(FlashOperatorWarning, match="head dims 12 and 12"):
            flash(short, short, short)
        with pytest.warns(FlashOperatorWarning, match="the scale is -1"):
            torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, scale=-1.0)
        registry.restore_flash_attention_impl()
        assert not flash(q, q, q).any()
    finally:
        registry.restore_flash_attention_impl(_raise_warn=False)
        library._destroy()
    assert calls == [*2 * [torch.float32], *3 * [torch.float16]]


def test_without_a_former_kernel_the_error_says_what_is_not_served(active: None) -> None:
    q = drawn(1, 2, 16, 32).detach().float()
    with pytest.raises(fg.InputError) as caught:
        flash(q, q, q)
    assert caught.value.numbers == "q has dtype torch.float32"


def test_another_key_is_refused() -> None:
    with pytest.raises(fg.InputError, match="dispatch key"):
        register("nonsense")


def test_a_torch_without_the_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(registry, "register_flash_attention_impl")
    with pytest.raises(fg.InputError, match="no registry"):
        register()
