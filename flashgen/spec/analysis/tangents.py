"""Tangents of score functions: derivatives along given directions, as straight-line code.

With s the score, t = f(s, theta) what kernels compute of it and x' the tangent of x,

    t'    = f_s s' + sum of f_th th'                        the tangent of t
    f_s'  = f_ss s' + sum of f_s,th th'                     the tangent of the slope
    f_th' = f_th,s s' + sum of f_th,th2 th2'                the tangent of a slope by an element

where th' is the element at the same indices of a second tensor, the tangent of the learned tensor.
A tangent that a call does not have is no part of any expression. The tangent of a sink has no part
in them: a sink is no score.

Of a spec with other weights than exp, t is the weight, so that these are its tangents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import sympy

from flashgen.shared.signature import tangent_names
from flashgen.spec.analysis.invariants import LeveledCode, leveled
from flashgen.spec.analysis.score import derivative, derivatives
from flashgen.spec.language.lets import elements_of, named
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.symbols import SCORE, SCORE_TANGENT
from flashgen.spec.language.tensor import Tensor
from flashgen.spec.language.tensor_elements import Element, TensorSymbol


@dataclass(frozen=True)
class Directions:
    """The tensors of a call that have tangents.

    Attributes:
        score: whether q or k has a tangent, so that the score moves.
        tensors: the symbol of the tangent of each learned tensor that has one.
    """

    score: bool
    tensors: tuple[tuple[TensorSymbol, TensorSymbol], ...] = ()

    @cached_property
    def tangent_symbols(self) -> dict[TensorSymbol, TensorSymbol]:
        return dict(self.tensors)


@dataclass(frozen=True)
class TangentAnalysis:
    """The tangents of a score function and of its derivatives.

    Attributes:
        score: t, of SCORE.
        tangent: t', of SCORE and SCORE_TANGENT; 0 where nothing that t depends on has a tangent.
        learned_symbols: the learned tensors, whose gradients have tangents too.
        directions: the tensors that have tangents.
    """

    score: sympy.Expr
    tangent: sympy.Expr
    learned_symbols: frozenset[TensorSymbol]
    directions: Directions

    @cached_property
    def slope(self) -> sympy.Expr:
        """f_s, the derivative of t by the score."""
        return derivative(self.score)

    @cached_property
    def slope_tangent(self) -> sympy.Expr:
        """f_s', the tangent of the slope."""
        return pushed(self.slope, self.directions)

    @cached_property
    def learned(self) -> tuple[tuple[Element, sympy.Expr, sympy.Expr], ...]:
        """Each element of a learned tensor that t reads, with f_th and f_th', in a fixed order."""
        read = [e for e in elements_of(self.score) if e.tensor in self.learned_symbols]
        slopes = zip(read, derivatives(self.score, read), strict=True)
        return tuple((element, by, pushed(by, self.directions)) for element, by in slopes)

    @cached_property
    def value_and_tangent(self) -> LeveledCode:
        """Code for (t, t'), which the tangent of the forward pass needs."""
        return leveled(self.score, self.tangent)


def analyse_tangents(spec: AttentionSpec, directions: Directions | None = None) -> TangentAnalysis:
    """The tangents of the score function of ``spec`` and of its derivatives.

    Args:
        directions: the tangents of the call; None where q, k and all learned tensors have one.
    """
    learned = frozenset(tensor.symbol for tensor in spec.tensors if tensor.grad)
    return _analysis(spec.score, learned, directions or directions_of(spec))


@lru_cache(maxsize=64)
def _analysis(
    score: sympy.Expr, learned: frozenset[TensorSymbol], directions: Directions
) -> TangentAnalysis:
    return TangentAnalysis(score, pushed(score, directions), learned, directions)


def pushed(expr: sympy.Expr, directions: Directions) -> sympy.Expr:
    """The tangent of an expression of the score and of elements of tensors."""
    moving = directions.tangent_symbols
    read = [element for element in elements_of(expr) if element.tensor in moving]
    terms = [
        partial * Element(moving[element.tensor], *element.indices)
        for element, partial in zip(read, derivatives(expr, read), strict=True)
    ]
    if directions.score and SCORE in expr.free_symbols:
        terms.insert(0, derivative(expr) * SCORE_TANGENT)
    return named(sympy.Add(*terms))


def directions_of(
    spec: AttentionSpec, score: bool = True, names: frozenset[str] | None = None
) -> Directions:
    """The tangents of a call of ``spec``.

    Args:
        score: whether q or k has a tangent.
        names: the learned tensors that have a tangent; None for all of them.
    """
    tangents = tangent_tensors(spec)
    return Directions(
        score,
        tuple(
            (tensor.symbol, tangents[tensor.name].symbol)
            for tensor in spec.tensors
            if tensor.grad and (names is None or tensor.name in names)
        ),
    )


def tangent_tensors(spec: AttentionSpec) -> Mapping[str, Tensor]:
    """For the name of each learned tensor of ``spec``, the captured tensor that is its tangent.

    It has the dims and the dtype of the tensor, and the name that `tangent_names` gives it.
    """
    learned = {tensor.name: tensor for tensor in spec.tensors if tensor.grad}
    names = tangent_names(learned, (capture.name for capture in (*spec.tensors, *spec.scalars)))
    return {
        name: Tensor(tangent_name, learned[name].dims, learned[name].dtype)
        for name, tangent_name in names.items()
    }
