"""`diagnose`: versions that do not fit, GPUs that pass, fail, crash and hang, and the screen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.calls import trust
from flashgen.calls.launch import gpu_facts
from flashgen.calls.trust import trial
from flashgen.shared.arch import known_archs
from flashgen.shared.errors import CompileError
from flashgen.tools.cli import app
from flashgen.tools.doctor import diagnosis, machine
from flashgen.tools.doctor.diagnosis import Diagnosis, diagnose
from flashgen.tools.doctor.machine import Cache, MachineFacts, Nvrtc, unfit
from flashgen.tools.doctor.problems import PROBLEMS
from tests.support import fake_trial
from tests.support.fake_driver import FakeDriver
from tests.support.tiers import slow
from tests.trust.test_decision import hopper

ARCHS = known_archs()
FITTING = MachineFacts(
    flashgen="0.1.0",
    templates="0" * 16,
    system="Linux x86_64",
    python="3.12.1",
    numpy="2.1.0",
    bindings="13.0.3",
    torch="2.10.0+cu130",
    torch_cuda="13.0",
    torch_sees=True,
    nvrtc=Nvrtc("13.0", "libnvrtc.so.13", ARCHS, 0.1),
    cache=Cache("cache", 3, 1234),
)


def with_gpu(machine: MachineFacts = FITTING, **driver: Any) -> MachineFacts:
    return replace(machine, gpus=(gpu_facts(driver=FakeDriver(**driver)),))


@pytest.mark.parametrize(
    ("found", "what", "way_out"),
    [
        (
            with_gpu(replace(FITTING, torch_cuda="12.8"), cuda=12_080),
            "NVRTC 13.0 compiles for CUDA 13",
            "driver of 580 or newer",
        ),
        (
            with_gpu(replace(FITTING, nvrtc=None), cuda=12_080),
            "torch is built for CUDA 13.0",
            "a build of torch for CUDA 12",
        ),
        (
            with_gpu(replace(FITTING, torch_cuda="14.0")),
            "torch is built for CUDA 14.0",
            "install a driver for CUDA 14, or a build of torch for CUDA 13",
        ),
        (
            with_gpu(replace(FITTING, torch_cuda=None)),
            "built without CUDA",
            "a CUDA build of torch",
        ),
        (with_gpu(replace(FITTING, torch_sees=False)), "torch 2.10.0+cu130 sees no GPU", "init"),
        (with_gpu(capability=(7, 5)), "sm_75", "sm_80"),
        (with_gpu(capability=(10, 0), name="NVIDIA B200"), None, None),
        (with_gpu(compute_mode=2), "compute mode prohibited", "nvidia-smi -i 0 -c DEFAULT"),
        (
            with_gpu(
                replace(FITTING, nvrtc=Nvrtc("13.0", "", ("sm_80", "sm_90"), 0.1)),
                capability=(12, 0),
            ),
            "does not compile for sm_120",
            "newer nvidia-cuda-nvrtc",
        ),
        (replace(FITTING, bindings=None), "cuda-bindings is missing", "pip install"),
        (replace(FITTING, bindings="12.9.1"), "cuda-bindings 12.9.1 loads NVRTC 13.0", "one major"),
        (FITTING, None, None),
        (with_gpu(), None, None),
        (with_gpu(cuda=14_000), None, None),
    ],
)
def test_versions_that_do_not_fit_are_named_with_what_to_install(
    found: MachineFacts, what: str | None, way_out: str | None
) -> None:
    findings = unfit(found)
    if what is None:
        assert findings == ()
        return
    (finding,) = findings
    assert what in finding.what
    assert way_out is not None
    assert way_out in finding.way_out


@pytest.fixture
def children(nothing_known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the machine and the behaviour of the child processes; returns the diagnosis."""

    def diagnosed(driver: FakeDriver, behaviour: str) -> Diagnosis:
        facts = replace(FITTING, gpus=(gpu_facts(driver=driver),))
        monkeypatch.setattr(diagnosis, "inspect", lambda given: facts)
        monkeypatch.setattr(trial, "command", fake_trial.command(behaviour, tmp_path / "log"))
        return diagnose(driver=driver)

    return diagnosed


def test_all_well_on_both_paths_of_a_hopper_gpu(children: Any) -> None:
    found = children(hopper(), "sm_90a=pass,sm_90=pass")
    assert found.exit_code == 0
    assert [(path.arch, path.taken) for path in found.paths] == [("sm_90a", True), ("sm_90", False)]
    names = [problem.name for problem in PROBLEMS]
    assert [result.problem for result in found.results] == [*names, *names]
    text = str(found)
    assert text.endswith("\nresult     all well\n")
    assert "path       sm_90a (taken): sm_90a passed on this GPU" in text
    assert "layouts    block layout, forward: predicted" in text
    assert len(found.layouts) == 3  # forward, and backward with free and with fixed order of sums
    # What doctor found is the verdict that later calls use.
    trust.forget()
    assert trust.decide(0, driver=hopper()).arch == "sm_90a"


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("fail@packed", "dq FAIL, max 0.3 of 0.01 allowed"),
        ("crash@packed", "ended by SIGSEGV"),
        slow("hang@packed", "no end within 2 s"),
    ],
)
def test_a_path_that_fails_at_a_problem_still_runs_the_others(
    children: Any, monkeypatch: pytest.MonkeyPatch, kind: str, says: str
) -> None:
    monkeypatch.setattr(trial, "RUNNING_SECONDS", 2)
    found = children(hopper(), f"sm_90a={kind},sm_90=pass")
    assert found.exit_code == 1
    assert [result.problem for result in found.results if not result.ok] == [PROBLEMS[3].name]
    assert len(found.results) == 2 * len(PROBLEMS)
    (finding,) = found.findings
    assert finding.what == f"sm_90a, {PROBLEMS[3].name}: {says}"
    assert "flashgen doctor --json" in finding.way_out
    assert [(path.arch, path.taken) for path in found.paths] == [("sm_90a", False), ("sm_90", True)]
    assert "WRONG" in str(found)
    trust.forget()
    with pytest.warns(trust.TrustWarning, match=PROBLEMS[3].name):
        assert trust.decide(0, driver=hopper()).arch == "sm_90"


def test_a_device_that_is_taken_by_others_is_no_verdict(children: Any) -> None:
    found = children(FakeDriver(), "sm_80=absent")
    assert found.exit_code == 1
    assert found.results == ()
    (finding,) = found.findings
    assert "busy or unavailable" in finding.what
    assert "while no other process" in finding.way_out
    assert "has not been tried" in found.paths[0].why


def test_a_failure_of_the_past_is_forgotten_when_doctor_passes(children: Any) -> None:
    assert children(FakeDriver(), "sm_80=fail@boxes").exit_code == 1
    found = children(FakeDriver(), "sm_80=pass")
    assert found.exit_code == 0
    assert found.paths[0].taken


def test_exclusive_compute_mode_does_not_hinder_doctor(children: Any) -> None:
    """It creates no context of its own."""
    driver = hopper(compute_mode=3)
    assert children(driver, "sm_90a=pass,sm_90=pass").exit_code == 0
    assert not [name for name in driver.calls if "Ctx" in name]


def test_where_versions_do_not_fit_nothing_is_tried(children: Any, tmp_path: Path) -> None:
    found = children(FakeDriver(cuda=12_080), "sm_80=pass")
    assert found.exit_code == 1
    assert not (tmp_path / "log").exists()
    assert "580" in str(found)


def test_the_variable_that_names_an_architecture_is_shown(
    children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_ARCH", "sm_90")
    found = children(hopper(), "sm_90a=pass,sm_90=pass")
    assert [path.arch for path in found.paths if path.taken] == ["sm_90"]
    assert "FLASHGEN_ARCH" in found.paths[1].why
    assert found.layouts == ()


def test_a_device_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "inspect", lambda given: with_gpu())
    found = diagnose(3)
    assert found.exit_code == 1
    assert found.findings[0].what == "there is no CUDA device 3"


# ---- this machine, without a GPU -----------------------------------------------------------------


@pytest.mark.slow
def test_without_a_gpu_the_compiler_and_the_emulator_are_checked() -> None:
    """The child process is a real one."""
    from typer.testing import CliRunner

    driver = FakeDriver(devices=0)
    found = diagnose(driver=driver)
    assert found.exit_code == 2
    (result,) = found.results
    assert (result.arch, result.ok, result.equal) == ("sm_80", True, 1.0)
    assert found.machine.no_gpu == "the NVIDIA driver sees no device"
    assert found.machine.nvrtc is not None
    assert found.machine.nvrtc.seconds > 0
    assert json.loads(json.dumps(found.as_dict()))["exit_code"] == 2
    # The command prints the same.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashgen.tools.doctor.diagnosis.diagnose", lambda device, tell: found)
        shown = CliRunner().invoke(app, ["doctor"])
        assert (shown.exit_code, shown.stdout) == (2, str(found))
        as_json = CliRunner().invoke(app, ["doctor", "--json"])
        assert json.loads(as_json.stdout) == json.loads(json.dumps(found.as_dict()))


def test_a_compiler_that_is_missing_is_wrong_and_not_only_a_missing_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> str:
        raise CompileError(
            "NVRTC cannot be loaded", where="", numbers="no library", way_out="pip install nvrtc"
        )

    monkeypatch.setattr(machine.nvrtc, "version", missing)
    found = diagnose(driver=FakeDriver(devices=0))
    assert found.exit_code == 1
    assert found.findings[0].what == "NVRTC cannot be loaded (no library)"
    assert "try        pip install nvrtc" in str(found)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(("BACKEND", "cpu"), ("OVERRIDE", "/missing.cu"), ("TRUST", "x"), ("CHECK_READS", "2")),
        *(("DEBUG", "9"), ("CACHE_DIR", "~nobody-of-this-name")),
    ],
)
def test_a_variable_with_which_every_call_fails_is_wrong(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(f"FLASHGEN_{variable}", value)
    found = machine.inspect(FakeDriver(devices=0))
    (finding,) = found.broken
    assert finding.what.startswith(f"the environment variable FLASHGEN_{variable} has a value")
    assert f"set FLASHGEN_{variable}" in finding.way_out


def test_a_cache_in_which_nothing_can_be_kept_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    for folder in (file, file / "below"):
        monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(folder))
        (finding,) = machine.inspect(FakeDriver(devices=0)).broken
        assert f"{file} is no folder that this user can write" in finding.what
