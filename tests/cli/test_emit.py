"""``flashgen emit``: files of given specs, the folder of all specs, and ``--check``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashgen.kernels.planner import plan_backward
from flashgen.spec.language.spec_file import load
from tests.support.commands import WINDOWED, flashgen
from tests.support.examples import spec_path


def test_emit_writes_files_and_check_finds_every_difference(tmp_path, windowed):
    out = str(tmp_path / "out")
    assert flashgen("emit", windowed, "-o", out, "--check").exit_code == 1
    written = flashgen("emit", windowed, "-o", out)
    assert written.exit_code == 0, written.output
    assert "written" in written.stdout
    kernels = ("forward", "backward_fused", "backward_dkdv", "backward_dq", "tangent_q_k_v")
    names = {f"windowed_{kernel}_fp16_d16_sm_80.cu" for kernel in kernels}
    block_q = plan_backward(load(windowed)).key_plan.block_q
    names |= {"delta_fp16_d16_sm_80.cu", f"convert_dq_fp16_d16_q{block_q}_sm_80.cu"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    file = tmp_path / "out" / "windowed_forward_fp16_d16_sm_80.cu"

    stamp = file.stat().st_mtime_ns
    again = flashgen("emit", windowed, "-o", out)
    assert "unchanged" in again.stdout
    assert file.stat().st_mtime_ns == stamp
    assert flashgen("emit", windowed, "-o", out, "--check").exit_code == 0

    text = file.read_bytes()
    file.write_bytes(text.replace(b"softmax", b"softmin", 1))
    changed = flashgen("emit", windowed, "-o", out, "--check")
    assert changed.exit_code == 1
    assert "softmin" in changed.stdout
    assert any(line.startswith("-") and "softmin" in line for line in changed.stdout.splitlines())
    assert any(line.startswith("+") and "softmax" in line for line in changed.stdout.splitlines())
    file.write_bytes(text.replace(b"\n", b"\r\n"))
    assert flashgen("emit", windowed, "-o", out, "--check").exit_code == 1


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with two specs, and generated/ with a gallery of one file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "specs").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"specs/{name}.py").write_text(WINDOWED.format(examples=""))
    (tmp_path / "generated").mkdir()
    link = "[the kernel](gallery/one_forward_fp16_d16_sm_80.cu)\n"
    (tmp_path / "generated/README.md").write_text(link)
    return tmp_path


def test_emit_without_specs_writes_a_gallery_spec_sections_and_digests(project):
    assert flashgen("emit").exit_code == 0
    files = {path.relative_to(project / "generated").as_posix() for path in project.rglob("*.cu*")}
    gallery = "gallery/one_forward_fp16_d16_sm_80.cu"
    assert files == {gallery, "specs/one.cuh", "specs/two.cuh"}
    digests = (project / "generated/DIGESTS").read_text().splitlines()
    names = [line.split()[1] for line in digests]
    assert names == sorted(names)
    assert {"one_forward_fp16_d16_sm_80.cu", "two_forward_fp16_d16_sm_90a.cu"} <= set(names)
    assert all(re.fullmatch(r"[0-9a-f]{16}  \S+\.cu", line) for line in digests)
    sections = (project / "generated/specs/one.cuh").read_text()
    assert "// in sm_80 and sm_90a: forward\n// specs/one.py:" in sections
    assert sections.count("float score_mod(") == sections.count("Scored score_mod(") == 1
    again = flashgen("emit")
    assert "written" not in again.stdout
    assert flashgen("emit", "--check").exit_code == 0


def test_emit_check_says_which_file_of_the_folder_differs(project):
    flashgen("emit")
    folder = project / "generated"
    file = folder / "gallery/one_forward_fp16_d16_sm_80.cu"
    sections, digests = folder / "specs/one.cuh", folder / "DIGESTS"
    for path, before, after in ((file, "softmax", "softmin"), (sections, "slope", "slape")):
        path.write_text(path.read_text().replace(before, after, 1))
    first, second, *rest = digests.read_text().splitlines(keepends=True)
    digests.write_text("f" * 16 + first[16:] + f"{'0' * 16}  other.cu\n" + "".join(rest))
    result = flashgen("emit", "--check")
    assert result.exit_code == 1
    for changed in ("softmin", "slape"):
        assert any(line[0] == "-" and changed in line for line in result.stdout.splitlines())
    assert f"{first.split()[1]} is emitted with another text" in result.stdout
    assert f"{second.split()[1]} is emitted and has no digest" in result.stdout
    assert "other.cu has a digest and is not emitted" in result.stdout
    assert "5 differences between generated/" in result.stdout

    digests.write_text("".join([first, second, *rest]).replace("\n", "\r\n"))
    file.unlink()
    result = flashgen("emit", "--check")
    assert "line endings differ: generated/DIGESTS" in result.stdout
    assert f"missing: {file.relative_to(project)}" in result.stdout


def test_emit_names_files_that_are_left_over_or_unknown(project):
    flashgen("emit")
    (project / "specs/two.py").unlink()
    result = flashgen("emit", "--check")
    assert result.exit_code == 1
    assert "left over: generated/specs/two.cuh, which no spec emits" in result.stdout
    assert "two_forward_fp16_d16_sm_80.cu has a digest and is not emitted" in result.stdout
    assert "left over" in flashgen("emit").stdout
    readme = project / "generated/README.md"
    readme.write_text(readme.read_text().replace("one_forward", "two_forward"))
    result = flashgen("emit")
    assert result.exit_code == 2
    assert "the gallery has a file that no spec emits" in result.stderr
    readme.write_text("")
    stale = "left over: generated/gallery/one_forward_fp16_d16_sm_80.cu, to which README.md"
    assert stale in flashgen("emit", "--check").stdout


def test_emit_without_specs_refuses_options_of_specs_and_needs_specs(project):
    result = flashgen("emit", "--arch", "sm_90a")
    assert result.exit_code == 2
    assert "flashgen emit specs/*.py --arch sm_90a" in result.stderr
    for path in (project / "specs").iterdir():
        path.unlink()
    assert "no .py file in specs/" in flashgen("emit").stderr


def test_different_specs_of_one_name_are_refused(tmp_path, windowed):
    other = tmp_path / "other"
    other.mkdir()
    (other / "windowed.py").write_text(Path(windowed).read_text().replace("q >= k", "q > k"))
    result = flashgen("emit", windowed, str(other / "windowed.py"), "-o", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "into the same file" in result.stderr


def test_a_paged_cache_has_kernels_for_whole_rows_and_for_split_keys(tmp_path):
    path = tmp_path / "cached.py"
    path.write_text("import flashgen as fg\n\nspec = fg.AttentionSpec(paged=True)\n")
    run = flashgen("emit", str(path), "-o", str(tmp_path / "out"))
    assert run.exit_code == 0, run.output
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert names == {f"cached{kind}_forward_fp16_d64_sm_80.cu" for kind in ("", "_split")}


def test_emit_names_the_path_of_each_pass_over_a_block_layout(tmp_path):
    spec = str(spec_path("local_global"))
    options = ("emit", spec, "-o", str(tmp_path), "--arch", "sm_90a", "--arch", "sm_80")
    said = flashgen(*options).stdout.replace("\n", " ")
    assert said.count("calls that name no architecture: block layout") == 3
    assert f"{spec}, sm_90a: calls that name no architecture" in said
