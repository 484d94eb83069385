"""The device of the tests in tests/gpu: a GPU, or in a dry run the emulator.

Without a GPU these tests are not collected. With FLASHGEN_GPU_DRY=1 they run on CPU tensors and the
emulator instead, with small shapes and few repeats, so that a mistake in a test is found before
the test runs on a GPU. Features of a device (streams, graphs, concurrent work) have a stand-in here
that makes the same calls one after another; a dry run shows only that the test can be executed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import pytest
import torch

from flashgen.calls import launch
from flashgen.calls.trust import decide
from flashgen.shared.errors import LaunchError

Tensor = torch.Tensor
Chosen = TypeVar("Chosen")

DRY = os.environ.get("FLASHGEN_GPU_DRY") == "1"


def _missing() -> str | None:
    """Why the tests of tests/gpu cannot run here; None when they can."""
    if DRY:
        return None
    found = launch.available() if torch.cuda.is_available() else "no CUDA device"
    return found and f"{found}; FLASHGEN_GPU_DRY=1 runs this on the emulator"


def _trust_for_tests() -> None:
    """Where every code path fails its trial, the tests run all the same and show what is wrong."""
    try:
        decide(0)
    except LaunchError:
        os.environ["FLASHGEN_TRUST"] = "always"


MISSING = _missing()
if not DRY and MISSING is None:
    _trust_for_tests()
DEVICE = torch.device("cpu") if DRY or MISSING else torch.device("cuda", 0)
BACKEND = "emulator" if DRY else "gpu"

lost: str | None = None  # the test in which the device's context died


def pick(real: Chosen, dry: Chosen) -> Chosen:
    """One of two values of the same meaning: for a GPU, and for a dry run."""
    return dry if DRY else real


def arch() -> str:
    """The architecture that operators compile for by default."""
    return "sm_80" if DRY else decide(0).arch


def options(turn: int = 0) -> dict[str, Any]:
    """Arguments of run_forward and run_backward: the backend, and the emulator's settings.

    Args:
        turn: in a dry run, the seed of the order of blocks; a GPU has its own order.
    """
    if DRY:
        return {"backend": BACKEND, "check_memory": False, "order_seed": turn}
    return {"backend": BACKEND}


def synchronize() -> None:
    """Waits for the device; errors of kernels are raised here."""
    if not DRY:
        torch.cuda.synchronize()


def note_loss(where: str) -> bool:
    """Whether the device's context has died; ``where`` is remembered as the place."""
    global lost
    if lost is None:
        try:
            synchronize()
        except RuntimeError as error:
            lost = f"{where} ({in_one_line(error)})"
    return lost is not None


def in_one_line(error: BaseException) -> str:
    """An error in one line, at most 300 characters of it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Failures:
    """Failures of many cases in one test: a failure ends its case; all are reported at the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cases = 0

    @contextlib.contextmanager
    def case(self, label: str) -> Iterator[None]:
        """A case: its exception is recorded as a line, unless the device's context has died."""
        self.cases += 1
        try:
            yield
        except Exception as error:
            self.lines.append(f"{label}: {in_one_line(error)}")
            if note_loss(label):
                self.tell()

    def add(self, label: str, found: Sequence[str]) -> None:
        """Adds the errors of a case, a line each."""
        self.lines += [f"{label}: {line}" for line in found]

    def tell(self) -> None:
        """Fails the test when a case failed."""
        if self.lines:
            text = "\n  ".join(self.lines)
            pytest.fail(f"{len(self.lines)} wrong in {self.cases} cases\n  {text}", pytrace=False)


# ---- streams -------------------------------------------------------------------------------------


class Stream:
    """A separate stream beside torch's current one; in a dry run, the only stream."""

    def __init__(self) -> None:
        self.real = None if DRY else torch.cuda.Stream()

    def current(self) -> AbstractContextManager[Any]:
        """Makes the stream torch's current stream."""
        return torch.cuda.stream(self.real) if self.real else contextlib.nullcontext()

    def wait(self) -> None:
        """Waits until the stream has no work left."""
        if self.real:
            self.real.synchronize()

    def after_others(self) -> None:
        """Makes the stream wait for the work that is queued on torch's current stream."""
        if self.real:
            self.real.wait_stream(torch.cuda.current_stream())


class Event:
    """A point in torch's current stream; in a dry run, it has always been reached."""

    def __init__(self) -> None:
        self.real = None
        if not DRY:
            self.real = torch.cuda.Event()
            self.real.record()

    @property
    def reached(self) -> bool:
        return self.real is None or self.real.query()


def occupy(milliseconds: float) -> Event:
    """Keeps torch's current stream occupied for about this time; returns the end of it."""
    if not DRY:
        # Cycles of a clock between 1 and 2 GHz.
        torch.cuda._sleep(int(milliseconds * 1.5e6))
    return Event()


class Neighbour:
    """Matrix products on a separate stream, so that the GPU is busy with other work.

    The products are short, so that other kernels can start soon.

    Attributes:
        met: the number of calls of `feed` that found the stream still busy.
        fed: the number of calls of `feed` after the first one.
    """

    def __init__(self) -> None:
        side = pick(2048, 16)
        self.stream = Stream()
        self.left = torch.randn(side, side, device=DEVICE).bfloat16()
        self.ahead: list[Event] = []
        self.met = 0
        self.fed = -1
        synchronize()

    def feed(self) -> None:
        """Queues products until about two milliseconds of them are ahead."""
        waiting = [event for event in self.ahead if not event.reached]
        self.fed += 1
        self.met += self.fed > 0 and (DRY or bool(waiting))
        with self.stream.current():
            for _ in range(pick(12, 1) - len(waiting)):
                for _ in range(pick(4, 1)):
                    torch.mm(self.left, self.left)
                waiting.append(Event())
        self.ahead = waiting


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, a torch operation that waits for the GPU is an error; no effect in a dry run."""
    if DRY:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- graphs --------------------------------------------------------------------------------------


class Graph:
    """A captured CUDA graph with its output tensors; in a dry run the call, with copied outputs.

    Attributes:
        outputs: the outputs of the last replay, always the same tensors.
    """

    def __init__(self, call: Callable[[], tuple[Tensor, ...]], warm_ups: int = 3) -> None:
        self.call = call
        self.graph: Any = None
        if DRY:
            self.outputs = tuple(output.clone() for output in call())
            return
        # torch requires a few calls on another stream before a capture.
        stream = Stream()
        stream.after_others()
        with stream.current():
            for _ in range(warm_ups):
                call()
        torch.cuda.current_stream().wait_stream(stream.real)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = call()

    def replay(self) -> tuple[Tensor, ...]:
        """Replays the graph; returns copies of the outputs."""
        if self.graph is None:
            for output, again in zip(self.outputs, self.call(), strict=True):
                output.copy_(again)
        else:
            self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


def graphed(call: Callable[..., Tensor], arguments: list[Tensor]) -> Callable[..., Tensor]:
    """The call with both passes captured into CUDA graphs; in a dry run the call itself."""
    if DRY:
        return call
    made: Callable[..., Tensor] = torch.cuda.make_graphed_callables(call, tuple(arguments))
    return made


def memory_gib() -> float:
    """Free memory in GiB, with the memory that torch caches; in a dry run a large number."""
    if DRY:
        return 1e6
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free / 2**30
