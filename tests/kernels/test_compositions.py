"""Combined features meet the error rule: the attention of published models, one kernel each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import flashgen as fg
from tests.support.judged import Call, dropping, sized
from tests.support.masks import causal
from tests.support.shapes import DTYPES, Case

Tensor = torch.Tensor

slope = fg.Tensor("slope", ("heads",), "float32")
table = fg.Tensor("table", ("distance",), "float32", grad=True)
ids = fg.Tensor("ids", ("batch", "seq_k"), "int32")
length = fg.Tensor("length", ("batch",), "int64")
bias = fg.Tensor("bias", ("batch", "heads", "seq_q", "seq_k"), "float32", grad=True)
window = fg.Scalar("window", "int32")


def causal_window(b, h, q, k):
    return (q >= k) & (q - k < window)


def document(b, h, q, k):
    return ids[b, q] == ids[b, k]


def padding(b, h, q, k):
    return k < length[b]


def softcap(score, b, h, q, k):
    return 30 * fg.tanh(score / 30)


def alibi(score, b, h, q, k):
    return score + slope[h] * (k - q)


def relative(score, b, h, q, k):
    return score + table[q - k + fg.seq_k - 1]


def pair_bias(score, b, h, q, k):
    return score + bias[b, h, q, k]


def near_or_far(b, h, i, j):
    return (i - j) % 3 != 1 or (i + b + h) % 4 == 0


def bottom_right(b, h, q, k):
    return q + fg.seq_k - fg.seq_q >= k


def captured(case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    """A value for each tensor above."""
    sizes = case.batch, case.heads_q, case.seq_q, case.seq_k
    return {
        "slope": torch.tensor([2.0 ** -(h + 1) for h in range(case.heads_q)]),
        "table": torch.randn(case.seq_q + case.seq_k, generator=generator),
        "ids": torch.randint(4, (case.batch, max(sizes[2:])), generator=generator).sort(1)[0].int(),
        "length": torch.randint(1, case.seq_k + 1, (case.batch,), generator=generator),
        "bias": torch.randn(sizes, generator=generator),
        "sink": torch.randn(case.heads_q, generator=generator),
        "cu_seqlens_q": torch.tensor([0, 100, 100, 117, 317, 381, 382], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 120, 125, 142, 142, 206, 356], dtype=torch.int32),
        "layout": torch.rand(6, 1, 7, 4, generator=generator) < 0.6,
    }


@dataclass(frozen=True)
class Composition:
    """A spec's options and the sizes to try it on."""

    case: Case
    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None
    dropout_p: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


COMPOSITIONS = {
    "gemma2": Composition(Case(130, 130, 2, 4, 2, head_dim=64), causal_window, softcap),
    "alibi_dropout": Composition(Case(113, 203, 1, 4, 4, head_dim=64), causal, alibi, 0.15),
    "t5_documents": Composition(Case(127, 140, 2, 2, 1, head_dim=64), document, relative, 0.1),
    "alphafold": Composition(Case(96, 150, 2, 4, 4, head_dim=32), padding, pair_bias),
    "gpt_oss": Composition(
        Case(130, 140, 1, 6, 2, head_dim=64), causal_window, options={"sink": True}
    ),
    "sparse_dropout": Composition(
        Case(150, 210, 2, 4, 2, head_dim=64),
        causal,
        dropout_p=0.2,
        options={"block_sparse": fg.BlockSparse(near_or_far, block_q=48, block_k=32)},
    ),
    "everything": Composition(
        Case(391, 361, 1, 2, 1, head_dim=32),
        bottom_right,
        softcap,
        dropout_p=0.2,
        options={
            "packed": True,
            "sink": True,
            "block_sparse": fg.BlockSparse(block_q=32, block_k=48),
        },
    ),
    "deepseek": Composition(Case(128, 217, 1, 2, 2, head_dim=192, head_dim_v=128), causal),
}


# float32 has no kernel of its own there.
ON_HOPPER = [(name, dtype) for name in COMPOSITIONS for dtype in DTYPES if dtype != "float32"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_meets_the_error_rule(name: str, dtype: str) -> None:
    check_composition(name, dtype, "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), ON_HOPPER)
def test_a_composition_meets_the_error_rule_on_hopper(name: str, dtype: str) -> None:
    check_composition(name, dtype, "sm_90a")


def check_composition(name: str, dtype: str, arch: str) -> None:
    of = COMPOSITIONS[name]
    case = replace(of.case, dtype=dtype)
    spec = fg.AttentionSpec(of.mask, of.score, name=name, **of.options)
    check(sized(spec, case, of.dropout_p), case, of.dropout_p, arch)


# Those that test_forward.py and test_backward.py have too are in the slow tier here.
@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 24, 40, 80, 96, 112, 256])
def test_any_head_dim_that_is_a_multiple_of_eight_works(head_dim: int) -> None:
    dtype = DTYPES[head_dim // 8 % 3]
    spec = fg.AttentionSpec(causal, softcap, head_dim=head_dim, dtype=dtype, name="dims")
    check(spec, Case(70, 90, 1, 2, 1, dtype, head_dim), 0.0)


def check(spec: fg.AttentionSpec, case: Case, dropout_p: float, arch: str = "sm_80") -> None:
    known = captured(case, torch.Generator().manual_seed(case.scores))
    numbers: dict[str, Any] = {
        "scalars": {scalar.name: 37 for scalar in spec.scalars},
        # A layout's compressed form is made of it.
        "tensors": {t.name: known[t.name] for t in spec.tensors if t.name in known},
    }
    call = Call(spec, case.tensors(), numbers | dropping(dropout_p), arch=arch)
    call.judged_backward(call.judged_forward())
