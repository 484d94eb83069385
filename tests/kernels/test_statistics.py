"""Statistics beside the output, against float64 by the error rule: kernels and the CPU path.

`make test` has a case of each kind; the others are `slow`.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import flashgen as fg
import ptx_emulator as emulator
from flashgen import reference
from flashgen.shared.errors import InputError, SpecError
from tests.support.planted import caught, planted
from tests.support.shapes import DTYPES, Case
from tests.support.tiers import one_in, slow, take_turns
from tests.support.weights import some_rows

Tensor = torch.Tensor

ARCHS = ("sm_80", "sm_90a")
ALL = fg.AuxRequest(max_scores=True, entropy=True, key_mass=True, block_mass=32)
OF_WEIGHTS = fg.AuxRequest(max_scores=True, key_mass=True, block_mass=32)

importance = fg.Tensor("importance", ("heads", "seq_k"))


def softcap(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 5 * fg.tanh(score / 5)


OWN = {
    "squares": fg.sum_over_keys(lambda score, weight, b, h, q, k: weight**2),
    "largest": fg.max_over_keys(lambda score, weight, b, h, q, k: weight * importance[h, k]),
    "age": fg.sum_over_queries(lambda score, weight, b, h, q, k: weight * (q - k)),
}
SPECS: dict[str, dict[str, Any]] = {
    "rows": {"mask_mod": some_rows},
    "softcap": {"mask_mod": some_rows, "score_mod": softcap, "statistics": OWN},
    "sink": {"mask_mod": lambda b, h, q, k: q >= k, "sink": True},
    "removed": {"score_mod": lambda s, b, h, q, k: fg.where((q + k) % 3 == 0, -torch.inf, s)},
    "layout": {
        "block_sparse": fg.BlockSparse(lambda i, j: (i + 2 * j) % 3 != 1, block_q=32, block_k=64)
    },
    "relu_squared": {
        "mask_mod": some_rows,
        "weight_mod": lambda score, *_: fg.maximum(score, 0) ** 2,
        "normalize": "none",
        "statistics": OWN,
    },
    "shares": {
        "mask_mod": some_rows,
        "weight_mod": lambda score, *_: fg.exp(score / 2),
        "normalize": "sum",
    },
}


def spec_of(name: str, head_dim: int = 64, dtype: str | None = "bfloat16") -> fg.AttentionSpec:
    return fg.AttentionSpec(**SPECS[name], head_dim=head_dim, dtype=dtype, name=f"of_{name}")


def captured_by(spec: fg.AttentionSpec, heads: int, keys: int) -> dict[str, Tensor]:
    values = torch.Generator().manual_seed(5)
    known = {
        "importance": torch.rand(heads, keys, generator=values),
        "sink": torch.randn(heads, generator=values),
    }
    return {tensor.name: known[tensor.name] for tensor in spec.tensors if tensor.name in known}


def results(aux: fg.AuxOutput) -> dict[str, Tensor]:
    names = ("max_scores", "entropy", "key_mass", "block_mass")
    found = {name: getattr(aux, name) for name in names if getattr(aux, name) is not None}
    return found | aux.statistics


def check(found: dict[str, Tensor], spec: fg.AttentionSpec, *qk: Tensor, **numbers: Any) -> None:
    request = ALL if spec.is_softmax else OF_WEIGHTS
    exact = reference.statistics(spec, *qk, request, **numbers)
    same = reference.statistics(spec, *qk, request, exact=False, **numbers)
    kept = reference.statistics(spec, *qk, request, from_rounded=True, **numbers)
    assert found.keys() == exact.keys()
    assert all(value.dtype == torch.float32 for value in found.values())
    verdicts = {
        x: reference.compare(found[x], exact[x], same[x], from_rounded=kept[x]) for x in exact
    }
    wrong = {name: str(verdict) for name, verdict in verdicts.items() if not verdict.ok}
    assert not wrong, f"{spec.name}: {wrong}"


def judged(spec: fg.AttentionSpec, case: Case, **how: Any) -> fg.AuxOutput:
    q, k, v = case.tensors(seed=3)
    captured = captured_by(spec, case.heads_q, case.seq_k)
    request = ALL if spec.is_softmax else OF_WEIGHTS
    _, aux = fg.attention(spec)(q, k, v, return_aux=request, **captured, **how)
    check(results(aux), spec, q, k, tensors=captured)
    return aux


# ---- the numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim"), one_in(3, take_turns(SPECS, DTYPES, (40, 64, 128, 256)))
)
def test_the_cpu_path_meets_the_error_rule(name: str, dtype: str, head_dim: int) -> None:
    judged(spec_of(name, head_dim, dtype), Case(133, 170, 2, 4, 2, dtype, head_dim))


@pytest.mark.parametrize(
    ("name", "arch", "dtype", "head_dim"),
    one_in(48, take_turns(SPECS, ARCHS, DTYPES, (40, 64, 128, 256)), 9),
)
def test_kernels_meet_the_error_rule(name: str, arch: str, dtype: str, head_dim: int) -> None:
    case = Case(75, 106, 1, 4, 2, dtype, head_dim)
    judged(spec_of(name, head_dim, dtype), case, backend="emulator", arch=arch)


@pytest.mark.parametrize("arch", [None, slow("sm_80"), slow("sm_90a")])
def test_packed_sequences_have_statistics_of_their_own(arch: str | None) -> None:
    spec = fg.AttentionSpec(
        lambda b, h, q, k: q >= k, packed=True, head_dim=64, dtype="float32", name="packed"
    )
    q, k, v = Case(70, 90, 1, 4, 2, "float32").tensors()
    ends = {
        "cu_seqlens_q": torch.tensor([0, 30, 30, 67], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 41, 50, 88], dtype=torch.int32),
    }
    how = {} if arch is None else {"backend": "emulator", "arch": arch}
    _, aux = fg.attention(spec)(q, k, v, return_aux=ALL._replace(block_mass=None), **ends, **how)
    request = ALL._replace(block_mass=None)
    exact = reference.statistics(spec, q, k, request, tensors=ends)
    for name, value in results(aux).items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5)


def test_blocks_of_a_packed_sequence_begin_with_it() -> None:
    spec = fg.AttentionSpec(packed=True, head_dim=64, dtype="float32", name="packed_blocks")
    q, k, v = Case(20, 70, 1, 2, 2, "float32").tensors()
    ends = torch.tensor([0, 8, 20], dtype=torch.int32), torch.tensor([0, 25, 70], dtype=torch.int32)
    given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    found = fg.attention(spec)(q, k, v, return_aux=fg.AuxRequest(block_mass=16), **given)[1]
    assert found.block_mass is not None
    plain = fg.attention(spec.replace(packed=False, name="plain_blocks"))
    for rows, keys in ((slice(0, 8), slice(0, 25)), (slice(8, 20), slice(25, 70))):
        part = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        alone = plain(*part, return_aux=fg.AuxRequest(block_mass=16))[1].block_mass
        torch.testing.assert_close(found.block_mass[:, :, rows, : alone.shape[3]], alone)
        assert not found.block_mass[:, :, rows, alone.shape[3] :].any()


@pytest.mark.parametrize("arch", [None, slow("sm_80"), slow("sm_90a")])
@pytest.mark.parametrize("offset", [17, torch.tensor([17, -4], dtype=torch.int32)])
def test_a_part_of_a_whole_has_the_statistics_of_its_rows(
    arch: str | None, offset: int | Tensor
) -> None:
    spec = fg.AttentionSpec(
        lambda b, h, q, k: q >= k, softcap, head_dim=64, dtype="float32", name="at_offsets"
    )
    q, k, v = Case(33, 50, 2, 2, 1, "float32").tensors()
    how = {} if arch is None else {"backend": "emulator", "arch": arch}
    _, aux = fg.attention(spec)(q, k, v, return_aux=ALL, q_offset=offset, k_offset=3, **how)
    check(results(aux), spec, q, k, q_offset=offset, k_offset=3)


@pytest.mark.parametrize("arch", [slow(None), slow("sm_80"), slow("sm_90a")])
def test_a_paged_cache_has_statistics_of_its_rows(arch: str | None) -> None:
    masked = {"mask_mod": lambda b, h, q, k: q >= k, "head_dim": 64, "dtype": "float32"}
    op = fg.attention(fg.AttentionSpec(**masked, paged=True, name="paged"))
    cache = torch.randn(8, 2, 16, 64, generator=torch.Generator().manual_seed(1))
    table = torch.tensor([[3, 0, 6], [7, 2, 5]], dtype=torch.int32)
    lengths = torch.tensor([45, 20], dtype=torch.int32)
    q = torch.randn(2, 4, 5, 64, generator=torch.Generator().manual_seed(2))
    pages = {"page_table": table, "cache_seqlens": lengths}
    request = fg.AuxRequest(max_scores=True, entropy=True)
    how = {} if arch is None else {"backend": "emulator", "arch": arch}
    found = results(op(q, cache, cache, return_aux=request, **pages, **how)[1])
    plain = fg.AttentionSpec(**masked, name="unpaged")
    for i, length in enumerate(lengths.tolist()):
        keys = cache[table[i].long()].transpose(0, 1).flatten(1, 2)[None, :, :length]
        exact = reference.statistics(plain, q[i : i + 1], keys, request, q_offset=length - 5)
        for name, value in found.items():
            torch.testing.assert_close(value[i].double(), exact[name][0], rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="no statistics of keys"):
        op(q, cache, cache, return_aux=fg.AuxRequest(key_mass=True), **pages)
    with pytest.raises(InputError, match="no mass of blocks"):
        op(q, cache, cache, return_aux=fg.AuxRequest(block_mass=16), **pages)


@pytest.mark.parametrize("arch", [None, slow("sm_80"), slow("sm_90a")])
def test_split_keys_and_many_blocks(arch: str | None) -> None:
    spec = spec_of("rows", dtype="float32")
    q, k, v = Case(1, 350, 1, 4, 2, "float32").tensors()
    op = fg.attention(spec)
    how = {} if arch is None else {"backend": "emulator", "arch": arch}
    request = ALL._replace(block_mass=1)
    _, aux = op(q, k, v, return_aux=request, q_offset=351, split_size=128, **how)
    assert aux.block_mass is not None  # two calls, of 256 and 128 columns
    exact = reference.statistics(spec, q, k, request, q_offset=351)
    for name, value in results(aux).items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5)


def test_rows_and_keys_without_scores() -> None:
    op = fg.attention(spec_of("rows", dtype="float32"))
    q, k, v = Case(9, 12, 1, 2, 1, "float32").tensors()
    aux = op(q, k[:, :, :0], v[:, :, :0], return_aux=ALL)[1]
    assert (aux.max_scores == -torch.inf).all()
    assert not aux.entropy.any()
    assert aux.key_mass.shape == (1, 2, 0)
    assert aux.block_mass.shape == (1, 2, 9, 0)
    aux = op(q[:, :, :0], k, v, return_aux=ALL)[1]
    assert not aux.key_mass.any()
    assert aux.key_mass.shape == (1, 2, 12)
    aux = op(q, k, v, return_aux=ALL)[1]
    assert (aux.max_scores[:, :, 0] == -torch.inf).all()
    assert not aux.entropy[:, :, 0].any()
    assert not aux.block_mass[:, :, 0].any()
    assert not aux.key_mass[:, :, :3].any()


@pytest.mark.parametrize("arch", [None, "sm_80", slow("sm_90a")])
def test_a_nan_is_the_largest_score(arch: str | None) -> None:
    op = fg.attention(spec_of("sink", dtype="bfloat16"))
    q, k, v = Case(9, 12, 1, 1, 1, "bfloat16").tensors()
    k[:, :, 5] = torch.nan
    sink = torch.zeros(1)
    how = {} if arch is None else {"backend": "emulator", "arch": arch}
    aux = op(q, k, v, return_aux=fg.AuxRequest(max_scores=True), sink=sink, **how)[1]
    assert aux.max_scores[0, 0].isnan().tolist() == [False] * 5 + [True] * 4


@pytest.mark.parametrize(
    ("arch", "case"),
    [
        ("sm_80", Case(3, 300, 1, 8, 2, "bfloat16")),  # rows of several heads in a tile
        slow("sm_90a", Case(3, 300, 1, 8, 2, "bfloat16")),
        slow("sm_80", Case(70, 300, 1, 4, 2, "float32")),
        slow("sm_90a", Case(70, 300, 1, 4, 2, "float16", 128)),
    ],
)
def test_the_kernel_of_the_output_writes_the_largest_scores(
    arch: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = fg.attention(spec_of("rows", case.head_dim, case.dtype))
    q, k, v = case.tensors(seed=4)
    how: dict[str, Any] = {"backend": "emulator", "arch": arch, "q_offset": 7, "split_size": 0}
    out, lse = op(q, k, v, return_lse=True, **how)
    launched = []
    launch = emulator.launch

    def counted(ptx: str, name: str, *rest: Any, **by_name: Any) -> Any:
        launched.append(name)
        return launch(ptx, name, *rest, **by_name)

    monkeypatch.setattr(emulator, "launch", counted)
    request = fg.AuxRequest(lse=True, max_scores=True)
    found, aux = op(q, k, v, return_aux=request, **how)
    assert len(launched) == 1
    assert "max_scores" in launched[0]
    assert op.report.kernel.facts.name == launched[0]
    assert torch.equal(found, out)
    assert torch.equal(aux.lse, lse)
    request = fg.AuxRequest(max_scores=True)
    exact = reference.statistics(op.spec, q, k, request, q_offset=7)["max_scores"]
    same = reference.statistics(op.spec, q, k, request, q_offset=7, exact=False)["max_scores"]
    verdict = reference.compare(aux.max_scores, exact, same)
    assert verdict.ok, verdict


def test_dropout_does_not_touch_statistics() -> None:
    spec = spec_of("rows", dtype="float32")
    tensors = Case(40, 50, 1, 2, 1, "float32").tensors()
    wanted = results(fg.attention(spec)(*tensors, return_aux=ALL)[1])
    dropping = fg.attention(spec.replace(dropout=True, name="dropping"))
    out, aux = dropping(*tensors, return_aux=ALL, dropout_p=0.5)
    assert not torch.equal(out, fg.attention(spec)(*tensors))
    for name, value in results(aux).items():
        torch.testing.assert_close(value, wanted[name])


# ---- gradients ----------------------------------------------------------------------------------


def dense_entropy(q: Tensor, k: Tensor, slope: Tensor) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    at_q, at_k = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    keep = some_rows(0, 0, at_q, at_k)
    score = torch.tanh(q @ k.mT * q.shape[3] ** -0.5 * slope[:, None, None].to(q.dtype))
    empty = ~keep.any(-1, keepdim=True)
    weight = score.masked_fill(~keep, -torch.inf).masked_fill(empty, 0).softmax(-1)
    return torch.special.entr(weight.masked_fill(empty, 0)).sum(-1)


@pytest.mark.parametrize(
    ("dtype", "arch"),
    [("float32", None), ("bfloat16", None), slow("float16", "sm_80"), slow("bfloat16", "sm_90a")],
)
def test_the_gradient_of_the_entropy_meets_the_error_rule(dtype: str, arch: str | None) -> None:
    slope = fg.Tensor("slope", ("heads",), grad=True)
    spec = fg.AttentionSpec(
        some_rows,
        lambda score, b, h, q, k: fg.tanh(score * slope[h]),
        head_dim=64,
        dtype=dtype,
        name="of_entropy",
    )
    q, k, v = (x.requires_grad_() for x in Case(75, 90, 2, 4, 2, dtype).tensors())
    slopes = torch.rand(4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    how = {} if arch is None else {"backend": "emulator", "arch": arch}
    _, aux = fg.attention(spec)(
        q, k, v, return_aux=fg.AuxRequest(entropy=True), slope=slopes, **how
    )
    given = torch.randn(aux.entropy.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(aux.entropy, [q, k, slopes], given)

    def gradients(kind: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.detach().to(kind).requires_grad_() for x in (q, k)]
        leaf = slopes.detach().to(torch.promote_types(kind, torch.float32)).requires_grad_()
        return torch.autograd.grad(dense_entropy(*leaves, leaf), [*leaves, leaf], given.to(kind))

    exact, same = gradients(torch.float64), gradients(q.dtype)
    for one, *others in zip(found, exact, same, strict=True):
        verdict = reference.compare(one, *others, factor=reference.GRADIENT_FACTOR)
        assert verdict.ok, verdict


def test_the_entropy_has_no_second_derivative() -> None:
    q, k, v = Case(9, 9, 1, 2, 2, "float32", 16).tensors()
    op = fg.attention(fg.AttentionSpec(head_dim=16, dtype="float32"))
    request = fg.AuxRequest(lse=True, entropy=True)

    def of(q: Tensor) -> Tensor:
        return op(q, k, v, return_aux=request)[1].entropy.sum()

    leaf = q.clone().requires_grad_()
    (slope,) = torch.autograd.grad(of(leaf), leaf, create_graph=True)
    refused = "entropy has no second derivatives"
    with pytest.raises(InputError, match=refused):
        torch.autograd.grad(slope.sum(), leaf)
    with pytest.raises(InputError, match=refused):
        torch.func.jvp(torch.func.grad(of), (q,), (q,))
    compiled = torch.compile(torch.func.grad(of), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), slope.detach())


@pytest.mark.parametrize("dims", [("heads",), ("batch", "heads", "seq_q")])
def test_the_entropy_has_the_derivatives_that_a_sink_gives_it(dims: tuple[str, ...]) -> None:
    op = fg.attention(
        fg.AttentionSpec(
            lambda b, h, q, k: q + 3 >= k,
            sink=fg.Tensor("sink", dims, grad=True),
            head_dim=16,
            dtype="float32",
        )
    )
    q, k, v = Case(17, 30, 2, 4, 2, "float32", head_dim=16).tensors()
    shape = tuple({"batch": 2, "heads": 4, "seq_q": 17}[dim] for dim in dims)
    values = torch.Generator().manual_seed(1)
    sink = torch.randn(shape, generator=values)
    sink[0] = -torch.inf

    def found(q: Tensor, k: Tensor, sink: Tensor) -> Tensor:
        return op(q, k, v, sink=sink, return_aux=fg.AuxRequest(entropy=True))[1].entropy

    def exact(q: Tensor, k: Tensor, sink: Tensor) -> Tensor:
        keep = torch.arange(17)[:, None] + 3 >= torch.arange(30)
        scores = (q @ k.repeat_interleave(2, 1).mT / 4).masked_fill(~keep, -torch.inf)
        logits = sink.view(*sink.shape, *(1,) * (4 - max(sink.ndim, 2))).expand(2, 4, 17, 1)
        weights = torch.cat([scores, logits], 3).softmax(3)[..., :30]
        return torch.special.entr(weights.where(keep, 1)).sum(3)

    of_result = torch.randn(2, 4, 17, generator=values)
    wanted = torch.func.vjp(exact, q.double(), k.double(), sink.double())[1](of_result.double())
    for one, other in zip(torch.func.vjp(found, q, k, sink)[1](of_result), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    ways = tuple(torch.randn(x.shape, generator=values) for x in (q, k, sink))
    at, along = (q, k, sink), tuple(x.double() for x in ways)
    of_entropy = torch.func.jvp(exact, tuple(x.double() for x in at), along)[1]
    moved = torch.func.jvp(found, at, ways)[1]
    torch.testing.assert_close(moved.double(), of_entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalize", ["none", fg.Tensor("divisor", ("heads", "seq_q"))])
def test_statistics_are_of_the_modified_and_divided_weights(normalize: Any) -> None:
    spec = fg.AttentionSpec(
        some_rows,
        softcap,
        weight_mod=lambda score, *_: fg.maximum(score, 0) ** 2,
        normalize=normalize,
        statistics={"squares": OWN["squares"], "age": OWN["age"]},
        head_dim=16,
        dtype="float32",
    )
    q, k, v = Case(19, 30, 1, 4, 2, "float32", head_dim=16).tensors()
    divisor = {tensor.name: torch.rand(4, 19) + 1 for tensor in spec.tensors}
    _, aux = fg.attention(spec)(q, k, v, return_aux=OF_WEIGHTS, **divisor)
    exact = reference.statistics(spec, q, k, OF_WEIGHTS, tensors=divisor)
    for name, value in results(aux).items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", [None, slow("sm_80"), slow("sm_90a")])
def test_weights_that_sum_to_0_are_shares_of_0(arch: str | None) -> None:
    spec = fg.AttentionSpec(
        some_rows,
        weight_mod=lambda score, *_: fg.maximum(score, 0) ** 2,
        normalize="sum",
        statistics=OWN,
        dtype="float32",
    )
    q, k, v = Case(19, 30, 1, 4, 2, "float32").tensors()
    q[:, :, ::2] = 0  # no score is above 0
    how = {} if arch is None else {"backend": "emulator", "arch": arch}
    captured = captured_by(spec, 4, 30)
    _, aux = fg.attention(spec)(q, k, v, return_aux=OF_WEIGHTS, **captured, **how)
    check(results(aux), spec, q, k, tensors=captured)


def test_a_statistic_may_compare_divided_weights() -> None:
    spec = fg.AttentionSpec(
        some_rows,
        weight_mod=lambda score, *_: fg.maximum(score, 0) ** 2,
        normalize="sum",
        statistics={
            "heavy": fg.sum_over_keys(lambda score, weight, *_: fg.where(weight > 0.2, score, 0))
        },
        dtype="float32",
    )
    q, k, v = Case(19, 30, 1, 4, 2, "float32").tensors()
    q[:, :, ::2] = 0  # no score is above 0
    _, aux = fg.attention(spec)(q, k, v, return_aux=OF_WEIGHTS)
    check(results(aux), spec, q, k)
    assert (aux.statistics["heavy"] > 0).any()


def test_weights_of_a_part_of_a_whole_are_those_of_its_heads_and_length() -> None:
    spec = fg.AttentionSpec(
        weight_mod=lambda score, b, h, q, k: (2 + fg.tanh(score)) * (h + 1) / fg.seq_k,
        normalize=fg.Tensor("divisor", ("heads", "seq_q")),
        statistics={"squares": OWN["squares"], "age": OWN["age"]},
        head_dim=16,
        dtype="float32",
    )
    op = fg.attention(spec)
    q, k, v = Case(19, 30, 1, 4, 4, "float32", head_dim=16).tensors()
    divisor = torch.rand(4, 19) + 1
    whole = op(q, k, v, divisor=divisor, return_aux=OF_WEIGHTS)[1]
    heads = [x[:, 2:] for x in (q, k, v)]
    part = op(*heads, divisor=divisor, h_offset=2, whole={"heads": 4}, return_aux=OF_WEIGHTS)[1]
    for name, value in results(part).items():
        torch.testing.assert_close(value, results(whole)[name][:, 2:])
    keys = [x[:, :, :16] for x in (k, v)]
    part = op(q, *keys, divisor=divisor, whole={"seq_k": 30}, return_aux=OF_WEIGHTS)[1]
    torch.testing.assert_close(part.key_mass, whole.key_mass[:, :, :16])


@pytest.mark.parametrize("rng", [None, torch.tensor([3, 4])])
def test_statistics_have_the_random_numbers_of_their_output(rng: Tensor | None) -> None:
    op = fg.attention(
        fg.AttentionSpec(lambda b, h, q, k: fg.rand(b, h, q, k) < 0.5, head_dim=16, dtype="float32")
    )
    q, k, v = Case(17, 30, 1, 2, 1, "float32", head_dim=16).tensors()
    aux = op(q, k, v, rng=rng, return_aux=fg.AuxRequest(key_mass=True, block_mass=8))[1]
    torch.testing.assert_close(aux.key_mass.sum(2), torch.full((1, 2), 17.0))
    torch.testing.assert_close(aux.block_mass.sum(3), torch.ones(1, 2, 17))


def test_the_other_statistics_have_no_gradient() -> None:
    spec = spec_of("softcap", dtype="float32")
    q, k, v = (x.requires_grad_() for x in Case(20, 30, 1, 2, 1, "float32").tensors())
    captured = captured_by(spec, 2, 30)
    request = ALL._replace(lse=True)
    out, aux = fg.attention(spec)(q, k, v, return_aux=request, **captured)
    assert out.requires_grad
    assert aux.lse.requires_grad
    assert [x for x, value in results(aux).items() if value.requires_grad] == ["entropy"]
    gradient = torch.autograd.grad(aux.lse.sum(), q)[0]
    lse = fg.attention(spec)(q, k, v, return_lse=True, **captured)[1]
    torch.testing.assert_close(gradient, torch.autograd.grad(lse.sum(), q)[0])

    def of(q: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = fg.attention(spec)(q, k, v, return_aux=request, **captured)
        return out, aux.max_scores

    _, (of_out, of_maxima) = torch.func.jvp(of, (q.detach(),), (torch.ones_like(q),))
    assert of_out.any()
    assert not of_maxima.any()


# ---- bugs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[e / 2] += x[e];", "[e / 2] += fabsf(x[e]);"),
        slow("const int h_kv = h / (p.heads_q / p.heads_kv);", "const int h_kv = h / 2;"),
        slow("keys.lo - column", "keys.lo + 3 - column"),
    ],
)
def test_wrong_sums_over_queries_are_seen_by_the_error_rule(old: str, new: str) -> None:
    spec = fg.AttentionSpec(
        lambda b, h, q, k: (q >= k) & (q - k < 30),
        head_dim=64,
        dtype="bfloat16",
        name="ages",
        statistics={"age": fg.sum_over_queries(lambda s, w, b, h, q, k: w * (q - k - 3))},
    )
    q, k, v = Case(70, 90, 1, 4, 2, "bfloat16").tensors()
    assert is_right(spec, q, k, v, "sm_80", fg.AuxRequest(), "age")
    with planted("forward", old, new):
        assert not is_right(spec, q[:, :, :-1], k, v, "sm_80", fg.AuxRequest(), "age")


def is_right(
    spec: fg.AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arch: str,
    request: fg.AuxRequest,
    name: str,
) -> bool:
    """Whether a statistic keeps the error rule. Each shape of q binds kernels anew."""
    exact, same = (
        reference.statistics(spec, q, k, request, exact=exact)[name] for exact in (True, False)
    )
    how = {"backend": "emulator", "arch": arch}
    found = results(fg.attention(spec)(q, k, v, return_aux=request, **how)[1])[name]
    return reference.compare(found, exact, same).ok


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_a_running_maximum_that_lags_behind_is_seen(arch: str) -> None:
    spec = fg.AttentionSpec(head_dim=64, dtype="bfloat16", name="lagging")
    q, k, v = Case(20, 500, 1, 1, 1, "bfloat16").tensors()
    of = arch, fg.AuxRequest(max_scores=True), "max_scores"
    assert is_right(spec, q, k, v, *of)
    row = "[g][r]" if arch == "sm_80" else "[0][r]"
    with planted("forward", f"quad_maximum(row_top{row})", f"quad_maximum(row_max{row})"):
        assert not is_right(spec, q[:, :, :-1], k, v, *of)


def test_query_heads_of_a_group_that_are_mixed_up_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    interleave = Tensor.repeat_interleave

    def repeated(self: Tensor, times: int, dim: int) -> Tensor:
        return self.repeat(1, times, 1, 1) if dim == 1 else interleave(self, times, dim)

    monkeypatch.setattr(Tensor, "repeat_interleave", repeated)
    with pytest.raises(AssertionError, match="key_mass"):
        judged(spec_of("rows", dtype="float32"), Case(40, 50, 1, 4, 2, "float32"))


def test_two_blocks_that_write_the_same_keys_are_a_race() -> None:
    spec = spec_of("rows").replace(name="raced")
    q, k, v = Case(40, 150, 1, 1, 1, "bfloat16").tensors()
    bug = "const int q_start = q_tile * BLOCK_Q;", "const int q_start = q_tile * (BLOCK_Q / 2);"
    with planted("forward", *bug), caught("race"):
        fg.attention(spec)(
            *(q[:, :, :16], k, v),
            return_aux=fg.AuxRequest(key_mass=True),
            backend="emulator",
            arch="sm_80",
        )


# ---- the interface ------------------------------------------------------------------------------


def test_torch_compile_and_vmap_take_statistics() -> None:
    op = fg.attention(spec_of("rows", dtype="float32"))
    q, k, v = Case(20, 30, 2, 4, 2, "float32").tensors()
    q.requires_grad_()

    def user(q: Tensor) -> dict[str, Tensor]:
        return results(op(q, k, v, return_aux=ALL)[1])

    wanted = user(q)
    found = torch.compile(user, backend="aot_eager", fullgraph=True)(q)
    slope = torch.autograd.grad(wanted["entropy"].sum(), q)[0]
    torch.testing.assert_close(torch.autograd.grad(found["entropy"].sum(), q)[0], slope)
    several = torch.stack([q.detach(), q.detach().flip(2)])
    mapped = torch.vmap(user)(several)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
        torch.testing.assert_close(mapped[name][0], value)
        torch.testing.assert_close(mapped[name][1], user(several[1])[name])


def test_statistics_do_not_change_the_operator_of_the_output() -> None:
    spec = spec_of("softcap").replace(statistics=None, name="same")
    op, other = fg.attention(spec), fg.attention(spec.replace(statistics={"n": OWN["squares"]}))
    assert op.name == other.name
    assert fg.emit(spec).forward.text == fg.emit(other.spec).forward.text


def test_a_spec_with_statistics_comes_back_from_a_pickle() -> None:
    spec = spec_of("softcap")
    restored = pickle.loads(pickle.dumps(spec))
    assert restored == spec
    assert restored != spec.replace(statistics=None)
    assert dict(restored.replace(head_dim=128).statistics) == OWN


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"statistics": {"a b": OWN["age"]}}, "named sums or maxima"),
        ({"statistics": {"\u00e9cart": OWN["age"]}}, "named sums or maxima"),
        ({"statistics": {"a" * 81: OWN["age"]}}, "named sums or maxima"),
        ({"statistics": {"age": lambda s: s}}, "named sums or maxima"),
        ({"statistics": [1]}, "named sums or maxima"),
    ],
)
def test_statistics_of_another_kind_are_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(SpecError, match=what) as caught:
        fg.AttentionSpec(**given)
    assert "test_statistics.py" in caught.value.where


def test_functions_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(SpecError, match="returns a condition"):
        fg.sum_over_keys(lambda score, weight, b, h, q, k: score > 0)
    with pytest.raises(SpecError, match="does not take 6 arguments"):
        fg.max_over_keys(lambda score, weight: score)


@pytest.mark.parametrize(
    ("name", "given", "what"),
    [
        ("rows", {"return_aux": True}, "not a request"),
        ("rows", {"return_aux": fg.AuxRequest(block_mass=True)}, "block_mass by the keys"),
        ("rows", {"return_aux": fg.AuxRequest(block_mass=0)}, "block_mass by the keys"),
        ("rows", {"return_aux": fg.AuxRequest(lse=3)}, "names results by True"),
        ("rows", {"return_aux": fg.AuxRequest(block_mass=10**400)}, "names results by True"),
        ("rows", {"return_aux": fg.AuxRequest(lse=torch.ones(2))}, "names results by True"),
        ("rows", {"return_aux": ALL, "return_lse": True}, "cannot be given together"),
        ("shares", {"return_aux": ALL}, "no log-sum-exp and no entropy"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(
    name: str, given: dict[str, Any], what: str
) -> None:
    tensors = Case(9, 12, 1, 1, 1, "bfloat16").tensors()
    with pytest.raises(InputError, match=what):
        fg.attention(spec_of(name))(*tensors, **given)
