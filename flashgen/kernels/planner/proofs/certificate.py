"""Certificates: a claim with the steps of its proof; each step holds or does not."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import sympy

COLUMNS = 97


@dataclass(frozen=True)
class ProofStep:
    """One line of a proof, and whether it holds."""

    text: str
    holds: bool = True


@dataclass(frozen=True)
class Certificate:
    """A claim and its proof.

    Attributes:
        name: the claim's name, one word.
        claim: the claim as a sentence.
        steps: the proof; the claim is proved when every step holds.
    """

    name: str
    claim: str
    steps: tuple[ProofStep, ...]

    @property
    def holds(self) -> bool:
        """Whether every step holds."""
        return all(step.holds for step in self.steps)

    def __str__(self) -> str:
        lines = textwrap.wrap(f"{self.name:<12}{self.claim}", COLUMNS, subsequent_indent=" " * 12)
        for step in self.steps:
            mark = "  " if step.holds else "X "
            indent = " " * 14
            lines += textwrap.wrap(
                mark + step.text, COLUMNS, initial_indent=" " * 12, subsequent_indent=indent + "  "
            )
        verdict = "proved" if self.holds else "NOT PROVED"
        return "\n".join([*lines, " " * 12 + verdict])


def vanishes(expr: sympy.Expr) -> bool:
    """Whether sympy simplifies an expression to 0."""
    return bool(sympy.simplify(expr) == 0)
