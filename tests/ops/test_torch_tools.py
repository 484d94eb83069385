"""torch's tools on calls of flashgen: they work, or one error says why and what to use."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flashgen as fg
from flashgen.shared.errors import InputError
from tests.support.masks import causal
from tests.support.processes import run_python

SPEC = fg.AttentionSpec(causal, head_dim=16, dtype="float32", name="counted")


def operands(dim_v=16, requires_grad=False):
    shapes = (2, 4, 5, 16), (2, 2, 7, 16), (2, 2, 7, dim_v)
    return tuple(torch.randn(shape, requires_grad=requires_grad) for shape in shapes)


def flex(q, k, v):
    return fg.flex_attention(q, k, v, score_mod=lambda s, b, h, q, k: s + q - k, enable_gqa=True)


def compiled(function, *, fullgraph):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=fullgraph, backend="eager")


@pytest.mark.parametrize("call", [flex, fg.attention(SPEC)], ids=["flex_attention", "attention"])
def test_attention_is_a_part_of_a_full_graph(call):
    given = operands()
    found = compiled(lambda *tensors: call(*tensors), fullgraph=True)(*given)
    torch.testing.assert_close(found, call(*given))


def test_compiling_flex_attention_warns_of_nothing():
    given = operands()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = compiled(flex, fullgraph=False)(*given)
    torch.testing.assert_close(out, flex(*given))


@pytest.mark.parametrize("call", [flex, fg.attention(SPEC)], ids=["flex_attention", "attention"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace_is_refused_with_what_replaces_it(call):
    with pytest.raises(InputError, match=r"torch\.jit\.trace cannot record") as caught:
        torch.jit.trace(lambda q, k, v: call(q, k, v), operands())
    assert "torch.export" in caught.value.way_out


@pytest.mark.parametrize("call", [flex, fg.attention(SPEC)], ids=["flex_attention", "attention"])
def test_fx_symbolic_trace_is_refused_with_what_replaces_it(call):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return call(q, k, v)

    with pytest.raises(InputError, match=r"torch\.fx\.symbolic_trace cannot record") as caught:
        torch.fx.symbolic_trace(Layer())
    assert "torch.export.export" in caught.value.way_out
    program = torch.export.export(Layer(), operands()).module()
    given = operands()
    torch.testing.assert_close(program(*given), call(*given))


@pytest.mark.parametrize("dim_v", [16, 8])
def test_the_flop_counter_counts_attention_as_torch_counts_its_own(dim_v):
    op = fg.attention(SPEC.replace(head_dim_v=dim_v))
    q, k, v = operands(dim_v, requires_grad=True)
    forward = sdpa_flop_count(q.shape, k.shape, v.shape)
    with FlopCounterMode(display=False) as counter:
        out = op(q, k, v)
    assert counter.get_total_flops() == forward
    backward = sdpa_backward_flop_count(out.shape, q.shape, k.shape, v.shape)
    with FlopCounterMode(display=False) as counter:
        op(q, k, v).sum().backward()
    assert counter.get_total_flops() == forward + backward


def test_the_flop_counter_counts_the_products_of_tangents_and_second_derivatives():
    op, (q, k, v) = fg.attention(SPEC.replace(head_dim_v=8)), operands(dim_v=8)
    forward = sdpa_flop_count(q.shape, k.shape, v.shape)
    pairs = 2 * 2 * 4 * 5 * 7  # of multiply-adds: of 2 x 4 heads, 5 queries and 7 keys
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(op, (q, k, v), (q, k, v))
    assert counter.get_total_flops() == forward + pairs * (3 * 16 + 2 * 8)
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(lambda v: op(q, k, v), (v,), (v,))
    assert counter.get_total_flops() == forward + pairs * (16 + 8)

    def gradients(*qkv):
        return torch.func.grad(lambda *x: op(*x).sum(), (0, 1, 2))(*qkv)

    with FlopCounterMode(display=False) as counter:
        gradients(q, k, v)
    first = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(gradients, (q, k, v), (q, k, v))
    second = counter.get_total_flops() - first
    assert second == pairs * (3 * 16 + 2 * 8) + pairs * (7 * 16 + 3 * 8)


def test_the_flop_counter_counts_an_operator_that_is_made_inside_it():
    q, k, v = operands()
    with FlopCounterMode(display=False) as counter:
        fg.flex_attention(q, k, v, lambda s, b, h, q, k: s * 1.25 - q, enable_gqa=True)
    assert counter.get_total_flops() == sdpa_flop_count(q.shape, k.shape, v.shape)


def test_the_flop_counter_counts_the_pairs_of_packed_sequences():
    op = fg.attention(SPEC.replace(packed=True, name="counted_packed"))
    q, k, v = (torch.randn(1, 2, 12, 16) for _ in range(3))
    ends = {
        "cu_seqlens_q": torch.tensor([0, 5, 12], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 3, 12], dtype=torch.int32),
    }
    with FlopCounterMode(display=False) as counter:
        op(q, k, v, **ends)
    assert counter.get_total_flops() == 2 * 2 * (5 * 3 + 7 * 9) * (16 + 16)


def test_the_emulator_is_reachable_after_importing_flashgen():
    code = "import flashgen, sys; assert 'numpy' not in sys.modules; flashgen.emulator.launch"
    run_python("-c", code)
