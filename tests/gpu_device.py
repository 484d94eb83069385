"""Where the tests of a real GPU run: on it, or dry, on the emulator through the same code.

Without a GPU these tests are skipped. With FLASHGEN_GPU_DRY=1 they run on CPU tensors and the
emulator instead, with small shapes and few repeats, so that a mistake in a test is found before
a GPU is there. What needs a device (streams, graphs, a busy neighbour) has a stand-in here that
makes the same calls one after another; it shows that the test runs, not that the promise holds.

A module of tests begins with::

    pytestmark = gpu.MARKS
    live_gpu = gpu.live_gpu
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import pytest
import torch

from flashgen import launch
from flashgen.ops.backends import nearest_arch

Tensor = torch.Tensor
Chosen = TypeVar("Chosen")

DRY = os.environ.get("FLASHGEN_GPU_DRY") == "1"


def _missing() -> str | None:
    """Why these tests cannot run here; None when they can."""
    if DRY:
        return None
    found = launch.available() if torch.cuda.is_available() else "no CUDA device"
    return found and f"{found}; FLASHGEN_GPU_DRY=1 runs this on the emulator"


MISSING = _missing()
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
    pytest.mark.usefixtures("live_gpu"),
]
DEVICE = torch.device("cpu") if DRY or MISSING else torch.device("cuda", 0)
BACKEND = "emulator" if DRY else "gpu"

_lost: str | None = None  # the test in which the device's context died


def pick(real: Chosen, dry: Chosen) -> Chosen:
    """One of two values of the same meaning: for a GPU, and for a dry run."""
    return dry if DRY else real


def arch() -> str:
    """The architecture that operators compile for when nobody names one."""
    return "sm_80" if DRY else nearest_arch(launch.device_arch(0))


def options(turn: int = 0) -> dict[str, Any]:
    """Arguments of run_forward and run_backward: the backend, and the emulator's settings.

    Args:
        turn: in a dry run, the order of blocks that the emulator draws; a GPU has its own.
    """
    if DRY:
        return {"backend": BACKEND, "check_memory": False, "order_seed": turn}
    return {"backend": BACKEND}


def synchronize() -> None:
    """Waits for the device; what kernels did wrong surfaces here."""
    if not DRY:
        torch.cuda.synchronize()


@pytest.fixture
def live_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A working device, waited for after the test, with torch's products at their best.

    After an invalid address or the like a process cannot use its GPU any more: the tests that
    follow are skipped, and say after which test.
    """
    if _lost is not None:
        pytest.skip(f"the GPU cannot be used any more after {_lost}")
    # Torch in half precision is the yardstick of the error rule.
    products = torch.backends.cuda.matmul
    options = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    before = [getattr(products, option) for option in options]
    for option in options:
        setattr(products, option, False)
    threads = torch.get_num_threads()  # one, because tests run side by side: not these
    torch.set_num_threads(pick(min(8, os.cpu_count() or 1), threads))
    yield
    torch.set_num_threads(threads)
    for option, value in zip(options, before, strict=True):
        setattr(products, option, value)
    if _lost is None and note_loss(request.node.name):
        pytest.fail(f"the GPU cannot be used any more after {_lost}", pytrace=False)
    if _lost is None and not DRY:
        torch.cuda.empty_cache()


def note_loss(where: str) -> bool:
    """Whether the device's context has died; ``where`` is remembered as the place."""
    global _lost
    if _lost is None:
        try:
            synchronize()
        except RuntimeError as error:
            _lost = f"{where} ({in_one_line(error)})"
    return _lost is not None


def in_one_line(error: BaseException) -> str:
    """An error in one line, at most 300 characters of it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Failures:
    """Failures of many cases in one test: each stops itself alone, all are told in the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cases = 0

    @contextlib.contextmanager
    def case(self, label: str) -> Iterator[None]:
        """A case: what it raises is kept as a line, unless the device died of it."""
        self.cases += 1
        try:
            yield
        except Exception as error:
            self.lines.append(f"{label}: {in_one_line(error)}")
            if note_loss(label):
                self.tell()

    def add(self, label: str, found: Sequence[str]) -> None:
        """What a case found wrong, a line each."""
        self.lines += [f"{label}: {line}" for line in found]

    def tell(self) -> None:
        """Fails the test when a case failed."""
        if self.lines:
            text = "\n  ".join(self.lines)
            pytest.fail(f"{len(self.lines)} wrong in {self.cases} cases\n  {text}", pytrace=False)


# ---- streams -------------------------------------------------------------------------------------


class Stream:
    """A stream of its own, beside torch's current one; dry, the only one there is."""

    def __init__(self) -> None:
        self.real = None if DRY else torch.cuda.Stream()

    def current(self) -> AbstractContextManager[Any]:
        """Makes it torch's current stream."""
        return torch.cuda.stream(self.real) if self.real else contextlib.nullcontext()

    def wait(self) -> None:
        """Waits until the stream has nothing left to do."""
        if self.real:
            self.real.synchronize()

    def after_others(self) -> None:
        """Makes the stream wait for what torch's current stream was given so far."""
        if self.real:
            self.real.wait_stream(torch.cuda.current_stream())


class Event:
    """A point in torch's current stream; dry, it has always been reached."""

    def __init__(self) -> None:
        self.real = None
        if not DRY:
            self.real = torch.cuda.Event()
            self.real.record()

    @property
    def reached(self) -> bool:
        return self.real is None or self.real.query()


def occupy(milliseconds: float) -> Event:
    """Keeps torch's current stream occupied for about so long; gives the end of it."""
    if not DRY:
        # Cycles of a clock between 1 and 2 GHz.
        torch.cuda._sleep(int(milliseconds * 1.5e6))
    return Event()


class Neighbour:
    """Matrix products on a stream of their own, so that the GPU is busy with something else.

    The products are short, so that kernels beside them get their turn soon.

    Attributes:
        met: how often the stream was still busy when `feed` came to it.
        fed: how often `feed` came to it after the first time.
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
    """An operation of torch that waits for the GPU is an error inside; nothing, dry."""
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
    """A captured CUDA graph with its output tensors; dry, the call, whose outputs are copied.

    Attributes:
        outputs: of the last replay, always the same tensors.
    """

    def __init__(self, call: Callable[[], tuple[Tensor, ...]], warm_ups: int = 3) -> None:
        self.call = call
        self.graph: Any = None
        if DRY:
            self.outputs = tuple(output.clone() for output in call())
            return
        # torch asks for a few calls on another stream before a capture.
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
        """Runs it again; gives copies of the outputs."""
        if self.graph is None:
            for output, again in zip(self.outputs, self.call(), strict=True):
                output.copy_(again)
        else:
            self.graph.replay()
        return tuple(output.clone() for output in self.outputs)


def memory_gib() -> float:
    """Free memory of the device in GiB, with what torch keeps for itself; dry, plenty."""
    if DRY:
        return 1e6
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free / 2**30
