"""A sink as an option of a spec and an argument of the operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import flashgen as fg
from flashgen.calls.ops.registration import operator_of
from flashgen.shared.errors import InputError, SpecError
from flashgen.tools.cli import app
from tests.kernels.test_sink import causal, like, logits, plain, sink_spec
from tests.support.examples import spec_path
from tests.support.opchecks import passes_opcheck
from tests.support.shapes import Case

Tensor = torch.Tensor

CASE = Case(9, 12, 2, 4, 2, "float32", 16)
SPEC = sink_spec(CASE, name="with_sink")
OP = fg.attention(SPEC)
KEEP = torch.arange(9)[:, None] >= torch.arange(12)


def leaves(case: Case = CASE) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in (*case.tensors(), logits(case))]


# ---- the spec -----------------------------------------------------------------------------------


def test_true_stands_for_a_learned_logit_of_each_head() -> None:
    assert SPEC.sink.key == ("sink", ("heads",), "float32", True)
    assert SPEC.tensors == (SPEC.sink,)
    assert sink_spec(CASE, sink=fg.Tensor("sink", ("heads",), grad=True), name="with_sink") == SPEC
    for none in (None, False):
        spec = sink_spec(CASE, sink=none, name="with_sink")
        assert spec.sink is None
        assert spec.tensors == ()
        assert spec != SPEC


def test_a_sink_follows_the_captured_tensors() -> None:
    bias = fg.Tensor("bias", ("seq_k",))
    spec = sink_spec(CASE, score_mod=lambda s, b, h, q, k: s + bias[k])
    assert [tensor.name for tensor in spec.tensors] == ["bias", "sink"]
    assert spec.replace(head_dim=32).sink is spec.sink


def test_a_captured_tensor_is_no_sink_of_an_equal_spec() -> None:
    """The same tensors, once as a sink too: two specs, with two operators."""
    t = fg.Tensor("t", ("heads",), grad=True)

    def scored(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * t[h]

    spec = sink_spec(CASE, sink=None, score_mod=scored)
    both = spec.replace(sink=t)
    assert spec.tensors == both.tensors == (t,)
    assert spec != both
    assert fg.attention(spec).name != fg.attention(both).name


@pytest.mark.parametrize(
    ("sink", "what", "way_out"),
    [
        (0.5, "is a Tensor with a logit for each head or row", "sink=True"),
        (fg.Tensor("t", ("heads",), "int32"), "dtype of a logit", "float32"),
        (fg.Tensor("t", ("heads", "batch")), "other dims than those of rows", '("heads",)'),
        (fg.Tensor("t", (8,)), "other dims than those of rows", '("heads",)'),
        (fg.Tensor("t", ("heads", "seq_k")), "other dims than those of rows", '("heads",)'),
    ],
)
def test_an_invalid_sink_is_refused(sink: Any, what: str, way_out: str) -> None:
    with pytest.raises(SpecError, match="sink") as caught:
        fg.AttentionSpec(sink=sink)
    assert what in caught.value.what
    assert way_out in caught.value.way_out
    assert "test_sink.py" in caught.value.where


def test_another_capture_of_the_sinks_name_is_refused() -> None:
    other = fg.Tensor("sink", ("seq_k",))
    with pytest.raises(SpecError, match="two different captures are named 'sink'"):
        sink_spec(CASE, score_mod=lambda s, b, h, q, k: s + other[k])


def test_a_wrong_sink_is_reported_with_the_other_mistakes() -> None:
    with pytest.raises(SpecError, match="2 mistakes") as caught:
        fg.AttentionSpec(head_dim=7, sink="yes")
    assert "head_dim" in caught.value.what
    assert "sink" in caught.value.what


# ---- the operator -------------------------------------------------------------------------------


def test_autograd_agrees_with_torch_and_a_column_of_sinks() -> None:
    ours, theirs = leaves(), leaves()
    found = OP(*ours[:3], sink=ours[3], return_lse=True)
    expected = plain(*theirs, KEEP)
    given = (like(expected[0], 1), like(expected[1], 2))
    gradients = torch.autograd.grad(found, ours, given)
    by_torch = torch.autograd.grad(expected, theirs, given)
    for a, b in zip((*found, *gradients), (*expected, *by_torch), strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


def test_a_packed_sequence_without_rows_adds_nothing_to_a_sink_of_rows() -> None:
    sink = fg.Tensor("sink", ("batch", "heads", "seq_q"), grad=True)
    spec = fg.AttentionSpec(packed=True, head_dim=16, dtype="float32", sink=sink)
    q, k, v = Case(9, 9, 1, 2, 2, "float32", 16).tensors()
    of_sequences = torch.randn(3, 2, 5).requires_grad_()
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32)

    def of(way: Tensor) -> Tensor:
        out, lse = fg.attention(spec)(
            *(q, k, v), sink=way, cu_seqlens_q=ends, cu_seqlens_k=ends, return_lse=True
        )
        return (out.square().sum(-1) + lse).sum()

    found = torch.func.grad(of)(of_sequences)
    assert not found[1].any()
    assert found[2].all()
    direction = torch.randn(of_sequences.shape)
    _, moved = torch.func.jvp(of, (of_sequences,), (direction,))
    torch.testing.assert_close((found * direction).sum(), moved)
    second = torch.func.jvp(torch.func.grad(of), (of_sequences,), (direction,))[1]
    assert not second[1].any()


@pytest.mark.slow
def test_the_emulated_kernels_agree_with_the_tiled_algorithms_through_autograd() -> None:
    found = []
    for backend in ("emulator", "tiled"):
        given = leaves()
        out = OP(*given[:3], sink=given[3], backend=backend)
        found.append((out, *torch.autograd.grad(out, given, like(out, 1))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_gradient_that_is_not_required_is_not_computed() -> None:
    given = leaves()
    out = OP(*given[:3], sink=given[3].detach(), backend="emulator")
    out.sum().backward()
    names = [param.name for param in OP.backward_reports[0].kernel.source.params]
    assert "sink_sums" not in names
    assert all(leaf.grad is not None for leaf in given[:3])


def test_a_gradient_that_the_spec_does_not_declare_is_refused() -> None:
    op = fg.attention(sink_spec(CASE, sink=fg.Tensor("sink", ("heads",))))
    q, k, v, sink = leaves()
    with pytest.raises(InputError, match="does not declare"):
        op(q, k, v, sink=sink)
    torch.testing.assert_close(
        op(q, k, v, sink=sink.detach()), plain(q, k, v, sink, KEEP)[0], atol=5e-6, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("sink", "what"),
    [
        (None, "is missing"),
        (torch.zeros(3), "does not have the length"),
        (torch.zeros(4, dtype=torch.int32), "dtype"),
    ],
)
def test_a_wrong_sink_is_refused_before_anything_runs(sink: Any, what: str) -> None:
    with pytest.raises(InputError, match=what):
        OP(*CASE.tensors(), **({} if sink is None else {"sink": sink}))


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True])
def test_opcheck_passes_for_both_operators(drops: bool) -> None:
    operator = operator_of(SPEC.replace(dropout=drops))
    state = (torch.tensor([3, 4]), torch.tensor(0.3)) if drops else ()
    assert passes_opcheck(operator.overload, (*leaves(), *state))
    given = [leaf.detach() for leaf in leaves()]
    out, lse = operator.overload(*given, *state)
    assert passes_opcheck(operator.overload_backward, (*given, out, lse, out, lse, *state))


@pytest.mark.parametrize("own", [False, True])
def test_vmap_maps_calls_with_one_sink_and_with_a_sink_each(own: bool) -> None:
    many = [torch.stack([t, t + 0.1, t - 0.2]) for t in (*CASE.tensors(), logits(CASE))]
    dims = (0, 0, 0, 0 if own else None)
    sinks = many[3] if own else many[3][0]
    found = torch.vmap(lambda q, k, v, sink: OP(q, k, v, sink=sink), dims)(*many[:3], sinks)
    for i in range(3):
        sink = sinks[i] if own else sinks
        expected = OP(*(t[i] for t in many[:3]), sink=sink)
        torch.testing.assert_close(found[i], expected, atol=2e-6, rtol=1e-5)


def test_gradients_of_a_vmapped_call_reach_each_sink() -> None:
    sinks = torch.stack([logits(CASE), -logits(CASE)])

    operands = CASE.tensors()

    def loss(sink: Tensor) -> Tensor:
        return OP(*operands, sink=sink).square().sum()

    found = torch.vmap(torch.func.grad(loss))(sinks)
    for gradient, sink in zip(found, sinks, strict=True):
        torch.testing.assert_close(gradient, torch.func.grad(loss)(sink), atol=2e-6, rtol=1e-5)


@pytest.mark.slow
def test_flashgen_run_checks_a_spec_with_a_sink() -> None:
    options = ["--shape", "1,2,40", "--head-dim", "16", "--backward", "--backend", "emulator"]
    result = CliRunner().invoke(app, ["run", str(spec_path("sink")), *options])
    assert result.exit_code == 0, result.output
    assert "sink [2], float32, learned, the file's example" in result.stdout
    assert "dsink" in result.stdout


def test_a_mask_of_the_same_name_is_another_operator_than_that_with_a_sink() -> None:
    plain_spec = fg.AttentionSpec(mask_mod=causal, head_dim=16, dtype="float32", name="with_sink")
    assert fg.attention(plain_spec).name != OP.name
