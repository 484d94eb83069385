"""Mods of hundreds of operations: the emitted kernels and the tiled algorithms against the oracle.

All kinds of `tests/support/large_mods.py`: deep chains, repeated squares, deep choices, shared
subexpressions, wide sums of learned elements, integer arithmetic, wide disjunctions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.kernels.codegen.spec_function import MOST_SINES
from flashgen.shared.paths import PATHS
from tests.support.judged import Call
from tests.support.large_mods import BUCKETS, KINDS, spec_of
from tests.support.shapes import Case
from tests.support.tiers import one_in

SIZES = {"sines": 4, **dict.fromkeys(("squares", "ladder", "shared", "reads"), 90)}
SIZES |= {"integers": 120, "terms": 160}
"""Operations with which a function is not inlined, and has several parts but for sines."""


def call_of(kind: str, size: int, **how: Any) -> Call:
    spec = spec_of(kind, size, head_dim=16)
    numbers = {}
    if spec.tensors:
        numbers["tensors"] = {
            "table": torch.randn(BUCKETS, generator=torch.Generator().manual_seed(3))
        }
    case = Case(40, 48, 1, 1, 1, spec.dtype, spec.head_dim)
    return Call(spec, case.tensors(size), numbers, **how)


@pytest.mark.parametrize("kind", one_in(4, KINDS, 2))
def test_the_tiled_algorithms_meet_the_error_rule_with_a_large_expression(kind: str) -> None:
    call = call_of(kind, SIZES[kind], backend="tiled")
    call.judged_backward(call.judged_forward())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_meet_the_error_rule_with_a_large_expression(kind: str, arch: str) -> None:
    call = call_of(kind, SIZES[kind], arch=arch)
    call.judged_backward(call.judged_forward())


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
def test_sines_that_are_called_meet_the_error_rule(arch: str) -> None:
    call = call_of("sines", MOST_SINES + 1, arch=arch)
    assert "__noinline__ float sine(" in fg.emit(call.spec, arch).forward.text
    call.judged_backward(call.judged_forward())
