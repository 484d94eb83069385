"""The printed derivation of a plan: its lines, why larger tiles were refused, and line breaks."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.kernels.planner.formulas import Formula, counted, tidy
from flashgen.kernels.planner.quantities import Number

COLUMNS = 97
"""The length of the lines of a printed derivation."""
INDENT = 10

# Intermediate steps, which the short form of a derivation leaves out.
_DETAILS = (
    *("columns", "dq_columns", "macs", "reads", "products", "rest", "special", "busiest"),
    *("overlap", "occupied", "room", "fitting", "repeats"),
)


@dataclass(frozen=True)
class DerivationLine:
    """One step of a derivation: ``name = formula = substituted = value``, at most ``limit``.

    Attributes:
        name: the quantity's name; `flashgen.kernels.planner.quantities.QUANTITIES` has its meaning.
        formula: the formula's text.
        substituted: the formula with this plan's numbers in place of names.
        value: the formula's value.
        unit: "B", "clk", or "".
        relation: "=", or "<=" when the formula is an upper bound of the quantity.
        limit: the largest allowed value; None where there is no limit.
        limit_name: the quantity that is the limit.
        binding: whether this constraint keeps the tile from being larger.
        detail: whether this is an intermediate step, which only `Plan.explain` prints.
    """

    name: str
    formula: str
    substituted: str
    value: Number
    unit: str = ""
    relation: str = "="
    limit: Number | None = None
    limit_name: str = ""
    binding: bool = False
    detail: bool = False


@dataclass(frozen=True)
class Excess:
    """A limit that a tile exceeds.

    Attributes:
        quantity: the quantity that exceeds its limit; "cost" when the tile fits but costs more,
            "whole boxes" when it fits but would divide blocks of a layout.
        needs, limit, unit: the tile's value, and the limit or the chosen tile's cost.
    """

    quantity: str
    needs: Number
    limit: Number
    unit: str


@dataclass(frozen=True)
class Refusal(Excess):
    """Why a larger tile was not chosen; ``change`` says what is larger about it."""

    change: str

    def __str__(self) -> str:
        needs, limit = counted(self.needs), counted(self.limit)
        unit = f" {self.unit}" if self.unit else ""
        if self.quantity == "cost" and self.needs < self.limit:
            comparison = f"fits, and costs {needs}{unit} against {limit}"
            rule = "another rule, which the notes give, chose the tile"
            return f"{self.change}: {comparison}; {rule}"
        if self.quantity == "cost":
            return f"{self.change}: fits, but costs {needs}{unit} against {limit}"
        if self.quantity == "whole boxes":
            return f"{self.change}: fits, but {needs}{unit} are no whole boxes of {limit}"
        unit_text = f"{unit} of" if unit else ""
        return f"{self.change}: needs {needs}{unit_text} {self.quantity}, {limit}{unit} allowed"


def line_of(
    formula: Formula,
    quantities: Mapping[str, Number],
    limit_name: str = "",
    *,
    upper_bound: bool = False,
) -> DerivationLine:
    """The derivation line of a formula for these values of the ``quantities``.

    Args:
        limit_name: the quantity that is the limit; "" without one.
        upper_bound: whether the formula bounds its quantity, and ``quantities`` has another value.
    """
    return DerivationLine(
        name=formula.name,
        formula=formula.text,
        substituted=formula.substituted(quantities),
        value=formula(quantities) if upper_bound else tidy(quantities[formula.name]),
        unit=formula.unit,
        relation="<=" if upper_bound else "=",
        limit=quantities[limit_name] if limit_name else None,
        limit_name=limit_name,
        detail=formula.name in _DETAILS,
    )


def printed_line(line: DerivationLine) -> list[str]:
    """A line of a derivation, broken into indented lines of at most `COLUMNS` columns."""
    value = counted(line.value) + (f" {line.unit}" if line.unit else "")
    if line.limit is not None:
        value += f" of {counted(line.limit)}" + (f" {line.unit}" if line.unit else "")
    if line.binding:
        value += "  (binds)"
    parts = [f"{line.name} {line.relation} {line.formula}"]
    if line.substituted not in (line.formula, str(line.value)):
        parts.append(f"= {line.substituted}")
    return wrapped(*parts, f"= {value}")


def wrapped(*parts: str) -> list[str]:
    """``parts`` on as few indented lines as possible, broken between parts rather than inside."""
    lines = [""]
    for part in parts:
        indent = "  " if len(lines) > 1 else ""
        width = COLUMNS - INDENT - len(indent)
        extended = f"{lines[-1]} {part}".strip()
        if len(extended) <= width:
            lines[-1] = extended
            continue
        pieces = textwrap.wrap(part, width - 2, subsequent_indent="  ", break_long_words=False)
        lines += pieces if lines[-1] else []
        if not lines[-1]:
            lines = pieces
    return [" " * INDENT + ("  " if index else "") + line for index, line in enumerate(lines)]
