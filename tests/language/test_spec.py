"""A spec is a checked, frozen value with the location of the user's source."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sympy

import flashgen as fg
from flashgen.shared.errors import SpecError
from flashgen.spec.language.float_operations import FloatQuotient
from flashgen.spec.language.spec_file import load
from flashgen.spec.language.symbols import SCORE, K, Q
from flashgen.spec.language.user_source import parsed
from tests.support.examples import SPECS
from tests.support.paths import ROOT, from_root
from tests.support.processes import run_python

HERE = from_root(__file__)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def half(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score / 2


def test_a_spec_without_functions_is_plain_attention() -> None:
    spec = fg.AttentionSpec()
    assert spec.mask == sympy.true
    assert spec.score == SCORE
    assert spec.scalars == ()
    assert (spec.mask_line, spec.score_line) == (None, None)
    assert (spec.head_dim, spec.head_dim_v, spec.dtype) == (64, 64, "float16")
    assert spec.scale is None


def test_a_spec_is_frozen_and_equal_by_what_it_computes() -> None:
    spec = fg.AttentionSpec(mask_mod=causal, score_mod=half)
    same = fg.AttentionSpec(mask_mod=causal, score_mod=half)
    assert spec == same
    assert hash(spec) == hash(same)
    assert spec != spec.replace(head_dim=128)
    with pytest.raises(AttributeError):
        spec.head_dim = 32  # type: ignore[misc]


def test_replace_changes_one_thing_and_reads_the_functions_again() -> None:
    spec = fg.AttentionSpec(mask_mod=causal, head_dim=64)
    wide = spec.replace(head_dim=128, score_mod=half)
    assert (wide.head_dim, wide.head_dim_v) == (128, 128)
    assert wide.score == FloatQuotient(SCORE, 2)
    assert wide.mask == spec.mask
    assert spec.replace(head_dim_v=32).replace(head_dim=96).head_dim_v == 32


def test_scalars_are_listed_once_without_the_sizes() -> None:
    window, cap = fg.Scalar("window", minimum=1), fg.Scalar("cap", "float32")
    spec = fg.AttentionSpec(
        mask_mod=lambda b, h, q, k: (q - k < window) & (k < fg.seq_k - window),
        score_mod=lambda s, b, h, q, k: cap * fg.tanh(s / cap) - window,
    )
    assert [scalar.name for scalar in spec.scalars] == ["window", "cap"]


def test_the_same_scalar_may_be_made_twice() -> None:
    spec = fg.AttentionSpec(
        mask_mod=lambda b, h, q, k: k < fg.Scalar("limit"),
        score_mod=lambda s, b, h, q, k: s * fg.Scalar("limit"),
    )
    assert [scalar.name for scalar in spec.scalars] == ["limit"]


def test_one_name_for_two_scalars_is_refused() -> None:
    with pytest.raises(SpecError, match="two different captures are named 'limit'") as caught:
        fg.AttentionSpec(
            mask_mod=lambda b, h, q, k: k < fg.Scalar("limit"),
            score_mod=lambda s, b, h, q, k: s * fg.Scalar("limit", "float32"),
        )
    assert "'int32'" in caught.value.numbers
    assert "'float32'" in caught.value.numbers


@pytest.mark.parametrize(
    ("options", "what", "numbers", "way_out"),
    [
        ({"head_dim": 60}, "head_dim is a multiple of 8 from 8 to 576", "60", "head_dim=64"),
        ({"head_dim": 0}, "head_dim is a multiple of 8", "0", "head_dim=8"),
        ({"head_dim": 640}, "head_dim is a multiple of 8", "640", "head_dim=576"),
        ({"head_dim": 64.0}, "head_dim is a multiple of 8", "64.0", "head_dim=64"),
        ({"head_dim": None}, "head_dim is a multiple of 8", "None", "head_dim=64"),
        ({"head_dim_v": 7}, "head_dim_v is a multiple of 8", "7", "head_dim_v=8"),
        (
            {"dtype": "fp16"},
            "kernels do not support this dtype",
            "'fp16'; available: float16",
            '"float16"',
        ),
        (
            {"dtype": "torch.bfloat16"},
            "kernels do not support this dtype",
            "bfloat16",
            '"bfloat16"',
        ),
        ({"dtype": "float64"}, "kernels do not support this dtype", "float64", '"float32"'),
        ({"scale": 0}, "scale is a positive", "scale 0", "scale=None"),
        ({"scale": -0.125}, "scale is a positive", "-0.125", "score_mod"),
        ({"scale": float("inf")}, "scale is a positive", "inf", "scale=None"),
        ({"scale": "1"}, "scale is a positive", "'1'", "scale=None"),
        ({"dropout": 0.1}, "dropout is True or False", "0.1", "dropout_p=0.1"),
        ({"name": "my spec"}, "name is not an identifier", "'my spec'", "'my_spec'"),
        ({"name": "7b"}, "name is not an identifier", "'7b'", "'spec_7b'"),
        ({"name": "x" * 300}, "of at most 80 characters", "x" * 300, f"name={'x' * 80!r}"),
    ],
)
def test_an_option_out_of_range_is_refused_with_one_that_is_in(
    options: dict[str, Any], what: str, numbers: str, way_out: str
) -> None:
    with pytest.raises(SpecError) as caught:
        fg.AttentionSpec(**options)
    assert what in caught.value.what
    assert numbers in caught.value.numbers
    assert way_out in caught.value.way_out
    assert caught.value.where.startswith(f"{HERE}:")


def test_all_mistakes_of_a_spec_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        fg.AttentionSpec(lambda q, k: q >= k, lambda s, b, h, q, k: q < k, head_dim=7, dtype="int8")
    assert caught.value.what.startswith("4 mistakes")
    assert caught.value.where.count("\n") == 3
    assert caught.value.way_out.count("\n") == 3


# Where the user wrote it.


def decorated(function: Any) -> Any:
    return function


@decorated
def with_decorator(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A docstring."""
    near = q - k < 8
    return near


def test_the_text_of_a_function_is_kept_as_written() -> None:
    line = fg.AttentionSpec(mask_mod=with_decorator).mask_line
    assert line.file == HERE
    source = Path(__file__).read_text().splitlines()
    assert source[line.line - 1] == "@decorated"
    assert line.text.splitlines()[0].startswith("def with_decorator(")
    assert line.text.splitlines()[-1] == "    return near"


def test_each_lambda_of_a_line_has_its_own_text() -> None:
    # fmt: off
    first, second = fg.AttentionSpec(lambda b, h, q, k: q >= k), fg.AttentionSpec(lambda b, h, q, k: q > k)  # noqa: E501
    # fmt: on
    assert first.mask_line.text == "lambda b, h, q, k: q >= k"
    assert second.mask_line.text == "lambda b, h, q, k: q > k"


def test_the_text_of_a_lambda_is_cut_at_characters_of_several_bytes() -> None:
    # fmt: off
    word, spec = "Größe", fg.AttentionSpec(lambda b, h, q, k: k >= len("Größe"), name="later")
    # fmt: on
    assert spec.mask_line.text == f'lambda b, h, q, k: k >= len("{word}")'


def test_a_lambda_inside_a_call_has_only_its_own_text() -> None:
    width = 8
    spec = fg.AttentionSpec(
        head_dim=32,
        mask_mod=lambda b, h, q, k: (
            (q >= k) & (q - k < width)
        ),
        dtype="float32",
    )  # fmt: skip
    text = spec.mask_line.text
    assert text.startswith("lambda b, h, q, k: (")
    assert "dtype" not in text


def test_a_nested_function_is_dedented() -> None:
    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q > k

    line = fg.AttentionSpec(mask_mod=inner).mask_line
    assert line.text.splitlines()[1] == "    return q > k"


def test_code_without_a_file_is_shown_as_its_expression() -> None:
    names: dict[str, Any] = {}
    exec("def mod(b, h, q, k):\n    return (q >= k) & (q - k < 8)\n", names)
    line = fg.AttentionSpec(mask_mod=names["mod"]).mask_line
    assert line.text == "(q >= k) & (q - k < 8)"
    assert line.file == "<string>"


def test_partials_and_callable_objects_are_read() -> None:
    import functools

    class Window:
        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return q - k < 8

    def window(width: int, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < width

    for mod in (Window(), functools.partial(window, 8)):
        spec = fg.AttentionSpec(mask_mod=mod)
        assert spec.mask == (Q - K < 8)
        assert "return q - k <" in spec.mask_line.text


# Files.


@pytest.mark.parametrize("file", SPECS, ids=lambda file: file.stem)
def test_a_spec_file_is_short_documented_and_named_by_its_file(file: Path) -> None:
    text = file.read_text()
    assert 10 <= len(text.splitlines()) <= 40
    assert text.startswith('"""')
    assert "Source:" in text
    assert "__main__" not in text
    assert load(file).name == file.stem


def test_a_variable_of_a_file_is_loaded_by_name(tmp_path: Path) -> None:
    file = tmp_path / "two.py"
    file.write_text(
        "import flashgen as fg\n"
        "spec = fg.AttentionSpec(head_dim=32)\n"
        "wide = fg.AttentionSpec(head_dim=128)\n"
        "other = fg.AttentionSpec(name='chosen')\n"
    )
    assert (load(file).name, load(file).head_dim) == ("two", 32)
    assert (load(f"{file}:wide").name, load(f"{file}:wide").head_dim) == ("wide", 128)
    assert load(f"{file}:other").name == "chosen"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.py"], "leaves nothing behind"


def test_a_file_name_that_is_no_identifier_becomes_one(tmp_path: Path) -> None:
    file = tmp_path / "7-days.py"
    file.write_text("import flashgen as fg\nspec = fg.AttentionSpec()\n")
    assert load(file).name == "spec_7_days"


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "causal.py").write_text("")
    with pytest.raises(SpecError, match="no such spec file") as caught:
        load(tmp_path / "casual.py")
    assert "causal.py" in caught.value.numbers


def test_a_missing_variable_names_the_specs_there_are(tmp_path: Path) -> None:
    file = tmp_path / "named.py"
    file.write_text("import flashgen as fg\nmine = fg.AttentionSpec()\n")
    with pytest.raises(SpecError, match="no AttentionSpec named 'spec'") as caught:
        load(file)
    assert "mine" in caught.value.numbers
    assert caught.value.way_out.endswith("named.py:mine")


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [("x = 1\ny = x / 0\n", "ZeroDivisionError", 2), ("x = (\n", "SyntaxError", 1)],
)
def test_a_file_that_fails_is_reported_with_its_line(
    tmp_path: Path, text: str, what: str, line: int
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(SpecError, match=what) as caught:
        load(file)
    assert caught.value.where.endswith(f"broken.py:{line}")


def test_paths_are_the_same_from_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = load(ROOT / "specs" / "causal.py").mask_line
    assert line.file == "specs/causal.py"


def test_a_loose_file_is_shown_by_its_bare_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loose.py"
    file.write_text(
        "import flashgen as fg\nspec = fg.AttentionSpec(mask_mod=lambda b, h, q, k: q > k)\n"
    )
    monkeypatch.chdir(ROOT)
    line = load(file).mask_line
    assert line.file == "loose.py"


def test_a_spec_is_made_where_the_working_directory_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loose.py"
    file.write_text("import flashgen as fg\nspec = fg.AttentionSpec(lambda b, h, q, k: q > k)\n")
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert load(file).mask_line.file == "loose.py"


PRINT_ALL = """
import sys
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from flashgen.spec.analysis import analyse
from flashgen.kernels.codegen.expressions import CPrinter
from flashgen.spec.language.spec_file import load
for file in sorted(Path(sys.argv[1]).glob("*.py")):
    spec = load(file)
    analysis = analyse(spec)
    printer = CPrinter({}, spec.dtype)
    print(spec.name, spec.mask, spec.score, spec.mask_line, spec.scalars)
    print(analysis)
    print(printer.expr(analysis.mask.may), printer.expr(analysis.mask.must))
    block = analysis.score.value_and_derivative.block
    print(printer.lets(block), [printer.float(r) for r in block.results])
"""


@pytest.mark.slow
def test_the_same_specs_give_the_same_text_in_every_process() -> None:
    texts = set()
    for seed in ("0", "77"):
        done = run_python("-c", PRINT_ALL, ROOT / "specs", PYTHONHASHSEED=seed)
        texts.add(done.stdout)
    assert len(texts) == 1
    assert str(ROOT) not in texts.pop()


def test_a_score_whose_choices_share_their_parts_is_traced_in_proportion_to_its_operations():
    def choices(score, b, h, q, k):
        for i in range(200):
            score = fg.where(q > i, score + k * 0.5, score)
        return fg.where(k > q, -1e30, score)

    def additions(score, b, h, q, k):
        for i in range(700):
            score = score + k * (i + 0.5)
        return score

    for score_mod in (choices, additions):
        started = time.process_time()
        fg.AttentionSpec(None, score_mod)
        assert time.process_time() - started < 10


def test_threads_read_the_sources_of_specs_at_once() -> None:
    text = (ROOT / "flashgen/spec/language/spec.py").read_text("utf-8")
    # Other threads run while garbage is collected, which is in the midst of a parse too.
    gc.callbacks.append(let_others_run := lambda *_: time.sleep(1e-5))
    thresholds = gc.get_threshold()
    gc.set_threshold(100)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(tree.body for tree in pool.map(parsed, [text] * 8))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_others_run)
