"""The program's commands: what they print, where, and their exit status."""

from __future__ import annotations

import pytest

import flashgen as fg
from flashgen.kernels import compile, pipeline
from flashgen.kernels.compile.disassembly import find_nvdisasm
from flashgen.version import __version__
from tests.support.commands import CAUSAL, flashgen, rows
from tests.support.paths import ROOT
from tests.support.processes import run_python

DOCUMENT = str(ROOT / "specs" / "document.py")


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
    lines = result.stdout.splitlines()
    planned = fg.plan(fg.load(CAUSAL))
    assert lines[:3] == [*planned.summary]
    assert f"{planned.block_q} queries and {planned.block_k} keys" in lines[0]
    assert "of shared memory" in lines[1]
    assert "registers that a thread needs" in lines[2]
    assert lines[3].startswith("plan      block_q")
    other = flashgen("plan", CAUSAL, "--head-dim", "128", "--dtype", "float32", "--arch", "sm_86")
    assert other.exit_code == 0, other.output
    assert "sm_86" in other.stdout
    assert other.stdout != result.stdout


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        *((CAUSAL, shape) for shape in ("1,1,0", "0,1,64", "1,0,64", "1,1,1,0,64", "1,1,1,64,0")),
        (DOCUMENT, "1,0,64"),
    ],
)
def test_a_shape_without_scores_is_planned_and_drawn_or_refused(spec, shape, tmp_path):
    page = str(tmp_path / "page.html")
    for options in (("plan",), ("plan", "--backward"), ("report", "-o", page), ("profile",)):
        result = flashgen(options[0], spec, *options[1:], "--shape", shape)
        assert result.exit_code == 0, result.output
    for command in ("tune", "visualize"):
        result = flashgen(command, spec, "--shape", shape)
        assert result.exit_code == 2
        assert result.stderr.startswith("InputError"), result.stderr


def test_plan_shows_the_products_of_forward_mode_beside_the_backward_pass():
    result = flashgen("plan", CAUSAL, "--tangent")
    assert result.exit_code == 0, result.output
    assert "tangents of q, k, v: 5 products per score" in result.stdout
    assert "the backward pass has" in result.stdout


def test_an_option_that_does_not_suit_the_spec_is_named():
    result = flashgen("plan", CAUSAL, "--head-dim", "12")
    assert result.exit_code == 2
    assert f"{CAUSAL} with --head-dim 12" in result.stderr
    assert "try      --head-dim 16\n" in result.stderr


@pytest.mark.parametrize("options", [(), ("--backward",)])
def test_plan_names_the_path_of_calls_with_a_block_layout(options):
    layout = str(ROOT / "specs" / "local_global.py")
    result = flashgen("plan", layout, "--arch", "sm_90a", *options)
    assert "calls that name no architecture: block layout" in result.stdout
    assert "calls that name" not in flashgen("plan", layout, *options).stdout


def test_plan_takes_the_paper_s_policy_and_a_capacity():
    result = flashgen("plan", CAUSAL, "--policy", "paper", "--sram", "100000")
    assert result.exit_code == 0, result.output
    refused = flashgen("plan", CAUSAL, "--sram", "100")
    assert refused.exit_code == 2
    assert "PlanError" in refused.stderr


def test_inspect_shows_each_stage(windowed):
    table = rows(flashgen("inspect", windowed).stdout)
    assert table["kernel"] == "windowed_forward_fp16_d16"
    assert table["spills"] == "0 B stored, 0 B loaded"
    assert (
        ".visible .entry windowed_forward_fp16_d16" in flashgen("inspect", windowed, "--ptx").stdout
    )
    assert "struct Params" in flashgen("inspect", windowed, "--cuda").stdout
    small = rows(flashgen("inspect", windowed, "--sram", "2000").stdout)
    assert small["tile"] == "block_q 16 x block_k 16, 1 warp"
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
    monkeypatch.setattr("flashgen.kernels.compile.disassembly.find_nvdisasm", lambda: None)
    result = flashgen("inspect", windowed, "--sass")
    assert result.exit_code == 2
    assert 'pip install "flashgen[sass]"' in result.stderr


def test_cache_lists_prunes_and_clears(tmp_path, windowed, monkeypatch):
    folder = str(tmp_path / "cache")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", folder)
    compile.forget()
    pipeline._build.cache_clear()
    assert f"0 kernels, 0 B in {folder}" in flashgen("cache", "list").stdout
    flashgen("inspect", windowed)
    listed = flashgen("cache", "list").stdout
    assert "windowed_forward_fp16_d16" in listed
    assert "1 kernel, " in listed
    assert "removed 0 kernels" in flashgen("cache", "prune").stdout
    assert "removed 1 kernel," in flashgen("cache", "prune", "--max-megabytes", "0").stdout
    assert "removed 0 kernels from" in flashgen("cache", "clear").stdout
    assert "caching on disk is off" in flashgen("cache", "list", FLASHGEN_CACHE_DIR="off").stdout


def test_the_module_is_the_same_program_and_needs_no_torch_to_plan():
    code = (
        "import sys, runpy; sys.argv = ['flashgen', 'plan', sys.argv[1]]\n"
        "try: runpy.run_module('flashgen', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'cuda' not in sys.modules"
    )
    assert "block_q" in run_python("-c", code, CAUSAL).stdout
    assert flashgen("--version").stdout.strip() == __version__
