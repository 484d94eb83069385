"""flashgen.calls.export: what is written, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import flashgen as fg
from flashgen.calls.export import ExportRequest, export
from flashgen.calls.export.c_source import c_sources
from flashgen.calls.export.collect import narrow_ranges, widest
from flashgen.calls.exported.folder import open_folder
from flashgen.calls.exported.manifest import FORMAT, Manifest
from flashgen.kernels.codegen import beyond_int32
from flashgen.kernels.compile import nvrtc
from flashgen.kernels.compile.cubin import kernel_facts
from flashgen.shared import config
from flashgen.shared.call import CallRanges
from flashgen.shared.errors import InputError, PlanError, SpecError
from flashgen.shared.plain import from_plain, to_plain
from flashgen.spec.language.signature import signature_of
from flashgen.tools.cli.export import shell_word
from flashgen.version import __version__
from tests.support.exports import exported, spec_of
from tests.support.tiers import slow


def test_the_manifest_has_versions_digests_and_the_signature() -> None:
    folder = exported("sliding_window")
    data = json.loads((folder / "manifest.json").read_text())
    assert data["format"] == FORMAT
    assert data["flashgen"] == __version__
    assert nvrtc.version().startswith(data["nvrtc"])
    assert data["command"].startswith("flashgen export specs/sliding_window.py")
    others = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert set(data["files"]) == others - {"manifest.json"}
    for name, record in data["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == record["sha256"]
    signature = data["programs"][0]["signature"]
    assert (signature["head_dim"], signature["dtype"]) == (16, "float16")
    assert [scalar["name"] for scalar in signature["scalars"]] == ["window"]


@pytest.mark.parametrize("name", ["sliding_window", slow("block_diagonal")])
def test_a_manifest_survives_its_form_as_json(name: str) -> None:
    manifest = open_folder(exported(name)).manifest
    again = from_plain(Manifest, json.loads(json.dumps(to_plain(manifest))))
    assert again == manifest
    assert again.programs[0].signature == signature_of(spec_of(name))


def test_an_export_holds_no_folder_of_the_machine() -> None:
    folder = exported("sliding_window")
    cache = config.cache_dir()
    assert cache is not None
    for path in folder.rglob("*"):
        if path.is_file():
            assert str(cache).encode() not in path.read_bytes(), path.name
            assert str(Path.home()).encode() not in path.read_bytes(), path.name
    for kernel in open_folder(folder).manifest.kernels:
        cubin = (folder / f"kernels/{kernel.stem}.cubin").read_bytes()
        found = kernel_facts(cubin, kernel.facts.name)
        assert found.param_bytes == kernel.resources.param_bytes


def test_the_same_request_gives_the_same_bytes(tmp_path: Path) -> None:
    request = ExportRequest(spec=spec_of("sliding_window"), archs=("sm_80",))
    texts = []
    for name in ("first", "second"):
        export(request, tmp_path / name)
        texts.append((tmp_path / name / "manifest.json").read_text())
    assert texts[0] == texts[1]


def test_an_earlier_export_is_replaced_and_other_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    request = ExportRequest(spec=spec_of("sliding_window"), archs=("sm_80",))
    export(replace(request, spec=spec_of("sliding_window").replace(name="earlier")), folder)
    export(request, folder)
    assert not list(folder.rglob("*earlier*"))
    open_folder(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="files of something else"):
        export(request, tmp_path / "other")
    assert (tmp_path / "other" / "notes.txt").read_text() == "mine"


def test_requests_that_do_not_suit_a_spec_are_refused(tmp_path: Path) -> None:
    spec = spec_of("sliding_window")

    def by_head(b: int, h: int, i: int, j: int) -> bool:
        return (h + i + j) % 2 == 0

    layout = spec.replace(block_sparse=fg.BlockSparse(by_head))
    per_head = spec_of("per_head_window")
    for request, error, message in (
        (ExportRequest(spec=layout, archs=("sm_80",)), SpecError, "differs between heads"),
        (ExportRequest(spec=spec, archs=("sm_70",)), PlanError, "sm_70"),
        (ExportRequest(spec=spec, archs=("sm_80",), calls=("window",)), InputError, "no such"),
        (
            ExportRequest(spec=per_head, archs=("sm_80",), heads_per_tile=(1, 4)),
            InputError,
            "cannot share a tile",
        ),
    ):
        with pytest.raises(error, match=message) as caught:
            export(request, tmp_path / "refused")
        assert caught.value.way_out
        assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(
    ("call", "way_out"),
    [
        ("split_size+split_size", "--call split_size"),
        ("q_offset:int32+whole+q_offset:int32", "--call q_offset:int32+whole"),
        (
            "q_offset:int32+q_offset:int64",
            "--call q_offset:int64; another dtype in a --call of its own",
        ),
    ],
)
def test_an_argument_that_is_given_twice_in_a_call_is_refused(
    call: str, way_out: str, tmp_path: Path
) -> None:
    request = ExportRequest(spec=spec_of("sliding_window"), archs=("sm_80",), calls=(call,))
    with pytest.raises(InputError, match="each of its arguments once") as caught:
        export(request, tmp_path / "refused")
    assert caught.value.way_out == way_out
    assert not (tmp_path / "refused").exists()


def test_a_table_of_a_layout_that_no_machine_would_finish_is_refused_before_the_work() -> None:
    def never(i: int, j: int) -> bool:
        return False

    for sizes in ((16, 16), (1, 5), (1, 2**28), (96, 7)):
        spec = spec_of("causal").replace(block_sparse=fg.BlockSparse(never, *sizes))
        with pytest.raises(InputError, match="too large for an export") as caught:
            ExportRequest(spec=spec, archs=("sm_80",), positions=99_999_999_999)
        (most,) = re.findall(r"--positions (\d+)", caught.value.way_out)
        ExportRequest(spec=spec, archs=("sm_80",), positions=int(most))


def test_calls_inside_of_the_narrow_ranges_stay_within_int32() -> None:
    spec = spec_of("block_diagonal")
    built = fg.build(spec)
    boxes = narrow_ranges([built], signature_of(spec))
    assert boxes
    assumptions = built.source.assumptions
    assert beyond_int32(assumptions, widest(signature_of(spec)))
    draw = random.Random(0)
    for box in boxes:
        for _ in range(20):
            ends = tuple(
                tuple(sorted(draw.choices((low, 0, high), k=2))) for low, high in box.values()
            )
            assert not beyond_int32(assumptions, CallRanges(tuple(box), ends))  # type: ignore[arg-type]


def test_narrow_ranges_of_a_mask_that_divides_positions_have_no_negative_offset() -> None:
    spec = spec_of("natten_2d")
    built = fg.build(spec)
    boxes = narrow_ranges([built], signature_of(spec))
    assert boxes
    for box in boxes:
        assert box["q_offset"][0] == box["k_offset"][0] == 0
        assert box["q"][0] < 0  # the rows of a tile in front of the first query
        for least, expected in ((0, ""), (-1, "k_offset can be negative")):
            ends = {**box, "k_offset": (least, 4)}
            ranges = CallRanges(tuple(ends), tuple(ends.values()))
            assert beyond_int32(built.source.assumptions, ranges) == expected


def test_the_sources_for_c_name_no_other_folder_and_end_lines_in_time() -> None:
    folder = exported("sliding_window")
    for name in ("sliding_window.h", "sliding_window.c"):
        text = (folder / name).read_text()
        assert "GENERATED by flashgen" in text
        assert max(map(len, text.splitlines())) <= 150
        assert "/*%" not in text
        assert "//%" not in text


NASTY = 'a\n#error b \\ "c" */ ??/ \u2028 \u202e \x85 \r d\\'


@pytest.mark.parametrize("end", ["", "\\", "??/", "\\ ", "??/\\ \\", "\n", "\n#error e"])
def test_no_command_leaves_its_comment_in_the_sources_for_c(end: str) -> None:
    manifest = open_folder(exported("sliding_window")).manifest
    plain = c_sources(replace(manifest, command="flashgen export"))
    for name, text in c_sources(replace(manifest, command=NASTY + end)).items():
        lines = [line for line in text.splitlines() if "#error b" not in line]
        assert lines == [line for line in plain[name].splitlines() if "flashgen export" not in line]
        (shown,) = set(text.splitlines()) - set(lines)
        assert shown.startswith("//   a\\n#error b")
        assert shown.isprintable()
        assert not shown.endswith(("\\", "??/", " "))


def test_a_command_of_several_lines_is_one_line_of_the_manifest() -> None:
    request = ExportRequest(spec=spec_of("sliding_window"), archs=("sm_80",), command=NASTY)
    assert request.command.isprintable()


@pytest.mark.parametrize(
    "path", ["a b", "it's", "a\nb", "'\n\\", "\u2028x", "\udcff\x01", "\U000e0001"]
)
def test_the_command_of_an_export_has_the_words_that_were_given(path: str) -> None:
    word = shell_word(path)
    assert word.isprintable()
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert os.fsdecode(done.stdout) == path
