"""Memory of the tiled algorithms: counted tensor by tensor, it grows with N and not with N x N."""

from __future__ import annotations

import itertools
import tracemalloc
import weakref
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls import cpu
from flashgen.calls.cpu import chunks
from flashgen.shared.call import OutputGradients, ResultTangents, Tangents
from flashgen.spec.language.spec import AttentionSpec
from tests.support.shapes import Case
from tests.support.tiers import one_in
from tests.support.tiled_calls import arguments

LENGTHS = (512, 1024, 2048, 4096)


@pytest.fixture(autouse=True)
def one_threads_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it, for short sequences."""
    monkeypatch.setattr(chunks, "ELEMENTS", 1 << 16)


class Bytes(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes of all tensors alive that were made within, and the elements of each in their order.

    Every result of every operation is seen; a storage counts once, while any tensor has it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.users: dict[int, int] = {}
        self.now = self.peak = self.largest = 0
        self.sizes: list[int] = []
        self.seen: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage()._cdata for x in inputs} - set(self.alive)
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                self._count(tensor, known)
        return result

    def _count(self, tensor: torch.Tensor, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in known or any(tensor is other for other in self.seen):
            return
        self.seen.add(tensor)
        if key not in self.alive:
            self.sizes.append(storage.nbytes() // tensor.element_size())
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self.users[key] = self.users.get(key, 0) + 1
        weakref.finalize(tensor, self._release, key)

    def _release(self, key: int) -> None:
        self.users[key] -= 1
        if self.users[key] == 0:
            self.now -= self.alive.pop(key)
            del self.users[key]


def measured(spec: AttentionSpec, n: int, **options: Any) -> tuple[Bytes, Bytes]:
    """Forward and backward of two heads over one kv head, n by n."""
    case = Case(n, n, 1, 2, 1, spec.dtype, spec.head_dim)
    q, k, v = case.tensors()
    given = arguments(spec, q, **options)
    with Bytes() as ahead:
        out, lse = cpu.forward(spec, q, k, v, given)
    with Bytes() as back:
        cpu.backward(spec, q, k, v, OutputGradients(out, lse, torch.ones_like(out)), given)
    return ahead, back


def test_the_count_sees_every_tensor_once() -> None:
    with Bytes() as count:
        a = torch.zeros(1000)
        b = a[:10].view(2, 5)
        c = a + 1
        del a, c
        assert count.now == 4000, "the view keeps the whole storage"
        del b
        assert count.now == 0
        d = torch.empty(50)
        torch.add(torch.ones(50), 1, out=d)
        d.mul_(2)
        assert count.now == 200
    assert count.peak == 8000
    assert count.largest == 1000


SPECS = {
    "causal": AttentionSpec(lambda b, h, q, k: k <= q, head_dim=32, dtype="float32"),
    "window and softcap in bfloat16": AttentionSpec(
        lambda b, h, q, k: fg.abs(q - k) < 500,
        lambda s, b, h, q, k: 50 * fg.tanh(s / 50),
        head_dim=32,
        dtype="bfloat16",
    ),
}


@pytest.mark.parametrize("name", one_in(2, SPECS))
def test_peak_memory_grows_linearly(name: str) -> None:
    runs = [measured(SPECS[name], n) for n in LENGTHS]
    for part in (0, 1):
        peaks = [run[part].peak for run in runs]
        assert all(b < 2.05 * a for a, b in itertools.pairwise(peaks)), peaks
        # From the second length on the workspace has its full size: only what grows with N grows.
        once, twice = peaks[2] - peaks[1], peaks[3] - peaks[2]
        assert twice == pytest.approx(2 * once, rel=0.05), peaks
        # No more than a few tensors of the size of q and its like, and a few tiles.
        assert peaks[-1] < 12 * (2 * LENGTHS[-1] * 32 * 4) + 6 * 4 * chunks.ELEMENTS, peaks
    for n, run in zip(LENGTHS, runs, strict=True):
        largest = max(run[0].largest, run[1].largest)
        assert largest <= max(chunks.ELEMENTS, 2 * n * 32)
        assert largest < n * n


def test_the_tangent_passes_grow_linearly_too() -> None:
    spec = SPECS["window and softcap in bfloat16"]
    peaks = []
    for n in LENGTHS[1:3]:
        q, k, v = Case(n, n, 1, 2, 1, spec.dtype, spec.head_dim).tensors()
        given, moving = arguments(spec, q), Tangents(q, k, v)
        out, lse = cpu.forward(spec, q, k, v, given)
        with Bytes() as ahead:
            of_out, of_lse = cpu.tangent(spec, q, k, v, (out, lse), moving, given)
        outputs, ways = OutputGradients(out, lse, out), ResultTangents(of_out, of_lse, out)
        with Bytes() as back:
            cpu.backward_tangent(spec, q, k, v, outputs, moving, ways, given)
        peaks.append((ahead.peak, back.peak))
        largest = max(ahead.largest, back.largest)
        assert largest <= max(chunks.ELEMENTS, 2 * n * 32)
        assert back.peak < 24 * (2 * n * 32 * 4) + 16 * 4 * chunks.ELEMENTS
    for before, after in itertools.pairwise(peaks):
        assert all(b < 2.05 * a for a, b in zip(before, after, strict=True)), peaks


def test_dropouts_bits_are_made_tile_by_tile() -> None:
    spec = SPECS["causal"].replace(dropout=True)
    peaks = []
    for n in LENGTHS[:2]:
        tracemalloc.start()  # numpy's memory
        counts = measured(spec, n, dropout_p=0.1, rng=(1, 2))
        peaks.append(max(count.peak for count in counts) + tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert all(b < 2.05 * a for a, b in itertools.pairwise(peaks)), peaks


@pytest.mark.slow
def test_many_heads_share_a_workspace_of_fixed_size() -> None:
    spec = SPECS["causal"]
    beyond = []
    for heads in (64, 256):
        q, k, v = Case(256, 256, 1, heads, heads, "float32", 32).tensors()
        with Bytes() as count:
            out, lse = cpu.forward(spec, q, k, v, arguments(spec, q))
        beyond.append(count.peak - out.nbytes - lse.nbytes)
        assert count.largest <= max(chunks.ELEMENTS, out.numel())
    assert beyond[1] < 1.1 * beyond[0] < 64 * 2**20


def test_buffers_full_of_nan_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that is not yet written holds NaN."""
    spec = SPECS["causal"]
    q, k, v = Case(100, 90, 2, 4, 2, "float32", 32).tensors()
    options = arguments(spec, q, k_offset=40)

    def run() -> tuple[torch.Tensor, ...]:
        out, lse = cpu.forward(spec, q, k, v, options)
        return (
            out,
            lse,
            *cpu.backward(spec, q, k, v, OutputGradients(out, lse, torch.ones_like(q)), options),
        )

    expected = run()
    empty, like = torch.empty, torch.empty_like
    made = []

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        made.append(tensor)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: poisoned(x.shape, dtype=x.dtype))
    found = run()
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", like)
    assert len(made) >= 8
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
