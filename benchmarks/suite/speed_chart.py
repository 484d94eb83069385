"""The chart of docs/index.md: flashgen beside the fastest peer, in every case of the records."""

from __future__ import annotations

import itertools
import math
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.suite.cases import ROOT
from benchmarks.suite.records import RESULTS, newest_of_cases, read
from benchmarks.suite.speed_table import NONE, USUAL, case_name
from benchmarks.suite.summary import is_ours, without_options
from flashgen.tools.views.svg import element, text_at

FOLDER = ROOT / "docs" / "pictures"

Row = dict[str, str]

PASSES = ("forward", "backward")
SHORT = {
    "FlashAttention-4": "FA4",
    "cuDNN flex_attention": "cuDNN flex",
    "cuDNN graph": "cuDNN",
    "cuDNN through torch, dense mask": "cuDNN dense",
}
"""Names of peers that are too long for the room beside a bar; the chart explains them."""

EXTRA = """<style>.fgp .small{font-size:11px}.fgp .slower{fill:#d55e00}
.fgp .axis{stroke:var(--fgp-ink);stroke-width:1}.fgp .grid{stroke:var(--fgp-soft);stroke-opacity:.3}
</style>"""

EDGE, LINE, BAR = 16, 17, 11


@dataclass(frozen=True)
class Layout:
    """Where the parts stand: names of cases beside the bars, or above them on a phone.

    Attributes:
        names: the width of the names; 0 where they stand above the bars.
        words: the width of the words beside a bar.
    """

    width: int
    names: int
    words: int

    @property
    def columns(self) -> int:
        return int((self.width - 2 * EDGE) / 7)

    @property
    def panel(self) -> float:
        return (self.width - 2 * EDGE - self.names) / len(PASSES)


LAYOUTS = {"speed.svg": Layout(900, 350, 104), "speed_narrow.svg": Layout(400, 0, 94)}


@dataclass(frozen=True)
class Group:
    """The cases of one run: the row of each pass by the name of the case."""

    rows: dict[str, dict[str, Row]] = field(default_factory=dict)

    @property
    def first(self) -> Row:
        return next(row for passes in self.rows.values() for row in passes.values())

    def sorted(self) -> list[tuple[str, dict[str, Row]]]:
        """The cases; the case in which flashgen's forward pass is furthest ahead comes first."""
        return sorted(
            self.rows.items(), key=lambda e: -float(e[1][min(e[1], key=PASSES.index)]["ratio"])
        )


def write(results: Path = RESULTS, folder: Path = FOLDER, *, check: bool = False) -> int:
    """Writes the pictures, or only compares them; 1 where one differs."""
    differs = 0
    for name, layout in LAYOUTS.items():
        path, text = folder / name, chart(layout, results)
        same = path.is_file() and path.read_text(encoding="utf-8") == text
        if not same and not check:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not same:
            differs = 1
        print(f"{name} {'shows the records' if same else 'differs' if check else 'is written'}")
    return differs


def chart(layout: Layout, results: Path = RESULTS) -> str:
    """The SVG of a layout."""
    every = [row for row in newest_of_cases(read(results / "speed.csv")) if row["part"] == "suite"]
    ours = without_options([row for row in every if is_ours(row)])
    shown = [row for row in ours if row["pass"] in PASSES and row["ratio"]]
    if not shown:
        page = f'<rect class="page" width="{layout.width}" height="60" rx="6"/>'
        return element(NONE, NONE, [page, text_at(EDGE, 34, NONE)], (layout.width, 60))
    groups: dict[str, Group] = {}
    for row in shown:
        group = groups.setdefault(row["run"], Group())
        group.rows.setdefault(case_name(row), {})[row["pass"]] = row
    ratios = [float(row["ratio"]) for row in shown]
    scale = Scale(min(*ratios, 0.5), max(*ratios, 2.0), layout.panel - layout.words - 14)
    behind = sum(ratio < 1 for ratio in ratios)
    title = f"Speed on one {shown[0]['gpu']}"
    lead = (
        f"Times as fast as the fastest peer, in {USUAL} unless a row says otherwise, on a "
        f"logarithmic scale. Of {len(shown)} measurements flashgen is at least as fast "
        f"as every peer in {len(shown) - behind}, and a peer is faster in {behind}."
    )
    parts = [EXTRA, text_at(EDGE, 28, title, "head")]
    y = paragraph(parts, lead, 32, layout)
    for style, words in (
        ("full", "to the right: flashgen is faster than every peer"),
        ("slower", "to the left: the peer beside the bar is faster"),
    ):
        y += 20
        parts.append(f'<rect class="{style}" x="{EDGE}" y="{y - 10}" width="12" height="12"/>')
        parts.append(text_at(EDGE + 20, y, words))
    peers = {run: peers_of(every, run) for run in groups}
    for run, group in groups.items():
        absent = sorted({*itertools.chain(*peers.values())} - {*peers[run]}, key=str.lower)
        y = heading(parts, group, peers[run], absent, y + 28, layout)
        y = bars(parts, group, scale, y + 12, layout)
    y = paragraph(parts, explained(shown, every), y + 4, layout, "small soft") + EDGE
    page = f'<rect class="page" width="{layout.width}" height="{y}" rx="6"/>'
    words = "; ".join(
        f"{case_name(row)}, {row['pass']}: {float(row['ratio']):.2f} times {row['peer']}"
        for row in shown
    )
    return element(title, f"{lead} {words}", [page, *parts], (layout.width, y))


@dataclass(frozen=True)
class Scale:
    """A logarithmic axis: the place of a ratio, from 0 to `room`."""

    least: float
    most: float
    room: float

    def __call__(self, ratio: float) -> float:
        whole = math.log(self.most / self.least)
        return round(math.log(ratio / self.least) / whole * self.room, 1)

    @property
    def ticks(self) -> list[float]:
        return [tick for tick in (0.25, 0.5, 1, 2, 4) if self.least <= tick <= self.most]


def peers_of(rows: list[Row], run: str) -> list[str]:
    """The other contenders that a run timed."""
    timed = {row["contender"] for row in rows if row["run"] == run and row["ms_p50"]}
    return sorted((name for name in timed if not name.startswith("flashgen")), key=str.lower)


def heading(
    parts: list[str], group: Group, peers: list[str], absent: list[str], y: int, layout: Layout
) -> int:
    """Appends when the run was and beside whom; the base line of the last line."""
    first = group.first
    parts.append(text_at(EDGE, y, f"Run of {first['date'][:10]}, commit {first['commit']}", "head"))
    text = f"Peers where they have the case: {', '.join(peers)}."
    if absent:
        text += f" Not in this run: {', '.join(absent)}."
    return paragraph(parts, text, y, layout)


def bars(parts: list[str], group: Group, scale: Scale, y: int, layout: Layout) -> int:
    """Appends the axes and the bars of a run; the y of their end."""
    left = [EDGE + layout.names + i * layout.panel for i in range(len(PASSES))]
    height = LINE if layout.names else 2 * LINE + 2
    top, bottom = y + 34, y + 34 + height * len(group.rows) + 4
    for x, which in zip(left, PASSES, strict=True):
        parts.append(text_at(x + scale(1), y + 12, which, "mid"))
        for tick in scale.ticks:
            parts.append(text_at(round(x + scale(tick), 1), y + 28, f"{tick:g}", "small soft mid"))
    y = top
    for name, passes in group.sorted():
        y += height
        base = y - 4
        parts.append(text_at(EDGE, base if layout.names else base - LINE, name, "small"))
        for x, which in zip(left, PASSES, strict=True):
            for tick in scale.ticks:  # not one line through all rows, which have names between
                style = "axis" if tick == 1 else "grid"
                path = f"M{x + scale(tick):.1f} {base - 13}v{LINE}"
                parts.append(f'<path class="{style}" d="{path}"/>')
            if row := passes.get(which):
                parts += bar(row, scale, x, base)
    return bottom + LINE


def bar(row: Row, scale: Scale, x: float, base: int) -> list[str]:
    ratio, peer = float(row["ratio"]), SHORT.get(row["peer"], row["peer"])
    start, end = sorted((scale(1), scale(ratio)))
    style = "slower" if ratio < 1 else "full"
    box = f'x="{x + start:.1f}" y="{base - 10}" width="{max(end - start, 1):.1f}" height="{BAR}"'
    words = f"{ratio:.2f} {peer}"
    return [
        f'<rect class="{style}" {box}/>',
        text_at(round(x + scale.room + 6, 1), base, words, "small"),
    ]


def explained(shown: list[Row], every: list[Row]) -> str:
    """The peers that are named beside bars: their whole names and packages."""
    library = {row["contender"]: row["library"] for row in every}
    peers = sorted({row["peer"] for row in shown}, key=str.lower)
    named = [
        f"{SHORT.get(peer, peer)}: {peer + ', ' if peer in SHORT else ''}{library.get(peer, '')}"
        for peer in peers
    ]
    rest = (
        "A case is the mask and score function, by files of specs/, batch x query heads/key heads, "
        "queries x keys, and d, the head dim. "
        "Where there is no bar, the pass was not timed."
    )
    return f"{'. '.join(named)}. {rest}"


def paragraph(parts: list[str], text: str, y: int, layout: Layout, style: str = "soft") -> int:
    """Appends lines of prose; returns the base line of the last one."""
    for line in textwrap.wrap(text, layout.columns, break_on_hyphens=False):
        y += LINE
        parts.append(text_at(EDGE, y, line, style))
    return y
