"""Calls with keys and values in the pages of a cache: results of every kind of call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.shared.paths import PATHS
from tests.support.judged import check_few_spills, check_gates
from tests.support.paged_calls import Paged, Sequences
from tests.support.paged_specs import CAUSAL, DECODING, MIXED, VERIFYING, paged
from tests.support.tiers import slow

Tensor = torch.Tensor

ARCHS = tuple(PATHS)


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize(
    ("name", "of", "page_size", "split_size"),
    [
        slow("causal", DECODING, 16, 128),
        ("tree", VERIFYING, 16, 64),
        slow("window", DECODING, 64, 64),
        slow("of_the_end", VERIFYING, 16, 64),
        slow("sink", VERIFYING, 48, 96),
        slow("softcap", DECODING, 128, 128),
        slow("alibi", VERIFYING, 16, 256),
        slow("bias", DECODING, 16, 112),
        slow("causal", Sequences.of((40, 40), (17, 90)), 16, None),  # more queries than keys
        slow("causal", Sequences.of((2, 2, 2), (0, 1, 33)), 16, 16),
        *(slow("tree", Sequences.of((n, n), (150, 8)), 16, 64) for n in range(1, 8)),
    ],
)
def test_results_are_those_of_contiguous_keys(
    name: str, of: Sequences, page_size: int, split_size: int | None, arch: str
) -> None:
    run = paged(name, of, arch, page_size, split_size=split_size).judged()
    check_gates(run.report.kernel)


@pytest.mark.parametrize(
    ("arch", "name", "split_size"),
    [
        ("sm_80", "of_the_end", 64),
        slow("sm_90a", "of_the_end", 64),
        *(slow(arch, "causal", None) for arch in ARCHS),
        *(slow(arch, "sink", 128) for arch in ARCHS),
    ],
)
def test_queries_of_different_numbers_are_packed(
    arch: str, name: str, split_size: int | None
) -> None:
    call = dataclasses.replace(paged(name, MIXED, arch, split_size=split_size), packed=True)
    call.judged()


def test_packed_rows_of_no_sequence_have_no_sink_where_splits_are_merged() -> None:
    op = fg.attention(CAUSAL.replace(head_dim=32, sink=True))
    q, k = torch.randn(2, 1, 2, 5, 32, generator=torch.Generator().manual_seed(1)).half()
    cache = torch.zeros(8, 2, 5, 32).half()
    cache[:1] = k
    integers = {"page_table": [[0] * 8], "cache_seqlens": [5], "cu_seqlens_q": [0, 3]}
    given: dict[str, Any] = {name: torch.tensor(x).int() for name, x in integers.items()}
    given |= {"sink": torch.ones(2), "return_lse": True, "split_size": 16}
    for backend in ("tiled", "emulator"):
        out, lse = op(q, cache, cache, **given, backend=backend)
        assert (lse[:, :, :3] >= 1).all()
        assert (lse[:, :, 3:] == -torch.inf).all(), backend
        assert not out[:, :, 3:].any()
    assert op.report.merge is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dims", "dtype"),
    [
        ("sm_90a", (40, 96), "bfloat16"),
        ("sm_80", (40, 96), "bfloat16"),
        *((arch, (128, 128), "bfloat16") for arch in ARCHS),
        *((arch, (256, 256), "float16") for arch in ARCHS),
        *((arch, (192, 128), "bfloat16") for arch in ARCHS),
        ("sm_80", (64, 64), "float32"),
        ("sm_80", (72, 40), "float32"),
    ],
)
def test_head_dims_and_dtypes(arch: str, dims: tuple[int, int], dtype: str) -> None:
    spec = CAUSAL.replace(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype)
    of = Sequences.of((2, 2), (130, 47), dims=dims, dtype=dtype)
    run = Paged(spec, of, 16, how={"arch": arch, "split_size": 64}).judged()
    (check_few_spills if dims[0] == 256 else check_gates)(run.report.kernel)


def test_the_cpu_path_computes_the_same() -> None:
    for name in ("of_the_end", "sink"):
        how = {"backend": "tiled", "arch": None}
        paged(name, VERIFYING, "sm_80").judged(**how)
        packed = dataclasses.replace(paged(name, MIXED, "sm_80"), packed=True)
        packed.judged(**how, split_size=64)
