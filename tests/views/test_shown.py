"""How maps are shown: SVG that browsers read, text for terminals, files; and wrong arguments."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flashgen as fg
from flashgen.shared.paths import PATHS
from flashgen.tools.views.drawing import COLOURS, join_cells, percent, ranges
from flashgen.tools.views.render import html_of
from flashgen.tools.views.svg import svg_of
from flashgen.tools.views.tile_map import pairs_in_words
from flashgen.tools.views.values import Page
from tests.support.masks import causal
from tests.support.processes import run_python

SVG = "{http://www.w3.org/2000/svg}"


def cells(svg: str, style: str) -> np.ndarray:
    """The cells that the paths of a style cover, from the rectangles in the SVG: bool [16, 16]."""
    covered = np.zeros((16, 16), dtype=int)
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        if path.get("class") == style:
            for x, y, w, h in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", path.get("d")):
                x, y, w, h = map(int, (x, y, w, h))
                covered[y : y + h, x : x + w] += 1
    assert covered.max() <= 1, "rectangles overlap"
    return covered == 1


def test_the_svg_covers_the_cells_of_each_kind() -> None:
    flags = torch.rand(256, 256, generator=torch.Generator().manual_seed(1)) < 0.5
    flags = flags[::16, ::16].repeat_interleave(16, 0).repeat_interleave(16, 1)
    given = fg.visualize(lambda b, h, q, k: (flags[q, k]) & (q >= k), (1, 1, 256), tile=(16, 16))
    kinds, svg = given.of().kinds, given.to_svg()
    for code, style in ((2, "mixed"), (3, "masked"), (4, "empty")):
        assert (kinds == code).any()
        assert np.array_equal(cells(svg, style), kinds == code)
    causal_map = fg.visualize(causal, (1, 1, 256), tile=(16, 16))
    assert np.array_equal(cells(causal_map.to_svg(), "full"), causal_map.of().kinds == 1)


def test_the_svg_is_well_formed_has_a_description_and_refers_to_nothing() -> None:
    spec = fg.AttentionSpec(mask_mod=causal, name="causal")
    svg = fg.visualize(spec, (2, 2, 256), tile=(16, 16)).to_svg()
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "causal"
    assert "every score is masked: 480 (46.9 %)" in root.findtext(f"{SVG}desc")
    assert "prefers-color-scheme:dark" in root.findtext(f"{SVG}style")
    assert not re.search(r"url\(|href|<script|@import", svg)
    texts = " ".join(text.text for text in root.iter(f"{SVG}text"))
    assert "keys 0 to 255" in texts
    assert "visited with the mask: some scores are kept" in texts


def test_text_with_markup_is_escaped() -> None:
    drawing = replace(fg.visualize(causal, 64).drawing(), title="<a & b>", lines=("</svg>",))
    root = ET.fromstring(svg_of(drawing))
    assert root.findtext(f"{SVG}title") == "<a & b>"
    assert "</svg>" in [text.text for text in root.iter(f"{SVG}text")]


def test_the_text_shows_each_tile() -> None:
    lines = str(fg.visualize(causal, (1, 1, 64), tile=(16, 16))).splitlines()
    at = lines.index("queries 0 to 63 down, keys 0 to 63 across")
    assert lines[at + 1 : at + 5] == ["▒▒······", "██▒▒····", "████▒▒··", "██████▒▒"]
    assert "··  skipped: every score is masked                 6 (37.5 %)" in lines


def test_notebooks_and_prompts_show_the_map() -> None:
    found = fg.visualize(causal, (1, 1, 64), tile=(16, 16))
    assert found._repr_svg_() == found.to_svg()
    assert found.to_svg() in found._repr_html_()
    assert repr(found) == str(found)


def test_a_map_is_saved_by_the_end_of_the_name(tmp_path: Path) -> None:
    found = fg.visualize(causal, (1, 1, 64), tile=(16, 16))
    for name, text in (
        ("a.svg", found.to_svg()),
        ("a.html", found.to_html()),
        ("a.txt", f"{found}\n"),
    ):
        found.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == text
    found.zoom(1, 1).save(str(tmp_path / "zoom.svg"))
    assert "<svg" in (tmp_path / "zoom.svg").read_text()
    for path, what in ((tmp_path / "a.bmp", "format"), (tmp_path / "no" / "a.svg", "file")):
        with pytest.raises(fg.InputError, match=what):
            found.save(path)


def test_a_picture_has_its_own_background_and_the_width_of_a_phone() -> None:
    root = ET.fromstring(fg.visualize(causal, (1, 2, 256)).to_svg())
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    page = next(iter(root.iter(f"{SVG}rect")))
    assert page.attrib["class"] == "page"
    assert (float(page.attrib["width"]), float(page.attrib["height"])) == (width, height)
    assert width <= 390
    widest = max(len(text.text or "") for text in root.iter(f"{SVG}text"))
    assert 13 * 0.52 * widest < width


@pytest.mark.slow
def test_a_png_has_the_colours_of_the_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("matplotlib.image")
    fg.visualize(causal, (1, 1, 512), tile=(64, 64)).save(tmp_path / "a.png")
    pixels = (image.imread(tmp_path / "a.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    assert pixels[0].tolist() == [255, 255, 255]
    for style in ("skip", "full", "mixed"):
        colour = [int(COLOURS[style][i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == colour).all(axis=1).mean() > 0.03, style
    monkeypatch.setattr("flashgen.tools.views.png.importlib.util.find_spec", lambda name: None)
    with pytest.raises(fg.InputError, match="matplotlib, which is not installed"):
        fg.visualize(causal, 64).save(tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_joined_cells_have_the_share_of_what_is_not_skipped() -> None:
    grid = np.zeros((5, 4), dtype=np.uint8)
    grid[:2, :2] = 1
    grid[2:4, 2:] = [[1, 0], [0, 0]]
    grid[4] = [2, 1, 2, 2]
    found = join_cells(grid, 3)
    assert found.codes.tolist() == [[1, 0], [0, 0], [1, 2]]
    assert found.shares.tolist() == [[0, 0], [0, 1], [4, 0]]
    assert join_cells(grid, 5).codes is grid


def test_numbers_in_words() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0 to 2, 5, 7 to 8"
    assert ranges(range(0, 40, 2)).endswith("8, ... (20 in all)")
    assert percent(1, 1000) == "0.10 %"
    assert pairs_in_words([(0, 1), (0, 2), (1, 1), (1, 2)]) == "batch 0 to 1, heads 1 to 2"
    assert pairs_in_words([(0, 1), (1, 2)]) == "batch 0, head 1; batch 1, head 2"
    assert pairs_in_words([(0, 1), (1, 1)], (2, 4)) == "head 1"
    assert pairs_in_words([(0, 0), (0, 1)], (2, 2), packed=True) == "sequence 0"


WINDOW = fg.Scalar("window", "int32")
IDS = fg.Tensor("ids", ("batch", "seq_k"), "int32")


def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k < WINDOW) & (IDS[b, k] > 0)


GIVEN = {"window": 8, "ids": torch.ones(1, 64, dtype=torch.int32)}
WRONG = {
    "no mask": ((3, 64), {}),
    "no shape": ((causal,), {}),
    "another shape": ((causal, (1, 2, 3, 4)), {}),
    "a wrong text": ((causal, "1,a"), {}),
    "negative": ((causal, (1, 1, -4)), {}),
    "lengths of pages": (
        (fg.AttentionSpec(causal, paged=True, name="paged"), (1, 1, 64)),
        {"cache_seqlens": torch.tensor([64], dtype=torch.int32)},
    ),
    "boundaries without elements": (
        (causal,),
        dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.zeros(0, dtype=torch.int32)),
    ),
    "no batch": ((causal, (0, 1, 64)), {}),
    "beyond every number": ((causal, 1 << 70), {}),
    "heads that do not divide": ((causal, (1, 6, 4, 64, 64)), {}),
    "no queries": ((causal, (1, 1, 0)), {}),
    "a tile of one number": ((causal, 64), {"tile": 16}),
    "an empty tile": ((causal, 64), {"tile": (0, 16)}),
    "another arch": ((causal, 64), {"arch": "sm_1"}),
    "another kernel": ((causal, 64), {"kernel": "delta"}),
    "another batch": ((causal, 64), {"batch": 1}),
    "another head": ((causal, 64), {"head": "0"}),
    "too many tiles": ((causal, 1 << 24), {"tile": (16, 16)}),
    "a missing scalar": ((windowed, 64), {"ids": GIVEN["ids"]}),
    "a missing tensor": ((windowed, 64), {"window": 8}),
    "a superfluous value": ((windowed, 64), {**GIVEN, "more": 1}),
    "a short tensor": ((windowed, 64), {**GIVEN, "ids": GIVEN["ids"][:, :9]}),
    "another dtype": ((windowed, 64), {**GIVEN, "ids": GIVEN["ids"].float()}),
    "a value twice": ((windowed, 64), {**GIVEN, "captures": {"window": 9}}),
    "an argument of another name": ((causal, 64), {"windw": 4}),
    "captures of another type": ((windowed, 64), {"captures": 3}),
    "a mod that is no condition": ((lambda b, h, q, k: q - k, 64), {}),
    "a mod with a branch": ((lambda b, h, q, k: 1 if q > k else 0, 64), {}),
    "an offset that is no number": ((causal, 64), {"q_offset": "a"}),
    "boundaries that descend": (
        (causal, (1, 1, 64)),
        {
            "cu_seqlens_q": torch.tensor([0, 40, 20], dtype=torch.int32),
            "cu_seqlens_k": torch.tensor([0, 40, 20], dtype=torch.int32),
        },
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_in_four_lines(name: str) -> None:
    arguments, options = WRONG[name]
    with pytest.raises(fg.FlashgenError) as caught:
        fg.visualize(*arguments, **options)
    labels = [line.split()[0] for line in str(caught.value).splitlines()[1:] if line[2] != " "]
    assert labels == ["where", "numbers", "try"]


def test_the_way_out_of_too_many_tiles_is_a_tile_that_works() -> None:
    with pytest.raises(fg.InputError) as caught:
        fg.visualize(causal, 1 << 20, tile=(64, 64))
    tile = tuple(map(int, re.findall(r"\d+", caught.value.way_out)))
    assert tile == (256, 256)


def test_a_map_refuses_places_that_it_does_not_have() -> None:
    found = fg.visualize(causal, (1, 2, 64), tile=(16, 16), head=1)
    for call in (
        lambda: found.of(0, 0),
        lambda: found.zoom(4, 0, head=1),
        lambda: found.zoom(0, 0, size=0, head=1),
        lambda: found.elements(0, -1, head=1),
        lambda: found.zoom("0", 0, head=1),
    ):
        with pytest.raises(fg.InputError, match="does not have"):
            call()
    wide = fg.visualize(causal, 1 << 15, tile=(1 << 12, 1 << 12))
    with pytest.raises(fg.InputError, match="too many scores"):
        wide.zoom(0, 0)


def test_values_that_only_the_score_reads_need_not_be_given() -> None:
    bias = fg.Tensor("bias", ("heads",), "float32", grad=True)
    spec = fg.AttentionSpec(
        mask_mod=causal, score_mod=lambda s, b, h, q, k: s + bias[h], sink=True, dropout=True
    )
    found = fg.visualize(spec, (1, 2, 64), tile=(16, 16))
    given = fg.visualize(spec, (1, 2, 64), tile=(16, 16), bias=torch.zeros(2))
    assert found.counts == given.counts == {"empty": 12, "mixed": 8, "full": 12}


def test_captures_may_have_the_names_of_arguments() -> None:
    tile = fg.Scalar("tile", "int32")
    mask = fg.Tensor("mask", ("seq_k",), "bool")
    spec = fg.AttentionSpec(mask_mod=lambda b, h, q, k: (k // tile <= q // tile) & mask[k])
    keys = torch.arange(64) < 40
    found = fg.visualize(spec, 64, tile=(16, 16), captures={"tile": 16}, mask=keys)
    assert found.counts == {"empty": 7, "mixed": 2, "full": 7}


def test_the_tile_is_that_of_the_plan_of_the_spec() -> None:
    spec = fg.AttentionSpec(mask_mod=causal, head_dim=128, dtype="bfloat16")
    for arch in PATHS:
        plan = fg.plan(spec, arch)
        found = fg.visualize(spec, (1, 1, 1024), arch=arch)
        assert found.tile == (plan.block_q, plan.block_k)
        assert f"planned for {arch}" in str(found)


def test_shapes_have_the_forms_of_the_commands() -> None:
    for shape in (
        (2, 4, 64),
        "2,4,64",
        np.array([2, 4, 64]),
        [2, 4, 4, 64, 64],
        torch.Size((2, 4, 64)),
    ):
        assert fg.visualize(causal, shape, tile=(16, 16)).tiles == 2 * 4 * 16
    assert fg.visualize(causal, (64, 128), tile=(16, 16)).tiles == 32
    assert fg.visualize(causal, 64, tile=(16, 16)).tiles == 16


def test_importing_pictures_is_left_to_the_first_use() -> None:
    program = "import sys, flashgen; print('torch' in sys.modules, 'visualize' in dir(flashgen))"
    assert run_python("-c", program).stdout == "False True\n"


def test_names_stay_in_their_elements_of_pictures_and_pages() -> None:
    name = '</title></script><b onclick="x">&\n\x00\x0b\u2028\udcff'
    drawing = replace(fg.visualize(causal, (64, 64)).drawing(), title=name, lines=(name,))
    found = ET.fromstring(svg_of(drawing).encode("utf-8"))
    assert {each.tag for each in found.iter()} <= {
        f"{SVG}{tag}" for tag in ("svg", "title", "desc", "style", "text", "rect", "path", "g")
    }
    assert next(found.iter(f"{SVG}title")).text.startswith("</title></script><b onclick=")
    page = html_of(Page(name, ()))
    page.encode("utf-8")
    assert "<b onclick" not in page
    assert page.count("</script>") == html_of(Page("plain", ())).count("</script>")
