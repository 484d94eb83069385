"""A page as HTML: one file with its style, its program and its data, which loads nothing."""

from __future__ import annotations

import base64
import functools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from flashgen.kernels.codegen.environment import template_folder
from flashgen.kernels.planner import Plan
from flashgen.kernels.planner.derivation import printed_line
from flashgen.kernels.planner.formulas import counted
from flashgen.kernels.planner.quantities import QUANTITIES
from flashgen.shared.errors import RenderError
from flashgen.tools.views.code import METRICS, KernelTexts
from flashgen.tools.views.plots import histogram_plot, roofline_plot, schedule_plot
from flashgen.tools.views.values import Figure, Page, Side

STYLES = ("page.css", "code.css", "plots.css")
PROGRAMS = ("data.js", "text_pane.js", "links.js", "heat.js", "tile_map.js", "page.js")
"""The files of templates/report that a page contains, in their order."""


def html_of(page: Page) -> str:
    """The page: one HTML document below 3 MB for all but the largest kernels.

    Raises:
        RenderError: a template is missing, or it and the values disagree.
    """
    return _filled(
        "page.html",
        page=page,
        differences=compared(*page.sides) if page.compares else (),
        data=_packed(page),
    )


def notebook_html(page: Page) -> str:
    """The page in a frame, for a cell of a notebook."""
    return _filled("notebook.html", title=page.title, document=html_of(page))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder() / "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "quantity": quantity,
        "seconds": seconds,
        "counted": counted,
        "printed": printed_line,
        "percent": lambda value: f"{100 * value:.1f} %",
        "change": _change,
        "named": _named,
    }
    environment.globals |= {
        "metrics": METRICS,
        "meanings": QUANTITIES,
        "roofline_plot": roofline_plot,
        "histogram_plot": histogram_plot,
        "schedule_plot": schedule_plot,
        "styles": [_text(name) for name in STYLES],
        "programs": [_text(name) for name in PROGRAMS],
    }
    return environment


def _text(name: str) -> str:
    return (template_folder() / "report" / name).read_text(encoding="utf-8")


def _filled(template: str, **fields: Any) -> str:
    try:
        text = _environment().get_template(template).render(**fields)
    except (jinja2.TemplateError, OSError) as error:
        raise RenderError(
            f"template report/{template} could not be filled: {error}",
            where=f"templates/report/{template}",
            numbers=f"{len(fields)} fields were given: {', '.join(sorted(fields))}",
            way_out="reinstall flashgen, or run it from a complete checkout",
        ) from error
    # The name of a file may have bytes that are no UTF-8.
    return text.encode("utf-8", "backslashreplace").decode()


# ---- numbers in words ----------------------------------------------------------------------------


def number(value: float) -> str:
    """1,024 or 0.0312: whole numbers in full, others with four digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"


def quantity(value: float | None, unit: str) -> str:
    """A figure with its unit; a dash without a value."""
    if value is None:
        return "\u2013"
    if unit == "s":
        return seconds(value)
    return f"{number(value)} {unit}".rstrip()


def seconds(value: float) -> str:
    """A time with three digits, in the unit that suits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("\u00b5s", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _change(value: float | None) -> str:
    if value is None:
        return ""
    return "0 %" if value == 0 else f"{100 * value:+,.1f} %"


def _named(plan: Plan) -> list[tuple[str, str]]:
    """The quantities in a plan's formulas that have no line of their own, with their meaning."""
    words = {name for line in plan.derivation for name in re.findall(r"[A-Za-z]\w*", line.formula)}
    words -= {line.name for line in plan.derivation}
    return [(name, meaning) for name, meaning in QUANTITIES.items() if name in words]


# ---- the texts, compressed -----------------------------------------------------------------------


def _packed(page: Page) -> str:
    """The texts, links, heat maps and tile maps of all kernels: JSON, deflated, in base64."""
    sides = [
        [_kernel_data(pane.code, pane.tile_map) for pane in side.kernels] for side in page.sides
    ]
    text = json.dumps({"sides": sides, "metrics": METRICS}, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _kernel_data(code: KernelTexts, tile_map: Any) -> dict[str, Any]:
    texts = {"python": code.python, "cuda": code.cuda, "ptx": code.ptx, "sass": code.sass}
    return {
        "texts": {name: vars(text) for name, text in texts.items()},
        "mods": list(map(vars, code.mods)),
        "heat": {name: vars(heat) for name, heat in code.heat.items()},
        "sassOfLine": code.sass_of_line,
        "tileMap": tile_map or None,
    }


# ---- the figures of two reports beside each other ------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A figure of two reports; None where one of them lacks it.

    Attributes:
        change: the second divided by the first, less 1; None where that says nothing.
    """

    name: str
    unit: str
    origin: str
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        if self.first is None or self.second is None or self.first == 0:
            return None
        return self.second / self.first - 1

    @property
    def equal(self) -> bool:
        return self.first == self.second


@dataclass(frozen=True)
class Compared:
    """The figures of a kernel of both reports, or of their results."""

    title: str
    rows: tuple[Difference, ...]


def compared(first: Side, second: Side) -> tuple[Compared, ...]:
    """The figures of all kernels of either side, kernels of one role in one table."""
    tables = []
    a, b = ({pane.title: pane.figures for pane in side.kernels} for side in (first, second))
    for title in dict.fromkeys([*a, *b]):
        rows = _rows(a.get(title, ()), b.get(title, ()))
        tables.append(Compared(title, tuple(rows)))
    errors = (
        [Figure(f"largest error of {x.name}", x.verdict.max_error) for x in side.errors]
        for side in (first, second)
    )
    results = tuple(_rows(*errors))
    return (*tables, Compared("results", results)) if results else tuple(tables)


def _rows(left: Sequence[Figure], right: Sequence[Figure]) -> Iterator[Difference]:
    a, b = ({figure.name: figure for figure in figures} for figures in (left, right))
    for name in dict.fromkeys([*a, *b]):
        first, second = a.get(name), b.get(name)
        present = first or second
        assert present is not None, "the name is of one of them"
        yield Difference(
            name,
            present.unit,
            present.origin,
            None if first is None else first.value,
            None if second is None else second.value,
        )
