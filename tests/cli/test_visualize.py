"""``flashgen visualize``: a picture of the tiles, from the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashgen as fg
from tests.support.commands import CAUSAL, WINDOWED, flashgen
from tests.support.tiers import slow


@pytest.mark.parametrize("ending", [".svg", slow(".html"), ".txt"])
def test_the_file_is_that_of_the_function(ending: str, tmp_path: Path) -> None:
    ours, theirs = tmp_path / f"ours{ending}", tmp_path / f"theirs{ending}"
    shown = flashgen(
        "visualize", CAUSAL, "-o", str(ours), "--shape", "1,2,320", "--tile", "64x32", "--head", "1"
    )
    assert shown.exit_code == 0, shown.output
    assert ours.name in shown.output
    spec = fg.load(CAUSAL)
    fg.visualize(spec, (1, 2, 320), tile=(64, 32), head=1).save(theirs)
    assert ours.read_text() == theirs.read_text()


def test_without_a_file_the_map_is_printed_with_the_scalars_of_the_options(tmp_path: Path) -> None:
    path = tmp_path / "windowed.py"
    path.write_text(WINDOWED.format(examples=""))
    options = ("--scalar", "window=64", "--scalar", "slope=1")
    shown = flashgen("visualize", str(path), "--shape", "1,1,256", *options)
    assert shown.exit_code == 0, shown.output
    assert str(fg.visualize(fg.load(str(path)), (1, 1, 256), window=64)) in shown.output


def test_the_tiles_that_the_error_of_a_wrong_tile_names_are_taken() -> None:
    shown = flashgen("visualize", CAUSAL, "--tile", "wide")
    tiles = [text.strip(",") for text in re.findall(r"--tile (\S+)", shown.output.split("try")[1])]
    assert tiles
    for tile in tiles:
        shown = flashgen("visualize", CAUSAL, "--shape", "1,1,256", "--tile", tile)
        assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("-o", "tiles.bmp"), "format"),
        (("-o", "no/such/folder/tiles.svg"), "folder"),
        (("--tile", "wide"), "not a tile"),
        pytest.param(("--tile", f"{'9' * 5000}x16"), "not a tile", id="too many digits"),
        (("--shape", "1"), "not a shape"),
        (("--head", "7"), "does not have this head"),
        (("--kernel", "sideways"), "kernel"),
    ],
)
def test_what_is_wrong_is_an_error_with_a_way_out(
    options: tuple[str, ...], what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = flashgen("visualize", CAUSAL, *options)
    assert shown.exit_code != 0
    assert what in shown.output
    assert "try" in shown.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--shape", "0,8,64"),
        ("--shape", "1,8,300000000"),
        ("--tile", "0x64"),
        ("--kernel", "sideways"),
        ("--batch", "4"),
        ("--head", "-1"),
    ],
)
def test_errors_about_an_option_are_in_the_language_of_the_command(option: str, value: str) -> None:
    output = flashgen("visualize", CAUSAL, option, value).output
    assert f"where    option {option}" in output
    way_out = output.split("  try ")[1]
    assert option in way_out
    assert not re.search(r"fg\.|\w=", way_out)


@pytest.mark.parametrize("codes", ["None", "'int8'"])
def test_a_paged_cache_is_shown_as_the_function_shows_it(tmp_path: Path, codes: str) -> None:
    file = tmp_path / "paged.py"
    mask = "lambda b, h, q, k: (k <= q) & (q - k < 50)"
    options = f"head_dim=64, paged=True, kv_dtype={codes}"
    file.write_text(f"import flashgen as fg\nspec = fg.AttentionSpec({mask}, {options})\n")
    shown = flashgen("visualize", str(file), "--shape", "1,2,1,40,300")
    assert shown.exit_code == 0, shown.output
    assert str(fg.visualize(fg.load(str(file)), (1, 2, 1, 40, 300))) in shown.output
