"""The training example: as a user runs it for a few steps, and what its comparison rests on."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.support.paths import ROOT
from tests.support.processes import run_python

pytest.importorskip("matplotlib", reason="the example plots: pip install matplotlib")

FOLDER = ROOT / "examples"
EXAMPLE = "train_char"

Tensor = torch.Tensor


@pytest.fixture
def small(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """The example's sizes, so small that a training takes no time."""
    sizes = example.Sizes

    def smaller() -> object:
        return sizes(context=24, batch=3, layers=1, heads=2, head_dim=8)

    monkeypatch.setattr(example, "Sizes", smaller)
    monkeypatch.setattr(example, "SAMPLE", 3)
    monkeypatch.delenv("FLASHGEN_BACKEND", raising=False)
    return smaller


@pytest.mark.slow
def test_the_example_trains_alike_with_torch_and_with_flashgen(tmp_path: Path) -> None:
    picture = tmp_path / "a new folder" / "curves.png"
    command = (FOLDER / "train_char.py", "--device", "cpu", "--steps", 6, "--plot", picture)
    done = run_python(*command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "flashgen  tiled algorithms" in done.stdout

    rows = re.findall(r"^ +(\d+)  +(\S+)  +(\S+)  +(\S+)  +(\S+)$", done.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 2, 3, 4, 5, 6], done.stdout
    for _, theirs, ours, difference, _ in rows:
        assert float(difference) <= 0.01
        assert abs(float(ours) - float(theirs)) <= 0.01 * float(theirs)
    # It learns: a model that knows nothing of 61 characters has a loss of log(61) = 4.1.
    for curve in (1, 2, 4):
        assert float(rows[0][curve]) == pytest.approx(math.log(61), rel=0.1)
        assert float(rows[-1][curve]) < 3.6
    assert any(row[2] != row[4] for row in rows), "dropout changes the loss"

    found = re.search(r"difference (\S+) at step \d of 6, allowed 1e-02: pass", done.stdout)
    assert found, done.stdout
    assert float(found[1]) <= 0.01
    held_out = re.search(r"held out  +(\S+)  +(\S+)  +(\S+)\n", done.stdout)
    assert held_out, done.stdout
    assert all(float(loss) < 3.6 for loss in held_out.groups())
    _assert_curves_are_drawn(picture)


def _assert_curves_are_drawn(picture: Path) -> None:
    from matplotlib import image

    pixels = np.round(image.imread(picture)[..., :3] * 255).astype(int)
    assert min(pixels.shape[:2]) > 500
    for color in ((0xF4, 0xB2, 0x66), (0x12, 0x35, 0x5B), (0x2A, 0x9D, 0x6F), (0xC0, 0x39, 0x2B)):
        drawn = (np.abs(pixels - color).max(axis=-1) < 8).sum()
        assert drawn > 100, f"{drawn} pixels of the color {color}"


@pytest.mark.usefixtures("small")
def test_all_trainings_see_the_same_batches_and_begin_with_the_same_weights(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[list[Tensor], list[Tensor]]] = []
    plain = example.CharTransformer

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *given: object) -> None:
            super().__init__(*given)
            seen.append(([p.detach().clone() for p in self.parameters()], []))

        def loss(self, numbers: Tensor, following: Tensor) -> Tensor:
            if self.training:
                seen[-1][1].append(torch.stack([numbers, following]))
            return super().loss(numbers, following)

    monkeypatch.setattr(example, "CharTransformer", Watched)
    given = ["--device", "cpu", "--steps", "4", "--plot", str(tmp_path / "curves.png")]
    assert example.main(given) == 0
    assert [len(batches) for _, batches in seen] == [4, 4, 4]
    first_weights, first_batches = seen[0]
    for weights, batches in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, first_weights, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(batches, first_batches, strict=True))
    assert len({tuple(batch.flatten().tolist()) for batch in first_batches}) == 4


def test_a_piece_of_the_text_comes_with_the_characters_that_follow(example: ModuleType) -> None:
    characters = example.TEXT.read_text(encoding="utf-8")
    text, sizes = example.Text(characters), example.Sizes(context=20, batch=5)
    border = len(characters) * 9 // 10
    for pieces, following in text.batches(sizes, 30, seed=1):
        for piece, after in zip(pieces.tolist(), following.tolist(), strict=True):
            both = text.decode([*piece, after[-1]])
            assert piece[1:] == after[:-1]
            assert both in characters[:border]
    pieces, following = text.held_out_pieces(sizes)
    assert text.decode(pieces.flatten().tolist()) == characters[border:][: pieces.numel()]
    assert text.decode(following.flatten().tolist()) == characters[border + 1 :][: pieces.numel()]
    assert len(characters) - border - pieces.numel() <= sizes.context


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_emitted_kernels_train_it_in_bfloat16_as_on_a_gpu(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
    given = ["--device", "cpu", "--dtype", "bfloat16", "--steps", "1"]
    assert example.main([*given, "--plot", str(tmp_path / "curves.png")]) == 0
    printed = capsys.readouterr().out
    assert "flashgen  causal_forward_bf16_d8, delta_bf16_d8" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_an_attention_that_sees_the_future_fails_the_example(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def without_mask(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(example, "torch_attention", without_mask)
    given = ["--device", "cpu", "--steps", "200", "--dropout", "0"]
    assert example.main([*given, "--plot", str(tmp_path / "curves.png")]) == 1
    assert "allowed 1e-02: FAIL" in capsys.readouterr().out


def test_a_loss_that_is_no_number_does_not_agree(example: ModuleType) -> None:
    assert example.agree([0.0, 0.01])
    assert not example.agree([0.0, 0.0101])
    assert not example.agree([0.0, math.nan])


@pytest.mark.usefixtures("small")
def test_dropout_acts_while_training_alone(example: ModuleType) -> None:
    asked: list[tuple[bool, float]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        asked.append((torch.is_grad_enabled(), dropout_p))
        return v

    text = example.Text(example.TEXT.read_text(encoding="utf-8"))
    setting = example.Setting(text, example.Sizes(), 2, 0, "cpu", "float32")
    model = example.train(example.Training("", attention, 0.25), setting, lambda: None)
    model.continued([1, 2], 1, seed=0)
    assert asked == [(True, 0.25), (True, 0.25), (False, 0.0), (False, 0.0)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--dropout", "1"], "--dropout 1.0: from 0 to below 1"),
        (["--text", "no such file"], "--text no such file: "),
        (["--text", os.devnull], "0 characters, at least"),
    ],
)
def test_a_wrong_option_is_reported_before_anything_is_trained(
    example: ModuleType, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main([*given, "--device", "cpu"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
