"""Conditions of tiles as C++ return statements that evaluate each part only where it is needed."""

from __future__ import annotations

import sympy

from flashgen.kernels.codegen.expressions import CPrinter
from flashgen.spec.analysis.sharing import CodeBlock, is_costly, share_evaluated


def returned(condition: sympy.Basic, printer: CPrinter) -> list[str]:
    """Statements that return a condition and evaluate no more of it than ``&&`` and ``||`` do.

    A value that only a later part of the condition needs is computed after a return statement for
    the case in which the earlier parts determine the result. An alternative of an ``||`` that
    divides or reads memory after an ``&&`` becomes a statement of its own.
    """
    conjunction = not isinstance(condition, sympy.Or)
    is_joined = isinstance(condition, sympy.And | sympy.Or)
    block = share_evaluated(*(condition.args if is_joined else (condition,)))
    lets = _lets(block, printer)
    body: list[str] = []
    undecided: list[sympy.Basic] = []

    def decide() -> None:
        if undecided:
            decided = map(sympy.Not, undecided) if conjunction else undecided
            test = printer.joined(decided, "||")
            body.append(f"if ({test}) return {'false' if conjunction else 'true'};")
            undecided.clear()

    for needed, part in block.stages():
        nested = not conjunction and isinstance(part, sympy.And) and is_costly(part)
        if needed or nested:
            decide()
        body += [lets[symbol] for symbol in needed]
        if nested:
            body += _alternative(part, printer, len(lets))
        else:
            undecided.append(part)
    if not undecided:
        return [*body, "return false;"]
    result = printer.joined(undecided, "&&" if conjunction else "||")
    return [*body, f"return {result};"]


def _alternative(condition: sympy.And, printer: CPrinter, first_let: int) -> list[str]:
    """Nested statements that return true where all parts of a condition hold."""
    parts = sorted(condition.args, key=is_costly)  # the cheap ones first
    block = share_evaluated(*parts, first_let=first_let)
    lets = _lets(block, printer, nested=True)
    body: list[str] = []
    open_parts: list[sympy.Basic] = []
    depth = 0
    for needed, part in block.stages():
        if needed and (open_parts or depth == 0):  # the names are local to this alternative
            test = f"if ({printer.joined(open_parts, '&&')}) " if open_parts else ""
            body.append(f"{'  ' * depth}{test}{{")
            open_parts, depth = [], depth + 1
        body += ["  " * depth + lets[symbol] for symbol in needed]
        open_parts.append(part)
    test = printer.joined(open_parts, "&&")
    body.append(f"{'  ' * depth}if ({test}) return true;")
    return [*body, *("  " * level + "}" for level in reversed(range(depth)))]


def _lets(block: CodeBlock, printer: CPrinter, *, nested: bool = False) -> dict[sympy.Symbol, str]:
    symbols = [symbol for symbol, _ in block.lets]
    return dict(zip(symbols, printer.lets(block, nested=nested), strict=True))
