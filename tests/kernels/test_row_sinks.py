"""A sink with a logit for each query, for each head and query, or for each batch entry."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import run_forward
from flashgen.shared.signature import BOUNDARIES
from flashgen.spec.language.spec import AttentionSpec
from tests.support.judged import Call, dropping, normal
from tests.support.masks import causal
from tests.support.shapes import Case
from tests.support.tiers import slow

Tensor = torch.Tensor

DIMS: dict[str, tuple[str, ...]] = {
    "query": ("seq_q",),
    "head and query": ("heads", "seq_q"),
    "entry": ("batch",),
    "every row": ("batch", "heads", "seq_q"),
}
CASE = Case(37, 45, 2, 4, 2, "float32", 16)
SIZES = {"batch": 2, "heads": 4, "seq_q": 60}
PATHS = [("tiled", None), slow("emulator", "sm_80"), slow("emulator", "sm_90a")]


def spec_of(dims: str, case: Case = CASE, *, grad: bool = True, **options: Any) -> AttentionSpec:
    sink = fg.Tensor("sink", DIMS[dims], options.pop("sink_dtype", "float32"), grad=grad)
    given = {"mask_mod": causal, "head_dim": case.head_dim, "dtype": case.dtype} | options
    return AttentionSpec(sink=sink, name="row_sinks", **given)


def logits(dims: str, **sizes: int) -> Tensor:
    shape = [(SIZES | sizes)[dim] for dim in DIMS[dims]]
    made = 2 * normal(shape, torch.float32, 5)
    made.view(-1)[::7] = -math.inf
    return made


def call_of(
    dims: str, case: Case = CASE, numbers: dict[str, Any] | None = None, **how: Any
) -> Call:
    tensors = {"sink": how.pop("sink", None)}
    if tensors["sink"] is None:
        tensors["sink"] = logits(dims)
    spec = how.pop("spec", None) or spec_of(dims, case)
    return Call(spec, case.tensors(7), {"tensors": tensors, **(numbers or {})}, **how)


def check(call: Call) -> None:
    call.judged_backward(call.judged_forward())


@pytest.mark.parametrize(
    ("dims", "dtype", "backend", "arch"),
    [
        *((dims, dtype, "tiled", None) for dims in DIMS for dtype in ("float32", "bfloat16")),
        ("head and query", "float16", "emulator", "sm_80"),
        slow("query", "bfloat16", "emulator", "sm_80"),
        slow("every row", "float32", "emulator", "sm_80"),
        slow("entry", "float16", "emulator", "sm_80"),
        slow("query", "float16", "emulator", "sm_90a"),
        slow("head and query", "bfloat16", "emulator", "sm_90a"),
        slow("every row", "float16", "emulator", "sm_90a"),
    ],
)
def test_both_passes_meet_the_error_rule_at_an_offset(
    dims: str, dtype: str, backend: str, arch: str | None
) -> None:
    case = Case(37, 45, 2, 4, 2, dtype, 16)
    check(call_of(dims, case, {"q_offset": 9}, backend=backend, arch=arch))


@pytest.mark.parametrize(("backend", "arch"), PATHS)
def test_a_row_sink_composes_with_a_score_dropout_and_another_dtype(
    backend: str, arch: str | None
) -> None:
    score = lambda score, b, h, q, k: 3 * fg.tanh(score / 3)  # noqa: E731
    spec = spec_of("head and query", score_mod=score, dropout=True, sink_dtype="bfloat16")
    sink = logits("head and query").bfloat16()
    numbers = {"q_offset": 16, **dropping(0.2)}
    check(call_of("", CASE, numbers, spec=spec, sink=sink, backend=backend, arch=arch))


@pytest.mark.parametrize("backend", ["tiled", slow("emulator")])
@pytest.mark.parametrize("dims", ["query", "every row"])
def test_rows_of_packed_sequences_count_from_the_first_of_each(dims: str, backend: str) -> None:
    case = Case(40, 48, 1, 4, 2, "float32", 16)
    bounds = torch.tensor([0, 13, 14, 38]), torch.tensor([0, 20, 20, 45])
    tensors = {name: x.int() for name, x in zip(BOUNDARIES, bounds, strict=True)}
    spec, sink = spec_of(dims, packed=True), logits(dims, batch=3)
    numbers = {"tensors": {"sink": sink, **tensors}}
    check(call_of(dims, case, numbers, spec=spec, backend=backend))


@pytest.mark.parametrize(
    ("backend", "arch"), [("tiled", None), ("emulator", "sm_80"), slow("emulator", "sm_90a")]
)
def test_the_sink_of_a_row_joins_the_merged_results_of_split_keys_once(
    backend: str, arch: str | None
) -> None:
    case = Case(3, 70, 2, 4, 1, "float16", 16)
    call = call_of("every row", case, {"q_offset": 50}, backend=backend, arch=arch)
    call.judged_forward(split_size=32)


@pytest.mark.parametrize("arch", [slow("sm_80"), slow("sm_90a")])
def test_heads_that_share_a_tile_have_sinks_of_their_own(arch: str) -> None:
    case = Case(2, 45, 1, 4, 1, "float16", 16)
    spec = spec_of("head and query", case, mask_mod=None)
    call_of("head and query", case, spec=spec, arch=arch).judged_forward()


def test_positions_that_are_tensors_read_the_sinks_of_their_rows() -> None:
    offsets = torch.tensor([3, 20])
    check(call_of("every row", CASE, {"q_offset": offsets}, backend="tiled"))
    case = Case(3, 70, 2, 4, 1, "float32", 16)
    split = call_of("every row", case, {"q_offset": torch.tensor([40, 55])}, backend="tiled")
    whole, parts = split.judged_forward(), split.judged_forward(split_size=32)
    torch.testing.assert_close(parts.lse, whole.lse)


@pytest.mark.parametrize("backend", ["tiled", "emulator"])
def test_rows_without_keys_have_the_sink_and_its_gradient(backend: str) -> None:
    spec, case = spec_of("head and query"), Case(5, 0, 1, 4, 2, "float32", 16)
    q, k, v = case.tensors(3)
    sink = logits("head and query", seq_q=8).requires_grad_()
    out, lse = fg.attention(spec)(q, k, v, sink=sink, q_offset=2, return_lse=True, backend=backend)
    assert torch.equal(lse[0], sink[:, 2:7])
    assert not out.any()
    kept = lse.isfinite()
    (gradient,) = torch.autograd.grad(lse[kept].sum(), sink)
    expected = torch.zeros_like(sink)
    expected[:, 2:7] = kept[0].float()
    assert torch.equal(gradient, expected)


def test_a_part_of_the_heads_and_rows_is_that_of_the_whole() -> None:
    op, (q, k, v) = fg.attention(spec_of("head and query")), CASE.tensors(3)
    sink = logits("head and query").requires_grad_()
    whole = op(q, k, v, sink=sink)
    place = {"q_offset": 17, "h_offset": 2, "whole": {"heads": 4, "seq_q": 37}}
    part = op(q[:, 2:, 17:], k[:, 1:], v[:, 1:], sink=sink, **place)
    torch.testing.assert_close(part, whole[:, 2:, 17:])
    (found,) = torch.autograd.grad(part.sum(), sink)
    (expected,) = torch.autograd.grad(whole[:, 2:, 17:].sum(), sink)
    torch.testing.assert_close(found, expected)


def test_equal_logits_of_rows_are_those_of_their_head() -> None:
    qkv, of_heads = CASE.tensors(3), torch.linspace(-1, 2, 4)
    by_head = spec_of("query").replace(sink=True)
    expected = run_forward(by_head, *qkv, tensors={"sink": of_heads})
    rows = of_heads[:, None].expand(4, 37)
    found = run_forward(spec_of("head and query"), *qkv, tensors={"sink": rows})
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


def test_a_compiled_call_learns_the_sinks_of_rows() -> None:
    op, (q, k, v) = fg.attention(spec_of("head and query")), CASE.tensors(3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return op(q, k, v, sink=sink)

    ours, theirs = (logits("head and query").requires_grad_() for _ in range(2))
    compiled(q, k, v, ours).sum().backward()
    op(q, k, v, sink=theirs).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


def test_a_call_with_too_few_sinks_of_rows_is_refused() -> None:
    q, k, v = CASE.tensors(3)
    with pytest.raises(fg.InputError, match="sink"):
        fg.attention(spec_of("query"))(q, k, v, sink=torch.zeros(30))
