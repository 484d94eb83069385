"""``flashgen run``: its table, its options, and the values of scalars and captured tensors."""

from __future__ import annotations

import re

import pytest

import ptx_emulator as emulator
from flashgen import reference
from flashgen.calls import launch
from flashgen.spec.language.spec_file import load
from flashgen.tools.cli.captured_tensors import tensor_values
from flashgen.tools.cli.inputs import Shape
from tests.support.commands import CAUSAL, WINDOWED, flashgen, rows
from tests.support.paths import ROOT


def test_run_ends_with_a_table_that_says_pass():
    result = flashgen("run", CAUSAL, "--shape", "1,2,48", "--backend", "emulator")
    assert result.exit_code == 0, result.output
    table = rows(result.stdout)
    assert table["spec"].startswith("causal, ")
    assert table["mask_mod"] == "q >= k"
    assert table["score_mod"] == "none"
    assert table["shape"] == "batch 1, heads 2, seq 48 x 48, head_dim 64, float16"
    assert table["backend"] == "emulator, from --backend"
    assert table["arch"] == "sm_80"
    assert "block_q" in table["tile"]
    assert "no spills, no stack" in table["registers"]
    assert " B read, " in table["bytes"]
    assert table["out"].startswith("pass, max ")
    assert table["lse"].startswith("pass, max ")
    assert table["result"] == "pass"


def test_run_takes_the_options_that_change_the_problem(windowed):
    result = flashgen(
        "run", windowed, "--shape", "2,4,2,20,33", "--dtype", "bfloat16", "--head-dim", "24",
        "--head-dim-v", "8", "--scalar", "window=7", "--q-offset", "13", "--seed", "5",
        "--backend", "emulator", "--arch", "sm_90",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    table = rows(result.stdout)
    assert "heads 4 over 2, seq 20 x 33, head_dim 24 and 8, bfloat16" in table["shape"]
    assert "window = 7" in table["scalars"]
    assert "(slope: the file's example)" in table["scalars"]
    assert table["arch"] == "sm_90"


@pytest.mark.slow
def test_run_compares_the_gradients_too_with_dropout_and_in_either_mode(windowed):
    for mode in ([], ["--deterministic"]):
        options = ["--shape", "1,2,1,20,30", "--scalar", "window=9", "--dropout", "0.1"]
        result = flashgen("run", windowed, "--backward", *options, *mode)
        assert result.exit_code == 0, result.output
        for name in ("dq", "dk", "dv"):
            assert re.search(rf"^{name} +pass", result.stdout, re.MULTILINE), result.stdout
        assert "dropout" in result.stdout
        assert ("backward_dq" in result.stdout) == bool(mode)


def test_run_compares_gradients_and_tangents_without_a_softmax():
    retention = str(ROOT / "specs" / "retention.py")
    options = ("--shape", "1,2,1,20,30", "--head-dim", "16", "--head-dim-v", "16")
    result = flashgen("run", retention, "--backward", "--tangent", *options)
    assert result.exit_code == 0, result.output
    assert rows(result.stdout)["tangent"].startswith("retention_tangent_q_k_v_bf16_d16: ")
    for name in ("dq", "dk", "dv", "out's tangent"):
        assert re.search(rf"^{name} +pass", result.stdout, re.MULTILINE), result.stdout
    assert not {"lse", "lse's tangent"} & set(rows(result.stdout))


def test_run_takes_several_orders_of_the_emulator_and_compares_their_bits(monkeypatch):
    seeds = []
    launched = emulator.launch
    monkeypatch.setattr(
        emulator, "launch", lambda *a, **k: seeds.append(k["order_seed"]) or launched(*a, **k)
    )
    orders = ["--order-seed", "3", "--order-seed", "8"]
    result = flashgen("run", CAUSAL, "--shape", "1,1,32", "--backend", "emulator", *orders)
    assert result.exit_code == 0, result.output
    assert seeds == [3, 8]
    assert rows(result.stdout)["orders"] == "3, 8: the same bits in all"
    for line in ("out, order 3", "lse, order 3", "out, order 8", "lse, order 8"):
        assert re.search(rf"^{line} +pass, max ", result.stdout, re.MULTILINE), result.stdout


def test_an_order_for_another_backend_is_refused():
    result = flashgen("run", CAUSAL, "--shape", "1,1,32", "--backend", "tiled", "--order-seed", "1")
    assert result.exit_code == 2
    assert "only the emulator draws an order" in result.output


def test_run_without_the_oracle_says_so(windowed):
    result = flashgen("run", windowed, "--shape", "1,1,5", "--no-check", "--backend", "emulator")
    assert result.exit_code == 0
    assert rows(result.stdout)["result"] == "not compared with the oracle"
    assert "out" not in rows(result.stdout)


def test_run_exits_with_1_when_the_result_does_not_meet_the_rule(monkeypatch):
    # A yardstick without any error leaves a float16 kernel no room for its own.
    monkeypatch.setattr(reference, "same_dtype", reference.attention)
    result = flashgen("run", CAUSAL, "--shape", "1,1,20", "--backend", "emulator")
    assert result.exit_code == 1
    assert rows(result.stdout)["result"] == "FAIL"
    assert rows(result.stdout)["out"].startswith("FAIL")


CAPTURING = """
import flashgen as fg

length = fg.Tensor("length", ("batch",), "int32")
keep = fg.Tensor("keep", ("batch", "seq_k"), "bool")
bias = fg.Tensor("bias", ("heads", "buckets"), grad=True)
{examples}

spec = fg.AttentionSpec(
    mask_mod=lambda b, h, q, k: (k < length[b]) & keep[b, k],
    score_mod=lambda score, b, h, q, k: score + bias[h, fg.maximum(q - k, 0)],
    head_dim=16,
)
"""
LENGTHS = """
def example_tensors(sizes, generator):
    assert (sizes.heads, sizes.heads_kv) == (2, 1), sizes
    return {"length": [sizes.seq_k - 5] * sizes.batch, "not_of_this_spec": 1}
"""


def capturing(tmp_path, examples):
    file = tmp_path / "capturing.py"
    file.write_text(CAPTURING.format(examples=examples))
    return str(file)


@pytest.mark.slow
def test_run_makes_captured_tensors_and_compares_their_gradients(tmp_path):
    file = capturing(tmp_path, LENGTHS)
    shape = ["--shape", "2,2,1,20,33", "--k-offset", "4"]
    result = flashgen("run", file, *shape, "--backward", "--backend", "emulator")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("captured")]
    assert [line.split(None, 1)[1] for line in lines] == [
        "length [2], int32, the file's example",
        "keep [2, 37], bool, random",
        "bias [2, 64], float32, learned, random",
    ]
    for name in ("out", "dq", "dk", "dv", "dbias"):
        assert re.search(rf"^{name} +pass", result.stdout, re.MULTILINE), result.stdout


def test_random_captures_follow_the_seed(tmp_path):
    file = capturing(tmp_path, "")
    spec = load(file)

    def made(**options):
        values, examples = tensor_values(spec, file, Shape(2, 4, 2, 30, 40), **options)
        assert examples == []
        return values

    one, same, other = made(), made(), made(seed=1)
    assert all(bool((one[name] == same[name]).all()) for name in one)
    assert not any(bool((one[name] == other[name]).all()) for name in ("keep", "bias"))
    assert made(k_offset=-50)["keep"].shape == (2, 1)
    assert 0 <= int(one["length"].min()) <= int(one["length"].max()) <= 40
    assert 0.02 < float(one["bias"].std()) < 0.5


READING = """
import flashgen as fg
table = fg.Tensor("table", ("heads", "distances"), "float32", grad=True)
rows = fg.Tensor("rows", ("rows", 5), "float32")
place = fg.Tensor("place", ("seq_k",), "int32")
word = fg.Tensor("word", ("batch", "tokens"), "uint8")
shift = fg.Scalar("shift", "int32")
spec = fg.AttentionSpec(
    None,
    lambda s, b, h, q, k: s + table[h, q - k + fg.seq_k + shift] + rows[word[b, q + k], place[k]],
    head_dim=16,
    dtype=None,
)
example_scalars = {"shift": 20}
"""


def test_random_captures_have_an_element_for_each_index(tmp_path):
    file = tmp_path / "reading.py"
    file.write_text(READING)
    result = flashgen("run", str(file), "--shape", "2,2,1,70,90", "--backend", "tiled")
    assert "SpecError: a command needs one dtype" in result.output
    run = ("run", str(file), "--shape", "2,2,1,70,90", "--backend", "tiled", "--dtype", "bfloat16")
    result = flashgen(*run)
    assert result.exit_code == 0, result.output
    shapes = re.findall(r"^captured +(\w+ \[[^]]*\])", result.stdout, re.MULTILINE)
    assert sorted(shapes) == ["place [90]", "rows [91, 5]", "table [2, 180]", "word [2, 159]"]


@pytest.mark.parametrize(
    ("examples", "what"),
    [
        ("def example_tensors(sizes, generator): return 1 / 0", "raised ZeroDivisionError"),
        ("def example_tensors(sizes, generator): return 3", "does not return a dictionary"),
        ("example_tensors = 3", "raised TypeError"),
        ('def example_tensors(sizes, generator): return {"keep": "x"}', "no tensor for keep"),
        (
            'def example_tensors(sizes, generator): return {"keep": [True]}',
            "keep has 1 dimensions, not 2",
        ),
    ],
)
def test_examples_that_are_wrong_are_refused(tmp_path, examples, what):
    result = flashgen("run", capturing(tmp_path, examples), "--backend", "tiled")
    assert result.exit_code == 2
    assert what in result.stderr
    assert result.stderr.startswith("InputError")


def test_a_missing_scalar_is_refused_with_the_option_to_write(tmp_path):
    file = tmp_path / "bare.py"
    file.write_text(WINDOWED.format(examples='example_scalars = {"window": 3}'))
    result = flashgen("run", str(file))
    assert result.exit_code == 2
    assert "InputError: the scalar 'slope' of the spec has no value" in result.stderr
    assert "try      --scalar slope=..." in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("window", "takes the name of a scalar"),
        ("width=3", "takes the name of a scalar"),
        ("window=3.5", "'window' cannot take this value"),
        ("window=0", "below the minimum"),
        ("slope=steep", "'slope' cannot take this value"),
    ],
)
def test_a_malformed_scalar_is_refused(windowed, option, what):
    result = flashgen("run", windowed, "--scalar", option)
    assert result.exit_code == 2
    assert what in result.stderr
    assert result.stderr.partition("  try ")[2].count("--scalar") == 1


def test_an_example_that_a_call_refuses_is_named_by_its_line(tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(
        "import flashgen as fg\n"
        'window = fg.Scalar("window", "int32", minimum=1)\n'
        'bias = fg.Tensor("bias", ("heads",), "float32")\n'
        "spec = fg.AttentionSpec(lambda b, h, q, k: q - k < window,\n"
        "    lambda s, b, h, q, k: s + bias[h], head_dim=16)\n"
        "example_scalars = {\n"
        '    "window": 0,\n'
        "}\n"
        "def example_tensors(sizes, generator):\n"
        '    return {"bias": [0.0] * (sizes.heads + 1)}\n'
    )
    refused = flashgen("run", str(file), "--shape", "1,2,16").stderr
    assert f"where    {file.as_posix()}:7\n" in refused
    assert "try      --scalar window=1 or more" in refused
    refused = flashgen("run", str(file), "--shape", "1,2,16", "--scalar", "window=1").stderr
    assert f"where    {file.as_posix()}:10\n" in refused


def test_examples_that_are_no_dictionary_are_refused(tmp_path):
    file = tmp_path / "odd.py"
    file.write_text(WINDOWED.format(examples="example_scalars = dict(window=3)"))
    result = flashgen("run", str(file))
    assert result.exit_code == 2
    assert "example_scalars is not a dictionary" in result.stderr
    assert "odd.py:6" in result.stderr


@pytest.mark.parametrize("shape", ["1,2", "1,2,3,4", "1,2,x", "", "-1,2,3", "1,2,3,4,5,6"])
def test_a_malformed_shape_is_refused(shape):
    result = flashgen("run", CAUSAL, f"--shape={shape}")
    assert result.exit_code == 2
    assert "this is not a shape" in result.stderr
    assert "B,Hq,Hkv,Nq,Nk" in result.stderr


def test_an_unknown_backend_and_a_missing_gpu_are_refused():
    result = flashgen("run", CAUSAL, "--backend", "cpu")
    assert result.exit_code == 2
    assert "available: gpu, emulator" in result.stderr
    if launch.available() is not None:
        result = flashgen("run", CAUSAL, FLASHGEN_BACKEND="gpu")
        assert result.exit_code == 2
        assert "LaunchError: there is no GPU to run on" in result.stderr
        assert "FLASHGEN_BACKEND" in result.stderr
