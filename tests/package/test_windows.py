"""Windows: nothing that only POSIX has is used where flashgen runs there.

`make lint` has mypy look at the packages as on Windows too, which finds every name of the standard
library that is not there. The rest is here: texts and file names, and a run without those names.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python

RUN = """
from tests.support.without_posix import hide
hide()
import sys
from flashgen.tools.cli import main
sys.argv = ["flashgen", *sys.argv[1:]]
main()
"""
CALLS = """
from tests.support.without_posix import hide
hide()
import torch
import flashgen as fg
from flashgen.calls.native import build
from flashgen.calls.trust import trial
from flashgen.kernels.compile import ownership
from flashgen.shared import config
assert ownership.sys.platform == "win32" and not hasattr(ownership.os, "geteuid")
assert not ownership.hindrance(config.cache_dir())
attend = fg.attention(fg.AttentionSpec(head_dim=16, dtype="float16"))
q, k, v = (torch.randn(1, 1, 64, 16, dtype=torch.float16, requires_grad=True) for _ in range(3))
tiled = attend(q, k, v)
tiled.sum().backward()
emulated = attend(q, k, v, backend="emulator")
emulated.sum().backward()
torch.testing.assert_close(tiled, emulated, atol=2e-3, rtol=2e-3)
ended = trial.run([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.5)
assert ended.out_of_time, ended
print(attend.native_calls)
"""


@pytest.mark.slow
def test_specs_run_without_what_only_posix_has(tmp_path: Path) -> None:
    given = {"FLASHGEN_CACHE_DIR": str(tmp_path / "cache"), "FLASHGEN_BACKEND": "emulator"}
    done = run_python("-c", RUN, "run", "specs/causal.py", "--shape", "1,1,64", **given)
    assert done.stdout.splitlines()[-1].split() == ["result", "pass"]
    again = run_python("-c", RUN, "run", "specs/causal.py", "--shape", "1,1,64", **given)
    assert "from the cache" in again.stdout
    export = ("export", "specs/causal.py", "--arch", "sm_80", "-o", tmp_path / "export")
    run_python("-c", RUN, *export, **given)
    assert (tmp_path / "export" / "manifest.json").is_file()
    native = run_python("-c", RUN, "build-native", status=(2,), **given)
    assert "the native part is not for Windows" in native.stderr
    given.pop("FLASHGEN_BACKEND")
    calls = run_python("-c", "import sys\n" + CALLS, **given)
    assert calls.stdout == "it is not for Windows\n"


def test_pictures_as_text_can_be_piped_where_the_code_page_lacks_their_characters(
    tmp_path: Path,
) -> None:
    given = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    done = run_python("-m", "flashgen", "visualize", "specs/causal.py", encoding="utf-8", **given)
    assert "█" in done.stdout


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """The lines with a text of a file or of a pipe in whatever encoding the system has."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        files, texts = ("open", "fdopen"), ("read_text", "write_text")
        if name not in (*files, *texts) and "text" not in [each.arg for each in node.keywords]:
            continue
        given = {each.arg: ast.unparse(each.value) for each in node.keywords}
        text = name in texts or given.get("text") == "True"
        if name in files and ast.unparse(node.func) != "os.open":
            words = (*map(ast.unparse, node.args), *given.values())
            text = not any(re.fullmatch(r"'[rwax+]*b\+?'", each) for each in words)
        if text and "encoding" not in given:
            yield node.lineno


def test_every_text_has_an_encoding_and_no_path_is_that_of_one_system() -> None:
    planted = 'p.read_text()\nopen(p)\nopen(p, "rb")\nrun(text=True)\np.open(encoding="utf-8")'
    assert list(without_encoding(ast.parse(planted))) == [1, 2, 4]
    for folder in ("flashgen", "ptx_emulator"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert list(without_encoding(tree)) == [], path
            texts = (str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant))
            places = [text for text in texts if re.match(r"/(tmp|dev|var|proc)/", text)]
            # It is read where it is there; NVML has the version elsewhere.
            assert places in ([], ["/proc/driver/nvidia/version"]), path


def test_every_file_of_the_wheel_has_a_name_that_windows_allows(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert len({name.lower() for name in names}) == len(names)
    devices = re.compile(r"(aux|con|nul|prn|com\d|lpt\d)(\..*)?", re.IGNORECASE)
    for name in names:
        for part in name.split("/"):
            assert not re.search(r'[<>:"\\|?*]|[. ]$', part), name
            assert not devices.fullmatch(part), name
