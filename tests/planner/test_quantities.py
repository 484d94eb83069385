"""Plans carry the evaluated quantities of their model by name, and print them."""

from __future__ import annotations

import pickle
import types

import pytest

import flashgen as fg
from flashgen.planner import Plan, plan, plan_backward
from flashgen.planner.quantities import QUANTITIES, Quantities


def plans() -> list[Plan]:
    spec = fg.AttentionSpec(head_dim=64)
    return [
        each
        for arch in ("sm_80", "sm_90a")
        for each in (plan(spec, arch), *plan_backward(spec, arch).kernels)
    ]


def test_every_quantity_has_a_meaning() -> None:
    for each in plans():
        assert set(each.quantities) <= set(QUANTITIES)


def test_the_derivation_prints_the_quantities() -> None:
    for each in plans():
        for line in each.derivation:
            if line.relation == "=":
                assert line.value == each.quantities[line.name]
        assert each.quantities["cost"] == each.cost


def test_quantities_are_immutable_and_can_be_pickled() -> None:
    quantities = plans()[0].quantities
    with pytest.raises(TypeError):
        quantities["cost"] = 0  # type: ignore[index]
    assert isinstance(pickle.loads(pickle.dumps(quantities)), Quantities)
    assert pickle.loads(pickle.dumps(quantities)) == quantities


def test_importing_the_planner_leaves_plan_a_function() -> None:
    import flashgen.planner.api

    assert isinstance(fg.plan, types.FunctionType)
    assert fg.plan is flashgen.planner.plan is flashgen.planner.api.plan
