"""The screens of `flashgen doctor` on docs/doctor.md, from machines that are written down here.

No GPU is behind them: the facts of machines are examples, and results are those of the emulator in
the place of the GPU, so that all bits are equal. What flashgen makes of them is computed: findings,
the code path that is taken, and the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flashgen.calls.launch import Gpu
from flashgen.calls.runtime.backends import DEFAULT_ARCH
from flashgen.tools.doctor.check import ProblemResult
from flashgen.tools.doctor.diagnosis import Diagnosis, PathOfGpu, PathRun
from flashgen.tools.doctor.machine import Cache, MachineFacts, Nvrtc, unfit
from flashgen.tools.doctor.problems import PROBLEMS

SHARES = (0.33, 0.33, 0.39, 0.59, 0.41, 0.35, 0.18, 0.16, 0.26, 0.11, 0.41, 0.04, 0.05)
"""Error divided by its limit of each problem, in the emulator."""

A100 = Gpu(0, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 << 30, "default", (13, 0), "580.65.06")
H100 = Gpu(0, "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 << 30, "default", (13, 0), "580.65.06")

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121")

BARE = MachineFacts(
    flashgen="0.1.0",
    templates="71502eaa4c9c29aa",
    system="Linux x86_64",
    python="3.12.4",
    numpy="2.4.6",
    bindings="13.0.3",
    torch="2.10.0+cu130",
    torch_cuda="13.0",
    torch_sees=True,
    nvrtc=Nvrtc("13.0", "nvidia/cu13/lib/libnvrtc.so.13", ARCHS, 0.02),
    cache=Cache("~/.cache/flashgen", 57, 21_394_116),
    native="it is not built: run `flashgen build-native`",
)


def results(arch: str) -> tuple[ProblemResult, ...]:
    """All problems right on a path."""
    rows = zip(PROBLEMS, SHARES, strict=True)
    return tuple(
        ProblemResult(
            one.name, arch, True, "", share, 1.0, 2 if "documents" in one.name else 0, 1.0
        )
        for one, share in rows
    )


def no_driver() -> Diagnosis:
    machine = replace(
        BARE,
        torch="2.10.0+cpu",
        torch_cuda=None,
        torch_sees=False,
        no_gpu="no NVIDIA driver is installed (libcuda.so.1 cannot be loaded)",
    )
    path = PathOfGpu(DEFAULT_ARCH, True, "the default of calls that run without a GPU")
    return Diagnosis(machine, None, (path,), results(DEFAULT_ARCH)[:1], unfit(machine))


def old_driver() -> Diagnosis:
    gpu = replace(A100, cuda=(12, 8), driver="570.86.15")
    machine = replace(BARE, gpus=(gpu,), torch_sees=False)
    return Diagnosis(machine, gpu, findings=unfit(machine))


def all_well() -> Diagnosis:
    machine = replace(BARE, gpus=(A100,), native="")
    path = PathOfGpu("sm_80", True, "sm_80 passed on this GPU, driver and compiler")
    return Diagnosis(machine, A100, (path,), results("sm_80"), unfit(machine))


def failing_path() -> Diagnosis:
    """A Hopper GPU on which packed sequences hang on the path of its own."""
    machine = replace(BARE, gpus=(H100,))
    right = results("sm_90a")
    hung = ProblemResult(right[3].problem, "sm_90a", False, "no end within 60 s")
    run = PathRun("sm_90a", (*right[:3], hung, *right[4:]))
    verdict = run.verdict
    assert verdict is not None, "a problem is wrong"
    paths = (
        PathOfGpu("sm_90a", False, f"sm_90a failed on this GPU: {verdict.failure}"),
        PathOfGpu("sm_90", True, "sm_90 passed on this GPU, driver and compiler"),
    )
    every = (*run.results, *results("sm_90"))
    return Diagnosis(machine, H100, paths, every, (*unfit(machine), *run.findings))


SCREENS: dict[str, Callable[[], Diagnosis]] = {
    "no driver": no_driver,
    "old driver": old_driver,
    "all well": all_well,
    "failing path": failing_path,
}


def screen(name: str) -> str:
    """The text of a screen."""
    return str(SCREENS[name]())
