"""Records of the benchmarks: the schema, what is appended, the speed table and the chart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.suite import model_errors, records, speed_chart, speed_table, status
from benchmarks.suite.records import MEASURES, SPEED, SchemaError, Stamp, Writer, append, read
from tests.support.paths import ROOT
from tests.support.tiers import every_share

STAMP = Stamp("20260101T000000Z", "abc123", "gpu", "NVIDIA Test", "580.1", "torch 9")


def speed_row(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "group": "grid", "spec": "causal", "batch": 2, "heads_q": 16, "heads_kv": 16,
        "seq_q": 8192, "seq_k": 8192, "head_dim": 128, "head_dim_v": 128, "dtype": "bfloat16",
        "pass": "forward", "contender": "flashgen sm_80", "path": "sm_80", "status": "ok",
        "live": 0.50006, "samples": 40, "ms_p20": 1.0, "ms_p50": 1.23456789, "ms_p80": 1.5,
        "tflops": 400.0, "of_matmul": 0.5, "peer": "sdpa cudnn", "ratio": 0.8,
    }  # fmt: skip
    return row | changes


def test_a_row_comes_back_as_it_was_written_with_six_digits(tmp_path: Path) -> None:
    Writer(tmp_path, STAMP, "suite").speed([speed_row(note="a, b\nand c")])
    (row,) = read(tmp_path / "speed.csv")
    assert list(row) == list(SPEED)
    assert row["ms_p50"] == "1.23457"
    assert (row["run"], row["gpu"], row["part"]) == (STAMP.run, "NVIDIA Test", "suite")
    assert row["note"] == "a, b and c"
    assert row["plan"] == ""


def test_measures_have_their_own_schema(tmp_path: Path) -> None:
    Writer(tmp_path, STAMP, "ceilings").measure("copy", "rate", 4300.0, "GB/s", "bytes=1")
    (row,) = read(tmp_path / "measures.csv")
    assert list(row) == list(MEASURES)
    assert (row["subject"], row["value"], row["unit"]) == ("copy", "4300", "GB/s")


def test_writing_only_ever_adds_behind_what_is_there(tmp_path: Path) -> None:
    writer, path = Writer(tmp_path, STAMP, "suite"), tmp_path / "speed.csv"
    writer.speed([speed_row()])
    before = path.read_bytes()
    writer.speed([speed_row(spec="full"), speed_row(spec="alibi")])
    after = path.read_bytes()
    assert after.startswith(before)
    assert [row["spec"] for row in read(path)] == ["causal", "full", "alibi"]


def test_a_column_that_the_schema_has_not_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    with pytest.raises(SchemaError, match="no column colour"):
        append(tmp_path / "speed.csv", [{"colour": "red"}])
    assert not (tmp_path / "speed.csv").exists()


def test_a_file_of_another_schema_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "speed.csv"
    path.write_text("run,spec,size\n1,causal,2\n")
    with pytest.raises(SchemaError, match="unknown: size"):
        append(path, [speed_row()])
    with pytest.raises(SchemaError, match=r"Missing: .*ms_p50"):
        read(path)
    assert path.read_text() == "run,spec,size\n1,causal,2\n"


def test_a_row_that_was_cut_short_is_noticed(tmp_path: Path) -> None:
    Writer(tmp_path, STAMP, "suite").speed([speed_row()])
    path = tmp_path / "speed.csv"
    path.write_text(path.read_text().rstrip("\n").rsplit(",", 3)[0] + "\n")
    with pytest.raises(SchemaError, match="row 2"):
        read(path)


def test_merge_adds_each_run_once_and_no_dry_one(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    Writer(source, STAMP, "suite").speed([speed_row(), speed_row(spec="full")])
    assert records.merge(source, target) == 2
    assert records.merge(source, target) == 0
    dry = Stamp("20270101T000000Z", "abc", "emulator", "none", "none", "torch 9")
    Writer(source, dry, "suite").speed([speed_row()])
    with pytest.raises(SchemaError, match="dry run"):
        records.merge(source, target)
    assert len(read(target / "speed.csv")) == 2


def test_the_records_of_the_repository_are_of_the_schema_and_of_gpus() -> None:
    for name in records.FILES:
        rows = read(records.RESULTS / name)
        assert {row["device"] for row in rows} <= {"gpu"}
        assert {row.get("status", "ok") for row in rows} <= set(records.STATUSES)


def test_the_speed_table_says_what_the_records_say() -> None:
    assert report.main(["--speed-table", "--check"]) == 0


def test_the_speed_chart_shows_what_the_records_say() -> None:
    assert report.main(["--speed-chart", "--check"]) == 0


def test_the_speed_chart_shows_losses_and_wins_alike_and_names_the_peers(tmp_path: Path) -> None:
    writer = Writer(tmp_path, STAMP, "suite")
    writer.speed([speed_row(), speed_row(**{"pass": "backward", "ratio": 1.6, "peer": "flex"})])
    writer.speed([speed_row(contender="flex", ms_p50=2.0, ratio="", library="torch 9")])
    text = speed_chart.chart(speed_chart.LAYOUTS["speed.svg"], tmp_path)
    for words in ("NVIDIA Test", "bfloat16", "causal, 2 x 16/16 heads, 8192 x 8192, d 128"):
        assert words in text
    lead = " ".join(re.findall(r">([^<>]*)<", text))
    assert "at least as fast as every peer in 1, and a peer is faster in 1." in lead
    assert (">0.80 sdpa cudnn<" in text, ">1.60 flex<" in text) == (True, True)
    assert 'class="slower" x=' in text
    assert "flex: torch 9." in text


def test_without_a_record_there_is_no_bar(tmp_path: Path) -> None:
    text = speed_chart.chart(speed_chart.LAYOUTS["speed.svg"], tmp_path)
    assert speed_table.NONE in text
    assert "M" not in text.partition("</style>")[2]


def test_three_pages_say_which_gpus_ran_the_kernels_and_what_that_proves() -> None:
    assert report.main(["--status", "--check"]) == 0


def test_the_status_follows_from_the_records_and_from_the_present_templates(tmp_path: Path) -> None:
    assert status.block(tmp_path) == "No GPU has run the kernels."
    writer = Writer(tmp_path, STAMP, "doctor")
    writer.measure("sm_90a", "path passed", 1, "", "templates=0123")
    writer.measure("tests/gpu", "passed", 9, "tests")
    now, later = (" ".join(status.block(tmp_path, t).split()) for t in ("0123", "4567"))
    assert "on one NVIDIA Test (" in now
    assert "the records prove sm_90a on NVIDIA Test." in now
    assert "the records prove no present code path" in later
    assert "sm_90a" not in later


def test_the_readme_compares_with_its_peers_as_the_newest_records_do() -> None:
    case = {"spec": "causal", "heads_q": "16", "seq_q": "8192", "head_dim": "128", "status": "ok"}
    rows = [r for r in read(records.RESULTS / "speed.csv") if case.items() <= r.items()]
    rows = [r for r in rows if r["head_dim_v"] == "128" and r["heads_kv"] == "16"]
    newest = max(row["run"] for row in rows if row["contender"] == "FlashAttention-4")
    took = {(r["pass"], r["contender"]): float(r["ms_p50"]) for r in rows if r["run"] == newest}

    def times(which: str, peer: str) -> str:
        return f"{took[which, peer] / took[which, 'flashgen sm_90a']:.2f}"

    forward, backward = (times(which, "cuDNN graph") for which in ("forward", "backward"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"forward {forward} times cuDNN 9.19, backward {backward} times cuDNN" in text
    assert f"{times('backward', 'FlashAttention-4')} times FlashAttention-4" in text


def test_without_a_record_the_speed_table_says_that_nothing_was_measured(tmp_path: Path) -> None:
    assert speed_table.block(tmp_path) == "No speed has been measured on a GPU yet."


def test_a_case_has_its_newest_record_of_the_gpu_that_ran_last(tmp_path: Path) -> None:
    other = Stamp("20250101T000000Z", "abc0", "gpu", "NVIDIA H100", "580.2", "torch 9")
    older = Stamp("20260201T000000Z", "abc1", "gpu", "NVIDIA H200", "580.2", "torch 9")
    newer = Stamp("20260301T000000Z", "abc2", "gpu", "NVIDIA H200", "580.2", "torch 9")
    Writer(tmp_path, other, "suite").speed([speed_row(spec="alibi", tflops=3.0)])
    Writer(tmp_path, older, "suite").speed(
        [speed_row(tflops=1.0), speed_row(spec="full", tflops=2.0)]
    )
    Writer(tmp_path, newer, "suite").speed([speed_row(tflops=412.3)])
    rows = [line for line in speed_table.block(tmp_path).splitlines() if line.startswith("| ")][2:]
    assert ["causal" in rows[0], "| 412 |" in rows[0]] == [True, True]
    assert ["full" in rows[1], "| 2 |" in rows[1]] == [True, True]
    assert len(rows) == 2


def test_the_table_is_of_the_newest_run_on_a_gpu_and_counts_what_is_slower(tmp_path: Path) -> None:
    Writer(tmp_path, STAMP, "suite").speed([speed_row(tflops=1.0)])
    newer = Stamp("20260201T000000Z", "def456", "gpu", "NVIDIA H200", "580.2", "torch 9")
    Writer(tmp_path, newer, "suite").speed(
        [
            speed_row(tflops=412.3),
            speed_row(contender="sdpa cudnn", tflops=644.0),
            # The first code path is that of a call without options, and counts, however slow.
            speed_row(spec="full", contender="flashgen sm_90a", ms_p50=0.5, tflops=700.0, ratio=2),
            speed_row(spec="full", contender="flashgen sm_80", ms_p50=0.1, tflops=900.0, ratio=9),
            speed_row(spec="full", contender="flashgen sm_90a split", ms_p50=0.1, ratio=9),
            speed_row(spec="alibi", status="wrong", ms_p50=None),
        ]
    )
    dry = Stamp("20260301T000000Z", "def456", "emulator", "none", "none", "torch 9")
    Writer(tmp_path, dry, "suite").speed([speed_row(tflops=9.0)])
    text = speed_table.block(tmp_path)
    assert "NVIDIA H200 (driver 580.2)" in text
    assert "commit def456" in text
    assert "Of 2 cases a peer is faster in 1; 1 were wrong or failed." in " ".join(text.split())
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 2
    assert rows[0].startswith("| causal, 2 x 16/16 heads, 8192 x 8192, d 128 | forward |")
    assert "| 412 | 50% | sdpa cudnn | 0.80 |" in rows[0]
    assert "| 700 | 50% | sdpa cudnn | 2.00 |" in rows[1]


def test_check_fails_on_a_page_that_differs_and_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpu.md"
    text = f"# x\n{speed_table.BEGIN}\n900 TFLOP/s everywhere\n{speed_table.END}\nrest\n"
    file.write_text(text)
    monkeypatch.setattr(speed_table, "PAGE", file)
    arguments = ["--speed-table", "--results", str(tmp_path)]
    assert report.main([*arguments, "--check"]) == 1
    assert file.read_text() == text
    assert report.main(arguments) == 0
    assert (
        file.read_text()
        == f"# x\n{speed_table.BEGIN}\n{speed_table.NONE}\n{speed_table.END}\nrest\n"
    )


@pytest.mark.parametrize("text", ["", speed_table.BEGIN, f"{speed_table.END}{speed_table.BEGIN}"])
def test_a_page_without_both_markers_is_refused(text: str) -> None:
    with pytest.raises(speed_table.MarkerError):
        speed_table.updated(text, "x")


@every_share
@pytest.mark.slow
def test_the_documentation_has_the_errors_of_the_model_on_the_records() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert model_errors.table() in page, "python benchmarks/report.py --model-errors"
