"""The functions of windows: sums of the elements that a warp's part of a tile reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy

from flashgen.kernels.codegen.expressions import CPrinter
from flashgen.kernels.codegen.readers import INDICES, type_of_sums
from flashgen.kernels.codegen.spec_function import PARAMETERS, SpecFunction
from flashgen.kernels.codegen.text import comment
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.models.kernel_model import MMA_ROWS
from flashgen.kernels.planner.models.spec_terms import added_by_scores, windows_of
from flashgen.shared.signature import field_stem
from flashgen.spec.analysis.sharing import share
from flashgen.spec.analysis.windows import Window, WindowAxis
from flashgen.spec.language.python_printer import python_text
from flashgen.spec.language.spec import AttentionSpec
from flashgen.spec.language.tensor_elements import Element


@dataclass(frozen=True)
class WindowCode:
    """A warp's sums of one element in shared memory (`Window`).

    Attributes:
        name: the name of the sum.
        start: the number of sums of the same warp before them.
        entries: the number of sums.
        firsts: the variables for the first index along each axis, each with the function that
            computes it; none for an axis whose first index is 0.
        slot: the device function that returns the place of a score's sum among them; -1: none.
        element: the device function that returns the address of the gradient of a place.
    """

    name: str
    start: int
    entries: int
    firsts: tuple[tuple[str, SpecFunction], ...]
    slot: SpecFunction
    element: SpecFunction

    @property
    def offset(self) -> str:
        """The start as a summand in C++; "" for 0."""
        return f"{self.start} + " if self.start else ""

    @property
    def at_held(self) -> str:
        """C++ of the address of the sum whose place a lane holds."""
        return f"sums + {self.offset}held_{self.name}"

    @property
    def functions(self) -> tuple[SpecFunction, ...]:
        """The functions, in the order of the file."""
        return (*(function for _, function in self.firsts), self.slot, self.element)


def codes_of_windows(
    spec: AttentionSpec, printer: CPrinter, elements: Sequence[Element], plan: Plan
) -> dict[Element, WindowCode]:
    """The windows of the elements that have one, side by side in a warp's shared memory.

    Args:
        elements: the elements of learned tensors; the sum of element n is named ``by<n>``.
    """
    learned = added_by_scores(spec, plan.kernel)
    codes: dict[Element, WindowCode] = {}
    start = 0
    for window in windows_of(learned, MMA_ROWS * plan.row_groups, plan.block_k):
        name = f"by{elements.index(window.element)}"
        codes[window.element] = WindowCode(
            name,
            start,
            window.entries,
            tuple(_firsts(name, window, printer)),
            _slot(name, window, printer),
            _element(name, window, printer, type_of_sums(plan)),
        )
        start += window.entries
    return codes


def _firsts(name: str, window: Window, printer: CPrinter) -> Iterator[tuple[str, SpecFunction]]:
    """The variables for the first indices, and their functions of the corners of a warp's part."""
    for axis in window.axes:
        if axis.first == 0:
            continue
        block = share(axis.first)
        lets = printer.lets(block)
        first, index = printer.index(block.results[0]), window.element.indices[axis.axis]
        why = f"The first {python_text(index)} in these ranges of queries and keys, clamped."
        body = [*lets, f"return inside({first}, {_size(window, axis)});"]
        variable, uses = _first(name, axis), axis.first.free_symbols
        yield variable, SpecFunction.create(f"{variable}_of", "int", comment(why), body, uses)


def _slot(name: str, window: Window, printer: CPrinter) -> SpecFunction:
    """The index of a score's sum in its window: the axes in order, the last one contiguous."""
    along = [window.element.indices[axis.axis] for axis in window.axes]
    block = share(*along)
    body, conditions, slot = printer.lets(block), [], ""
    for i, axis, index in zip(INDICES, window.axes, block.results, strict=False):
        start = f" - {_first(name, axis)}" if axis.first != 0 else ""
        body.append(
            f"const int {i} = inside({printer.index(index)}, {_size(window, axis)}){start};"
        )
        conditions.append(f"unsigned({i}) < {axis.extent}")
        slot = f"({slot}) * {axis.extent} + {i}" if slot else i
    body.append(f"return {' && '.join(conditions)} ? {slot} : -1;")
    why = f"The index of {python_text(window.element)} in {name}'s window; -1: outside."
    function = SpecFunction.create(f"index_in_{name}", "int", comment(why), body, _uses(*along))
    return _with_firsts(function, name, window)


def _element(name: str, window: Window, printer: CPrinter, kind: str) -> SpecFunction:
    """The address of the gradient of a place; ``kind`` is the type of the sums."""
    element, axes = window.element, {axis.axis for axis in window.axes}
    fixed = {n: index for n, index in enumerate(element.indices) if n not in axes}
    block = share(*fixed.values())
    lets = printer.lets(block)
    indices = dict(zip(fixed, map(printer.index, block.results), strict=True))
    remaining = window.entries
    for axis in window.axes:
        slot = "place" if remaining == window.entries else f"place % {remaining}"
        remaining //= axis.extent
        start = f"{_first(name, axis)} + " if axis.first != 0 else ""
        indices[axis.axis] = start + slot + (f" / {remaining}" if remaining > 1 else "")
    arguments = ", ".join(indices[n] for n in range(len(indices)))
    body = [*lets, f"return sum_of_{element.tensor.name}(p, {arguments});"]
    why = f"The address of the gradient of a place in {name}'s window."
    uses = _uses(*fixed.values())
    function = SpecFunction.create(f"element_of_{name}", f"{kind}*", comment(why), body, uses)
    return _with_firsts(function, name, window, "int place")


def _first(name: str, axis: WindowAxis) -> str:
    """The variable for the first index of a window along an axis."""
    return f"{name}_first_{axis.axis}"


def _size(window: Window, axis: WindowAxis) -> str:
    return f"p.c_{field_stem(window.element.tensor.name)}_size_{axis.axis}"


def _uses(*exprs: sympy.Expr) -> set[sympy.Symbol]:
    return {symbol for expr in exprs for symbol in expr.free_symbols} & PARAMETERS.keys()


def _with_firsts(
    function: SpecFunction, name: str, window: Window, *extra_params: str
) -> SpecFunction:
    """The function with parameters for the first indices, and more parameters, at the end."""
    firsts = [f"int {_first(name, axis)}" for axis in window.axes if axis.first != 0]
    return dataclasses.replace(function, parameters=(*function.parameters, *firsts, *extra_params))
