"""Every spec's forward kernel, counted: no bank conflict in its main loop, operands coalesced."""

from __future__ import annotations

from pathlib import Path

import pytest

import flashgen as fg
from flashgen.tools.profile.run import profile_forward
from tests.support.examples import SPEC_IDS, SPECS, fitted, values_of
from tests.support.profiles import random_operands
from tests.support.shapes import Case
from tests.support.tiers import case_id, take_turns

OPERANDS = {"q", "k", "v", "o"}


def check(path: Path, spec: fg.AttentionSpec) -> None:
    case = fitted(spec, Case(150, 170, 1, 2, 2, spec.dtype, spec.head_dim))
    sizes = (case.batch, case.heads_q, case.heads_kv, case.seq_q, case.seq_k)
    _, profiles = profile_forward(spec, *random_operands(spec, sizes), **values_of(path, case))
    (profile,) = (each for each in profiles if each.plan.kernel == "forward")
    loop = [phase.totals for phase in profile.phases if phase.number.startswith("5")]
    assert sum(totals.wavefronts for totals in loop) > 500
    assert sum(totals.bank_conflicts for totals in loop) == 0
    found = {tensor.name: tensor for tensor in profile.tensors}
    assert set(found) >= OPERANDS
    for name in OPERANDS:
        assert found[name].sectors == found[name].sectors_least > 0, name


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if n % 36 == 0 else pytest.mark.slow) for n, p in enumerate(SPECS)],
    ids=SPEC_IDS,
)
def test_no_bank_conflict_in_the_main_loop_and_operands_coalesced(path):
    check(path, fg.load(path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "head_dims"), take_turns(SPECS, ((32, 128), (96, 256), (192,))), ids=case_id
)
def test_the_same_at_other_head_dims(path, head_dims):
    for head_dim in head_dims:
        check(path, fg.load(path).replace(head_dim=head_dim))
