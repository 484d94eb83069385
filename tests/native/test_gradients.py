"""The native node of autograd: without the interpreter, and as the node in Python."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch._dynamo import compiled_autograd

import flashgen as fg
from flashgen.calls.runtime.forward import PreparedForward
from flashgen.shared.errors import InputError, LaunchError
from tests.support.native_driver import CAUSAL, CONTEXT, NativeDriver, native_gpu

pytestmark = pytest.mark.slow

Tensor = torch.Tensor


@pytest.fixture
def gpu() -> Iterator[NativeDriver]:
    with native_gpu() as driver:
        yield driver


def operands(seq: int = 32, *, learn: bool = True) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, seq, 64).half().requires_grad_(learn) for _ in range(3)]


def known(tensors: list[Tensor], **options: Any) -> Any:
    """The operator, after calls that have made the plans of both passes."""
    op = fg.attention(CAUSAL)
    for _ in range(4):
        out = op(*tensors, **options)
        if out.requires_grad:
            torch.autograd.grad(out, [x for x in tensors if x.requires_grad], torch.ones_like(out))
    return op


def hits_of(op: Any, call: Any) -> tuple[int, int]:
    before = op._used.native.hits
    call()
    after = op._used.native.hits
    return after[0] - before[0], after[1] - before[1]


def test_the_backward_pass_launches_while_another_thread_holds_the_gil(gpu: NativeDriver) -> None:
    """The second of two nodes launches in the 200 ms for which another thread holds the GIL. The
    first launch of the first node takes 50 ms, in which that thread takes the GIL. The graph is
    retained, because torch itself takes the GIL to free what Python has seen."""
    tensors = operands()
    op = known(tensors)
    out = op(op(*tensors), *tensors[1:])
    held: list[int] = []
    ready, started = threading.Event(), threading.Event()
    usleep = ctypes.PyDLL(None).usleep  # a PyDLL keeps the GIL

    def hold() -> None:
        ready.set()
        started.wait()
        time.sleep(0.01)
        held.append(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
        usleep(200_000)
        held.append(time.clock_gettime_ns(time.CLOCK_MONOTONIC))

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    gpu.reset()
    gpu.set("fake_delay", 50_000)
    started.set()
    torch.autograd.grad(out, tensors, torch.ones_like(out), retain_graph=True)
    thread.join()
    stamps = [record.nanoseconds for record in gpu.records]
    assert len(stamps) == 6
    first, last = held
    inside = [first < stamp < last for stamp in stamps]
    assert inside == [False, True, True, True, True, True], (held, stamps)


def test_a_second_backward_pass_needs_a_retained_graph(gpu: NativeDriver) -> None:
    tensors = operands()
    op = known(tensors)
    out = op(*tensors)
    assert out.grad_fn.name() == "AttendBackward"

    def again(**options: Any) -> Any:
        return torch.autograd.grad(out, tensors, torch.ones_like(out), **options)

    assert hits_of(op, lambda: (again(retain_graph=True), again())) == (0, 2)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        again()


@pytest.mark.parametrize("place", [0, 2])
def test_a_saved_tensor_that_is_modified_is_refused(gpu: NativeDriver, place: int) -> None:
    tensors = operands()
    out = known(tensors)(*tensors)
    with torch.no_grad():
        tensors[place].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_result_that_is_modified_is_refused(gpu: NativeDriver) -> None:
    tensors = operands()
    out = known(tensors)(*tensors)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("needed", [(0,), (1,), (0, 2)])
def test_gradients_are_made_for_the_tensors_that_need_them(
    gpu: NativeDriver, needed: tuple[int, ...]
) -> None:
    tensors = operands()
    for place, tensor in enumerate(tensors):
        tensor.requires_grad_(place in needed)
    op = known(tensors)

    def call() -> None:
        out = op(*tensors)
        out.backward(torch.ones_like(out))

    assert hits_of(op, call) == (1, 1)
    assert [x.grad is not None for x in tensors] == [i in needed for i in range(3)]


def test_a_gradient_of_a_gradient_is_that_of_python(gpu: NativeDriver) -> None:
    tensors = operands()
    op = known(tensors)
    out = op(*tensors)
    first = torch.autograd.grad(out.sum(), tensors, create_graph=True)
    first[0].sum().backward()
    assert all(tensor.grad is not None for tensor in tensors)


def test_compiled_autograd_is_refused_with_a_way_out(
    gpu: NativeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = operands()
    op = known(tensors)

    def gradients() -> None:
        out = op(*tensors)
        with compiled_autograd._enable(torch.compile(backend="eager")):
            out.backward(torch.ones_like(out))

    with pytest.raises(InputError, match="compiled autograd cannot compile") as caught:
        gradients()
    assert "FLASHGEN_NATIVE=0" in caught.value.way_out
    monkeypatch.setenv("FLASHGEN_NATIVE", "0")
    gradients()
    assert all(tensor.grad is not None for tensor in tensors)


def test_forward_mode_is_that_of_python(gpu: NativeDriver) -> None:
    tensors = operands()
    op = known(tensors)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0].detach(), tensors[0].detach())
        out = op(dual, *tensors[1:])
        assert torch.autograd.forward_ad.unpack_dual(out).tangent is not None


def test_hooks_run(gpu: NativeDriver) -> None:
    tensors = operands()
    op = known(tensors)
    seen: list[str] = []
    out = op(*tensors)
    out.register_hook(lambda gradient: seen.append("out"))
    out.grad_fn.register_hook(lambda inputs, outputs: seen.append("node"))
    tensors[0].register_hook(lambda gradient: seen.append("q"))
    out.sum().backward()
    assert seen == ["out", "node", "q"]
    packed: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = op(*tensors)
    out.sum().backward()
    assert len(packed) == 5

    def refuse(tensor: Tensor) -> Tensor:
        raise ValueError("not kept")

    with (
        torch.autograd.graph.saved_tensors_hooks(refuse, lambda tensor: tensor),
        pytest.raises(ValueError, match="not kept"),
    ):
        op(*tensors)
    out = op(*tensors)
    out.register_hook(refuse)
    with pytest.raises(ValueError, match="not kept"):
        out.sum().backward()


def test_a_refused_launch_has_the_error_of_the_python_path(gpu: NativeDriver) -> None:
    tensors = operands()
    op = fg.attention(CAUSAL)
    errors = []
    out = None
    for turn in range(5):
        gpu.set("fake_fails", 701 if turn in (0, 4) else 0)
        try:
            out = op(*tensors)
            torch.autograd.grad(out.sum(), tensors)
        except LaunchError as error:
            errors.append(str(error))
    gpu.set("fake_fails", 0)
    assert len(errors) == 2
    assert errors[0] == errors[1]
    node = op(*tensors)
    gpu.set("fake_fails", 701)
    with pytest.raises(LaunchError, match="exceeds the registers or threads"):
        torch.autograd.grad(node.sum(), tensors)
    gpu.set("fake_fails", 0)
    assert hits_of(op, lambda: op(*tensors).sum().backward()) == (1, 1)


def test_a_refused_tensor_map_has_the_error_of_the_python_path() -> None:
    with native_gpu("sm_90a") as gpu:
        op = fg.attention(CAUSAL)
        tensors, kept, errors = operands(learn=False), [], []
        for turn in range(5):
            gpu.set("fake_map_fails", 1 if turn in (0, 4) else 0)
            kept.append(given := [x.clone() for x in tensors])  # other addresses
            try:
                op(*given)
            except LaunchError as error:
                errors.append(str(error))
        gpu.set("fake_map_fails", 0)
        assert len(errors) == 2
        assert errors[0] == errors[1]


def test_checkpoints_recompute_without_python(gpu: NativeDriver) -> None:
    tensors = operands()
    op = fg.attention(CAUSAL)
    for turn in range(5):
        out = torch.utils.checkpoint.checkpoint(op, *tensors, use_reentrant=False)
        gpu.reset()
        torch.autograd.grad(out, tensors, torch.ones_like(out))
        assert len(gpu.records) == 4, turn
    assert op._used.native.hits[1] >= 2


def test_the_primary_context_is_pushed_where_it_is_not_current(gpu: NativeDriver) -> None:
    tensors = operands()
    op = known(tensors)
    gpu.reset()

    def work() -> None:  # a new thread has no context
        gpu.c.fake_set_context(ctypes.c_void_p(0))
        gpu.c.fake_set_stream(ctypes.c_void_p(5))
        torch.autograd.grad(op(*tensors), tensors, torch.ones_like(tensors[0]))
        assert gpu.c.fake_depth() == 0

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [(record.context, record.stream) for record in gpu.records] == [(CONTEXT, 5)] * 4


def test_threads_make_the_same_calls_at_once(gpu: NativeDriver) -> None:
    tensors = operands()
    op = known(tensors)
    gpu.set("fake_keeps", 0)
    wrong: list[str] = []

    def work() -> None:
        try:
            mine = [x.detach().requires_grad_() for x in tensors]
            for turn in range(100):
                seq = 16 + turn % 40
                few = [x[:, :, :seq] for x in mine]
                torch.autograd.grad(op(*few).sum() + op(*mine).sum(), mine)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gpu.set("fake_keeps", 1)
    assert not wrong


def test_memory_stays_flat_over_2000_calls_of_changing_shapes(gpu: NativeDriver) -> None:
    op = fg.attention(CAUSAL)
    gpu.set("fake_keeps", 0)
    q, *others = operands(64, learn=False)
    shapes = [(rows, keys) for rows in range(1, 51) for keys in range(1, 51)]

    def megabytes_after(some: list[tuple[int, int]]) -> float:
        for rows, keys in some:
            tensors = [q[:, :, :rows], *(x[:, :, :keys] for x in others)]
            learnt = [x.detach().requires_grad_() for x in tensors]
            for _ in range(4):
                torch.autograd.grad(op(*learnt).sum(), learnt)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    before = megabytes_after(shapes[:500])  # the caches are full
    after = megabytes_after(shapes[500:])
    gpu.set("fake_keeps", 1)
    assert op._used.native.hits == (2 * 2500, 2500)
    assert op._used.native.kept_calls <= 512
    assert after - before < 10, f"{before:.0f} MB, then {after:.0f} MB"


@pytest.mark.parametrize(
    "name", ["FLASHGEN_NATIVE", "FLASHGEN_ARCH", "FLASHGEN_BACKEND", "FLASHGEN_CHECK_READS"]
)
def test_a_variable_that_calls_follow_is_followed(
    gpu: NativeDriver, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = operands(learn=False)
    op = known(tensors)
    values = {"FLASHGEN_ARCH": "sm_80", "FLASHGEN_BACKEND": "gpu"}
    assert hits_of(op, lambda: op(*tensors)) == (1, 0)
    monkeypatch.setenv(name, values.get(name, "0"))
    assert hits_of(op, lambda: op(*tensors)) == (0, 0)
    monkeypatch.delenv(name)
    assert hits_of(op, lambda: op(*tensors)) == (1, 0)


@pytest.mark.parametrize("value", ["0", " 0 ", "2"])
def test_the_native_part_is_off_where_its_variable_does_not_say_1(
    gpu: NativeDriver, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = operands(learn=False)
    op = known(tensors)
    for other, hits in (("", 1), ("1", 1), (value, 0)):
        monkeypatch.setenv("FLASHGEN_NATIVE", other)
        assert hits_of(op, lambda: op(*tensors)) == (hits, 0)


def test_no_plan_of_a_backward_pass_is_made_under_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with native_gpu("sm_90a") as gpu:
        op, tensors = fg.attention(CAUSAL), operands()

        def passes(count: int, **variables: str) -> list[str]:
            outs = [op(*tensors) for _ in range(count)]
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                gpu.reset()
                for out in outs:
                    torch.autograd.grad(out, tensors, torch.ones_like(out))
            return [gpu.binaries[record.function].arch for record in gpu.records]

        assert set(passes(5, FLASHGEN_ARCH="sm_80")) == {"sm_80"}
        assert set(passes(5)) == {"sm_90a"}
        assert op._used.native.hits == (8, 4)


def test_a_call_that_launches_nothing_has_no_plan(
    gpu: NativeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = operands(learn=False)
    op = known(tensors)

    def build(*_: Any) -> None:
        raise AssertionError("a kernel is built for a call without kernels")

    monkeypatch.setattr(PreparedForward, "_kernel", build)
    for _ in range(4):
        op(*operands(24, learn=False), backend="tiled")
    assert op._used.native.reasons == []


def test_the_switch_of_deterministic_algorithms_is_followed(gpu: NativeDriver) -> None:
    tensors = operands()
    op = known(tensors)
    out = op(*tensors)
    torch.use_deterministic_algorithms(True)
    try:
        gpu.reset()
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    names = {gpu.binaries[record.function].kernel for record in gpu.records}
    assert not any("fused" in name for name in names), names


def test_reports_are_those_of_the_last_call(gpu: NativeDriver) -> None:
    tensors = operands()
    op = known(tensors)
    op(*tensors).sum().backward()
    assert op.report.kernel.source.name.startswith("native_causal")
    assert [report.kernel.facts.name.split("_")[0] for report in op.backward_reports] == [
        *("delta", "native", "convert"),
    ]
    op(*operands(48))
    other = op.report
    assert other.backend == "gpu"
    assert op._used.native.last_forward() is None


def test_a_report_is_that_of_the_last_call_however_it_was_made(gpu: NativeDriver) -> None:
    tensors = operands()
    op = known(tensors)

    def rows() -> int:
        return int(op._used.last_forward()[0].call.seq_q)

    getattr(torch.ops.flashgen, op.name)(*operands(48))
    assert rows() == 48
    op(*tensors)
    assert rows() == 32
    with pytest.raises(InputError):
        op(*tensors[:2], None)
    assert rows() == 32
    out, other = op(*tensors), op(*operands(48))
    out.sum().backward()
    assert op._used.last_backward().call.call.seq_q == 32
    other.sum().backward()
    assert op._used.last_backward().call.call.seq_q == 48


def test_a_call_of_another_kind_of_tensor_or_mode_is_left_to_python(gpu: NativeDriver) -> None:
    tensors = operands(learn=False)
    op = known(tensors)

    class Own(Tensor):
        pass

    def with_mode() -> None:
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            op(*tensors)

    assert hits_of(op, lambda: op(*(x.as_subclass(Own) for x in tensors))) == (0, 0)
    assert hits_of(op, with_mode) == (0, 0)
    assert hits_of(op, lambda: torch.func.vmap(op)(*(x[None] for x in tensors))) == (0, 0)
    assert hits_of(op, lambda: op(*tensors)) == (1, 0)
