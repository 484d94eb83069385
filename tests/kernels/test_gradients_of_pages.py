"""The gradient of q where keys and values are in the pages of a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.shared.paths import PATHS
from tests.support.judged import check_gates
from tests.support.paged_calls import Sequences
from tests.support.paged_gradients import PagedGradient
from tests.support.paged_specs import paged
from tests.support.tiers import slow

Tensor = torch.Tensor

ARCHS = tuple(PATHS)
ROWS = Sequences.of((9, 9, 9, 9), (37, 300, 0, 129))
"""One empty sequence, and lengths that are no multiples of a page or of a tile."""


def gradient(name: str, of: Sequences, arch: str, page_size: int = 16, **how: Any) -> PagedGradient:
    return PagedGradient(paged(name, of, arch, page_size, **how))


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        ("causal", 16),
        slow("causal", 1),
        slow("causal", 12),
        slow("causal", 64),
        slow("causal", 256),
        slow("window", 16),
        slow("of_the_end", 16),
        slow("sink", 48),
        slow("softcap", 64),
        slow("bias", 16),
        slow("tree", 16),
    ],
)
def test_the_gradient_is_that_of_contiguous_keys(name: str, page_size: int, arch: str) -> None:
    of = Sequences.of((8, 8), (150, 8)) if name == "tree" else ROWS
    dq, outputs, record = gradient(name, of, arch, page_size).run()
    gradient(name, of, arch, page_size).judge(dq, outputs)
    delta, of_queries = record.launches
    assert [delta.build.source.role, of_queries.build.source.role] == ["delta", "dq"]
    check_gates(of_queries.build)
