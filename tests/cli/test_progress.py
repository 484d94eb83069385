"""A long run in the emulator says how long it takes, and Ctrl-C ends it quietly."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial

import pytest

import ptx_emulator as emulator
from flashgen.calls.ops import run_backward, run_forward
from flashgen.spec.language.spec_file import load
from flashgen.tools.cli import progress
from flashgen.tools.cli.arguments import CallArguments
from flashgen.tools.cli.call import random_call
from flashgen.tools.cli.inputs import Shape
from tests.support.commands import CAUSAL, flashgen
from tests.support.paths import ROOT
from tests.support.tiers import slow


@pytest.fixture
def every_run_is_long(monkeypatch):
    monkeypatch.setattr(progress, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_TERMINAL_SECONDS", 0.0)


def test_a_long_run_prints_an_estimate_and_then_what_is_left(every_run_is_long):
    said = flashgen("run", CAUSAL, "--shape", "1,1,256", "--no-check").stderr.splitlines()
    about = next(n for n, line in enumerate(said) if "takes about" in line)
    parts = [int(line.partition("%")[0]) for line in said[about + 1 :] if "% done" in line]
    assert parts == sorted(parts)
    assert len(parts) >= 3
    assert parts[-1] >= 90
    assert all(line.endswith(" left") for line in said[about + 1 :])


def test_a_short_run_prints_no_estimate():
    assert "takes about" not in flashgen("run", CAUSAL, "--shape", "1,1,64").stderr


@pytest.mark.parametrize("deterministic", [False, slow(True)])
def test_the_work_of_a_call_is_known_before_it_runs(deterministic):
    spec = load(CAUSAL)
    arguments = CallArguments(path=CAUSAL, deterministic=deterministic)
    call = random_call(spec, arguments, Shape(1, 2, 1, 200, 256))
    counted: dict[int, emulator.Counters] = {}
    how = {"backend": "emulator", "check_memory": False}
    with emulator.watching(lambda counters: counted.setdefault(id(counters), counters)):
        run = run_forward(spec, *call.operands, **call.options, **how)
    assert sum(each.multiply_adds for each in counted.values()) == progress.expected_work(
        spec, call, arguments
    )
    before = list(counted.values())
    tensors = (*call.operands, run.out, run.lse, *call.gradients)
    with emulator.watching(lambda counters: counted.setdefault(id(counters), counters)):
        run_backward(spec, *tensors, **call.options, **how, deterministic=deterministic)
    launches = [each for each in counted.values() if each not in before]
    assert sum(each.multiply_adds for each in launches) == progress.expected_work(
        spec, call, arguments, "backward"
    )


@pytest.mark.slow
def test_ctrl_c_ends_an_emulated_run_without_a_traceback():
    line = [sys.executable, "-m", "flashgen", "run", CAUSAL, "--shape", "1,64,4096", "--no-check"]
    # A process that a shell starts in the background ignores SIGINT, and so do its children.
    restored = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    run = subprocess.Popen(line, **pipes, text=True, cwd=ROOT, preexec_fn=restored)
    assert run.stderr is not None
    for said in run.stderr:
        if "takes about" in said:
            run.send_signal(signal.SIGINT)
            break
    out, err = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (40, "40 s"), (180, "3 min"), (9000, "2.5 h"), (4e5, "5 days")],
)
def test_durations_have_a_fitting_unit(seconds, text):
    assert progress.duration(seconds) == text
