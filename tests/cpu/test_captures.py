"""Captured tensors in the tiled algorithms: against the oracle, by gradcheck, in memory."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen import reference
from flashgen.calls import cpu
from flashgen.calls.cpu import chunks, elements
from flashgen.calls.cpu.chunks import SequenceRows
from flashgen.calls.cpu.mods import compiled
from flashgen.calls.cpu.parts import chunks_of
from flashgen.calls.cpu.problem import SequenceProblem
from flashgen.shared.call import OutputGradients
from flashgen.shared.dtypes import TENSOR_DTYPES
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.tracing import trace_score
from tests.cpu.test_memory import Bytes
from tests.support.captured import K_OFFSET, Q_OFFSET, VARIANTS
from tests.support.shapes import Case
from tests.support.tiers import one_in, slow
from tests.support.tiled_calls import arguments, both, forward, gradients_are_derivatives

Tensor = torch.Tensor
STATE = (1234567, 89)
OFFSETS = {"q_offset": Q_OFFSET, "k_offset": K_OFFSET}
DROPOUT = {"dropout_p": 0.3, "rng": STATE}

SHAPES = {
    "square": Case(9, 9, 2, 2, 2, "float32", 8),
    "grouped": Case(7, 11, 2, 4, 2, "float32", 8),
    "one kv head": Case(11, 5, 1, 3, 1, "float32", 8),
}


def checked(name: str, case: Case, options: dict[str, Any], *, fast: bool) -> bool:
    variant = VARIANTS[name]
    spec, tensors = variant.spec(dropout="rng" in options), variant.tensors(case)
    return gradients_are_derivatives(spec, case, tensors, fast=fast, **options)


@pytest.mark.parametrize(
    ("shape", "options"), one_in(2, itertools.product(SHAPES, [{}, OFFSETS | DROPOUT]), first=1)
)
@pytest.mark.parametrize("name", one_in(4, VARIANTS))
def test_gradients_are_the_derivative_along_random_directions(
    name: str, shape: str, options: dict[str, Any]
) -> None:
    assert checked(name, SHAPES[shape], options, fast=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("relative bias", OFFSETS),
        slow("one tensor in a product", DROPOUT),
        slow("document and looked up by its id", {}),
        slow("temperature", {}),
    ],
)
def test_every_element_of_the_gradients_is_the_derivative(
    name: str, options: dict[str, Any]
) -> None:
    assert checked(name, Case(5, 7, 1, 2, 1, "float32", 8), options, fast=False)


@pytest.mark.parametrize("block", [slow(None), 32])
@pytest.mark.parametrize("dtype", one_in(3, ["float16", "bfloat16", "float32"]))
@pytest.mark.parametrize("name", one_in(2, VARIANTS))
def test_every_variant_agrees_with_the_oracle(name: str, dtype: str, block: int | None) -> None:
    variant, case = VARIANTS[name], Case(77, 130, 2, 4, 2, dtype, 40)
    spec = variant.spec(40, dtype, dropout=True)
    q, k, v = case.tensors()
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(q.shape, generator=generator).to(q.dtype)
    dlse = torch.randn(q.shape[:3], generator=generator)
    tensors = {
        name: x.float() if x.is_floating_point() else x for name, x in variant.tensors(case).items()
    }
    call = {"tensors": tensors, "dropout_p": 0.17, "rng": STATE, **OFFSETS}
    out, lse, *gradients = both(spec, q, k, v, dout, dlse, block_q=block, block_k=block, **call)
    exact = reference.attention(spec, q, k, v, **call)
    same = reference.same_dtype(spec, q, k, v, **call)
    for got, ref, ordinary in zip((out, lse), exact, same, strict=True):
        verdict = reference.compare(got, ref, ordinary)
        assert verdict.max_error <= verdict.max_allowed, verdict
        assert (verdict.nans, verdict.infinities) == (0, 0)
    exact = reference.gradients(spec, q, k, v, dout, dlse, **call)
    eps = torch.finfo(q.dtype).eps
    learned = [tensors[tensor.name] for tensor in spec.tensors if tensor.grad]
    for got, ref, of in zip(gradients, exact, (q, k, v, *learned), strict=True):
        assert got.dtype == of.dtype
        assert got.shape == of.shape
        error = float((got.double() - ref).abs().max())
        # Up to 80,000 summands meet in one element of a learned tensor.
        factor = 40 if of.dim() < 4 else 20
        assert error <= factor * eps * max(1.0, float(ref.abs().max())), error


def spec_of(mask=None, score=None, **options) -> AttentionSpec:
    given = {"head_dim": 8, "dtype": "float32", **options}
    return AttentionSpec(mask, score, **given)


# What is read.


@pytest.mark.parametrize("dtype", TENSOR_DTYPES)
def test_an_index_outside_means_the_nearest_element(dtype: str) -> None:
    x = fg.Tensor("x", ("n", 3, "m"), dtype)
    tensor = torch.arange(-12, 12).view(4, 3, 2).to(getattr(torch, dtype))
    positions = torch.arange(-9, 10)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        element = x[q, 1, k // 2]
        return fg.where(element, 1.0, 0.0) if dtype == "bool" else 1.0 * element

    bound = compiled((trace_score(score).expr,), torch.float32).bind({x.symbol: tensor})
    (found,) = bound(positions[:, None], positions)
    for i, q in enumerate(positions.tolist()):
        for j, k in enumerate(positions.tolist()):
            element = tensor[min(max(q, 0), 3), 1, min(max(k // 2, 0), 1)]
            assert float(found[i, j]) == float(element), (q, k)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.full((90, 9), math.nan)[1::2, 2:5][:40].copy_(x),
        lambda x: x[:, :1].expand(40, 3),
        lambda x: x[:1].expand(40, 3),
        lambda x: x[:1, :1],
        lambda x: x[2:],
    ],
    ids=["transposed", "with gaps", "shared columns", "shared rows", "one element", "with offset"],
)
def test_strides_are_followed_and_gradients_are_of_the_shape_given(view: Any) -> None:
    x = fg.Tensor("x", ("n", "m"), grad=True)
    spec = spec_of(
        lambda b, h, q, k: x[k, q] < 1.5, lambda s, b, h, q, k: s * x[k, h] + x[q, 1] * x[k, 2]
    )
    q, k, v = Case(30, 40, 1, 4, 2, "float32", 8).tensors()
    tensor = view(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)))
    results = [
        both(spec, q, k, v, torch.ones_like(q), tensors={"x": of}, block_q=16, block_k=16)
        for of in (tensor, tensor.contiguous())
    ]
    assert results[0][5].shape == tensor.shape
    assert results[0][5].abs().max() > 0
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_integers_are_exact_in_the_mask_and_in_the_class_of_a_tile() -> None:
    far = fg.Tensor("far", ("batch",), "int64")
    spec = spec_of(lambda b, h, q, k: far[b] - 2**59 > k)
    q, k, v = Case(5, 40, 2, 1, 1, "float32", 8).tensors()
    for block in (8, 16, 64):
        tensors = {"far": torch.tensor([2**59 + 17, 2**59 + 40])}
        out, _ = forward(spec, q, k, v, tensors=tensors, block_q=8, block_k=block)
        exact, _ = reference.attention(spec, q, k, v, tensors=tensors)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    small = fg.Tensor("small", ("batch",), "int8")
    spec = spec_of(lambda b, h, q, k: 3 * small[b] > k + 300)
    tensors = {"small": torch.tensor([110, 127], dtype=torch.int8)}
    out, _ = forward(spec, q, k, v, tensors=tensors, block_q=8, block_k=8)
    exact, _ = reference.attention(spec, q, k, v, tensors=tensors)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


def test_an_element_that_is_the_same_for_a_whole_call_is_read_once() -> None:
    gate, bias = fg.Tensor("gate", ("heads",)), fg.Tensor("bias", ("heads", "seq_k"))
    expr = trace_score(lambda s, b, h, q, k: s * fg.sigmoid(gate[h]) + bias[h, k]).expr
    program = compiled((expr,), torch.float32)
    reads = [
        [step for step in steps if getattr(step.function, "func", None) is elements.read]
        for steps in (program.once, program.per_tile)
    ]
    assert [len(steps) for steps in reads] == [1, 1]
    assert torch.sigmoid in {step.function for step in program.once}


def test_an_index_may_be_an_element_or_a_rounded_score() -> None:
    x = fg.Tensor("x", ("n",), grad=True)
    i = fg.Tensor("i", ("m",), "uint8")
    spec = spec_of(None, lambda s, b, h, q, k: s + x[i[k] - q] * x[fg.floor(3 * s)])
    case = Case(9, 11, 1, 2, 1, "float32", 8)
    q, k, v, dout = (t.double() for t in (*case.tensors(), case.tensors(5)[0]))
    tensors = {"x": torch.arange(7.0).double(), "i": torch.tensor([200, 3, 0], dtype=torch.uint8)}
    found = both(spec, q, k, v, dout, tensors=tensors, block_q=4, block_k=6)
    expected = reference.gradients(spec, q, k, v, dout, tensors=tensors)
    for one, other in zip(found[2:], expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# Which tiles are visited.


def visited(spec: AttentionSpec, q: Tensor, k: Tensor, **options: Any) -> list[list[Any]]:
    """Of each chunk of one batch entry, the runs of keys of its first tile of queries."""
    given = arguments(spec, q, block_q=16, block_k=16, **options)
    problem = SequenceProblem(spec, q, k, given, SequenceRows(None, (0, 0)))
    return [part.runs(0, 16) for part in chunks_of(problem)]


def test_lengths_and_prefixes_skip_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "ELEMENTS", 1)  # each chunk is one pair
    q, k, _ = Case(16, 96, 3, 1, 1, "float32", 8).tensors()
    length = torch.tensor([0, 40, 96])
    for tensor in (length, length[:, None].expand(3, 2)[:, 0]):
        runs = visited(VARIANTS["padding"].spec(), q, k, tensors={
            "length": tensor, "gate": torch.ones(1), "t": torch.tensor(1.0)})  # fmt: skip
        spans = [[(run.start, run.stop, run.full) for run in found] for found in runs]
        assert spans[0] == []
        assert [stop for _, stop, full in spans[1] if full][-1] == 32
        assert spans[1][-1] == (32, 48, False)
        assert [full for _, _, full in spans[2]] == [True] * 6
    prefix = torch.tensor([0, 40, 96], dtype=torch.int16)
    runs = visited(VARIANTS["prefix"].spec(), q, k, tensors={"prefix": prefix})
    assert [max((run.stop for run in found), default=0) for found in runs] == [16, 48, 96]


def test_a_tile_is_visited_where_any_of_its_pairs_needs_it() -> None:
    q, k, v = Case(16, 96, 3, 1, 1, "float32", 8).tensors()
    tensors = {"length": torch.tensor([0, 40, 70]), "gate": torch.ones(1), "t": torch.tensor(1.0)}
    spec = VARIANTS["padding"].spec()
    (runs,) = visited(spec, q, k, tensors=tensors)
    assert max(run.stop for run in runs) == 80
    assert not any(run.full for run in runs)
    k[:, :, 80:] = math.nan
    out, _ = forward(spec, q, k, v, tensors=tensors, block_q=16, block_k=16)
    assert out.isfinite().all()


def test_a_second_call_sees_new_contents() -> None:
    spec, (q, k, v) = VARIANTS["padding"].spec(), Case(16, 96, 3, 1, 1, "float32", 8).tensors()
    tensors = {"length": torch.tensor([96, 5, 70]), "gate": torch.ones(1), "t": torch.tensor(1.0)}
    forward(spec, q, k, v, tensors=tensors)
    tensors["length"].copy_(torch.tensor([3, 90, 0]))
    out, _ = forward(spec, q, k, v, tensors=tensors)
    exact, _ = reference.attention(spec, q, k, v, tensors=tensors)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [n for n, v in VARIANTS.items() if v.mods[0] is not None])
def test_tiles_are_classified_as_their_elements_say(name: str) -> None:
    """Nothing of an empty tile is true, and all of a full one."""
    case, variant = Case(90, 70, 3, 4, 2, "float32", 8), VARIANTS[name]
    spec, tensors = variant.spec(), variant.tensors(case)
    q, k, _ = case.tensors()
    given = arguments(spec, q, tensors=tensors, block_q=16, block_k=8, **OFFSETS)
    problem = SequenceProblem(spec, q, k, given, SequenceRows(None, (0, 0)))
    (part,) = chunks_of(problem)
    for start, stop in problem.queries.tiles():
        seen = torch.zeros(70, dtype=torch.bool)
        for run in part.runs(start, stop):
            keys = slice(run.start, run.stop)
            seen[keys] = True
            if run.full:
                assert (part.mask_bits(slice(start, stop), keys) == -1).all()
        everything = part.mask_bits(slice(start, stop), slice(0, 70))
        found = everything.expand(*everything.shape[:3], 70)
        assert (found[..., ~seen] == 0).all()


# Gradients where nothing is finite, or nothing is to be added.


@pytest.mark.parametrize("block", [4, 64])
def test_what_is_masked_adds_exactly_0_whatever_the_derivative_is_there(block: int) -> None:
    x = fg.Tensor("x", ("n",), grad=True)
    q, k, v = Case(6, 8, 2, 4, 2, "float32", 8).tensors()
    dout, dlse = torch.ones_like(q), torch.ones(2, 4, 6)
    dlse[:, :, 2] = math.nan  # of a row without a key
    values = torch.rand(8) + 0.5
    values[6:] = 0
    blocks = {"block_q": block, "block_k": block}
    for score in (
        lambda s, b, h, q, k: s + fg.sqrt(x[k]),  # an infinite slope
        lambda s, b, h, q, k: s / x[k],  # and value
        lambda s, b, h, q, k: s * fg.log(x[k] * x[k]),  # 0 / 0
        lambda s, b, h, q, k: fg.log(x[k]) * q,  # and no score
    ):
        spec = spec_of(lambda b, h, q, k: (k < 6) & (q != 2), score)
        results = both(spec, q, k, v, dout, dlse, tensors={"x": values}, **blocks)
        expected = reference.gradients(spec, q, k, v, dout, dlse, tensors={"x": values})
        assert (results[5][6:] == 0).all()
        for one, other in zip(results[2:], expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=2e-4, atol=2e-5)


def test_where_the_score_function_gives_minus_infinity_nothing_is_added() -> None:
    x = fg.Tensor("x", ("heads", "seq_k"), grad=True)
    q, k, v = Case(6, 8, 1, 2, 2, "float32", 8).tensors()
    dout, dlse = torch.ones_like(q), torch.ones(1, 2, 6)
    values = torch.rand(2, 8) + 0.5
    values[0, 3] = 0
    for score, tensor in (
        (lambda s, b, h, q, k: s + fg.log(x[h, k]), values),
        (lambda s, b, h, q, k: s + x[h, k], values.log()),
        (lambda s, b, h, q, k: s + x[h, k], values.log().index_fill(0, torch.tensor(1), -math.inf)),
    ):
        spec = spec_of(None, score)
        *_, found = both(spec, q, k, v, dout, dlse, tensors={"x": tensor}, block_q=4, block_k=4)
        *_, expected = reference.gradients(spec, q, k, v, dout, dlse, tensors={"x": tensor})
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        live = tensor > (-math.inf if tensor is not values else 0)
        assert (found[~live] == 0).all()
        assert (found[live] != 0).all()


def test_a_tensor_that_only_the_mask_reads_has_a_gradient_of_0() -> None:
    edge, slope = fg.Tensor("edge", ("heads",), grad=True), fg.Tensor("slope", (), grad=True)
    unused = lambda s, b, h, q, k: s + slope * k + fg.floor(edge[h])  # noqa: E731
    q, k, v = Case(20, 30, 1, 4, 2, "float32", 8).tensors()
    tensors = {"slope": torch.tensor(0.1), "edge": torch.tensor([3.0, 20.0, 0.5, 7.0])}
    for score in (lambda s, b, h, q, k: s + slope * k, unused):
        spec = spec_of(lambda b, h, q, k: k < edge[h], score)
        *_, first, second = both(spec, q, k, v, torch.ones_like(q), torch.ones(1, 4, 20),
                                 tensors=tensors)  # fmt: skip
        assert first.shape == (4,)
        assert (first == 0).all()
        assert second != 0


@pytest.mark.parametrize("seq", [(0, 5), (5, 0), (0, 0)])
def test_without_queries_or_keys_gradients_of_captures_are_0(seq: tuple[int, int]) -> None:
    case = Case(*seq, 2, 4, 2, "float32", 8)
    q, k, v = case.tensors()
    for name in ("head gate", "one tensor twice", "padding"):
        spec, tensors = VARIANTS[name].spec(), VARIANTS[name].tensors(case)
        found = both(spec, q, k, v, torch.ones_like(q), torch.ones(2, 4, seq[0]), tensors=tensors)
        learned = [tensors[x.name] for x in spec.tensors if x.grad]
        assert [g.shape for g in found[5:]] == [x.shape for x in learned]
        assert all((g == 0).all() for g in (found[0], *found[2:]))


# How they are added up.


def test_gradients_are_added_in_float32_and_rounded_once() -> None:
    # One key and no gradient of out: each row adds 1. Adding ones in bfloat16 would end at 256.
    bias = fg.Tensor("bias", (), "bfloat16", grad=True)
    spec = spec_of(None, lambda s, b, h, q, k: s + bias, dtype="bfloat16")
    q, k, v = Case(300, 1, dtype="bfloat16", head_dim=8).tensors()
    tensors = {"bias": torch.tensor(1.0).bfloat16()}
    *_, found = both(spec, q, k, v, torch.zeros_like(q), torch.ones(1, 1, 300), tensors=tensors,
                     block_q=8, block_k=8)  # fmt: skip
    assert found.dtype == torch.bfloat16
    assert found == 300


@pytest.mark.parametrize("threads", [1, 4])
def test_equal_calls_give_equal_bits(threads: int) -> None:
    """With many threads that add to few elements at a time."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name in ("relative bias", "one tensor in a product", "causal with learned buckets"):
            case, variant = Case(300, 280, 2, 4, 2, "bfloat16", 8), VARIANTS[name]
            spec = variant.spec(8, "bfloat16")
            tensors = {name: x.float() for name, x in variant.tensors(case).items()}
            q, k, v = case.tensors()
            runs = [both(spec, q, k, v, torch.ones_like(q), torch.ones(2, 4, 300), tensors=tensors)
                    for _ in range(4)]  # fmt: skip
            for run in runs[1:]:
                assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))
    finally:
        torch.set_num_threads(before)


def test_memory_grows_linearly_and_no_tensor_is_of_the_size_of_the_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "ELEMENTS", 1 << 16)
    document, table = (
        fg.Tensor("document", ("batch", "n"), "int32"),
        fg.Tensor("table", ("m",), grad=True),
    )
    spec = spec_of(
        lambda b, h, q, k: (document[b, q] == document[b, k]) & (k <= q),
        lambda s, b, h, q, k: s * fg.sigmoid(table[q - k]),
    )
    peaks = []
    for n in (512, 1024, 2048):
        q, k, v = Case(n, n, 1, 2, 1, "float32", 8).tensors()
        ids = (torch.arange(n) // (n // 4)).int()[None]
        given = arguments(spec, q, tensors={"document": ids, "table": torch.randn(n)})
        with Bytes() as count:
            out, lse = cpu.forward(spec, q, k, v, given)
            cpu.backward(spec, q, k, v, OutputGradients(out, lse, torch.ones_like(out)), given)
        peaks.append(count.peak)
        assert count.largest <= max(chunks.ELEMENTS, 2 * n * 8)
    # Over two doublings: of the sizes between, one may be the first that needs another tile of the
    # workspace. Squares would be sixteen times larger.
    assert peaks[-1] < 2.2**2 * peaks[0], peaks
    assert peaks[-1] < 12 * 4 * 2 * 2048 * 8 + 10 * 8 * chunks.ELEMENTS, peaks


def test_elements_that_leave_64_bits_in_a_mask_are_refused_by_name() -> None:
    ids = fg.Tensor("ids", ("seq_q",), "int64")
    spec = fg.AttentionSpec(lambda b, h, q, k: ids[q] * 2 + k > 0, head_dim=16)
    q, k, v = (torch.zeros(1, 1, 20, 16).half() for _ in range(3))
    with pytest.raises(fg.InputError, match="more than 64 bits") as caught:
        fg.attention(spec)(q, k, v, ids=torch.full((20,), 2**62), backend="tiled")
    assert caught.value.where == "captured tensor ids"
