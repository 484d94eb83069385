"""A sink joins the softmax's denominator: emulated kernels, the tiled path and the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls import cpu
from flashgen.calls.ops import BackwardRun, ForwardRun, run_backward, run_forward
from flashgen.kernels.planner import backward_traffic, forward_traffic
from flashgen.shared.call import OutputGradients
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.tensor import Tensor as Capture
from tests.support.judged import RNG, Call, dropping, like
from tests.support.shapes import DTYPES, Case
from tests.support.tiers import one_in, slow
from tests.support.tiled_calls import arguments, both

Tensor = torch.Tensor

LOWEST = torch.finfo(torch.float32).min


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 24)


def capped(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 3 * fg.tanh(score / 3)


def sink_spec(case: Case, mask: Any = causal, **options: Any) -> AttentionSpec:
    given = {"sink": True, "head_dim": case.head_dim, "dtype": case.dtype} | options
    return AttentionSpec(mask_mod=mask, **given)


def logits(case: Case) -> Tensor:
    """From one that takes most of a row's weight to one that takes little."""
    return torch.linspace(4, -2, case.heads_q)


def call_of(
    spec: AttentionSpec, case: Case, sink: Tensor | None, backend: str = "emulator", **numbers: Any
) -> Call:
    tensors = {} if sink is None else {"sink": sink}
    return Call(spec, case.tensors(), numbers | {"tensors": tensors}, backend=backend)


def run(
    *given: Any, deterministic: bool = False, order_seed: int | None = None, **numbers: Any
) -> tuple[ForwardRun, BackwardRun]:
    """Both passes, with gradients of out and lse."""
    call = call_of(*given, **numbers)
    forward = call.forward(order_seed=order_seed)
    how = {"deterministic": deterministic, "order_seed": order_seed}
    return forward, call.backward(forward, **how)


def check(
    *given: Any, deterministic: bool = False, **numbers: Any
) -> tuple[ForwardRun, BackwardRun]:
    """Runs both passes and holds everything against the oracle."""
    call = call_of(*given, **numbers)
    forward = call.judged_forward()
    return forward, call.judged_backward(forward, deterministic=deterministic)


# ---- the error rule -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    [("float16", False), ("bfloat16", True), ("float32", True)],
)
@pytest.mark.slow
def test_a_sink_with_a_window_and_shared_keys_meets_the_error_rule(
    dtype: str, deterministic: bool
) -> None:
    """The composition of GPT-OSS."""
    case = Case(70, 70, 1, 4, 1, dtype, 32)
    check(sink_spec(case, window), case, logits(case), deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_with_dropout_a_score_and_offsets_meets_the_error_rule(dtype: str) -> None:
    case = Case(50, 90, 1, 2, 2, dtype, 40)
    spec = sink_spec(case, window, score_mod=capped, dropout=True)
    check(spec, case, logits(case), q_offset=16, **dropping(0.2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "dtype", "shape"),
    [((), "float32", ()), ((1,), "float16", (1,)), (("heads",), "bfloat16", (1,))],
)
def test_one_sink_may_serve_all_heads_in_any_dtype(
    dims: tuple[Any, ...], dtype: str, shape: tuple[int, ...]
) -> None:
    case = Case(40, 40, 2, 2, 1, "float16", 16)
    sink = torch.full(shape, 0.7, dtype=getattr(torch, dtype))
    spec = sink_spec(case, sink=Capture("sink", dims, dtype, grad=True))
    for backend in ("emulator", "tiled"):
        _, backward = check(spec, case, sink, backend)
        (gradient,) = backward.captured
        assert (gradient.shape, gradient.dtype) == (sink.shape, sink.dtype)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        slow("float16", "emulator"),
        slow("float32", "emulator"),
        ("float16", "tiled"),
    ],
)
def test_sinks_of_any_size_meet_the_error_rule(dtype: str, backend: str) -> None:
    """Some rows have no keys: LSE of these is the sink to the last bit, also when it is none."""
    case = Case(60, 50, 1, 6, 2, dtype, 40)
    sink = torch.tensor([-math.inf, LOWEST, -1e4, 60.0, 1e4, 1e30])
    forward, backward = check(sink_spec(case), case, sink, backend, k_offset=20)
    assert (forward.lse[:, :, :20] == sink[:, None]).all()
    assert (forward.out[:, :, :20] == 0).all()
    assert (backward.dq[:, :, :20] == 0).all()
    assert (forward.out[:, 4:] == 0).all(), "nothing is left of P beside such a sink"


@pytest.mark.parametrize("backend", [slow("emulator"), "tiled"])
@pytest.mark.parametrize("dtype", one_in(3, DTYPES))
def test_a_sink_of_minus_infinity_gives_the_bits_of_no_sink(dtype: str, backend: str) -> None:
    case = Case(60, 50, 1, 2, 1, dtype, 40)
    numbers = {"k_offset": 20, "deterministic": True}
    none = torch.full((2,), -math.inf)
    with_sink = run(sink_spec(case), case, none, backend, **numbers)
    without = run(sink_spec(case, sink=None), case, None, backend, **numbers)
    for name in ("out", "lse"):
        assert torch.equal(getattr(with_sink[0], name), getattr(without[0], name)), name
    for name in ("dq", "dk", "dv"):
        assert torch.equal(getattr(with_sink[1], name), getattr(without[1], name)), name
    assert torch.equal(with_sink[1].captured[0], torch.zeros(2))
    assert (with_sink[0].lse[:, :, :20] == -math.inf).all()


# ---- rows without keys --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [slow("emulator"), "tiled"])
@pytest.mark.parametrize("by_score", one_in(2, [False, True], first=1))
def test_rows_without_keys_give_their_lse_gradient_to_the_sink_and_nothing_else(
    by_score: bool, backend: str
) -> None:
    """Also where it is the score function that leaves nothing of a row."""

    def half(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= 30

    def scored(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return 2 * score + fg.log(fg.where(q >= 30, 1.0, 0.0))

    case = Case(30, 40, 2, 4, 2, "float16", 16)
    mods = {"score_mod": scored} if by_score else {}
    spec = sink_spec(case, None if by_score else half, **mods)
    sink = torch.tensor([2.0, -1.0, 1e4, LOWEST])
    forward, backward = run(spec, case, sink, backend)
    assert torch.equal(forward.lse, sink[:, None].expand(2, 4, 30))
    for zeros in (forward.out, backward.dq, backward.dk, backward.dv):
        assert torch.equal(zeros, torch.zeros_like(zeros))
    given = like(forward.lse, 2).double().sum((0, 2))
    torch.testing.assert_close(backward.captured[0].double(), given, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["emulator", "tiled"])
@pytest.mark.parametrize("shape", [(4,), (1,)])
def test_a_call_without_keys_has_the_sink_for_its_lse(shape: tuple[int, ...], backend: str) -> None:
    case = Case(5, 0, 2, 4, 2, "float32", 16)
    sink = torch.linspace(1, -1, 4)[: shape[0]]
    forward, backward = run(sink_spec(case), case, sink, backend)
    assert torch.equal(forward.lse, sink[:, None].expand(2, 4, 5))
    exact = reference.attention(sink_spec(case), *case.tensors(), tensors={"sink": sink})
    assert torch.equal(exact[1].float(), forward.lse)
    call = call_of(sink_spec(case), case, sink)
    expected = reference.gradients(call.spec, *call.qkv, *call.gradients, **call.numbers)[3]
    torch.testing.assert_close(backward.captured[0].double(), expected, atol=1e-6, rtol=0)
    assert expected.abs().min() > 0
    found = both(call.spec, *call.qkv, *call.gradients, **call.numbers)
    assert torch.equal(found[1], forward.lse)
    assert torch.equal(found[5], backward.captured[0])


@pytest.mark.parametrize("backend", ["emulator", "tiled"])
@pytest.mark.parametrize("kind", ["packed", "paged"])
@pytest.mark.parametrize("dims", [("heads",), ("batch", "heads"), ("heads", "seq_q")])
def test_rows_of_a_call_without_sequences_have_no_sink(
    dims: tuple[str, ...], kind: str, backend: str
) -> None:
    sink = fg.Tensor("sink", dims, "float32", grad=True)
    op = fg.attention(fg.AttentionSpec(head_dim=16, dtype="float32", sink=sink, **{kind: True}))
    q, kv = torch.ones(1, 4, 3, 16, requires_grad=kind == "packed"), torch.ones(2, 1, 2, 5, 16)
    logits = torch.ones([{"batch": 0, "heads": 4, "seq_q": 3}[dim] for dim in dims])
    logits.requires_grad_(kind == "packed")
    none = torch.zeros(1, dtype=torch.int32)
    more = {"cu_seqlens_k": none}
    if kind == "paged":
        more = {"page_table": none[:0, None], "cache_seqlens": none[:0]}
    for at in ({}, {"q_offset": none[:0]}):
        given = {"sink": logits, "cu_seqlens_q": none, **more, **at}
        out, lse = op(q, *kv, **given, return_lse=True, backend=backend)
        assert not out.any()
        assert (lse == -torch.inf).all()
        if kind == "packed":
            gradients = torch.autograd.grad(
                (out, lse), (q, logits), (out + 1, torch.ones_like(lse))
            )
            assert not any(x.any() for x in gradients)


# ---- gradients ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_gradient_of_a_sink_has_the_same_bits_in_every_order_of_blocks() -> None:
    """And deterministic=True does not refuse it, as it does gradients that are added atomically."""
    case = Case(150, 40, 2, 2, 1, "float16", 16)
    found = [
        run(sink_spec(case), case, logits(case), deterministic=bool(seed % 2), order_seed=seed)[1]
        for seed in range(6)
    ]
    assert all(torch.equal(each.captured[0], found[0].captured[0]) for each in found[1:])


@pytest.mark.slow
def test_a_sink_that_the_score_reads_too_gets_both_gradients() -> None:
    sink = Capture("sink", ("heads",), "float32", grad=True)

    def scored(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * fg.sigmoid(sink[h])

    case = Case(40, 30, 2, 2, 1, "float16", 16)
    spec = sink_spec(case, sink=sink, score_mod=scored)
    assert spec.tensors == (sink,)
    for backend in ("emulator", "tiled"):
        check(spec, case, logits(case), backend)


def plain(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with a column of sink logits that is dropped after the softmax, in plain torch."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[3])
    scores = scores.masked_fill(~keep, -math.inf)
    column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    joined = torch.cat([scores, column], -1)
    weights = joined.softmax(-1)[..., :-1]
    return weights @ v, joined.logsumexp(-1)


def test_the_oracle_is_torch_with_a_column_of_sinks() -> None:
    case = Case(30, 40, 2, 4, 2, "float32", 16)
    leaves = [t.double().requires_grad_() for t in (*case.tensors(), logits(case))]
    keep = torch.arange(30)[:, None] >= torch.arange(40) + 10
    expected = plain(*leaves, keep)
    numbers = {"tensors": {"sink": leaves[3].detach()}, "k_offset": 10}
    operands = [leaf.detach() for leaf in leaves[:3]]
    found = reference.attention(sink_spec(case), *operands, **numbers)
    dout, dlse = like(expected[0], 1), like(expected[1], 2)
    gradients = reference.gradients(sink_spec(case), *operands, dout, dlse, **numbers)
    by_torch = torch.autograd.grad(expected, leaves, (dout, dlse))
    for ours, theirs in zip((*found, *gradients), (*expected, *by_torch), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=1e-12, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dims", [("heads",), ()])
def test_the_tiled_gradients_are_the_derivative(dims: tuple[Any, ...], dropout_p: float) -> None:
    """gradcheck in float64, with rows that have no keys."""
    case = Case(9, 11, 1, 2, 1, "float32", 8)
    spec = sink_spec(case, dropout=dropout_p > 0, sink=Capture("sink", dims, grad=True))
    sink = logits(case).double() if dims else torch.tensor(0.5, dtype=torch.double)
    leaves = [t.double().requires_grad_() for t in (*case.tensors(), sink)]
    numbers = {"k_offset": 3, "dropout_p": dropout_p, "rng": RNG, "block_q": 4, "block_k": 4}

    class Tiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
            options = arguments(spec, given[0], tensors={"sink": given[3]}, **numbers)
            results = cpu.forward(spec, *given[:3], options)
            ctx.save_for_backward(*given, *results)
            return results

        @staticmethod
        def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
            q, k, v, sink, out, lse = ctx.saved_tensors
            options = arguments(spec, q, tensors={"sink": sink}, **numbers)
            return cpu.backward(spec, q, k, v, OutputGradients(out, lse, dout, dlse), options)

    assert torch.autograd.gradcheck(Tiled.apply, leaves)


# ---- what is emitted ----------------------------------------------------------------------------


@pytest.mark.parametrize("given_dlse", [slow(False), slow(True)])
def test_the_emulator_counts_exactly_the_predicted_bytes(given_dlse: bool) -> None:
    case = Case(150, 260, 1, 2, 1, "float16", 16)
    spec, (q, k, v) = sink_spec(case, None), case.tensors()
    how = {"backend": "emulator", "check_memory": False, "tensors": {"sink": logits(case)}}
    forward = run_forward(spec, q, k, v, **how)
    expected = forward_traffic(forward.plan, 1, 2, 1, 150, 260)
    assert forward.counters.global_read_bytes == sum(
        (expected.q, expected.k, expected.v, expected.sink)
    )
    assert forward.counters.global_write_bytes == expected.o + expected.lse
    dlse = like(forward.lse, 2) if given_dlse else None
    backward = run_backward(spec, q, k, v, forward.out, forward.lse, forward.out, dlse, **how)
    for report in backward.reports:
        found = backward_traffic(report.kernel.plan, 1, 2, 1, 150, 260, dlse=given_dlse)
        assert report.counters.global_read_bytes == found.read + found.added
        assert report.counters.global_write_bytes == found.written + found.added


def test_sums_for_the_sink_are_computed_only_if_its_gradient_is_required() -> None:
    case = Case(20, 20, 1, 2, 1, "float16", 16)
    learned, fixed = (
        fg.emit(sink_spec(case, sink=Capture("sink", ("heads",), grad=grad)))
        for grad in (True, False)
    )
    assert learned.forward.text == fixed.forward.text
    assert "sink_sums" in learned.backward[0].text
    assert "sink_sums" not in {param.name for param in fixed.backward[0].params}
    for of_learned, of_fixed in zip(learned.backward[1:], fixed.backward[1:], strict=True):
        assert of_learned.text == of_fixed.text
