"""``flashgen report``: what the page holds, comparisons, and what is refused."""

from __future__ import annotations

import base64
import html
import html.parser
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.shared.paths import PATHS
from flashgen.tools.profile.kernel_profile import Profile
from tests.support.commands import CAUSAL, flashgen
from tests.support.profiles import all_kernels, loaded, tangents
from tests.support.tiers import slow

MOST_BYTES = 3_000_000
VOID = {"meta", "input", "br", "link", "img", "hr"}


class Elements(html.parser.HTMLParser):
    """The elements of a page; checks that each is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [given["id"]] if given.get("id") else []
        self.addresses += [v for n, v in attrs if n in ("src", "href", "data", "action") and v]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += text


def data_of(file: Path) -> dict[str, Any]:
    found = re.search(r'id="data">([^<]*)<', file.read_text(encoding="utf-8"))
    assert found is not None
    return json.loads(zlib.decompress(base64.b64decode(found[1])))


def profiles() -> tuple[Profile, ...]:
    sizes = (1, 2, 2, 100, 100)
    forward, *backward = all_kernels(loaded("causal"), sizes)
    return (forward, *backward[:3], *tangents(loaded("causal"), sizes))


def test_the_page_is_one_sound_document_that_names_no_address(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    found = Elements(text)
    assert len(found.ids) == len(set(found.ids))
    assert [each for each in found.addresses if not each.startswith("#")] == []
    assert not re.search(r"https?://", text.partition('id="data"')[0])
    assert "/tmp/" not in text


def test_the_page_has_a_pane_for_each_kernel_with_the_profile_s_counts(written: Path) -> None:
    kernels = data_of(written)["sides"][0]
    text = written.read_text(encoding="utf-8")
    roles = re.findall(r'data-title="(\w+)"', text)
    assert roles == ["forward", "delta", "fused", "convert_dq", "tangent"]
    for kernel, profile in zip(kernels, profiles(), strict=True):
        assert kernel["texts"]["cuda"]["lines"] == profile.build.source.text.splitlines()
        heat = kernel["heat"]["warps"]
        assert sum(heat["cuda"].values()) == heat["total"] == profile.totals.warp_instructions
        assert f"<dd>{profile.totals.warp_instructions:,}</dd>" in text


def test_the_tile_map_has_the_visits_that_the_emulator_counted(written: Path) -> None:
    forward, delta, fused, _, tangent = data_of(written)["sides"][0]
    for kernel in (forward, fused, tangent):
        found = kernel["tileMap"]
        assert found["visits"] == found["counted"] > 0
        heads = found["heads"]
        assert sum(len(h["pairs"]) for h in heads) == 2
        kept = base64.b64decode(heads[0]["scores"])
        bits = [byte >> (7 - i) & 1 for byte in kept for i in range(8)]
        assert bits[:10000] == [int(q >= k) for q in range(100) for k in range(100)]
    assert delta["tileMap"] is None


def test_the_plan_says_what_binds_and_what_was_refused(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    plan = fg.plan(loaded("causal"), arch="sm_80")
    rows = Elements(text).rows
    bound = [row[0].split()[0] for row in rows if "binds" in row[0]]
    assert bound[: len(plan.binding)] == list(plan.binding)
    for refusal in plan.refused:
        assert f"<li>{refusal}</li>" in text


def test_the_errors_are_those_of_the_oracle(written: Path) -> None:
    text = html.unescape(written.read_text(encoding="utf-8"))
    assert re.findall(r"<strong>([\w' ]+)</strong>: <span class=\"good\">pass", text) == [
        *("out", "lse", "dq", "dk", "dv", "out's tangent", "lse's tangent")
    ]
    bars = re.findall(r'class="(ours|theirs)" x=', text)
    assert bars.count("ours") == bars.count("theirs") == 7 * 8


# ---- comparisons


@pytest.mark.slow
def test_two_tiles_are_compared_by_their_figures(comparison: Path) -> None:
    rows = {row[0]: row[1:] for row in Elements(comparison.read_text(encoding="utf-8")).rows[:40]}
    first, second, change, _ = rows["shared memory"]
    assert (first, second) == ("40,960 B", "16,384 B")
    assert change == "-60.0 %"
    assert len(data_of(comparison)["sides"]) == 2


@pytest.mark.slow
def test_two_architectures_and_two_specs_are_compared(tmp_path: Path) -> None:
    file = tmp_path / "both.html"
    other = CAUSAL.replace("causal", "softcap")
    for arguments, differ in (
        ((CAUSAL, "--arch", "sm_80,sm_90a"), "in architecture."),
        ((CAUSAL, other), "in spec."),
        ((CAUSAL, other, "--arch", "sm_80,sm_90a"), "in spec and architecture, so that a change"),
    ):
        done = flashgen("report", *arguments, "--shape", "1,1,64", "-o", str(file))
        assert done.exit_code == 0, done.output + done.stderr
        assert len(data_of(file)["sides"]) == 2
        assert done.stdout.count("2 results within the error rule") == 2
        assert f"The calls differ {differ}" in file.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", ["t5_bias", "natten_2d", "document", "block_sparse", "sink"])
def test_every_kind_of_spec_has_a_report_below_3_mb(tmp_path: Path, name: str, arch: str) -> None:
    file = tmp_path / f"{name}.html"
    path = CAUSAL.replace("causal", name)
    done = flashgen("report", path, "--backward", "--arch", arch, "-o", str(file))
    assert done.exit_code == 0, done.output + done.stderr
    assert file.stat().st_size < MOST_BYTES
    Elements(file.read_text(encoding="utf-8"))
    for kernel in data_of(file)["sides"][0]:
        found = kernel["tileMap"]
        if found is None:
            continue
        predicted = found["visits"] if found["computed"] is None else found["computed"]
        assert predicted == found["counted"]


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["no/such.py"], "SpecError: there is no such spec file"),
        ([CAUSAL, "no/such.py"], "SpecError: there is no such spec file"),
        ([CAUSAL, "--arch", "sm_80,sm_90a,sm_89"], "InputError: a report compares two calls"),
        ([CAUSAL, "--arch", "sm_11"], "PlanError: "),
        ([CAUSAL, "--tile", "big"], "InputError: this is not a tile"),
        ([CAUSAL, "--tile", "64x33"], "PlanError: the forward kernel cannot have this tile"),
        ([CAUSAL, "--shape", "8,64,8192"], "InputError: this shape is too large for the emulator"),
        ([CAUSAL, "--shape", "1,4,32768"], "InputError: this shape is too large for the emulator"),
        ([CAUSAL, "--shape", "1,2"], "InputError: this is not a shape"),
        ([CAUSAL, "--predict", "1,2"], "InputError: this is not a shape"),
        ([CAUSAL, "-o", "no/such/folder/x.html"], "InputError: no file can be written"),
        ([CAUSAL, "-o", "."], "InputError: this file cannot be written"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_four_lines(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = flashgen("report", *arguments)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if not line.endswith(" ...")]
    assert lines[0].startswith(expected), done.stderr
    assert [line.split()[0] for line in lines[1:4]] == ["where", "numbers", "try"]
    assert not list(tmp_path.iterdir())


def test_a_long_call_has_no_oracle_and_the_page_says_so(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("flashgen.tools.views.collect.ORACLE_SCORES", 100)
    monkeypatch.setattr("flashgen.tools.views.collect.MAP_SCORES", 100)
    file = tmp_path / "long.html"
    options = "--shape", "1,1,64", "--head-dim-v", "32"
    done = flashgen("report", CAUSAL, *options, "-o", str(file))
    assert done.exit_code == 0, done.output + done.stderr
    text = file.read_text(encoding="utf-8")
    assert "seq 64 x 64, head_dim 64 and 32, float16" in text
    assert "No oracle was computed: it makes all 4,096 scores in float64" in text
    assert "Single scores are left out: 4,096, and the page holds 100." in text
    assert data_of(file)["sides"][0][0]["tileMap"]["heads"][0]["scores"] is None


# ---- the report of an operator's last call


@pytest.mark.parametrize("backend", ["emulator", slow("tiled")])
def test_the_report_of_a_call_is_a_page_and_a_frame_in_notebooks(backend: str) -> None:
    op = fg.attention(loaded("causal"))
    q = torch.zeros(1, 1, 32, 64, dtype=torch.float16)
    op(q, q, q, backend=backend)
    text = op.report.html()
    Elements(text)
    shown = op.report._repr_html_()
    assert shown.startswith("<iframe")
    assert html.unescape(shown.partition('srcdoc="')[2].partition('" width=')[0]) == text
    if backend == "tiled":
        assert "without a kernel" in text
    else:
        counted = op.report.counters.warp_instructions
        assert f"<dd>{counted:,}</dd>" in text
        assert (
            "def causal"
            in zlib.decompress(base64.b64decode(re.search(r'id="data">([^<]*)<', text)[1])).decode()
        )
