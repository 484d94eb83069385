"""The part "stalls": Nsight Compute's samples of instructions, by reason, line and stage."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import flashgen as fg
from benchmarks import sass
from benchmarks.suite import ncu
from benchmarks.suite.journal import entries
from benchmarks.suite.one_kernel import keep
from benchmarks.suite.parts import stalls
from benchmarks.suite.parts.stalls import Profile, record, stand_in
from benchmarks.suite.records import read
from flashgen.kernels.compile.disassembly import find_nvdisasm
from tests.benchmarks.test_contenders import context_in
from tests.benchmarks.test_doctor import OnGpu
from tests.benchmarks.test_numbers import NCU

# The columns and their names are those of the source page of Nsight Compute.
PAGE = """\
==WARNING== Note: Running with unmodified GPU clocks.
"Kernel Name","causal_forward_bf16_d128(Params)"
"Address","Source","Warp Stall Sampling (All Samples)","Warp Stall Sampling (Not-issued Samples)",\
"# Samples","Instructions Executed","Address Space","stall_barrier","stall_gmma","stall_wait",\
"stall_barrier (Not Issued)","stall_wait (Not Issued)"
"0x7f0000000000","      LDC R1, c[0x0][0x28] ",\
"1,010","900","1010","5,120","Constant","1000","0","10","900","0"
"0x7f0000000010"," @!P0 BRA.DIV UR4, 0x7f00","7","0","7","12","","","0","7","0",""
"Kernel Name","kernel_flash_bwd_sm90_object"
"#","Address","Source","Samples","stall_long_sb"
"0","0x0"," EXIT ","3","3"
"""


def test_the_source_page_is_read_by_the_names_of_its_columns() -> None:
    (name, code), (peer, others) = ncu.source(PAGE)
    assert name == "causal_forward_bf16_d128"
    assert [(each.op, each.samples, each.executed) for each in code] == [
        ("LDC", 1010.0, 5120.0),
        ("BRA.DIV", 7.0, 12.0),
    ]
    assert code[0].stalls == {"barrier": 1000, "wait": 10}
    assert code[1].stalls == {"wait": 7}
    assert peer == "kernel_flash_bwd_sm90_object"
    assert [(each.text, each.samples) for each in others] == [("EXIT", 3.0)]
    assert others[0].stalls == {"long_sb": 3}
    assert ncu.source("==ERROR== The report has no samples") == []


def test_a_kernel_without_a_text_has_totals_by_reason_and_its_instructions(tmp_path: Path) -> None:
    ((kernel, code), _) = ncu.source(PAGE)
    record(context_in(tmp_path), Profile.from_files(kernel, code, tmp_path), "here")
    rows = read(tmp_path / "measures.csv")
    assert [(row["metric"], row["value"], row["unit"], row["note"]) for row in rows] == [
        ("stall barrier", "1000", "samples", "98.3% of all"),
        ("stall wait", "17", "samples", "1.7% of all"),
    ]
    lines = (tmp_path / "stalls-1.txt").read_text().splitlines()
    assert lines[0] == f"==== {kernel}, here: 1017 samples; barrier 98%, wait 2%"
    assert "@!P0 BRA.DIV UR4, 0x7f00" in lines[-1]


FAKE = """\
#!/bin/sh
echo "$@" >> {folder}/commands
case "$*" in
  *"-i "*"--page source"*) cat {folder}/source ;;
  *"-i "*"--page raw"*) cat {folder}/raw ;;
  *) while [ "$1" != "-o" ]; do shift; done; touch "$2.ncu-rep" ;;
esac
"""


def test_nsight_compute_is_run_once_for_all_kernels_and_its_pages_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("ncu", FAKE.format(folder=tmp_path)), ("source", PAGE), ("raw", NCU)):
        (tmp_path / name).write_text(text)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(type(stalls.FA4), "missing", lambda self, device: "not installed")
    context = replace(context_in(tmp_path, OnGpu(), "stalls"), tiny=False)
    stalls.run(context)
    collect, *imports = (tmp_path / "commands").read_text().splitlines()
    assert (
        "--target-processes application-only -k regex:_(forward|backward)_ --section SourceCounters"
        in collect
    )
    assert "--device gpu --family fused" in collect
    assert "--spec causal full --head-dim 128 64" in collect
    assert [words.split(" --page ")[1].split()[0] for words in imports] == ["source", "raw"]
    rows = {(row["subject"], row["metric"]): row for row in read(tmp_path / "measures.csv")}
    counted = rows["causal_forward_bf16_d64", "dram__bytes_read.sum"]
    assert (counted["value"], counted["unit"]) == ("1.04858e+06", "byte")
    assert rows["causal_forward_bf16_d128", "stall barrier"]["value"] == "1000"
    skipped = [e["what"] for e in entries(context.journal.path) if e["event"] == "skipped"]
    assert skipped[0] == "stalls of FlashAttention-4: not installed"
    assert "stages of causal_forward_bf16_d128: nvdisasm" in skipped[1]
    # Without samples there is nothing but a note.
    (tmp_path / "ncu").write_text("#!/bin/sh\necho no permission; exit 1\n")
    assert ncu.pages(context, "other", "x", (), ("true",)) == {}
    last = entries(context.journal.path)[-1]["what"]
    assert last.startswith("counters of other: ncu: exit code 1: no permission")


TEXT = """\
float helper(float x) { return x + 1; }
extern "C" __global__ void k() {
  // 1. Begin.
  a();
  // 5. Main loop.
  auto product = [&]() {
    // 5a. S = Q K^T
    b();
  };
  // 7. Main loop: S of this tile.
  product();
}
"""
LISTING = """\
	.section	.text.k,"ax",@progbits
	//## File "k.cu", line 4
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File "k.cu", line 1 inlined at "k.cu", line 8
	//## File "k.cu", line 8 inlined at "k.cu", line 11
	//## File "k.cu", line 11
        /*0010*/                   FADD R1, R1, 1 ;
	//## File "k.cu", line 11
        /*0020*/                   EXIT ;
"""


def test_an_instruction_belongs_to_the_stage_of_its_innermost_line_in_the_kernel(
    tmp_path: Path,
) -> None:
    (tmp_path / "k.cu").write_text(TEXT)
    (tmp_path / "k.sass").write_text(LISTING)
    code = [
        ncu.Sampled(text, samples)
        for text, samples in (("LDC R1, c[0][0]", 1), ("FADD R1, R1, 1", 5), ("NOP", 2), ("NOP", 0))
    ]
    profile = Profile.from_files("k", code, tmp_path)
    assert profile.lines == [4, 8, 0, 0]  # the third is not the instruction that was compiled
    record(context_in(tmp_path), profile, "")
    stages = {row["metric"]: row for row in read(tmp_path / "measures.csv")}
    assert {name: row["value"] for name, row in stages.items()} == {"stage 1": "1", "stage 5a": "5"}
    assert stages["stage 5a"]["note"].endswith("S = Q K^T")
    assert "    8  5a     b();" in (tmp_path / "stalls-1.txt").read_text()


@pytest.mark.skipif(find_nvdisasm() is None, reason="reads machine code: nvidia-cuda-nvdisasm")
def test_almost_all_instructions_of_a_kernel_have_a_stage(tmp_path: Path) -> None:
    spec = fg.load("specs/full.py").replace(dtype="bfloat16", head_dim=64)
    keep(fg.build(spec, "sm_90a"), tmp_path)
    ((kernel, code),) = ncu.source(stand_in(tmp_path))
    listing = (tmp_path / f"{kernel}.sass").read_text()
    assert len(code) == len(sass.instructions(listing))
    profile = Profile.from_files(kernel, code, tmp_path)
    assert sum(line > 0 for line in profile.lines) > 0.97 * len(code)
    shares = {name.split(".")[0]: len(found) for name, found in profile.by_stage().items()}
    assert {"5a", "5b", "5c", "5e", "7"} <= {name for name, count in shares.items() if count}
