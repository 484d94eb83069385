"""The supervisor of `make gpu`: shares of time, and parts that crash, hang or come too late."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.suite import summary, supervisor
from benchmarks.suite.journal import Journal, entries
from benchmarks.suite.parts import PARTS, load
from benchmarks.suite.records import Stamp, Writer
from benchmarks.suite.supervisor import (
    Budget,
    Outcome,
    Part,
    Settings,
    Share,
    allowed,
    groups_of,
    journal_of,
    run_all,
)
from tests.support.paths import ROOT


def test_a_part_gets_its_weight_of_what_is_left() -> None:
    first, second = Share("a", 300, 10), Share("b", 100, 10)
    assert allowed(first, [second], 400) == 300
    assert allowed(second, [], 100) == 100
    # What the first did not use is the second's.
    assert allowed(second, [], 390) == 390


def test_a_part_takes_the_least_it_needs_and_is_skipped_when_less_is_left() -> None:
    small, large = Share("small", 1, 10), Share("large", 99, 10)
    assert allowed(small, [large], 100) == 10
    assert allowed(small, [large], 9) == 0
    assert allowed(small, [], 0) == 0


def test_a_budget_knows_what_is_left() -> None:
    now = [100.0]
    budget = Budget(110.0, lambda: now[0])
    assert budget.left == 10
    assert budget.at_most(3).deadline == 103
    assert budget.at_most(30).deadline == 110
    now[0] = 111
    assert budget.out
    assert budget.left == 0


def test_the_default_run_has_all_parts_in_order_of_importance_and_fits_nine_minutes() -> None:
    names = [part.name for part in PARTS]
    assert names == [
        *("doctor", "boxes", "paths", "packed", "correctness", "stalls", "ceilings", "forms"),
        *("suite", "overhead", "models", "compile", "memory", "sparsity", "roofline", "sanitizer"),
    ]
    # Parts that run side by side take the time of the longest.
    groups = [[part.share.weight for part in group] for group in groups_of(PARTS)]
    assert sum(map(max, groups)) <= 60 * gpu.MINUTES
    for part in PARTS:
        assert callable(load(part))


def test_a_second_command_of_a_run_has_the_three_minutes_of_the_models() -> None:
    shares = [part.share for part in gpu.chosen_parts(["suite", "models"])]
    left = 60 * 9.5
    seconds: dict[str, float] = {}
    for place, share in enumerate(shares):
        seconds[share.name] = allowed(share, shares[place + 1 :], left)
        left -= seconds[share.name]
    assert seconds["models"] >= 180
    assert seconds["suite"] >= 300


def fake(name: str, weight: float = 1, least: float = 0.1, stall: float = 30) -> Part:
    return Part(Share(name, weight, least), name, stall, name)


def settings(tmp_path: Path, seconds: float) -> Settings:
    return Settings(seconds / 60, tmp_path, tmp_path / "work", "emulator", "1", "x", warm=False)


PRELUDE = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmarks.suite.journal import Journal
journal = Journal(Path(sys.argv[1]))
"""


def run_programs(
    tmp_path: Path, programs: dict[str, str], seconds: float = 60, **parts: Part
) -> dict[str, Outcome]:
    """Parts that are small programs, each with a journal."""

    def command(part: Part, settings: Settings, deadline: float) -> list[str]:
        program = PRELUDE + programs[part.name]
        return [sys.executable, "-c", program, str(journal_of(settings.work, part.name))]

    chosen = [parts.get(name, fake(name)) for name in programs]
    outcomes = run_all(
        chosen, settings(tmp_path, seconds), command=command, tell=lambda line: None, grace=0.2
    )
    return {outcome.name: outcome for outcome in outcomes}


STEPS = """
def step(name, act=lambda: None):
    if journal.lost(name):
        journal.failed(f"{name}: {journal.lost(name)}")
    elif not journal.done(name):
        with journal.step(name):
            act()
            Path(sys.argv[1]).with_suffix(".log").open("a").write(name + " ")
"""


def test_a_part_that_crashes_loses_one_step_and_no_other_part(tmp_path: Path) -> None:
    crash = STEPS + 'step("one"); step("two", lambda: os.kill(os.getpid(), 11)); step("three")'
    found = run_programs(tmp_path, {"bad": crash, "good": STEPS + 'step("x")'})
    assert found["bad"].state == "done"
    assert found["bad"].processes == 2
    assert found["bad"].failed == ["two: ended by SIGSEGV"]
    assert (tmp_path / "work" / "bad.log").read_text().split() == ["one", "three"]
    assert found["good"].ok
    assert not found["bad"].ok


def test_a_part_that_hangs_is_stopped_when_it_shows_no_sign_of_life(tmp_path: Path) -> None:
    hang = STEPS + 'step("one", lambda: time.sleep(1000)); step("two")'
    start = time.monotonic()
    found = run_programs(
        tmp_path, {"bad": hang, "good": STEPS + 'step("x")'}, bad=fake("bad", stall=1.5)
    )
    assert time.monotonic() - start < 40
    assert found["bad"].failed == ["one: hung: no sign of life for 2 s"]
    assert (tmp_path / "work" / "bad.log").read_text().split() == ["two"]
    assert found["good"].state == "done"


def test_a_part_that_finds_its_device_unusable_is_started_again_behind_the_place(
    tmp_path: Path,
) -> None:
    gone = STEPS + 'step("one", lambda: os._exit(75)); step("two")'
    found = run_programs(tmp_path, {"part": gone})
    assert found["part"].failed == ["one: its device failed"]
    assert found["part"].processes == 2


def test_a_part_that_cannot_even_begin_is_not_started_again(tmp_path: Path) -> None:
    found = run_programs(tmp_path, {"bad": "sys.exit('no such module')", "good": "pass"})
    assert found["bad"].state == "failed"
    assert found["bad"].processes == 1
    assert "no such module" in found["bad"].failed[0]
    assert found["good"].state == "done"


@pytest.mark.slow
def test_parts_without_time_are_skipped_and_listed_in_the_summary(tmp_path: Path) -> None:
    late = STEPS + 'step("one", lambda: time.sleep(1000))'
    found = run_programs(
        tmp_path,
        {"long": late, "short": STEPS + 'step("x")'},
        seconds=3,
        long=fake("long", weight=100),
        short=fake("short", weight=1, least=2.0),
    )
    assert found["long"].state == "stopped"
    assert found["long"].skipped == ["stopped in one"]
    assert found["short"].state == "skipped"
    text = summary.text("1", list(found.values()), tmp_path)
    assert "long: stopped in one" in text
    assert "short: all of it: needs 2 s" in text
    assert text.index("== failed") < text.index("== slower than a peer") < text.index("== left")


def test_kernels_are_compiled_behind_the_first_part_and_never_beside_one_that_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    @contextlib.contextmanager
    def warming(settings: Settings) -> Iterator[None]:
        told.append("compiling")
        yield
        told.append("stopped")

    monkeypatch.setattr(supervisor, "warming", warming)
    given = replace(settings(tmp_path, 60), warm=True)
    names = ("doctor", "tests", "ceilings", "suite")
    for untimed in (0, 2):
        parts = [replace(fake(name), times=n >= untimed) for n, name in enumerate(names)]
        run_all(
            parts,
            given,
            command=lambda *_: [sys.executable, "-c", "pass"],
            tell=lambda line: told.append(line.split()[0]),
        )
    assert told == [*names, "doctor", "compiling", "tests", "stopped", "ceilings", "suite"]
    assert [part.name for part in PARTS if not part.times] == [
        "doctor", "boxes", "paths", "packed", "correctness",
    ]  # fmt: skip


def test_parts_that_measure_no_time_run_side_by_side_on_a_gpu(tmp_path: Path) -> None:
    """Each of the two waits until the other one has begun."""
    meet = """
import pathlib, sys, time
mine, other = (pathlib.Path(name) for name in sys.argv[1:])
mine.touch()
while not other.exists():
    time.sleep(0.02)
"""
    parts = [replace(fake(name), times=False) for name in ("one", "two")] + [fake("three")]

    def command(part: Part, settings: Settings, deadline: float) -> list[str]:
        files = {name: str(tmp_path / name) for name in ("one", "two", "three")}
        other = {"one": "two", "two": "one", "three": "one"}[part.name]
        return [sys.executable, "-c", meet, files[part.name], files[other]]

    given = replace(settings(tmp_path, 60), device="gpu")
    outcomes = run_all(parts, given, command=command, tell=lambda line: None)
    assert [(outcome.name, outcome.state) for outcome in outcomes] == [
        ("one", "done"), ("two", "done"), ("three", "done"),
    ]  # fmt: skip


def test_the_digest_says_on_one_screen_what_failed_and_what_is_slower(tmp_path: Path) -> None:
    stamp = Stamp("1", "c", "gpu", "g", "d", "v")
    row = {
        "spec": "causal", "contender": "flashgen sm_80", "status": "ok", "ms_p50": 2.0,
        "tflops": 300.0, "of_matmul": 0.4, "peer": "sdpa cudnn", "ratio": 0.5, "pass": "forward",
        "library": "cuDNN 9.19; torch 2.11",
    }  # fmt: skip
    rows = [row, {**row, "spec": "full", "ratio": 1.5}, {**row, "contender": "sdpa cudnn"}]
    # Calls with options are no losses of a call without: they stand apart in the whole summary.
    rows += [{**row, "contender": "flashgen sm_80 deterministic", "ratio": 0.25}]
    Writer(tmp_path, stamp, "suite").speed(rows)
    outcome = Outcome("suite", "done", failed=[f"case {i}" for i in range(99)], skipped=["a", "b"])
    text = summary.digest("1", [outcome], tmp_path)
    assert len(text.splitlines()) < 60
    assert "99 failed, 0 rows wrong, 1 slower than a peer, 1 not, 2 left out" in text
    assert "0.50 x sdpa cudnn" in text
    assert text.index("== furthest behind") < text.index("== main cases")
    assert "sdpa cudnn                       cuDNN 9.19; torch 2.11" in text
    assert "case 0" in text
    assert "0.25 x" not in text
    whole = summary.text("1", [outcome], tmp_path)
    _, losses, options = whole.split("slower than a peer (1)")
    assert "0.50 x sdpa cudnn" in losses
    assert "0.25 x sdpa cudnn" not in losses
    assert "0.25 x sdpa cudnn" in options


def test_a_journal_says_what_was_done_and_what_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    with journal.step("one"):
        pass
    journal.note("begin", step="outer")
    journal.note("begin", step="inner")
    journal.note("restart", reason="ended by SIGSEGV")
    with path.open("a") as file:
        file.write('{"event": "beg')  # cut short by a crash
    again = Journal(path)
    assert again.done("one")
    assert not again.done("outer")
    assert again.lost("inner") == "ended by SIGSEGV"
    assert again.lost("outer") is None
    assert len(entries(path)) == 5


def test_a_run_goes_on_behind_what_the_last_one_has_done(tmp_path: Path) -> None:
    late = (
        STEPS
        + """
step("one")
if not Path(sys.argv[1]).with_suffix(".again").exists():
    Path(sys.argv[1]).with_suffix(".again").touch()
    journal.skipped("two")
else:
    step("two")
"""
    )
    first = run_programs(tmp_path, {"part": late})["part"]
    assert first.skipped == ["two"]
    again = run_programs(tmp_path, {"part": late})["part"]
    assert again.skipped == []
    assert (tmp_path / "work" / "part.log").read_text().split() == ["one", "two"]
    run = gpu.run_of(tmp_path / "kept")
    assert gpu.run_of(tmp_path / "kept") == run


def test_an_exception_leaves_a_step_open(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(RuntimeError), journal.step("one"):
        raise RuntimeError
    assert not journal.done("one")
    assert [json.loads(line)["event"] for line in journal.path.read_text().splitlines()] == [
        "begin"
    ]


def test_without_a_gpu_the_command_says_so_and_does_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.device, "missing_gpu", lambda: "torch sees no CUDA device")
    assert gpu.main([]) == 2
    assert "no GPU to measure on: torch sees no CUDA device" in capsys.readouterr().out


def test_a_dry_run_does_not_write_among_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--part", "dry", "--out", str(ROOT / "benchmarks" / "results")]) == 2
    assert "do not belong" in capsys.readouterr().out
