"""Weights that are no exponentials: emulated kernels and the tiled path against float64.

Each attention is compared with the reference by the error rule, and the reference with autograd of
the dense form in float64. `make test` has a case of each kind; the others are `slow`.
"""

from __future__ import annotations

import itertools
import pickle
import re
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.kernels.planner import plan_backward
from flashgen.kernels.planner.tile_problem import Tile
from flashgen.kernels.planner.traffic import backward_traffic
from flashgen.reference.gradients import gradients
from flashgen.shared.errors import InputError, SpecError
from tests.support.judged import Call, dropping
from tests.support.masks import causal
from tests.support.planted import planted
from tests.support.shapes import DTYPES, Case
from tests.support.tiers import one_in, slow, take_turns
from tests.support.weights import SPECS, captured_by, dense, silu, spec_of

ARCHS = ("sm_80", "sm_90a")
Tensor = torch.Tensor


def call_of(name: str, case: Case, **how: Any) -> Call:
    spec = spec_of(name, case.head_dim, case.dtype)
    captured = captured_by(spec, case.heads_q, case.seq_q)
    numbers = {"tensors": captured} | (dropping(0.2) if spec.dropout else {})
    return Call(spec, case.tensors(seed=3), numbers, **how)


# ---- the language and the reference -------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_the_reference_is_autograd_of_the_dense_form(name: str) -> None:
    spec = spec_of(name, 16, None)
    q, k, v = (x.double().requires_grad_() for x in Case(13, 17, 2, 4, 2, "float32", 16).tensors())
    captured = {x: t.double().requires_grad_() for x, t in captured_by(spec, 4, 13).items()}
    out = dense(name, q, k, v, captured, None)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, [q, k, v, *captured.values()], dout)
    given = q.detach(), k.detach(), v.detach()
    tensors = {x: t.detach() for x, t in captured.items()}
    plain = spec.replace(dropout=False)
    torch.testing.assert_close(reference.attention(plain, *given, tensors=tensors)[0], out.detach())
    found = gradients(plain, *given, dout, tensors=tensors)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["relu_squared", "removed"])
def test_a_spec_comes_back_from_a_pickle(name: str) -> None:
    spec = spec_of(name, 64, "float16")
    restored = pickle.loads(pickle.dumps(spec))
    assert restored == spec
    assert restored.replace(head_dim=128).score == spec.score


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"weight_mod": silu}, "stands in place of the softmax's exponential"),
        ({"normalize": "sum", "sink": True}, "a sink is a logit of the softmax"),
        ({"normalize": "l1"}, "normalize is the name of a divisor"),
        ({"normalize": fg.Tensor("r", ("seq_k",))}, "not a Tensor of floats with one for each row"),
        ({"weight_mod": lambda s, *_: s > 0, "normalize": "none"}, "returns a condition"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecError, match=what) as caught:
        fg.AttentionSpec(**options)
    assert "test_weights.py" in caught.value.where


def test_a_removed_score_has_no_weight_even_where_the_weight_of_infinity_is_nan() -> None:
    spec = spec_of("removed", 16, "float32")
    op = fg.attention(spec)
    q, k, v = (x.requires_grad_() for x in Case(9, 9, 1, 1, 1, "float32", 16).tensors())
    out = op(q, k, v)
    out.sum().backward()
    assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))


# ---- the operator -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", one_in(4, SPECS, 1))
def test_the_operator_is_the_dense_form_with_gradients_on_cpu_tensors(name: str) -> None:
    op = fg.attention(spec_of(name, 16, "float32").replace(dropout=False))
    tensors = Case(70, 90, 2, 4, 2, "float32", 16).tensors()
    q, k, v = (x.requires_grad_() for x in tensors)
    captured = {x: t.requires_grad_() for x, t in captured_by(op.spec, 4, 70).items()}
    leaves = [q, k, v, *captured.values()]
    out = op(q, k, v, **captured)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, leaves, dout)
    exact = dense(name, *(x.double() for x in (q, k, v)), captured, None)
    wanted = torch.autograd.grad(exact, leaves, dout.double())
    torch.testing.assert_close(out, exact.float(), rtol=1e-4, atol=1e-4)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-3, atol=1e-3)


def test_there_is_no_lse_and_no_weight_without_keys() -> None:
    op = fg.attention(spec_of("power", 16, "float32"))
    q, k, v = Case(5, 7, 1, 2, 2, "float32", 16).tensors()
    with pytest.raises(InputError, match="no log-sum-exp"):
        op(q, k, v, return_lse=True)
    assert not op(q, k[:, :, :0], v[:, :, :0]).any()
    assert not op(q, k, v)[:, :, 0].any()  # an empty row


@pytest.mark.slow
def test_a_compiled_call_has_one_node() -> None:
    op = fg.attention(spec_of("hstu", 16, "float32"))
    q, k, v = (x.requires_grad_() for x in Case(40, 40, 1, 2, 2, "float32", 16).tensors())
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), op(q, k, v))


# ---- kernels ------------------------------------------------------------------------------------


def in_range(cases: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The cases but those of weights that float16 cannot hold: fourth powers of small scores."""
    return [case for case in cases if not {"power", "float16"} <= {*case}]


FORWARD = take_turns(SPECS, ARCHS, DTYPES, (40, 64, 128, 256))


@pytest.mark.parametrize(("name", "arch", "dtype", "head_dim"), one_in(24, in_range(FORWARD)))
def test_forward_kernels_meet_the_error_rule(
    name: str, arch: str, dtype: str, head_dim: int
) -> None:
    case = Case(133, 170, 1, 4, 2, dtype, head_dim)
    call_of(name, case, arch=arch).judged_forward(split_size=0)


BACKWARD = take_turns(SPECS, ARCHS, DTYPES, (False, True), (64, 128, 40, 256))


@pytest.mark.parametrize(
    ("name", "arch", "dtype", "deterministic", "head_dim"), one_in(96, in_range(BACKWARD), 7)
)
def test_gradients_meet_the_error_rule(
    name: str, arch: str, dtype: str, deterministic: bool, head_dim: int
) -> None:
    case = Case(133, 170, 1, 4, 2, dtype, head_dim)
    call_of(name, case, arch=arch, deterministic=deterministic).judged_backward()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["power", "retention", "relu_squared"])
def test_gradients_where_warpgroups_share_keys(name: str) -> None:
    tiles = {"fused": Tile(64, 8, 6, 1, 8, 8)}
    case = Case(150, 200, 1, 2, 1, "bfloat16", 128)
    call_of(name, case, arch="sm_90a", tiles=tiles).judged_backward()


def one(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 1.0


def of_its_row(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 0.01 * (q + 1)


@pytest.mark.parametrize(
    ("weight", "mask", "normalize", "head_dims", "deterministic"),
    [
        (one, None, "sum", (64, 64), False),
        slow(one, causal, "sum", (64, 64), False),
        slow(one, causal, "sum", (96, 8), True),
        slow(one, None, "sum", (256, 256), False),
        slow(of_its_row, None, "none", (64, 64), False),
        slow(of_its_row, causal, "none", (128, 128), True),
    ],
)
def test_products_have_registers_of_their_own_where_the_weights_of_a_row_are_equal(
    weight: Any, mask: Any, normalize: str, head_dims: tuple[int, int], deterministic: bool
) -> None:
    d, d_v = head_dims
    spec = fg.AttentionSpec(
        mask,
        weight_mod=weight,
        normalize=normalize,
        head_dim=d,
        head_dim_v=d_v,
        dtype="bfloat16",
        name="average",
    )
    call = Call(spec, Case(70, 230, 1, 1, 1, "bfloat16", d, d_v).tensors(), arch="sm_90a")
    call.judged_backward(call.judged_forward(), deterministic=deterministic)


@pytest.mark.parametrize(
    ("name", "arch", "rows", "dtype"),
    one_in(
        12, in_range(take_turns(("hstu", "power", "exponential"), ARCHS, (1, 5, 70), DTYPES)), 5
    ),
)
def test_results_over_split_keys_are_added_up(name: str, arch: str, rows: int, dtype: str) -> None:
    call = call_of(name, Case(rows, 330, 1, 4, 2, dtype), arch=arch)
    call.numbers["q_offset"] = (330 - rows) // 16 * 16
    run = call.judged_forward(split_size=64)
    assert run.report.merge is not None


@pytest.mark.parametrize(("name", "arch"), [("hstu", "sm_80"), slow("power", "sm_90a")])
def test_rows_of_no_sequence_are_0_where_keys_are_split(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_empty = Tensor.new_empty
    monkeypatch.setattr(
        Tensor, "new_empty", lambda *sizes, **options: new_empty(*sizes, **options).fill_(torch.nan)
    )
    spec = fg.AttentionSpec(**SPECS[name], packed=True, head_dim=64, name=f"{name}_packed")
    ends = {
        "cu_seqlens_q": torch.tensor([0, 11], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 70], dtype=torch.int32),
    }
    call = Call(spec, Case(20, 80, 1, 2, 1).tensors(), {"tensors": ends}, arch=arch)
    run = call.judged_forward(split_size=32)
    assert run.report.merge is not None
    assert not run.out[:, :, 11:].any()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["hstu", "power"])
def test_heads_share_a_tile_and_sequences_a_batch_entry(name: str, arch: str) -> None:
    call_of(name, Case(16, 130, 1, 8, 1), arch=arch).judged_forward(split_size=0)
    spec = fg.AttentionSpec(**SPECS[name], packed=True, head_dim=64, name=f"{name}_packed")
    ends = {
        "cu_seqlens_q": torch.tensor([0, 30, 30, 97], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 41, 60, 130], dtype=torch.int32),
    }
    packed = Call(spec, Case(101, 130, 1, 4, 2).tensors(), {"tensors": ends}, arch=arch)
    packed.judged_forward()
    packed.judged_backward()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_a_block_layout_keeps_its_blocks(arch: str) -> None:
    layout = fg.BlockSparse(lambda b, h, i, j: (i + j) % 3 == 0, block_q=32, block_k=32)
    spec = fg.AttentionSpec(
        causal, weight_mod=silu, normalize="sum", block_sparse=layout, head_dim=64, name="blocks"
    )
    call = Call(spec, Case(200, 300, 1, 2, 2).tensors(), {}, arch=arch)
    call.judged_forward(split_size=0)
    call.judged_backward()


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        ("forward", "sum[1] += x[2];", "sum[1] += fabsf(x[2]);"),
        slow("fused", "scored.slope;", "1.0f;"),
        slow("delta", "float(sum)};", "0.0f};"),
        slow("delta", "1.0f / weights", "1.0f"),
    ],
)
def test_wrong_numbers_are_seen_by_the_error_rule(kernel: str, old: str, new: str) -> None:
    spec = fg.AttentionSpec(causal, weight_mod=silu, normalize="sum", head_dim=64, name="shares")
    call = Call(spec, Case(100, 130, 1, 2, 1).tensors(), {}, arch="sm_80")
    with planted(kernel, old, new), pytest.raises(AssertionError):
        call.judged_forward(split_size=0) if kernel == "forward" else call.judged_backward()


@pytest.mark.parametrize("name", ["hstu", "retention"])
def test_without_sums_rows_are_not_read_and_nothing_is_multiplied_by_their_factors(
    name: str,
) -> None:
    for arch, deterministic in itertools.product(ARCHS, (False, True)):
        for source in fg.emit(spec_of(name), arch, deterministic=deterministic).backward:
            code = re.sub(r"//.*", "", source.text)
            for field in ("rows", "lse", "dlse"):
                assert f"p.{field}" not in code, source.name
            assert not re.search(r"\b(base|minus_delta|delta)\[", code), source.name


@pytest.mark.parametrize("arch", ARCHS)
def test_a_profile_without_sums_counts_no_bytes_of_rows(arch: str) -> None:
    for name, has_rows in (("linear", False), ("exponential", True)):
        plans = plan_backward(spec_of(name), arch).kernels
        moved = {p.kernel: backward_traffic(p, 1, 2, 2, 256, 256) for p in plans}
        assert (moved["delta"].o > 0) == (moved["delta"].rows_written > 0) == has_rows
        assert (moved["fused"].rows_read > 0) == has_rows
        assert moved["delta"].sums_zeroed > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_plans_count_what_a_weight_takes_in_place_of_a_softmax(arch: str) -> None:
    softmax, linear = fg.AttentionSpec(causal), spec_of("linear")
    of_softmax, of_linear = (fg.plan(spec, arch=arch) for spec in (softmax, linear))
    assert of_softmax.quantities["special"] > 0 == of_linear.quantities["special"]
    # The product with the scale, without a maximum, an exponent, an exponential and a sum.
    assert of_linear.quantities["score_ops"] == 1 - 4
    assert "weights: no maximum and no exponential of a softmax" in str(of_linear.explain())
    assert not any("weights:" in note for note in of_softmax.notes)
    sigmoid = fg.plan(spec_of("sigmoid"), arch=arch)
    assert sigmoid.quantities["special_ops"] == 1  # ex2 and rcp, for one ex2


def test_kernels_have_no_maximum_and_no_exponential_of_a_softmax() -> None:
    for arch in ARCHS:
        emitted = fg.emit(spec_of("relu_squared"), arch)
        for source in (emitted.forward, *emitted.backward):
            for word in ("row_max", "exp_scale", "ex2.approx", "LOG2E", "is_far"):
                assert word not in source.text, (source.name, word)
