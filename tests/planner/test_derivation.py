"""A derivation is its own arithmetic, its bounds are solved right, its refusals are true."""

from __future__ import annotations

import pytest
import sympy

from flashgen.kernels.planner import PlanRequest, plan_forward
from flashgen.kernels.planner.formulas import Formula, evaluate
from flashgen.kernels.planner.models import backward_sm80, forward_sm80, kernel_model
from flashgen.kernels.planner.models.kernel_model import KernelModel
from flashgen.kernels.planner.proofs.plan_constraints import SYMBOLS, expression
from flashgen.kernels.planner.quantities import QUANTITIES
from flashgen.kernels.planner.search import best_occupancy, evaluated, larger
from flashgen.kernels.planner.tile_problem import MODELS
from flashgen.spec.language.spec_file import load
from tests.support.examples import spec_path
from tests.support.plan_problems import (
    every_backward,
    every_hopper_kernel,
    every_plan,
    plan_of,
    problem_behind,
)
from tests.support.tiers import one_in


def formulas_of(kernel: KernelModel) -> list[Formula]:
    bounds = (kernel.smem, kernel.smem_bound, kernel.registers, kernel.register_bound)
    return [*kernel.sizes, *bounds, *kernel.cost_steps]


KERNELS = [
    pytest.param(kernel, id=f"{path}-{kernel.name}")
    for path, models in MODELS.items()
    for kernel in models.values()
]
# Plans of the forward kernel, of backward kernels, and of those of path sm_90a.
FORMULAS = list(
    dict.fromkeys(
        [value for value in vars(forward_sm80).values() if isinstance(value, Formula)]
        + [value for value in vars(backward_sm80).values() if isinstance(value, Formula)]
        + [formula for kernel in KERNELS for formula in formulas_of(*kernel.values)]
    )
)


FAMILIES = {
    "forward": lambda: every_plan(step=40),
    "backward": lambda: (k for b in every_backward(step=80) for k in b.kernels),
    "hopper": every_hopper_kernel,
}


@pytest.fixture(params=FAMILIES)
def plans(request):
    return FAMILIES[request.param]()


def test_every_printed_line_is_its_own_arithmetic_and_every_constraint_holds(plans):
    checked = 0
    for each in plans:
        assert set(each.quantities) <= set(QUANTITIES)
        assert each.quantities["cost"] == each.cost
        for line in each.derivation:
            # Where a step goes into the next, it is printed with four digits.
            assert evaluate(line.substituted) == pytest.approx(line.value, rel=2e-3), line
            if line.relation == "=":
                assert line.value == each.quantities[line.name]
            if line.relation == "<=":
                assert line.name == ("block_k" if each.rows_are_queries else "block_q")
                assert getattr(each, line.name) <= line.value
            if line.limit is not None:
                assert line.value <= line.limit
            checked += 1
        limited = [line.name for line in each.derivation if line.limit is not None]
        assert limited == ([] if each.streams else ["smem", "smem_sm", "registers"])
    assert checked > 1000


def test_every_refusal_of_a_larger_tile_is_true(plans):
    for each in plans:
        if each.streams:
            continue
        problem, tile = problem_behind(each)
        bigger_tiles = larger(evaluated(problem, tile))
        for refusal, (change, bigger) in zip(each.refused, bigger_tiles, strict=True):
            assert refusal.change.startswith(change)
            best = best_occupancy(problem, bigger)
            if refusal.quantity == "cost":
                assert best.excesses == ()
                assert refusal.needs == best.cost >= each.cost == refusal.limit
            else:
                broken = best.excesses[0]
                assert (refusal.quantity, refusal.needs) == (broken.quantity, broken.needs)
                assert refusal.needs > refusal.limit


def test_lines_fit_the_banner_of_an_emitted_file(plans):
    for each in plans:
        for text in (str(each), each.explain()):
            for line in text.splitlines():
                assert len(f"// {line}") <= 100
                assert line == line.rstrip()


def test_whole_numbers_are_exact():
    for line in plan_of(128).derivation:
        if isinstance(line.value, int) and not {"busiest", "alone"} & {line.name}:
            assert evaluate(line.substituted) == line.value


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.text)
def test_formulas_mention_only_quantities_with_a_meaning(formula):
    assert expression(formula).free_symbols == {SYMBOLS[name] for name in formula.names}
    assert set(formula.names) <= set(QUANTITIES)


@pytest.mark.parametrize("formula", one_in(3, FORMULAS), ids=lambda formula: formula.text)
def test_the_expression_and_the_function_are_the_same_formula(formula):
    values = {name: 3 + 2 * place for place, name in enumerate(QUANTITIES)}
    as_sympy = expression(formula).subs({SYMBOLS[name]: values[name] for name in formula.names})
    assert float(as_sympy) == pytest.approx(formula(values))


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_register_bound_is_the_register_formula_solved(kernel):
    bound = expression(kernel.registers).subs(
        SYMBOLS[kernel.walks], expression(kernel.register_bound)
    )
    assert sympy.simplify(bound - SYMBOLS["register_limit"]) == 0


@pytest.mark.parametrize("kernel", [of for of in KERNELS if of.id != "sm_80-forward"])
def test_the_shared_memory_bound_fills_m_and_m_sm(kernel):
    """But for what rounding up to the alignment of a buffer adds, and the room that results may
    need beyond the operands."""
    m, m_sm, blocks, reserved = (SYMBOLS[n] for n in ("M", "M_sm", "blocks", "reserved"))
    smem = expression(kernel.smem).replace(sympy.ceiling, lambda whole: whole)
    smem = smem.replace(lambda part: isinstance(part, sympy.Max) and 0 in part.args, lambda _: 0)
    filled = smem.subs(SYMBOLS[kernel.walks], expression(kernel.smem_bound))
    assert sympy.simplify(filled - sympy.Min(m, m_sm / blocks - reserved)) == 0


def test_the_shared_memory_bound_of_block_k_fills_m_and_m_sm():
    """With Q, K and V in the place of the maximum, and either of the two capacities binding."""
    m, m_sm, blocks, reserved = (SYMBOLS[n] for n in ("M", "M_sm", "blocks", "reserved"))
    block_q, block_k, d_qk, d_v, e = (
        SYMBOLS[n] for n in ("block_q", "block_k", "d_qk", "d_v", "e")
    )
    smem = e * (block_q * d_qk + SYMBOLS["stages"] * block_k * (d_qk + d_v))
    room = sympy.Min(m, m_sm / blocks - reserved)
    filled = smem.subs(block_k, expression(forward_sm80.BLOCK_K_BY_SMEM))
    assert sympy.simplify(filled - room) == 0
    # The other branch of the maximum, O staged over everything, does not grow with block_k.
    assert expression(forward_sm80.SMEM) == e * sympy.Max(
        sympy.expand_mul(smem / e, deep=False), block_q * d_v
    )


def test_what_a_tile_needs_never_falls_with_the_number_of_blocks():
    """So that the search may stop at the first number of resident blocks that does not fit."""
    blocks = SYMBOLS["blocks"]
    assert expression(kernel_model.SMEM_OF_SM).diff(blocks).is_positive
    for kernel in MODELS["sm_80"].values():
        for formula in (*kernel.sizes, kernel.smem, kernel.registers):
            assert blocks not in expression(formula).free_symbols
    at = evaluated(*problem_behind(plan_of(64))).quantities
    limits = [kernel_model.REGISTER_LIMIT({**at, "blocks": count}) for count in range(1, 17)]
    assert limits == sorted(limits, reverse=True)


def test_what_binds_is_what_refused_a_larger_tile():
    shared, registers, dearer = plan_of(192, "float16", "sm_86"), plan_of(128), plan_of(64)
    assert "smem" in shared.binding
    assert "registers" in registers.binding
    assert "cost" in dearer.binding
    for each in (shared, registers, dearer):
        shown = [line for line in each.explain().splitlines() if line.endswith("(binds)")]
        assert len(shown) == len(each.binding)


def test_the_short_form_leaves_out_only_details():
    each = plan_of(64)
    short, full = str(each).splitlines(), each.explain().splitlines()
    assert set(short) < set(full)
    assert not [line for line in short if line.lstrip().startswith(("occupied =", "rest ="))]


def test_the_printed_derivation():
    text = str(plan_of(128))
    for line in (
        "plan      block_q 128  block_k 48  warps 4  stages 1  blocks per SM 2",
        "          smem = e*max(block_q*d_qk + stages*block_k*(d_qk + d_v), block_q*d_v)",
        "            = 2*max(128*128 + 1*48*(128 + 128), 128*128) = 57,344 B of 166,912 B",
        "            = 2*(48 + 128)/2 + 64 + 2*48/8 + 0 = 252 of 255  (binds)",
        "          tensor = factors*(d_qk + d_v)/tensor_rate = 1*(128 + 128)/1024 = 0.2500 clk",
        "          refused block_k 64: needs 272 registers per thread, 255 allowed",
    ):
        assert line in text.splitlines()


def test_m_is_a_symbol_until_a_number_is_put_in():
    at = evaluated(*problem_behind(plan_of(128))).quantities
    known_but_m = {SYMBOLS[n]: v for n, v in at.items() if n not in ("M", "M_sm", "block_k")}
    bound = expression(forward_sm80.BLOCK_K_BY_SMEM).subs(known_but_m)
    assert bound.free_symbols == {SYMBOLS["M"], SYMBOLS["M_sm"]}
    values = [bound.subs({SYMBOLS["M"]: m, SYMBOLS["M_sm"]: m + 1024}) for m in (10**5, 2 * 10**5)]
    assert values[0] < values[1]


def test_two_row_groups_halve_the_reads_of_k_and_v_from_shared_memory():
    at = evaluated(*problem_behind(plan_of(128))).quantities
    one, two = ({**at, "row_groups": groups} for groups in (1, 2))
    reads = at["e"] * (at["d_qk"] + at["d_v"]) / 16 / 128
    steps = forward_sm80.MODELS["forward", 2].cost_steps
    shared = next(step for step in steps if step.name == "shared")
    assert shared(one) - shared(two) == pytest.approx(reads / 2)


@pytest.mark.parametrize("name", ["butterfly", "bigbird", "local_global", "block_sparse"])
def test_no_tile_over_a_block_layout_is_refused_for_a_cost_below_the_chosen_one(name):
    """Costs are those of the scores that a tile computes, of which larger tiles have more."""
    found = plan_forward(PlanRequest(load(spec_path(name)), "sm_90a"))
    refusals = [each for each in found.refused if each.quantity in ("cost", "whole boxes")]
    for each in refusals:
        if each.quantity == "cost":
            assert each.needs >= each.limit
            assert "clk per score of the call against" in str(each)
        else:
            assert each.needs % each.limit
            assert f"{each.needs} keys are no whole boxes of {each.limit}" in str(each)
    assert refusals or name == "local_global"  # larger tiles of local_global do not fit
