"""What a user cannot do ends in four lines and a status, never in a traceback of the program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from flashgen.shared import config
from flashgen.shared.arch import known_archs
from flashgen.shared.paths import PATHS
from tests.support.commands import CAUSAL, flashgen
from tests.support.paths import ROOT

LONG = "a" * 300


def refused(result) -> list[str]:
    """The four lines on stderr of a command that was refused."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if not line.endswith(" ...")]
    assert [line.split()[0] for line in lines[1:4]] == ["where", "numbers", "try"], result.stderr
    assert "flashgen has a bug" not in lines[0]
    return lines


@pytest.mark.parametrize("path", [LONG, f"{LONG}.py", f"{LONG}/x.py", f"{LONG}.py:{LONG}", "", ":"])
def test_a_path_that_no_file_can_have_is_no_spec_file(path):
    assert refused(flashgen("plan", path))[0] == "SpecError: there is no such spec file"


def test_a_spec_file_that_fails_is_run_alone_by_the_way_out(tmp_path):
    file = tmp_path / "a file.py"
    file.write_text("1 / 0\n")
    *_, way_out = refused(flashgen("plan", str(file)))
    assert way_out == f"  try      a file that runs on its own: python '{file}'"


def test_a_spec_file_needs_no_suffix(tmp_path):
    file = tmp_path / "variant"
    file.write_text("import flashgen as fg\nspec = other = fg.AttentionSpec(head_dim=64)\n")
    for path in (str(file), f"{file}:other"):
        assert flashgen("plan", path).exit_code == 0
    assert "specs in it: spec, other" in refused(flashgen("plan", f"{file}:another"))[2]


@pytest.mark.parametrize("call", ["sys.exit()", "sys.exit(0)", "raise SystemExit", "exit(3)"])
def test_a_spec_file_that_ends_the_program_is_an_error(tmp_path, call):
    file = tmp_path / "ends.py"
    file.write_text(f"import sys\n{call}\n")
    lines = refused(flashgen("plan", str(file)))
    assert lines[0].startswith("SpecError: running the spec file raised SystemExit")
    assert lines[1].endswith("ends.py:2")


def test_an_example_that_ends_the_program_is_an_error(tmp_path):
    file = tmp_path / "ends.py"
    file.write_text(
        "import sys\nimport flashgen as fg\nbias = fg.Tensor('bias', ('heads',), 'float32')\n"
        "spec = fg.AttentionSpec(score_mod=lambda s, b, h, q, k: s + bias[h], head_dim=64)\n"
        "def example_tensors(sizes, generator): sys.exit(0)\n"
    )
    assert "raised SystemExit" in refused(flashgen("run", str(file)))[0]


def test_examples_of_scalars_are_read_in_the_encoding_of_the_file(tmp_path):
    file = tmp_path / "latin.py"
    text = (
        "# -*- coding: latin-1 -*-\n# \xe9\nimport flashgen as fg\nw = fg.Scalar('w', 'int32')\n"
        "example_scalars = {**{}, 1: w}\n"
        "spec = fg.AttentionSpec(mask_mod=lambda b, h, q, k: q - k < w, head_dim=64)\n"
    )
    file.write_bytes(text.encode("latin-1"))
    assert "example_scalars is not a dictionary" in refused(flashgen("run", str(file)))[0]


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("100000,100000,100000", "do not fit the memory"),
        ("9" * 23 + ",1,1", "not a shape"),
        ("1,1," + "9" * 5000, "not a shape"),
    ],
)
def test_a_shape_that_no_memory_holds_is_refused(shape, says):
    assert says in refused(flashgen("run", CAUSAL, "--shape", shape))[0]


def test_memory_that_runs_out_later_is_an_error_of_the_call(monkeypatch):
    def no_memory(*args, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    monkeypatch.setattr("flashgen.tools.cli.run.random_call", no_memory)
    assert "not enough memory" in refused(flashgen("run", CAUSAL))[0]


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/x", "/proc/x"])
def test_kernels_cannot_be_emitted_into_what_is_no_folder(folder):
    _, where, numbers, _ = refused(flashgen("emit", CAUSAL, "-o", folder))
    assert folder.rpartition("/")[0] in where + numbers


@pytest.mark.parametrize("name", ["missing/roofline.png", "roofline.svg", "roofline"])
def test_a_plot_that_cannot_be_written_is_refused_before_the_run(tmp_path, monkeypatch, name):
    monkeypatch.setattr("flashgen.tools.cli.profiled.random_call", None)  # a run would fail here
    result = flashgen("profile", CAUSAL, "--plot", str(tmp_path / name))
    assert refused(result)[1] == "  where    option --plot"


@pytest.mark.parametrize(
    "line",
    [
        ("cache", "prune", "--max-days", "-1"),
        ("cache", "prune", "--max-megabytes", "-1"),
        ("tune", CAUSAL, "--most", "-1"),
        ("tune", CAUSAL, "--show", "0"),
        ("profile", CAUSAL, "--lines", "-1"),
        ("run", CAUSAL, "--seed", "-1"),
        ("run", CAUSAL, "--seed", "9" * 30),
        ("doctor", "--device", "-1"),
        ("plan", CAUSAL, "--sram", "many"),
        ("plan",),
        ("plan", CAUSAL, "--no-such-option"),
        ("no-such-command",),
        ("export", "-o", "folder"),
        ("cache", "--clear"),
    ],
)
def test_a_wrong_command_line_is_four_lines(line):
    lines = refused(flashgen(*line))
    assert lines[1].startswith("  where    the command line of ")
    assert lines[2].startswith(f"  numbers  given {line[0]}")
    assert lines[3].endswith("--help")


def test_an_error_that_no_part_expects_is_four_lines_too(monkeypatch):
    monkeypatch.setattr("flashgen.tools.cli.plan.changed_spec", lambda *_: 1 // 0)
    result = flashgen("plan", CAUSAL, FLASHGEN_DEBUG="0")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "FlashgenError: flashgen has a bug: ZeroDivisionError"
    assert "Traceback" in flashgen("plan", CAUSAL, FLASHGEN_DEBUG="1").stderr


def test_a_package_that_is_not_installed_is_named_and_is_no_bug():
    program = "import sys; sys.modules['torch'] = None; from flashgen.tools.cli import main; main()"
    command = [sys.executable, "-c", program, "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    first, *_, way_out = done.stderr.splitlines()[-4:]
    assert done.returncode == 2
    assert first == "InputError: a package that this command needs is not installed"
    assert way_out == "  try      pip install torch"


def in_shell(line: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m flashgen"
    command = ["bash", "-c", line.replace("flashgen", program)]
    # With a buffer, a write fails only when the buffer is flushed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


def test_a_reader_that_closes_the_output_ends_the_program_quietly():
    done = in_shell("flashgen --help | true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("output", [">/dev/full", ">&-"])
def test_an_output_that_cannot_be_written_is_an_error(output):
    done = in_shell(f"flashgen --version {output}")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 4, done.stderr
    assert "where    the standard output" in done.stderr


def test_an_error_after_output_that_cannot_be_written_keeps_its_four_lines(tmp_path):
    file = tmp_path / "prints.py"
    file.write_text("print('said')\nraise SystemExit\n")
    done = in_shell(f"flashgen plan {file} >/dev/full")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 4, done.stderr


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_the_status_remains_where_nobody_reads_the_error(stderr):
    assert in_shell(f"flashgen no-such-command {stderr}").returncode == 2


def test_ctrl_c_ends_the_program_with_its_status_and_leaves_no_part_of_a_file(
    tmp_path, monkeypatch
):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    result = flashgen("emit", CAUSAL, "-o", str(tmp_path / "kernels"))
    assert result.exit_code == 128 + signal.SIGINT
    assert "Traceback" not in result.output
    assert list((tmp_path / "kernels").iterdir()) == []


@pytest.mark.parametrize(
    ("line", "where", "way_out"),
    [
        (("--sram", "0"), "option --sram", "--sram 101376, which"),
        (("--arch", "sm_70"), "option --arch", "--arch sm_80, whose"),
        (("--policy", "best"), "option --policy", "--policy derived or --policy paper"),
        (("--decode", "--page", "16", "--kv-dtype", "int4"), " with --kv-dtype int4", "--kv-dtype"),
        (("--decode", "--split-size", "15"), "option --split-size", "--split-size 512, or 0"),
        (
            ("--world", "2", "--shape", "1,2,64", "--method", "x"),
            "option --method",
            "--method all_gather",
        ),
        (("--world", "2", "--shape", "1,2,64", "--link", "0"), "option --link", "--link 450"),
        (("--world", "2", "--shape", "1,2,64", "--shard", "x"), "option --shard", "--shard head_"),
        (("--world", "2", "--shape", "1,2,64", "--map", "a.txt"), "option --map", "--map a.png"),
    ],
)
def test_an_error_about_an_option_names_it_and_its_way_out_can_be_typed(line, where, way_out):
    lines = refused(flashgen("plan", CAUSAL, *line))
    assert lines[1].endswith(where)
    assert lines[3].startswith(f"  try      {way_out}")


def test_an_error_about_one_of_several_architectures_names_the_option(tmp_path):
    for line in (("emit", CAUSAL), ("export", CAUSAL, "-o", str(tmp_path / "exported"))):
        lines = refused(flashgen(*line, "--arch", "sm_90a", "--arch", "sm_70"))
        assert lines[1].endswith("option --arch")
        assert lines[3].startswith("  try      --arch sm_80, whose")


def test_what_a_spec_file_gives_keeps_its_name_in_python(tmp_path):
    file = tmp_path / "odd.py"
    file.write_text("import flashgen as fg\nspec = fg.AttentionSpec(head_dim=63)\n")
    for line in ((), ("--head-dim", "64")):
        assert refused(flashgen("plan", str(file), *line))[3] == "  try      head_dim=64"


def test_a_scalar_and_a_tile_of_an_error_can_be_typed(windowed):
    wrong = ("plan", windowed, "--shape", "1,2,64", "--scalar", "slope=1", "--scalar", "window=0")
    _, where, _, way_out = refused(flashgen(*wrong))
    assert where == "  where    option --scalar window"
    assert way_out.startswith("  try      --scalar window=1 or more")
    _, where, _, way_out = refused(flashgen("visualize", CAUSAL, "--shape", "1,1,100000000"))
    assert where == "  where    option --tile"
    assert way_out == "  try      --tile 32768x24576"


def test_the_help_names_each_status_and_each_architecture():
    text = " ".join(flashgen("--help").stdout.split())
    for status in ("0 done", "1 a result is wrong", "2 refused", "130 interrupted", "141 the"):
        assert status in text
    for variable in re.findall(r"^FLASHGEN_\w+", config.__doc__ or "", re.MULTILINE):
        assert f"{variable}," in text or f"{variable}." in text
    of_plan = "".join(flashgen("plan", "--help").stdout.replace("│", "").split())
    for arch in (*known_archs(), *PATHS):
        assert arch in of_plan
