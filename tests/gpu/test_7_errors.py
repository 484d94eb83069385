"""On a GPU: bad input never reaches a launch, and errors of the driver become LaunchErrors.

Dry, launches of the emulator are counted, and a stand-in for the driver fails on demand: it does
not show which codes a real driver gives, nor that the device works afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import ptx_emulator as emulator
from flashgen.calls import launch
from flashgen.kernels.compile import Binary
from flashgen.shared.errors import FlashgenError, InputError, LaunchError
from tests.support import gpu_device as gpu
from tests.support.fake_driver import FakeDriver
from tests.support.gpu_problems import RNG, Mode, Problem, path_of, problem
from tests.support.processes import run_python
from tests.support.shapes import Case


@pytest.fixture
def one() -> Problem:
    return problem(path_of("causal"), Case(40, 50, 1, 4, 2), Mode(0.17, True))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels as they are launched, on the GPU or in the emulator."""
    seen: list[str] = []
    real, emulated = launch.Launch.__call__, emulator.launch

    def on_gpu(self: launch.Launch, *rest: Any) -> None:
        seen.append(self.kernel.name)
        real(self, *rest)

    def in_emulator(ptx: str, name: str, *rest: Any, **options: Any) -> Any:
        seen.append(name)
        return emulated(ptx, name, *rest, **options)

    monkeypatch.setattr(launch.Launch, "__call__", on_gpu)
    monkeypatch.setattr(emulator, "launch", in_emulator)
    return seen


def test_launches_are_seen(one: Problem, launches: list[str]) -> None:
    """Else the tests below would show nothing."""
    one.backward(one.forward())
    assert len(launches) == 4  # forward, delta, dkdv, dq


Change = Callable[[Problem], dict[str, Any]]
BAD: dict[str, Change] = {
    "dtype": lambda one: {"k": one.k.float()},
    "head_dim": lambda one: {"q": one.q[..., :32]},
    "heads": lambda one: {"q": one.q[:, :3]},
    "batch": lambda one: {"k": one.k.expand(2, -1, -1, -1)},
    "lengths of k and v": lambda one: {"v": one.v[:, :, :49]},
    "dimensions": lambda one: {"v": one.v[0]},
    "last stride": lambda one: {"q": one.q.transpose(2, 3).contiguous().transpose(2, 3)},
    "no tensor": lambda one: {"q": one.q.tolist()},
    "meta tensor": lambda one: {"k": one.k.to("meta")},
    "offset": lambda one: {"q_offset": 2**40},
    "scale": lambda one: {"scale": float("nan")},
    "dropout_p": lambda one: {"dropout_p": 1.0},
    "rng dtype": lambda one: {"rng": torch.tensor(RNG, device=gpu.DEVICE).to(torch.float64)},
    "rng size": lambda one: {"rng": torch.zeros(3, dtype=torch.int64, device=gpu.DEVICE)},
    "backend": lambda one: {"backend": "tpu"},
    "scalar": lambda one: {"scalars": {"window": 3}},
}
# A dry run has no other device.
ELSEWHERE: dict[str, Change] = {
    "one operand on the CPU": lambda one: {"k": one.k.cpu()},
    "rng on the CPU": lambda one: {"rng": torch.tensor(RNG)},
    "emulator for CUDA tensors": lambda one: {"backend": "emulator"},
    "tiled for CUDA tensors": lambda one: {"backend": "tiled"},
}


@pytest.mark.parametrize("wrong", [*BAD, *gpu.pick(list(ELSEWHERE), [])])
def test_bad_input_never_reaches_a_launch(wrong: str, one: Problem, launches: list[str]) -> None:
    change = (BAD | ELSEWHERE)[wrong](one)
    operands = {name: change.pop(name, getattr(one, name)) for name in ("q", "k", "v")}
    with pytest.raises(InputError):
        replace(one, **operands).forward(**change)
    assert launches == []


@pytest.mark.parametrize("name", ["out", "lse", "dout", "dlse"])
def test_bad_gradients_never_reach_a_launch(name: str, one: Problem, launches: list[str]) -> None:
    forward = one.forward()
    launches.clear()
    short = {"out": forward.out, "lse": forward.lse, "dout": one.dout, "dlse": one.dlse}
    short = {name: short[name][:, :, 1:]}
    ours = {key: value for key, value in short.items() if key in ("dout", "dlse")}
    theirs = {key: value for key, value in short.items() if key in ("out", "lse")}
    with pytest.raises(InputError):
        replace(one, **ours).backward(replace(forward, **theirs))
    assert launches == []


@pytest.mark.skipif(gpu.DRY, reason="the emulator's grids have no limits")
def test_more_blocks_than_a_grid_can_have_are_refused(one: Problem, launches: list[str]) -> None:
    many = problem(path_of("causal"), Case(2, 2, 65_536, 1, 1))
    with pytest.raises(FlashgenError, match="65,53") as caught:
        many.forward()
    assert isinstance(caught.value, InputError | LaunchError)
    assert not one.wrong()


# ---- the driver ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A kernel as the launcher takes it, with parameters whose pointers are null."""

    binary: Binary
    threads: int
    smem_bytes: int
    packed: bytes

    def load(self, driver: Any) -> launch.Kernel:
        return launch.load(self.binary, driver=driver)

    def run(self, kernel: launch.Kernel, grid: tuple[int, int, int] = (1, 1, 1)) -> None:
        launch.Launch(kernel, grid, (self.threads, 1, 1), self.smem_bytes)(self.packed)


def of_forward(one: Problem) -> Launch:
    forward = one.forward()
    build = forward.report.kernel
    assert build is not None
    sizes = {"batch": 1, "heads_q": 4, "heads_kv": 2, "seq_q": 64, "seq_k": 64}
    packed = launch.pack(
        build.source.params, {field.name: sizes.get(field.name, 0) for field in build.source.params}
    )
    return Launch(build.binary, build.plan.threads, build.plan.smem_bytes, packed)


def failing(call: str, code: int) -> FakeDriver | None:
    """The real driver, which is made to fail; dry, one that fails by itself."""
    return FakeDriver(smem=232_448, fail={call: code}) if gpu.DRY else None


@pytest.mark.parametrize("damage", ["cubin", "kernel"])
def test_a_damaged_binary_is_an_error_of_the_driver_in_words(one: Problem, damage: str) -> None:
    good = of_forward(one)
    changes, failure, where = {
        "cubin": ({"cubin": good.binary.cubin[:1000]}, ("cuModuleLoadData", 209), "loading"),
        "kernel": ({"kernel": "no_such"}, ("cuModuleGetFunction", 999), "no_such"),
    }[damage]
    binary = replace(good.binary, **changes, key=damage)
    with pytest.raises(LaunchError, match="CUDA_ERROR") as caught:
        replace(good, binary=binary).load(failing(*failure))
    assert where in caught.value.where
    assert not one.wrong()


def test_an_impossible_grid_is_refused_and_rejected_by_the_driver_too(
    one: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = of_forward(one)
    kernel = good.load(failing("cuLaunchKernel", 999))
    impossible = (1, 70_000, 1)
    with pytest.raises(LaunchError, match="too large along y"):
        good.run(kernel, impossible)
    monkeypatch.setattr(launch, "_check_limits", lambda *given: None)
    with pytest.raises(LaunchError, match="CUDA_ERROR"):
        good.run(kernel, impossible)
    monkeypatch.undo()
    assert not one.wrong()


def lose_the_device() -> None:
    """A kernel reads a null pointer; the next launch says so. The process cannot go on after it."""
    one = problem(path_of("causal"), Case(64, 64, 1, 4, 2))
    bad = of_forward(one)
    kernel = bad.load(failing("cuLaunchKernel", 700))
    if not gpu.DRY:
        bad.run(kernel)
        with pytest.raises(RuntimeError):
            torch.cuda.synchronize()
    with pytest.raises(LaunchError, match="outside its buffers") as caught:
        bad.run(kernel)
    assert "code 700" in caught.value.numbers
    assert "emulator" in caught.value.way_out
    print("reported")


def test_a_kernel_that_leaves_its_buffers_is_reported_at_the_next_launch() -> None:
    """In a process of its own, which loses the device by it."""
    program = "import tests.gpu.test_7_errors as t; t.lose_the_device()"
    done = run_python("-c", program, status=None)
    assert "reported" in done.stdout, done.stderr[-2000:]
