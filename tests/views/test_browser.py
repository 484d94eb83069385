"""The page in a real browser: links, switches, layout, and nothing from the network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import slow

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)
MISSING = ""
if CHROMIUM is None:
    MISSING = "there is no browser: apt-get install chromium"
elif find_spec("playwright") is None:
    MISSING = 'playwright is missing: pip install "flashgen[dev]"'


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield found
        finally:
            found.close()


class Opened:
    """A page of a file, and everything that went wrong in it.

    Attributes:
        wrong: messages of errors and warnings on the console, and exceptions.
        requests: addresses that the page loads, besides its own file and data in itself.
    """

    def __init__(self, found: Any, file: Path, width: int = 1280, scheme: str = "light") -> None:
        self.page = found.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.page.set_default_timeout(20_000)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(file.resolve().as_uri())
        self.page.wait_for_selector("html[data-ready]")

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", "about:")):
            self.requests.append(request.url)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is a browser"),
]

SHOWN = ".kernel:not([hidden])"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def opened(chromium: Any, written: Path) -> Opened:
    """The page of causal attention, whose state the tests below restore or set anew."""
    return Opened(chromium, written)


def rows(opened: Opened, kind: str, names: str) -> list[int]:
    """The numbers of the lines of a text that have one of the classes."""
    selector = ", ".join(f"{SHOWN} .pane-{kind} .l.{name}" for name in names.split())
    script = "rows => rows.map(row => Number(row.dataset.n))"
    return opened.page.eval_on_selector_all(selector, script)


def links(opened: Opened, kind: str) -> list[int]:
    """The links of a text of the first kernel, as the page has them in its data."""
    script = f"""async () => {{
      const text = document.getElementById("data").textContent;
      const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
      return (await new Response(stream).json()).sides[0][0].texts.{kind}.links;
    }}"""
    return opened.page.evaluate(script)


def first_with(counted: list[int], least: int) -> int:
    """The number of the first line with this many links to one line."""
    return next(n for n, line in enumerate(counted, 1) if line and counted.count(line) >= least)


def line(opened: Opened, kind: str, number: int) -> Any:
    found = opened.page.locator(f'{SHOWN} .pane-{kind} .l[data-n="{number}"]').first
    found.scroll_into_view_if_needed()
    return found


def test_texts_open_at_the_mod_and_at_the_hottest_line_in_colour(
    chromium: Any, written: Path
) -> None:
    page = Opened(chromium, written).page
    hottest = """pane => {
      const rows = [...pane.querySelectorAll(".l")];
      const heat = (row) => Number(row.style.getPropertyValue("--h"));
      const top = rows.reduce((a, b) => (heat(b) > heat(a) ? b : a)).getBoundingClientRect();
      const list = pane.querySelector(".lines").getBoundingClientRect();
      return top.top >= list.top - 1 && top.bottom <= list.bottom + 1;
    }"""
    assert page.eval_on_selector(f"{SHOWN} .pane-cuda", hottest)
    for name in ("note", "word", "number"):
        assert page.locator(f"{SHOWN} .pane-cuda .is-{name}").count() > 10
    assert page.locator(f"{SHOWN} .pane:not([hidden]) .lines:not(:has(.l))").count() == 0


def test_counts_of_steps_have_names_on_a_phone(chromium: Any, written: Path) -> None:
    page = Opened(chromium, written, width=390).page
    cell = page.locator(f"{SHOWN} .steps td").first
    cell.scroll_into_view_if_needed()
    box = cell.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390


def test_pointing_at_a_line_of_ptx_marks_its_line_of_cuda_and_back(opened: Opened) -> None:
    of_ptx = links(opened, "ptx")
    number = first_with(of_ptx, 3)
    cuda = of_ptx[number - 1]
    line(opened, "ptx", number).hover()
    assert rows(opened, "cuda", "hover-linked") == [cuda]
    line(opened, "cuda", cuda).hover()
    expected = [n for n, each in enumerate(of_ptx, 1) if each == cuda]
    assert rows(opened, "ptx", "hover-linked") == expected
    of_sass = links(opened, "sass")
    expected = [n for n, each in enumerate(of_sass, 1) if each == cuda]
    assert rows(opened, "sass", "hover-linked") == expected
    opened.page.mouse.move(1, 1)
    assert rows(opened, "cuda", "hover-linked") == []


def test_choosing_a_line_keeps_its_links_and_brings_them_in_view(opened: Opened) -> None:
    of_ptx = links(opened, "ptx")
    number = len(of_ptx) - next(n for n, each in enumerate(reversed(of_ptx)) if each)
    line(opened, "ptx", number).click()
    opened.page.mouse.move(1, 1)
    cuda = of_ptx[number - 1]
    assert rows(opened, "cuda", "linked") == [cuda]
    assert rows(opened, "ptx", "here") == [number]
    script = """row => {
      const [a, b] = [row.getBoundingClientRect(), row.closest(".lines").getBoundingClientRect()];
      return a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
    }"""
    assert opened.page.eval_on_selector(f"{SHOWN} .pane-cuda .l.linked", script)
    status = opened.page.inner_text(f"{SHOWN} .status")
    assert status.startswith(f"PTX line {number}: ")
    assert "1 line of CUDA" in status


def test_a_line_of_python_is_linked_with_the_functions_made_of_it(opened: Opened) -> None:
    opened.page.locator(f"{SHOWN} .pane-python .l", has_text="return q >= k").click()
    marked = opened.page.locator(f"{SHOWN} .pane-cuda .l.linked").all_text_contents()
    assert any("Range row_keys" in text for text in marked)
    assert rows(opened, "ptx", "linked via")
    opened.page.locator(f"{SHOWN} .pane-cuda .l.linked").first.click()
    assert rows(opened, "python", "linked")


def test_the_search_marks_lines_and_enter_goes_from_one_to_the_next(opened: Opened) -> None:
    field = opened.page.locator(f"{SHOWN} .pane-cuda input")
    field.fill("__syncthreads")
    found = rows(opened, "cuda", "match")
    assert len(found) > 1
    for expected in found[:2]:
        field.press("Enter")
        assert rows(opened, "cuda", "here") == [expected]
    assert opened.page.inner_text(f"{SHOWN} .pane-cuda output") == f"2 of {len(found)}"
    field.press("Shift+Enter")
    assert rows(opened, "cuda", "here") == [found[0]]
    assert rows(opened, "ptx", "linked via")
    field.fill("no such text in any line")
    assert rows(opened, "cuda", "match") == []
    assert opened.page.inner_text(f"{SHOWN} .pane-cuda output") == "0 lines"
    field.fill("")


def test_the_keyboard_moves_the_choice_and_escape_ends_it(opened: Opened) -> None:
    pane = opened.page.locator(f"{SHOWN} .pane-sass .lines")
    pane.focus()
    pane.press("Home")
    assert rows(opened, "sass", "here") == [1]
    pane.press("ArrowDown")
    assert rows(opened, "sass", "here") == [2]
    active = pane.get_attribute("aria-activedescendant")
    assert opened.page.get_attribute(f"#{active}", "data-n") == "2"
    assert opened.page.get_attribute(f"#{active}", "aria-selected") == "true"
    pane.press("End")
    assert rows(opened, "sass", "here") == [len(links(opened, "sass"))]
    pane.press("Escape")
    assert rows(opened, "sass", "here") == []


def test_a_step_leads_to_its_line(opened: Opened) -> None:
    button = opened.page.locator(f"{SHOWN} .to-line", has_text="Main loop").first
    button.click()
    number = int(button.get_attribute("data-line"))
    assert rows(opened, "cuda", "here") == [number]


def test_the_heat_map_can_be_switched(opened: Opened) -> None:
    page = opened.page
    total = f"{SHOWN} .scale-text"
    seen = {}
    for metric in ("warps", "sectors", "conflicts", "global_bytes", "static"):
        page.select_option(f"{SHOWN} .metric", metric)
        script = "rows => rows.map(row => [row.dataset.n, row.dataset.c, row.style.cssText])"
        counted = page.eval_on_selector_all(f"{SHOWN} .pane-cuda .l[data-c]", script)
        seen[metric] = (page.inner_text(total), tuple(map(tuple, counted)))
        assert bool(counted) == (metric != "conflicts")
    assert len({rows for _, rows in seen.values()}) == 5
    page.select_option(f"{SHOWN} .metric", "warps")
    own = page.inner_text(total)
    page.check(f"{SHOWN} .outer")
    outer = page.inner_text(total)
    page.uncheck(f"{SHOWN} .outer")
    assert own.split(", ")[0] != outer.split(", ")[0]
    assert own.split(" in all")[0].split(", ", 1)[1] == outer.split(" in all")[0].split(", ", 1)[1]


def test_the_kernel_can_be_switched(opened: Opened) -> None:
    page = opened.page
    for place, role in enumerate(("forward", "delta", "fused", "convert_dq")):
        page.select_option(".kernel-select", str(place))
        assert page.locator(SHOWN).count() == 1
        assert page.get_attribute(SHOWN, "data-title") == role
        assert page.locator(f"{SHOWN} .pane-ptx .l").count() > 100
    page.select_option(".kernel-select", "0")


def test_the_tile_map_shows_each_head_and_the_scores_of_a_tile(opened: Opened) -> None:
    page = opened.page
    found = page.locator(f"{SHOWN} .tile-map")
    page.focus(f"{SHOWN} .tile-map .map")
    first = found.locator(".where").inner_text()
    assert first.startswith("Tile (0, 0): queries 0 to 99, keys 0 to 95;")
    assert "4,656" not in first
    page.keyboard.press("ArrowRight")
    assert found.locator(".where").inner_text().startswith("Tile (0, 1): queries 0 to 99, keys 96")
    assert "10 of 400 scores kept" in found.locator(".where").inner_text()
    found.locator(".head").select_option("1")
    pixels = "canvas => canvas.getContext('2d').getImageData(0, 0, 9, 9).data.some((b) => b > 0)"
    for name in ("map", "scores"):
        assert page.eval_on_selector(f"{SHOWN} .tile-map .{name}", pixels)


def test_nothing_went_wrong_and_nothing_was_requested(opened: Opened) -> None:
    assert opened.wrong == []
    assert opened.requests == []


# ---- layout


@pytest.mark.parametrize(
    ("width", "scheme"), [(1280, "dark"), (400, "light"), slow(1280, "light"), slow(400, "dark")]
)
def test_the_page_has_no_horizontal_scroll_bar(
    chromium: Any, written: Path, width: int, scheme: str
) -> None:
    opened = Opened(chromium, written, width, scheme)
    for place in range(4 if scheme == "light" else 1):
        opened.page.select_option(".kernel-select", str(place))
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert opened.page.evaluate(overflow) == 0
    luminance = """() => {
      const of = (text) => text.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0);
      const style = getComputedStyle(document.body);
      return [of(style.backgroundColor), of(style.color)];
    }"""
    background, ink = opened.page.evaluate(luminance)
    assert (background > 600 > 300 > ink) if scheme == "light" else (background < 200 < 500 < ink)
    opened.page.select_option("#theme", "dark" if scheme == "light" else "light")
    background, ink = opened.page.evaluate(luminance)
    assert (background > ink) == (scheme == "dark")
    assert opened.wrong == []
    opened.page.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_a_comparison_has_two_sides_that_follow_each_other(
    chromium: Any, comparison: Path, width: int
) -> None:
    opened = Opened(chromium, comparison, width)
    page = opened.page
    script = "sides => sides.map((side) => Math.round(side.getBoundingClientRect().left))"
    left = page.eval_on_selector_all(".side", script)
    assert (left[0] < left[1]) == (width == 1280)
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0
    number = page.locator(".side").nth(1).locator(".pane-ptx .l[data-c]").first
    number.click()
    marks = page.eval_on_selector_all(
        ".side", "s => s.map((e) => e.querySelectorAll('.here').length)"
    )
    assert marks == [0, 1]
    assert opened.wrong == opened.requests == []
    page.close()


@pytest.mark.slow
def test_the_frame_of_a_notebook_shows_the_page(chromium: Any, tmp_path: Path) -> None:
    import torch

    import flashgen as fg
    from tests.support.profiles import loaded

    op = fg.attention(loaded("causal"))
    q = torch.zeros(1, 1, 32, 64, dtype=torch.float16)
    op(q, q, q, backend="emulator")
    file = tmp_path / "notebook.html"
    cell = f"<!doctype html><html data-ready><body>{op.report._repr_html_()}</body></html>"
    file.write_text(cell, encoding="utf-8")
    opened = Opened(chromium, file)
    frame = opened.page.frame_locator("iframe")
    frame.locator(".pane-cuda .l").first.wait_for()
    assert frame.locator(".pane-ptx .l").count() > 100
    assert opened.wrong == opened.requests == []
