"""FLASHGEN_OVERRIDE: what an edited file includes, is named, and may hold."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import flashgen as fg
from flashgen.kernels.compile import Binary, compile, forget
from flashgen.kernels.pipeline import build_merge
from flashgen.shared.errors import FlashgenError
from tests.support.compile_sources import STACKED, TOY
from tests.support.tiers import slow

INCLUDES = {
    "plain": '#include "factor.h"\n',
    "indented": '  #  include   "factor.h" // the factor\n',
    "comment": '/* a */ #/* b */include /* c\n */ "factor.h"\n',
    "spliced": '#inc\\\nlude \\\n "factor.h"\n',
    "digraph": '%:include "factor.h"\n',
    "absolute": '#include "{folder}/factor.h"\n',
    "other folder": '#include "../{name}/factor.h"\n',
    "nested": '#include "inner/first.h"\n',
    "conditional": '#if 1\n#include "factor.h"\n#endif\n',
    "has_include": '#if __has_include("factor.h")\n#include "factor.h"\n#endif\n',
    "behind a comment of a line": '// an open /* comment\n#include "factor.h"\n// */\n',
}


def build(source: str = TOY, kernel: str = "toy") -> Binary:
    return compile(source, filename=f"{kernel}.cu", kernel=kernel, arch="sm_80")


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_cache: Path) -> Path:
    path = tmp_path / "edited" / "toy.cu"
    (path.parent / "inner").mkdir(parents=True)
    (path.parent / "inner" / "first.h").write_text('#include "second.h"\n')
    (path.parent / "inner" / "second.h").write_text('#include "../factor.h"\n')
    (path.parent / "factor.h").write_text("#define FACTOR 4.0f\n")
    path.write_text(TOY)
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(path))
    return path


@pytest.mark.parametrize("disk", [True, slow(False)])
@pytest.mark.parametrize("include", INCLUDES.values(), ids=INCLUDES)
def test_a_header_that_changes_is_another_kernel(
    include: str, disk: bool, edited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not disk:
        monkeypatch.setenv("FLASHGEN_CACHE_DIR", "off")
    folder = edited.parent
    include = include.replace("{folder}", str(folder)).replace("{name}", folder.name)
    edited.write_text(include + TOY.replace("2.0f", "FACTOR"))
    first = build()
    (folder / "factor.h").write_text("#define FACTOR 5.0f\n")
    second = build()
    assert not second.from_cache
    assert first.key != second.key
    assert "0f40800000" in first.ptx  # 4
    assert "0f40A00000" in second.ptx  # 5
    forget()
    assert build().from_cache == disk
    (folder / "factor.h").write_text("#define FACTOR 4.0f\n")
    assert build().ptx == first.ptx


def test_a_built_spec_follows_the_edited_file_within_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_cache: Path
) -> None:
    spec = fg.AttentionSpec(head_dim=16, name="overridden")
    own = fg.build(spec)
    path = tmp_path / own.source.filename
    (tmp_path / "own.h").write_text("// nothing\n")
    path.write_text(f'#include "own.h"\n{own.source.text}')
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(path))
    first = fg.build(spec)
    assert first.binary.warnings[0] == f"compiled from FLASHGEN_OVERRIDE={path}"
    assert fg.build(spec) is first
    (tmp_path / "own.h").write_text("// something else\n")
    assert fg.build(spec).binary.key != first.binary.key
    monkeypatch.delenv("FLASHGEN_OVERRIDE")
    assert fg.build(spec) is own


def test_a_name_that_fits_no_kernel_is_a_warning_with_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = fg.AttentionSpec(head_dim=16, name="misnamed")
    source = fg.emit(spec).forward
    path = tmp_path / "misnamed_forward_edited.cu"
    path.write_text(source.text)
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(path))
    with pytest.warns(UserWarning, match="the name of no kernel here") as notes:
        fg.build(spec)
    (text,) = {str(note.message) for note in notes}
    assert source.filename in text
    for backward in fg.emit(spec).backward:
        assert backward.filename in text
    # The file of a later kernel of the same spec is none of these.
    path = path.rename(tmp_path / fg.emit(spec).backward[-1].filename)
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fg.build(spec)


def test_a_file_that_has_replaced_a_kernel_is_no_longer_warned_of(edited: Path) -> None:
    with pytest.warns(UserWarning, match=r"kernels are stacked\.cu"):
        build(STACKED, "stacked")
    assert build().warnings[0].startswith("compiled from FLASHGEN_OVERRIDE")
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(STACKED, "stacked").source == STACKED


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        (b"// caf\xe9\n", "byte 0xe9 at 6"),
        ("// text\n".encode("utf-16"), "byte 0xff at 0"),
        (b"int x;\0 int y;", "a zero byte at 6"),
        (b"\x80" * 100, "byte 0x80 at 0"),
    ],
)
def test_text_that_is_not_utf_8_is_our_error(data: bytes, numbers: str, edited: Path) -> None:
    edited.write_bytes(data)
    with pytest.raises(FlashgenError, match=r"no text in UTF-8") as error:
        build()
    assert numbers in error.value.numbers
    assert len(str(error.value).splitlines()) == 4


def test_an_include_by_a_macro_is_refused(edited: Path) -> None:
    edited.write_text('#define FILE "factor.h"\n#include FILE\n' + TOY)
    with pytest.raises(FlashgenError, match="names its file by a macro") as error:
        build()
    assert "#include FILE" in error.value.numbers


def test_an_edited_kernel_that_does_not_wait_for_the_launch_before_it_is_refused(
    edited: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is launched before that one ends."""
    merge = build_merge(16, "float16", "sm_90a", splits=True).source
    path = edited.parent / merge.filename
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(path))
    path.write_text(merge.text + "// edited\n")
    assert build_merge(16, "float16", "sm_90a", splits=True).plan.overlaps
    wait = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    assert merge.text.count(wait) == 1
    path.write_text(merge.text.replace(wait, ""))
    with pytest.raises(fg.CompileError, match="does not wait for the kernel before") as error:
        build_merge(16, "float16", "sm_90a", splits=True)
    assert merge.filename in error.value.where
    assert wait in error.value.way_out


def test_an_operator_that_has_been_called_follows_the_edited_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_cache: Path
) -> None:
    spec = fg.AttentionSpec(head_dim=16, dtype="float32", name="called_before")
    op, source = fg.attention(spec), fg.emit(spec).forward
    q, k, v = (torch.randn(1, 1, 16, 16) for _ in range(3))

    def computed() -> torch.Tensor:
        return op(q, k, v, backend="emulator")

    own = computed()
    path = tmp_path / source.filename
    scaled = source.text.replace("(score - row_max) * scale", "(score - row_max) * scale * 0.5f")
    assert scaled != source.text
    path.write_text(scaled)
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(path))
    halved = computed()
    assert not torch.equal(halved, own)
    path.write_text(source.text + "\n")
    assert torch.equal(computed(), own)
    path.write_text(scaled)
    assert torch.equal(computed(), halved)
    monkeypatch.delenv("FLASHGEN_OVERRIDE")
    assert torch.equal(computed(), own)
