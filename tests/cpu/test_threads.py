"""Threads share a call: one region, whole tiles, and operations of one thread of torch each."""

from __future__ import annotations

import importlib
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.cpu.threads import share
from tests.support.tiled_calls import both

BIAS = fg.Tensor("bias", ("heads", "seq_k"), grad=True)
PLAIN = fg.AttentionSpec(lambda b, h, q, k: q >= k, head_dim=16)
LEARNED = fg.AttentionSpec(
    lambda b, h, q, k: q >= k, lambda s, b, h, q, k: fg.tanh(s) + BIAS[h, k], head_dim=16, sink=True
)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def run(spec: fg.AttentionSpec, heads: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, 300, 16, generator=draw) for _ in range(4))
    tensors: dict[str, Any] = {
        x.name: torch.randn(heads, *[300] * (len(x.dims) - 1), generator=draw) for x in spec.tensors
    }
    return both(spec, q, k, v, dout, tensors=tensors)


@pytest.mark.parametrize("spec", [PLAIN, LEARNED], ids=["plain", "learned"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.usefixtures("two_threads")
def test_two_threads_compute_tiles_with_one_thread_of_torch_each(
    spec: fg.AttentionSpec, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for place, name in (("forward", "_query_tile"), ("backward", "_key_tile")):
        module = importlib.import_module(f"flashgen.calls.cpu.{place}")
        tile = getattr(module, name)

        def recorded(*given: Any, tile: Any = tile, name: str = name) -> None:
            seen.append((name, threading.current_thread().name, torch.get_num_threads()))
            tile(*given)

        monkeypatch.setattr(module, name, recorded)
    shared = run(spec, heads)
    assert {threads for _, _, threads in seen} == {1}
    assert {name for name, _, _ in seen} == {"_query_tile", "_key_tile"}
    assert all(thread.startswith("flashgen-cpu") for _, thread, _ in seen)
    assert torch.get_num_threads() == 2
    again = run(spec, heads)
    torch.set_num_threads(1)
    alone = run(spec, heads)
    for ours, same, other in zip(shared, again, alone, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("two_threads")
def test_an_error_of_a_thread_is_raised_and_ends_the_call() -> None:
    done = []

    def work(thread: int, item: int) -> None:
        if item == 3:
            raise fg.InputError("wrong", where="here", numbers="3", way_out="4")
        done.append(item)

    with pytest.raises(fg.InputError, match="wrong"):
        share(2, 10_000, work)
    assert len(done) < 10_000
    share(2, 5, lambda thread, item: done.append(-thread), fixed=True)
    assert sorted(done[-5:]) == [-1, -1, 0, 0, 0]


def _in_child(queue: Any) -> None:
    torch.set_num_threads(2)
    queue.put(run(PLAIN, 2)[0].sum().item())


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_has_threads_of_its_own() -> None:
    expected = run(PLAIN, 2)[0].sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    found = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert found == pytest.approx(expected)
