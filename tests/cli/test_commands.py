"""The program's commands: what they print, where, and their exit status."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashgen import compile, launch, pipeline, reference
from flashgen.cli import app
from flashgen.cli.captured_tensors import tensor_values
from flashgen.cli.inputs import Shape
from flashgen.cli.inspect import find_nvdisasm
from flashgen.language.spec_file import load
from flashgen.planner import plan_backward
from flashgen.version import __version__
from tests.support.paths import ROOT
from tests.support.processes import run_python

CAUSAL = str(ROOT / "specs" / "causal.py")

WINDOWED = """
import flashgen as fg

window = fg.Scalar("window", "int32", minimum=1)
slope = fg.Scalar("slope", "float32")
{examples}

spec = fg.AttentionSpec(
    mask_mod=lambda b, h, q, k: (q >= k) & (q - k < window),
    score_mod=lambda score, b, h, q, k: score + slope * (k - q),
    head_dim=16,
)
"""


@pytest.fixture
def windowed(tmp_path):
    file = tmp_path / "windowed.py"
    file.write_text(WINDOWED.format(examples='example_scalars = {"window": 3, "slope": 0.5}'))
    return str(file)


def flashgen(*arguments: str, **environment: str):
    return CliRunner().invoke(app, list(arguments), env=environment or None)


def rows(output: str) -> dict[str, str]:
    """The table that ``run`` and ``inspect`` print, by name."""
    pairs = (line.split(None, 1) for line in output.splitlines() if line.strip())
    return {pair[0]: pair[1] if len(pair) > 1 else "" for pair in pairs}


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


def test_run_compares_the_gradients_too_with_dropout_and_in_either_mode(windowed):
    for mode in ([], ["--deterministic"]):
        options = ["--shape", "1,2,1,20,30", "--scalar", "window=9", "--dropout", "0.1"]
        result = flashgen("run", windowed, "--backward", *options, *mode)
        assert result.exit_code == 0, result.output
        for name in ("dq", "dk", "dv"):
            assert re.search(rf"^{name} +pass", result.stdout, re.MULTILINE), result.stdout
        assert "dropout" in result.stdout
        assert ("backward_dq" in result.stdout) == bool(mode)


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
    score_mod=lambda score, b, h, q, k: score + bias[h, q - k],
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


def test_an_error_is_four_lines_and_the_traceback_only_when_debugging():
    quiet = flashgen("plan", "no/such.py", FLASHGEN_DEBUG="0")
    assert quiet.exit_code == 2
    assert quiet.stdout == ""
    lines = quiet.stderr.splitlines()
    assert lines[0] == "SpecError: there is no such spec file"
    assert [line.split()[0] for line in lines[1:]] == ["where", "numbers", "try"]
    loud = flashgen("plan", "no/such.py", FLASHGEN_DEBUG="1")
    assert loud.exit_code == 2
    assert "Traceback (most recent call last)" in loud.stderr


def test_plan_prints_the_derivation():
    result = flashgen("plan", CAUSAL)
    assert result.exit_code == 0, result.output
    assert "block_q" in result.stdout
    other = flashgen("plan", CAUSAL, "--head-dim", "128", "--dtype", "float32", "--arch", "sm_86")
    assert other.exit_code == 0, other.output
    assert "sm_86" in other.stdout
    assert other.stdout != result.stdout


def test_an_option_that_does_not_suit_the_spec_is_named():
    result = flashgen("plan", CAUSAL, "--head-dim", "12")
    assert result.exit_code == 2
    assert f"{CAUSAL} with --head-dim 12" in result.stderr
    assert "try      head_dim=16" in result.stderr


def test_plan_takes_the_paper_s_policy_and_a_capacity():
    result = flashgen("plan", CAUSAL, "--policy", "paper", "--sram", "100000")
    assert result.exit_code == 0, result.output
    refused = flashgen("plan", CAUSAL, "--sram", "100")
    assert refused.exit_code == 2
    assert "PlanError" in refused.stderr


def test_emit_writes_files_and_check_finds_every_difference(tmp_path, windowed):
    out = str(tmp_path / "out")
    assert flashgen("emit", windowed, "-o", out, "--check").exit_code == 1
    written = flashgen("emit", windowed, "-o", out)
    assert written.exit_code == 0, written.output
    assert "written" in written.stdout
    kernels = ("forward", "backward_fused", "backward_dkdv", "backward_dq")
    names = {f"windowed_{kernel}_fp16_d16_sm_80.cu" for kernel in kernels}
    block_q = plan_backward(load(windowed)).of_keys.block_q
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


def test_inspect_shows_each_stage(windowed):
    table = rows(flashgen("inspect", windowed).stdout)
    assert table["kernel"] == "windowed_forward_fp16_d16"
    assert table["spills"] == "0 B stored, 0 B loaded"
    assert (
        ".visible .entry windowed_forward_fp16_d16" in flashgen("inspect", windowed, "--ptx").stdout
    )
    assert "struct Params" in flashgen("inspect", windowed, "--cuda").stdout
    assert "registers" in flashgen("inspect", windowed, "--log").stdout


def test_inspect_disassembles(windowed):
    result = flashgen("inspect", windowed, "--sass")
    if find_nvdisasm() is None:
        assert result.exit_code == 2
        assert "flashgen[sass]" in result.stderr
    else:
        assert result.exit_code == 0, result.output
        assert "HMMA.16816.F32" in result.stdout


def test_inspect_without_a_disassembler_names_the_extra(windowed, monkeypatch):
    monkeypatch.setattr("flashgen.cli.inspect.find_nvdisasm", lambda: None)
    result = flashgen("inspect", windowed, "--sass")
    assert result.exit_code == 2
    assert 'pip install "flashgen[sass]"' in result.stderr


def test_cache_lists_prunes_and_clears(tmp_path, windowed, monkeypatch):
    folder = str(tmp_path / "cache")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", folder)
    compile.forget()
    pipeline._build_forward.cache_clear()
    assert f"0 kernels, 0 B in {folder}" in flashgen("cache").stdout
    flashgen("inspect", windowed)
    listed = flashgen("cache", "--list").stdout
    assert "windowed_forward_fp16_d16" in listed
    assert "1 kernel, " in listed
    assert "removed 0 kernels" in flashgen("cache", "--prune").stdout
    assert "removed 1 kernel," in flashgen("cache", "--prune", "--max-megabytes", "0").stdout
    assert "removed 0 kernels from" in flashgen("cache", "--clear").stdout
    assert "caching on disk is off" in flashgen("cache", FLASHGEN_CACHE_DIR="off").stdout


def test_the_module_is_the_same_program_and_needs_no_torch_to_plan():
    code = (
        "import sys, runpy; sys.argv = ['flashgen', 'plan', sys.argv[1]]\n"
        "try: runpy.run_module('flashgen', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'cuda' not in sys.modules"
    )
    assert "block_q" in run_python("-c", code, CAUSAL).stdout
    assert flashgen("--version").stdout.strip() == __version__
