"""``flashgen export``: folders, options and errors of the command."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import flashgen as fg
from tests.support.commands import flashgen
from tests.support.examples import spec_path


def test_export_writes_a_folder_that_load_export_reads(tmp_path: Path, windowed: str) -> None:
    folder = tmp_path / "out"
    done = flashgen("export", windowed, "-o", str(folder), "--arch", "sm_80")
    assert done.exit_code == 0, done.output
    assert "2 kernels for sm_80; windowed.h and windowed.c" in done.stdout
    command = json.loads((folder / "manifest.json").read_text())["command"]
    assert command == "flashgen export windowed.py -o out --arch sm_80"
    q, k, v = (torch.randn(1, 1, 20, 16).half() for _ in range(3))
    out = fg.load_export(folder)(q, k, v, window=4, slope=0.5)
    own = fg.attention(fg.load(windowed))(q, k, v, window=4, slope=0.5, backend="emulator")
    assert torch.equal(out, own)


def test_wrong_options_end_with_an_error_in_four_lines(tmp_path: Path, windowed: str) -> None:
    for options in (
        ("--arch", "sm_70"),
        ("--heads-per-tile", "x"),
        ("--heads-per-tile", "9" * 5000),
        ("--call", "window"),
        ("--call", "split_size+cu_seqlens_q"),
        ("--head-dim", "7"),
    ):
        done = flashgen("export", windowed, "-o", str(tmp_path / "out"), *options)
        assert done.exit_code == 2
        assert len(done.stderr.strip().splitlines()) >= 4
        assert "  try " in done.stderr
        assert "a bug" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_export_names_the_path_of_a_pass_over_a_block_layout(tmp_path: Path) -> None:
    spec, folder = str(spec_path("local_global")), str(tmp_path / "out")
    done = flashgen("export", spec, "-o", folder, "--arch", "sm_90a", "--head-dim", "16")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("calls that name no architecture: block layout, forward") == 1
