"""q_offset and k_offset as tensors: the same results as with numbers, one for each batch entry."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops.registration import operator_of
from flashgen.shared.errors import InputError
from flashgen.shared.paths import PATHS
from flashgen.spec.language.signature import at_offsets
from tests.support.judged import Call
from tests.support.masks import causal
from tests.support.opchecks import passes_opcheck
from tests.support.shapes import DTYPES, Case

Tensor = torch.Tensor

table = fg.Tensor("table", ("batch", "seq_k"), grad=True)
bias = fg.Tensor("bias", ("distance",), grad=True)
ARCHS = tuple(PATHS)
AT_Q = torch.tensor([40, -3])
AT_K = torch.tensor([-5, 17], dtype=torch.int32)


def windowed(b, h, q, k):
    return (q >= k) & (q - k < 24) & (q % 7 != 3)


def sloped(score, b, h, q, k):
    return score + (q - k) * 0.01 * (h + 1)


def by_key(score, b, h, q, k):
    return score + table[b, fg.maximum(k, 0)]


def by_distance(score, b, h, q, k):
    return score + bias[fg.clamp(q - k + 64, 0, 189)]


MODS: dict[str, tuple[Any, Any]] = {
    "causal": (causal, None),
    "windowed": (windowed, sloped),
    "by_key": (causal, by_key),
    "by_distance": (None, by_distance),
}


def spec_of(name: str = "causal", **options: Any) -> fg.AttentionSpec:
    options = {"head_dim": 16, "dtype": "float16", "name": name} | options
    return fg.AttentionSpec(*MODS[name], **options)


def tensors_of(spec: fg.AttentionSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    known = {
        "table": torch.randn(2, 160, generator=generator),
        "bias": torch.randn(190, generator=generator),
    }
    return {tensor.name: known[tensor.name] for tensor in spec.tensors if tensor.name in known}


def call_of(spec: fg.AttentionSpec, offsets: dict[str, Any], **how: Any) -> Call:
    qkv = Case(70, 100, 2, 4, 2, spec.dtype, 16).tensors()
    return Call(spec, qkv, {"tensors": tensors_of(spec), **offsets}, **how)


def both(call: Call, **options: Any) -> None:
    call.judged_backward(call.judged_forward(), **options)


@pytest.mark.parametrize("mods", MODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_tiled_path_takes_a_position_for_each_batch_entry(mods: str, dtype: str) -> None:
    both(call_of(spec_of(mods, dtype=dtype), {"q_offset": AT_Q, "k_offset": AT_K}, backend="tiled"))


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("mods", MODS)
def test_kernels_take_a_position_for_each_batch_entry(mods, arch, deterministic) -> None:
    call = call_of(spec_of(mods), {"q_offset": AT_Q, "k_offset": AT_K}, arch=arch)
    both(call, deterministic=deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("arch", PATHS)
def test_kernels_of_every_dtype_that_can_drop_take_one_tensor(dtype: str, arch: str) -> None:
    spec = spec_of("windowed", dtype=dtype, dropout=True)
    both(call_of(spec, {"q_offset": AT_Q, "k_offset": 3}, arch=arch))


@pytest.mark.parametrize("backend", ["tiled", pytest.param("emulator", marks=pytest.mark.slow)])
@pytest.mark.parametrize("offset", [torch.tensor(9), torch.tensor([9], dtype=torch.int32)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("mods", ["windowed", "causal"])
def test_a_tensor_of_one_number_gives_the_bits_of_the_number(
    backend: str, offset: Tensor, dtype: str, mods: str
) -> None:
    heads_kv = 4 if mods == "causal" else 2
    op = fg.attention(spec_of(mods, dtype=dtype))
    qkv = Case(70, 100, 2, 4, heads_kv, dtype, 16).tensors()
    results = []
    for given in (9, offset):
        leaves = [x.clone().requires_grad_() for x in qkv]
        out, lse = op(*leaves, q_offset=given, k_offset=2, return_lse=True, backend=backend)
        gradients = torch.autograd.grad(out.float().square().sum(), leaves)
        results.append((out, lse, *gradients))
    assert all(map(torch.equal, *results))


def test_a_call_reads_the_values_that_the_tensor_has_when_it_runs() -> None:
    op, qkv = fg.attention(spec_of()), Case(8, 30, 2, 2, 2, "float16", 16).tensors()
    offset = torch.tensor([4, 9])
    for values in ([4, 9], [11, 0]):
        offset.copy_(torch.tensor(values))
        parts = [op(*(x[i : i + 1] for x in qkv), q_offset=value) for i, value in enumerate(values)]
        assert torch.equal(op(*qkv, q_offset=offset), torch.cat(parts))


@pytest.mark.parametrize("arch", [None, *(pytest.param(a, marks=pytest.mark.slow) for a in ARCHS)])
def test_packed_sequences_have_a_position_each(arch: str | None) -> None:
    ends = {
        "cu_seqlens_q": torch.tensor([0, 20, 20, 70], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 45, 50, 100], dtype=torch.int32),
    }
    spec = spec_of("windowed", packed=True)
    qkv = Case(70, 100, 1, 4, 2, "float16", 16).tensors()
    numbers = {"tensors": ends, "q_offset": torch.tensor([25, 0, -8]), "k_offset": 0}
    both(Call(spec, qkv, numbers, backend="emulator" if arch else "tiled", arch=arch))


@pytest.mark.parametrize("backend", ["tiled", pytest.param("emulator", marks=pytest.mark.slow)])
def test_a_block_layout_of_the_call_is_read_at_the_positions(backend: str) -> None:
    spec = spec_of(block_sparse=fg.BlockSparse(block_q=32, block_k=32))
    live = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.6
    call = Call(
        spec,
        Case(70, 100, 2, 4, 2, "float16", 16).tensors(),
        {"tensors": {"layout": live}, "q_offset": torch.tensor([33, 80]), "k_offset": 7},
        backend=backend,
    )
    both(call)


def refused(spec: fg.AttentionSpec, case: Case, **given: Any) -> InputError:
    with pytest.raises(InputError) as error:
        fg.attention(spec)(*case.tensors(), **given)
    return error.value


CASE = Case(8, 9, 2, 2, 2, "float16", 16)


@pytest.mark.parametrize(
    ("offset", "what"),
    [
        (torch.tensor(1.0), "torch.float32"),
        (torch.tensor(True), "torch.bool"),
        (torch.tensor(1, dtype=torch.int16), "torch.int16"),
        (torch.zeros(2, 1, dtype=torch.int64), "shape (2, 1)"),
        (torch.zeros(3, dtype=torch.int64), "shape (3,)"),
        (torch.zeros((), dtype=torch.int64, device="meta"), "on meta"),
        (torch.tensor([0, 2**28]), "268,435,464"),
        (torch.tensor(-(2**40)), "-1,099,511,627,776"),
    ],
)
def test_a_tensor_that_is_no_offset_is_refused(offset: Tensor, what: str) -> None:
    error = refused(spec_of(), CASE, k_offset=offset)
    assert "k_offset" in error.where
    assert what in error.numbers


def test_dropout_needs_offsets_that_the_host_knows() -> None:
    given = {"k_offset": torch.tensor(16), "dropout_p": 0.5}
    error = refused(spec_of(dropout=True), CASE, **given)
    assert error.where == "argument k_offset"
    assert error.way_out == "k_offset as an int, or dropout_p=0"


def test_captured_tensors_reach_the_last_position_on_the_cpu() -> None:
    error = refused(
        spec_of("by_key"), CASE, table=torch.zeros(2, 12), k_offset=torch.tensor([0, 4])
    )
    assert error.where == "argument table"
    assert "ends at 13" in error.numbers


def test_a_layout_reaches_the_last_position_on_the_cpu() -> None:
    spec = spec_of(block_sparse=fg.BlockSparse(block_q=8, block_k=8))
    layout = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    error = refused(spec, CASE, layout=layout, q_offset=torch.tensor([0, 9]))
    assert error.where == "argument layout"


def test_a_layout_that_is_a_function_needs_numbers() -> None:
    spec = spec_of(block_sparse=fg.BlockSparse(lambda b, h, i, j: i >= j, block_q=8, block_k=8))
    error = refused(spec, CASE, q_offset=torch.tensor(0))
    assert "Python ints" in error.way_out


@pytest.mark.slow
def test_tracing_a_graph_takes_other_values_and_lengths() -> None:
    op = fg.attention(spec_of("windowed", dtype="float32"))
    compiled = torch.compile(
        lambda q, k, v, at: op(q, k, v, q_offset=at, k_offset=1),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for seq, at in ((20, torch.tensor([3, 9])), (33, torch.tensor([7, 0])), (5, torch.tensor(2))):
        results = []
        for function in (compiled, lambda q, k, v, at: op(q, k, v, q_offset=at, k_offset=1)):
            leaves = [x.requires_grad_() for x in Case(seq, 40, 2, 2, 2, "float32", 16).tensors()]
            out = function(*leaves, at)
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        for mine, other in zip(*results, strict=True):
            torch.testing.assert_close(mine, other)


def test_the_registered_operator_passes_the_checks_of_torch() -> None:
    dtypes = (("q_offset", "int64"), ("k_offset", "int32"))
    operator = operator_of(at_offsets(spec_of(dtype="float32"), dtypes))
    leaves = [x.requires_grad_() for x in Case(8, 9, 2, 2, 2, "float32", 16).tensors()]
    assert passes_opcheck(
        operator.overload, (*leaves, AT_Q, AT_K[:1], None, None, torch.tensor(0.5))
    )


def test_vmap_takes_an_offset_of_each_sample() -> None:
    op = fg.attention(spec_of(dtype="float32"))
    q, k, v = (torch.randn(3, 2, 2, n, 16) for n in (8, 30, 30))
    at = torch.tensor([1, 20, 7])
    found = torch.vmap(lambda q, k, v, at: op(q, k, v, q_offset=at))(q, k, v, at)
    wanted = [op(q[i], k[i], v[i], q_offset=int(at[i])) for i in range(3)]
    torch.testing.assert_close(found, torch.stack(wanted))


def test_autocast_and_offsets_together_take_the_kernel_of_both() -> None:
    op = fg.attention(spec_of(dtype="float32"))
    q, k, v = Case(8, 30, 2, 2, 2, "float32", 16).tensors()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(op(q, k, v, q_offset=torch.tensor(20)), op(q, k, v, q_offset=20))


def test_a_spec_at_offsets_can_be_pickled() -> None:
    spec = at_offsets(spec_of("by_key"), (("q_offset", "int64"),))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert "q_offset" not in operator_of(spec).numbers
