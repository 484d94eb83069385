"""A call in the capture of a CUDA graph, whose launches are replayed by the emulator.

The driver of these tests runs no kernel. What a capture keeps of a launch are the function, the
sizes and the bytes of the parameters, and a replay here is the function's PTX on those bytes: on
the memory that had these addresses during the capture, with its contents at the replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import flashgen as fg
import ptx_emulator as emulator
from flashgen import reference
from flashgen.calls.launch.params import field_bytes
from flashgen.calls.runtime.bound_kernel import span
from tests.support.judged import forward_verdicts
from tests.support.native_driver import CAUSAL, STREAM, NativeDriver, Record, native_gpu
from tests.support.parts_of_groups import divide_groups

pytestmark = pytest.mark.slow

Tensor = torch.Tensor

CAPTURED_STREAM = 99
_TYPES = {"int32": np.int32, "int64": np.int64, "float32": np.float32}


class Graph:
    """The launches of a capture.

    A graph has a memory pool of its own, so that tensors which only live during the capture keep
    their addresses. Here they get memory that is full of NaN.
    """

    def __init__(self, driver: NativeDriver) -> None:
        self._driver = driver
        self.launches: list[Record] = []

    def replay(self, tensors: Sequence[Tensor]) -> None:
        """
        Args:
            tensors: those of the capture that still live.
        """
        memory = {tensor.data_ptr(): span(tensor) for tensor in tensors}
        for record in self.launches:
            self._emulate(record, memory)

    def _emulate(self, record: Record, memory: dict[int, Any]) -> None:
        binary = self._driver.binaries[record.function]
        arguments = self._driver.arguments[binary.key]
        packed, at, values = bytes(record.params[: record.bytes]), 0, []
        maps = iter(arguments.maps)

        def memory_at(address: int) -> Any:
            return memory.setdefault(address, np.full(1 << 16, np.nan, np.float32))

        for param in arguments.params:
            width = field_bytes(param.ctype)
            at += -at % min(width, 64)
            field = packed[at : at + width]
            at += width
            if param.ctype in _TYPES:
                values.append(np.frombuffer(field, _TYPES[param.ctype])[0])
                continue
            address = int.from_bytes(field[:8], "little")  # in a map of this driver it is first
            if param.ctype == "pointer":
                values.append(memory_at(address) if address else None)
                continue
            spec = next(maps)
            of_map = {"dims": spec.dims, "strides": spec.strides, "dtype": spec.dtype}
            values.append(emulator.TensorMap(memory_at(address), spec.box, spec.swizzle, **of_map))
        emulator.launch(
            binary.ptx,
            binary.kernel,
            tuple(record.grid),
            tuple(record.block),
            [tuple(values)],
            shared_bytes=record.smem,
            overlaps=bool(record.overlaps),
        )


@contextmanager
def captured(driver: NativeDriver) -> Iterator[Graph]:
    """As torch.cuda.graph: another stream is current, and its launches are kept."""
    graph = Graph(driver)
    driver.reset()
    driver.c.fake_set_stream(CAPTURED_STREAM)
    try:
        yield graph
    finally:
        driver.c.fake_set_stream(STREAM)
    graph.launches = driver.records
    assert {record.stream for record in graph.launches} == {CAPTURED_STREAM}


@pytest.mark.parametrize(
    ("arch", "heads"), [("sm_80", (2, 2)), ("sm_90a", (2, 2)), ("sm_90a", (3, 1))]
)
@pytest.mark.parametrize("native", [True, False])
def test_a_replay_of_both_passes_computes_with_the_present_contents(
    arch: str, heads: tuple[int, int], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three query heads that share keys are divided into parts of two heads and of one."""
    divide_groups(monkeypatch, 2)
    monkeypatch.setenv("FLASHGEN_NATIVE", "1" if native else "0")
    torch.manual_seed(0)
    qkv = [
        torch.randn(1, count, 70, 64).half().requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]
    dout = torch.zeros_like(qkv[0])
    op = fg.attention(CAUSAL)

    def both_passes() -> tuple[Tensor, ...]:
        out, lse = op(*qkv, return_lse=True)
        return out, lse, *torch.autograd.grad(out, qkv, dout)

    with native_gpu(arch) as driver:
        for _ in range(4):  # the warm-up, which loads kernels
            both_passes()
        calls = op._used.native
        before = calls.hits if native else None
        with captured(driver) as graph:
            results = both_passes()
        if before is None:
            assert calls is None
        else:
            assert calls.hits == (before[0] + 1, before[1] + 1)
        for tensor in (*qkv, dout):
            tensor.data.normal_()
        graph.replay([*(x.detach() for x in (*qkv, *results)), dout])
    found = [x.detach() for x in results]
    given = [x.detach() for x in qkv]
    of_forward = forward_verdicts(found[:2], CAUSAL, *given)
    of_backward = reference.judge_gradients(found[2:], CAUSAL, *given, dout, None)
    wrong = {name: one for name, one in {**of_forward, **of_backward}.items() if not one.ok}
    assert not wrong, wrong
    launched = [driver.binaries[record.function].kernel for record in graph.launches]
    assert any("convert_dk" in kernel for kernel in launched) == (heads == (3, 1))
