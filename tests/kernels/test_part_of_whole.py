"""Calls on some heads and some positions of a whole compute what the call on the whole does."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest
import torch

import flashgen as fg
from flashgen.reference import attention
from flashgen.shared.paths import PATHS
from flashgen.shared.signature import WHOLE
from flashgen.spec.language.signature import in_whole
from tests.support.examples import spec_path
from tests.support.judged import normal
from tests.support.tiers import slow

Tensor = torch.Tensor

HEADS, HEADS_KV, SEQ, D = 4, 2, 96, 16
SLOPES = fg.Tensor("slopes", ("heads",), "float32", grad=True)
CUTS = (slice(0, 2), slice(2, 4))


def mask_mod(b, h, q, k):  # type: ignore[no-untyped-def]
    return (q - k < 8 * (h + 1) + fg.heads) & (k < fg.seq_k - h) & (q + k < fg.seq_q + 70)


def score_mod(score, b, h, q, k):  # type: ignore[no-untyped-def]
    return score + SLOPES[h] * (k - q) / fg.seq_k + 0.01 * h * fg.heads


def by_head(b: int, h: int, i: int, j: int) -> bool:
    return (i + j + h) % 3 != 0


SPECS = {
    "sizes": fg.AttentionSpec(mask_mod, score_mod, head_dim=D, name="reads_sizes"),
    "dropout_and_sink": fg.AttentionSpec(
        score_mod=score_mod, head_dim=D, dropout=True, sink=True, name="drops_beside_sink"
    ),
    "layout_of_heads": fg.AttentionSpec(
        head_dim=D, block_sparse=fg.BlockSparse(by_head, block_q=16, block_k=32), name="by_head"
    ),
    "given_layout": fg.AttentionSpec(
        mask_mod, head_dim=D, block_sparse=fg.BlockSparse(block_q=16, block_k=32), name="given"
    ),
}


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    learned: tuple[Tensor, ...]


def numbers_of(spec: fg.AttentionSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tensor in spec.tensors:
        if tensor.grad:
            found[tensor.name] = torch.linspace(-0.5, 0.5, HEADS)
    if spec.block_sparse is not None and not spec.block_sparse.is_static:
        generator = torch.Generator().manual_seed(3)
        found["layout"] = torch.rand(1, HEADS, SEQ // 16, SEQ // 32, generator=generator) < 0.6
    if spec.dropout:
        found |= {"dropout_p": 0.3, "rng": torch.tensor([5, 9])}
    return found


def computed(
    spec: fg.AttentionSpec, heads: slice, rows: slice, how: dict[str, str], **part: Any
) -> Results:
    """The results for some heads and some queries, given the operands of the whole."""
    group = HEADS // HEADS_KV
    q, do = (normal((2, HEADS, SEQ, D), torch.float16, i)[:, heads, rows] for i in (1, 4))
    of_keys = slice(heads.start // group, heads.stop // group)
    k, v = (normal((2, HEADS_KV, SEQ, D), torch.float16, i)[:, of_keys] for i in (2, 3))
    numbers = numbers_of(spec)
    learned = [x.requires_grad_() for name, x in numbers.items() if name in ("slopes", "sink")]
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = fg.attention(spec)(*given, return_lse=True, **how, **numbers, **part)
    gradients = torch.autograd.grad((out, lse), [*given, *learned], (do, lse.detach() * 0.1))
    return Results(out.detach(), lse.detach(), *gradients[:3], gradients[3:])


WHERE = {"tiled": {"backend": "tiled"}} | {
    arch: {"backend": "emulator", "arch": arch} for arch in PATHS
}


@pytest.mark.parametrize(
    ("name", "where"),
    [(name, where) if where == "tiled" else slow(name, where) for name in SPECS for where in WHERE],
)
def test_some_heads_are_those_of_the_whole(name: str, where: str) -> None:
    """torch.equal for each head; learned gradients are sums over the parts."""
    spec = SPECS[name]
    whole = computed(spec, slice(0, HEADS), slice(0, SEQ), WHERE[where])
    parts = [
        computed(
            spec,
            heads,
            slice(0, SEQ),
            WHERE[where],
            h_offset=heads.start,
            whole={"heads": HEADS},
        )
        for heads in CUTS
    ]
    for place, expected in enumerate(whole[:5]):
        found = torch.cat([part[place] for part in parts], 1)
        assert torch.equal(found, expected), Results._fields[place]
    for expected, *found in zip(whole.learned, *(part.learned for part in parts), strict=True):
        torch.testing.assert_close(sum(found), expected, rtol=1e-4, atol=1e-5)
        for gradient, heads in zip(found, CUTS, strict=True):
            others = torch.ones(HEADS, dtype=torch.bool)
            others[heads] = False
            assert not gradient[others].any()


@pytest.mark.parametrize("where", ["tiled", slow("sm_80"), slow("sm_90a")])
def test_packed_sequences_keep_their_lengths(where: str) -> None:
    """The mask compares the lengths of each sequence, which are not those of the call."""
    op = fg.attention(fg.load(spec_path("variable_length")))
    q, k, v = (normal((1, 2, n, 64), torch.float16, i) for i, n in enumerate((50, 90, 90)))
    ends = {"cu_seqlens_q": [0, 20, 50], "cu_seqlens_k": [0, 50, 90]}
    tensors = {name: torch.tensor(x, dtype=torch.int32) for name, x in ends.items()}
    expected = op(q, k, v, **tensors, **WHERE[where])
    part = {"h_offset": 1, "whole": {"heads": 2}}
    found = op(q[:, 1:], k[:, 1:], v[:, 1:], **tensors, **part, **WHERE[where])
    assert torch.equal(found, expected[:, 1:])


@pytest.mark.parametrize("where", ["tiled", slow("sm_80"), slow("sm_90a")])
def test_some_queries_see_the_lengths_of_the_whole(where: str) -> None:
    """Rows of the whole's results, within the error that another cut of tiles makes."""
    spec = SPECS["sizes"]
    whole = computed(spec, slice(0, HEADS), slice(0, SEQ), WHERE[where])
    rows = slice(32, SEQ)
    part = computed(spec, slice(0, HEADS), rows, WHERE[where], q_offset=32, whole={"seq_q": SEQ})
    torch.testing.assert_close(part.out, whole.out[:, :, rows], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(part.lse, whole.lse[:, :, rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(part.dq, whole.dq[:, :, rows], rtol=4e-3, atol=4e-3)


def test_dropout_of_some_heads_needs_no_other_seed() -> None:
    spec = SPECS["dropout_and_sink"]
    first, other = (
        computed(
            spec, CUTS[0], slice(0, SEQ), WHERE["tiled"], h_offset=start, whole={"heads": HEADS}
        )
        for start in (0, 2)
    )
    assert not torch.equal(first.out, other.out)


@pytest.mark.parametrize("name", SPECS)
def test_the_oracle_of_some_heads_is_that_of_the_whole(name: str) -> None:
    spec = SPECS[name]
    numbers = numbers_of(spec)
    drops = {key: numbers.pop(key) for key in ("dropout_p", "rng") if key in numbers}
    q, k, v = (
        normal((2, heads, SEQ, D), torch.float16, i)
        for i, heads in enumerate((HEADS, HEADS_KV, HEADS_KV))
    )
    whole = attention(spec, q, k, v, tensors=numbers, **drops)
    for heads in CUTS:
        kv = slice(heads.start // 2, heads.stop // 2)
        scalars = dict(zip(WHOLE, (heads.start, HEADS, SEQ, SEQ), strict=True))
        of_heads = q[:, heads], k[:, kv], v[:, kv]
        part = attention(in_whole(spec), *of_heads, tensors=numbers, scalars=scalars, **drops)
        for found, expected in zip(part, whole, strict=True):
            assert torch.equal(found, expected[:, heads])


@pytest.mark.slow
def test_a_compiled_call_sees_the_heads_of_the_whole() -> None:
    spec = SPECS["sizes"]
    op, slopes = fg.attention(spec), torch.linspace(-0.5, 0.5, HEADS)
    q, k, v = (normal((1, 2, 32, D), torch.float16, i) for i in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return op(q, k, v, slopes=slopes, h_offset=2, whole={"heads": HEADS, "seq_k": SEQ})

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))
    assert not torch.equal(call(q, k, v), op(q, k, v, slopes=slopes[:2]))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"h_offset": 3}, "are not among those of the whole"),
        ({"h_offset": -1, "whole": {"heads": 4}}, "are not among those of the whole"),
        ({"h_offset": 1.5, "whole": {"heads": 4}}, "h_offset is not a whole number"),
        ({"h_offset": torch.tensor([1, 2])}, "h_offset is not a whole number"),
        ({"whole": {"heads": True}}, "is not a whole number"),
        ({"whole": {"seq_q": 3}}, "fewer positions than the call: seq_q"),
        ({"whole": {"rows": 3}}, "whole is a mapping of sizes"),
        ({"whole": 4}, "whole is a mapping of sizes"),
        ({"whole": {"heads": HEADS}, "slopes": torch.zeros(2)}, "slopes does not have the length"),
    ],
)
def test_a_part_outside_its_whole_is_refused(given: dict[str, Any], what: str) -> None:
    q, k, v = (normal((1, 2, 32, D), torch.float16, i) for i in range(3))
    with pytest.raises(fg.InputError, match=what):
        fg.attention(SPECS["sizes"])(q, k, v, **{"slopes": torch.zeros(HEADS), **given})


@pytest.mark.parametrize("name", SPECS)
def test_the_spec_of_a_part_survives_pickling(name: str) -> None:
    spec = in_whole(SPECS[name])
    found = pickle.loads(pickle.dumps(spec))
    assert found == spec
    assert found.keep == spec.keep
    assert [x.key for x in found.scalars] == [x.key for x in spec.scalars]
