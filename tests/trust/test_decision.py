"""trust: which code path a GPU takes, with a fake driver and child processes that pass or fail."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from flashgen.calls import trust
from flashgen.calls.launch import gpu_facts
from flashgen.calls.trust import Decision, TrustWarning, decision, trial, verdicts
from flashgen.kernels.codegen.environment import template_digest
from flashgen.shared.errors import FlashgenError, LaunchError
from tests.support import fake_trial
from tests.support.fake_driver import FakeDriver
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.tiers import slow

HOPPER = "a Hopper GPU"
"""A model that no record proves, so that its paths are tried."""


def hopper(**more: Any) -> FakeDriver:
    return FakeDriver((9, 0), name=HOPPER, **more)


def in_capture() -> bool:
    return True


class Trials:
    """The child processes of a test: their behaviour, and those that were started."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = folder / "trials"
        self.monkeypatch = monkeypatch

    def behave(self, behaviour: str) -> None:
        self.monkeypatch.setattr(trial, "command", fake_trial.command(behaviour, self.log))

    @property
    def started(self) -> list[str]:
        """The code path of each process, in order."""
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(tmp_path, monkeypatch)


def test_a_path_that_passes_is_tried_once_and_taken_from_then_on(
    trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    trials.behave("sm_90a=pass")
    first = trust.decide(0, driver=hopper())
    assert first == Decision("sm_90a", "sm_90a passed on this GPU, driver and compiler")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"flashgen: trying the code path sm_90a on {HOPPER}, once, at most 120 s ..."
    assert said[1].startswith("flashgen: sm_90a passed after ")
    trust.forget()  # as in a new process
    assert trust.decide(0, driver=hopper()) == first
    assert trials.started == ["sm_90a"]
    assert capsys.readouterr().err == ""


def test_a_decision_is_made_once_in_a_process(trials: Trials) -> None:
    trials.behave("sm_90a=pass")
    driver = hopper()
    first = trust.decide(0, driver=driver)
    calls = len(driver.calls)
    assert trust.decide(0, driver=driver) is first
    assert len(driver.calls) == calls


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("fail@causal", "causal: dq FAIL, max 0.3 of 0.01 allowed"),
        ("crash@packed", "packed: ended by SIGSEGV"),
        slow("hang@boxes", "boxes: no end within 3 s"),
    ],
)
def test_a_path_that_fails_gives_way_to_the_next_with_a_warning_that_names_the_problem(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    monkeypatch.setattr(trial, "RUNNING_SECONDS", 3)
    trials.behave(f"sm_90a={kind},sm_90=pass")
    with pytest.warns(TrustWarning) as caught:
        found = trust.decide(0, driver=hopper())
    assert found.arch == "sm_90"
    assert found.is_final
    (warned,) = map(str, (each.message for each in caught))
    assert warned.startswith(f"the code path sm_90 is taken on {HOPPER}: ")
    assert f"sm_90a failed on this GPU: {how}" in warned
    assert "report the output of `flashgen doctor --json`" in warned
    # The next process does not try again, and warns again.
    trust.forget()
    with pytest.warns(TrustWarning, match="sm_90a failed"):
        assert trust.decide(0, driver=hopper()) == found
    assert trials.started == ["sm_90a", "sm_90"]


def test_a_gpu_whose_only_path_fails_raises_four_lines(trials: Trials) -> None:
    trials.behave("sm_80=fail@causal")
    for _ in range(2):  # it is not tried again, and raises again
        with pytest.raises(LaunchError, match="no code path of this GPU passes") as caught:
            trust.decide(0, driver=FakeDriver())
        assert "CUDA device 0" in caught.value.where
        assert "causal: dq FAIL" in caught.value.numbers
        assert "flashgen doctor" in caught.value.way_out
        assert "FLASHGEN_TRUST=always" in caught.value.way_out
    assert trials.started == ["sm_80"]


def test_where_both_paths_fail_the_error_names_both(trials: Trials) -> None:
    trials.behave("sm_90a=fail@boxes,sm_90=crash@causal")
    with pytest.raises(LaunchError) as caught:
        trust.decide(0, driver=hopper())
    assert "sm_90a failed on this GPU: boxes" in caught.value.numbers
    assert "sm_90 failed on this GPU: causal" in caught.value.numbers


@pytest.mark.parametrize(
    ("kind", "why"),
    [("absent", "devices are busy or unavailable"), slow("slow@causal", "no end within 3 s")],
)
def test_a_trial_that_proves_nothing_is_no_failure_and_is_made_again(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    """The device is taken by others, or compiling takes too long."""
    monkeypatch.setattr(trial, "SECONDS", 3)
    trials.behave(f"sm_80={kind}")
    with pytest.warns(TrustWarning, match="run `flashgen doctor` while no other process"):
        found = trust.decide(0, driver=FakeDriver())
    assert found.arch == "sm_80"
    assert why in found.why
    assert "taken untried" in found.why
    trust.forget()
    trials.behave("sm_80=pass")
    assert trust.decide(0, driver=FakeDriver()).why.startswith("sm_80 passed")


def test_nothing_is_tried_in_the_capture_of_a_graph(trials: Trials) -> None:
    trials.behave("sm_90a=pass,sm_90=pass")
    driver = hopper()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trust.decide(0, capturing=in_capture, driver=driver)
    assert (found.arch, found.is_final) == ("sm_90", False)
    assert "a CUDA graph is being captured" in found.why
    assert trials.started == []
    # Behind the capture it is tried.
    assert trust.decide(0, driver=driver).arch == "sm_90a"
    assert trust.decide(0, capturing=in_capture, driver=driver).arch == "sm_90a"


def test_in_a_capture_a_path_that_passed_earlier_is_taken(trials: Trials) -> None:
    trials.behave("sm_90a=fail@boxes,sm_90=pass")
    with pytest.warns(TrustWarning):
        trust.decide(0, driver=hopper())
    trust.forget()
    with pytest.warns(TrustWarning, match="sm_90a failed"):
        found = trust.decide(0, capturing=in_capture, driver=hopper())
    assert (found.arch, found.is_final) == ("sm_90", True)


def test_in_exclusive_compute_mode_the_warning_says_what_to_run(trials: Trials) -> None:
    trials.behave("sm_90a=pass")
    with pytest.warns(TrustWarning, match="exclusive compute mode; run `flashgen doctor` while"):
        found = trust.decide(0, driver=hopper(compute_mode=3))
    assert (found.arch, found.is_final) == ("sm_90", True)
    assert trials.started == []


def test_a_driver_that_is_older_than_the_compiler_is_not_tried(trials: Trials) -> None:
    trials.behave("sm_90a=fail@boxes,sm_90=fail@boxes")
    found = trust.decide(0, driver=hopper(cuda=12_080))
    assert not found.is_final
    assert "the driver is older than the compiler" in found.why
    assert trials.started == []


def test_always_takes_the_fastest_path_without_a_trial(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.behave("sm_90a=fail@boxes")
    monkeypatch.setenv("FLASHGEN_TRUST", "always")
    assert trust.decide(0, driver=hopper()).arch == "sm_90a"
    assert trials.started == []


def test_never_takes_what_records_prove_and_says_what_is_taken_where_there_is_none(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHGEN_TRUST", "never")
    with pytest.warns(TrustWarning, match=f"no record proves a code path on {HOPPER}: sm_90,"):
        assert trust.decide(0, driver=hopper()).arch == "sm_90"
    prove(monkeypatch, tmp_path, "sm_90a")
    trust.forget()
    assert trust.decide(0, driver=hopper()).arch == "sm_90a"
    assert trials.started == []


def prove(monkeypatch: pytest.MonkeyPatch, folder: Path, arch: str, **other: str) -> None:
    """Replaces the records by one of a path on the fake GPU."""
    entry = {"gpu": HOPPER, "arch": arch, "templates": template_digest(), **other}
    file = folder / f"{len(list(folder.iterdir()))}.json"
    file.write_text(json.dumps({"proven": [entry]}))
    monkeypatch.setattr(verdicts, "PROVEN", file)


def test_a_path_that_a_record_proves_needs_no_trial(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trials.behave("sm_90a=fail@boxes")
    prove(monkeypatch, tmp_path, "sm_90a")
    found = trust.decide(0, driver=hopper())
    assert found.arch == "sm_90a"
    assert found.why == f"sm_90a is proven on {HOPPER} by flashgen's records"
    assert trials.started == []


def test_a_failure_on_this_machine_counts_more_than_a_record(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trials.behave("sm_90a=fail@causal,sm_90=pass")
    with pytest.warns(TrustWarning):
        trust.decide(0, driver=hopper())
    prove(monkeypatch, tmp_path, "sm_90a")
    trust.forget()
    with pytest.warns(TrustWarning, match="sm_90a failed"):
        assert trust.decide(0, driver=hopper()).arch == "sm_90"


@pytest.mark.parametrize("other", [{"gpu": "NVIDIA H200"}, {"templates": "0" * 16}])
def test_a_record_of_another_gpu_or_of_other_templates_proves_nothing(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: dict[str, str]
) -> None:
    trials.behave("sm_90a=pass")
    prove(monkeypatch, tmp_path, "sm_90a", **other)
    assert trust.decide(0, driver=hopper()).arch == "sm_90a"
    assert trials.started == ["sm_90a"]


@pytest.mark.parametrize("part", ["gpu", "driver", "nvrtc", "templates"])
def test_a_verdict_holds_for_its_gpu_driver_compiler_and_templates_only(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    trials.behave("sm_80=pass")
    trust.decide(0, driver=FakeDriver())
    trust.forget()
    if part == "gpu":
        trust.decide(0, driver=FakeDriver(name="NVIDIA A100-PCIE-40GB"))
    else:
        target, value = {
            "driver": ("flashgen.calls.launch.gpu.driver_version", "580.1"),
            "nvrtc": ("flashgen.kernels.compile.nvrtc.version", "13.9 build 1"),
            "templates": ("flashgen.kernels.codegen.environment.template_digest", "0" * 16),
        }[part]
        monkeypatch.setattr(target, lambda: value)
        trust.decide(0, driver=FakeDriver())
    assert trials.started == ["sm_80", "sm_80"]


def test_without_a_cache_each_process_tries_once(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", "off")
    trials.behave("sm_90a=fail@boxes,sm_90=pass")
    with pytest.warns(TrustWarning):
        trust.decide(0, driver=hopper())
    with pytest.warns(TrustWarning):
        trust.decide(0, driver=hopper())  # another driver: decided again, from memory
    assert trials.started == ["sm_90a", "sm_90"]


def test_a_damaged_verdict_is_tried_again(trials: Trials, fresh_cache: Path) -> None:
    trials.behave("sm_80=pass")
    trust.decide(0, driver=FakeDriver())
    (file,) = (fresh_cache / "trust").iterdir()
    file.write_text("{")
    trust.forget()
    with pytest.warns(UserWarning, match="holds no verdict"):
        assert trust.decide(0, driver=FakeDriver()).arch == "sm_80"
    assert trials.started == ["sm_80", "sm_80"]


RANK = f"""
import sys
from flashgen.calls import trust
from flashgen.calls.trust import trial
from tests.support import fake_trial
from tests.support.fake_driver import FakeDriver

trial.command = fake_trial.command("sm_90a=fail@causal,sm_90=pass", sys.argv[1])
print(trust.decide(0, driver=FakeDriver((9, 0), name="{HOPPER}")).arch)
"""


@pytest.mark.slow
def test_many_processes_at_once_try_a_path_once(trials: Trials, fresh_cache: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(trials.log)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(2)
    ]
    assert [rank.communicate()[0] for rank in ranks] == ["sm_90\n"] * 2
    assert trials.started == ["sm_90a", "sm_90"]


def test_those_that_waited_for_a_trial_without_a_result_do_not_try_one_after_another(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.behave("sm_80=pass")
    gpu = gpu_facts(driver=FakeDriver())
    clock = iter([0.0, 50.0])
    monkeypatch.setattr(decision, "time", type("Clock", (), {"monotonic": lambda: next(clock)}))
    found = decision.attempt(gpu, "sm_80")
    assert found.passed is None
    assert "another process has just tried it" in found.why
    assert trials.started == []


@pytest.mark.parametrize(("whole", "step", "lost"), [(60, 2, "causal"), slow(2, 60, None)])
def test_a_child_that_hangs_is_stopped_and_one_whose_time_is_over_has_not_failed(
    trials: Trials, monkeypatch: pytest.MonkeyPatch, whole: int, step: int, lost: str | None
) -> None:
    """Compiling may have taken nearly all of the time."""
    monkeypatch.setattr(trial, "RUNNING_SECONDS", step)
    trials.behave("sm_80=hang@causal")
    begin = time.monotonic()
    ended = trial.run(trial.command("sm_80", 0, "--trial"), seconds=whole)
    assert time.monotonic() - begin < 20
    assert (ended.lost, ended.reason) == (lost, "no end within 2 s")
    assert [each["problem"] for each in ended.results] == ["boxes"]
    assert (decision.verdict_of(ended) is None) == (lost is None)


def test_lines_that_are_no_events_are_ignored() -> None:
    program = (
        """print('5'); print('{"a": 1}'); print('{"event": "ready"}'); print('{"eve', end='')"""
    )
    ended = trial.run([sys.executable, "-c", program])
    assert ended == trial.Ended(({"event": "ready"},))


def test_the_last_line_on_stderr_is_the_reason() -> None:
    ended = trial.run([sys.executable, "-c", "import sys; print('a'); sys.exit('no device')"])
    assert ended.reason == "exit code 1: no device"


def test_a_program_that_is_not_there_proves_nothing() -> None:
    ended = trial.run(["/nowhere/python"])
    assert ended.reason.startswith("a child process cannot be started")
    assert decision.verdict_of(ended) is None


def test_a_wrong_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHGEN_TRUST", "maybe")
    with pytest.raises(FlashgenError, match="FLASHGEN_TRUST"):
        trust.decide(0, driver=FakeDriver())


def test_the_cache_command_removes_verdicts(trials: Trials, fresh_cache: Path) -> None:
    from flashgen.kernels.compile import cache

    trials.behave("sm_80=pass")
    trust.decide(0, driver=FakeDriver())
    cache.clear(fresh_cache)
    assert not (fresh_cache / "trust").exists()


def test_the_records_that_come_with_flashgen_can_be_read() -> None:
    run_python(
        "-c",
        "from flashgen.calls.trust import verdicts; print(len(verdicts._proven(verdicts.PROVEN)))",
    )
