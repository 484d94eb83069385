"""The backward kernel that makes the gradients of learned tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from flashgen import expr as fx
from flashgen.analysis import Analysis, kind_of_sum
from flashgen.expr import Element
from flashgen.plan import Plan
from flashgen.render.backward_sm90 import panels_of_plan, products_of
from flashgen.render.exponential import Exponential
from flashgen.render.functions import SpecFunction, SpecFunctions
from flashgen.render.kernel import kernel
from flashgen.render.readers import SUMS
from flashgen.render.source import Source
from flashgen.render.walk import ScoreCode, walk_of
from flashgen.spec import AttentionSpec


@dataclass(frozen=True)
class Part:
    """One element that the score reads, and how what belongs to it is added up.

    Attributes:
        sum: name of its sum, and of its field in ``Partials``.
        kind: as `analysis.kind_of_sum` has it. For "block" a lane has one sum; for "row" one for
            each row; for "column" the warp's rows are added up in each step; for "element" every
            score adds for itself.
        place: the function that says where the sum goes.
        add: the function that adds to it, given the place and the number.
        what: the element as the user wrote it.
    """

    sum: str
    kind: str
    place: SpecFunction
    add: str
    what: str


@dataclass(frozen=True)
class Exact:
    """What a kernel of exact sums keeps for one learned tensor.

    Attributes:
        name: of the variable.
        tensor: name of the tensor.
    """

    name: str
    tensor: str


def _index_symbols(*elements: Element) -> set[sympy.Basic]:
    return {symbol for e in elements for index in e.indices for symbol in index.free_symbols}


@dataclass(frozen=True)
class Partials:
    """The function of all derivatives: its call, and the names of what it returns.

    Attributes:
        quad_sums, column_sums: sums are taken over the lanes of a row; over the rows of a warp.
    """

    call: str
    fields: str
    quad_sums: bool
    column_sums: bool


def captured(spec: AttentionSpec, analysis: Analysis, plan: Plan) -> Source:
    """The kernel that adds up the gradients of the learned tensors that the score reads.

    Two forms of one template for each path: "captured" adds floats atomically, "captured_exact"
    whole numbers.

    Raises:
        RenderError: when the template asks for a field that it is not given.
    """
    functions = SpecFunctions(spec, analysis)
    hopper = plan.path == "sm_90a"
    fragment, row = ("s[n]", "e / 2") if hopper else ("s[g][n]", "g][e / 2")
    score = ScoreCode.of(functions, element=f"{fragment}[e]")
    walk = walk_of(functions)
    derivatives = functions.score_partials()
    elements = [element for element, _ in analysis.score.learned]
    learned = dict.fromkeys(element.tensor.name for element in elements)
    exact = [Exact(f"exact{n}", tensor) for n, tensor in enumerate(learned)]
    if plan.kernel == "captured":
        exact = []
    adds = {each.tensor: f"{each.name}.add" for each in exact}
    parts = [
        Part(
            sum=f"by{n}",
            kind=kind_of_sum(element),
            place=functions.place_of(f"by{n}", element, SUMS[plan.kernel]),
            add=adds.get(element.tensor.name, "atomicAdd"),
            what=fx.shown(element),
        )
        for n, element in enumerate(elements)
    ]
    placed = _index_symbols(*elements)
    by_kind: dict[str, list[Element]] = {part.kind: [] for part in parts}
    for element, part in zip(elements, parts, strict=True):
        by_kind[part.kind].append(element)
    in_loop = _index_symbols(*by_kind.get("element", ()))
    return kernel(
        "backward_captured_sm90.cu.j2" if hopper else "backward_captured_sm80.cu.j2",
        spec,
        plan,
        functions,
        walk,
        score,
        more=(derivatives, *(part.place for part in parts)),
        partials=Partials(
            derivatives.call(score=f"{fragment}[2 * r + c] * p.scale"),
            ", ".join(part.sum for part in parts),
            quad_sums=not by_kind.keys().isdisjoint(("row", "block")),
            column_sums=not by_kind.keys().isdisjoint(("column", "block")),
        ),
        parts=parts,
        exact=exact,
        exponential=Exponential.of(plan, score, row, value="value"),
        transposed=False,
        **(_sm90(plan) if hopper else _sm80(plan)),
        factor=" * p.dropout_scale" if spec.dropout else "",
        has_rows="row" in by_kind,
        part_uses_q=fx.Q in derivatives.uses or fx.Q in in_loop,
        part_uses_k=fx.K in derivatives.uses or fx.K in placed,
        part_uses_score=fx.SCORE in placed,
        uses_k=score.uses_k or fx.K in derivatives.uses or fx.K in placed,
    )


def _sm80(plan: Plan) -> dict[str, Any]:
    """Fields of the code path alone."""
    tails = (plan.head_dim % 16, plan.head_dim_v % 16)
    return {"qk_tail": plan.itemsize == 2 and 8 in tails, "pv_tail": False}


def _sm90(plan: Plan) -> dict[str, Any]:
    """Fields of the code path alone."""
    products = products_of(plan, {("multiply_rows", plan.block_k)})
    return {**panels_of_plan(plan), "products": products, "exchanges": None, "fused": False}
