"""On a GPU: rows appended to a paged cache, in place and without a synchronisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.runtime.append_kv import prepare
from flashgen.calls.runtime.arguments.new_rows import AppendOperands
from tests.support import gpu_device as gpu
from tests.support.paged_caches import LAYOUTS, Appended, Cache, append_in_a_loop, cache_of, rows_of

Tensor = torch.Tensor
Call = Callable[[], tuple[Tensor, ...]]
SHAPE, DIMS = (40, 4, 16), (128, 128)


def moved(rows: Appended) -> Appended:
    fields = {f.name: getattr(rows, f.name) for f in dataclasses.fields(rows)}
    return rows.change(**{n: x.to(gpu.DEVICE) for n, x in fields.items() if x is not None})


def on_device(layout: str, dtype: torch.dtype, pad: int = 0) -> tuple[Cache, Cache]:
    """A cache on the CPU, and the same on the device."""
    given = layout, SHAPE, DIMS, dtype, pad
    return cache_of(*given), cache_of(*given, gpu.DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS[: gpu.pick(5, 3)])
def test_rows_are_written_to_caches_of_any_layout(
    layout: str, pad: int, dtype: torch.dtype
) -> None:
    rows = rows_of((0, 7, 1), (3, 40, 130), SHAPE, DIMS, dtype, packed=True, behind=2)
    there = moved(rows)
    for given in (there.by_table, there.by_slots):
        expected, cache = on_device(layout, dtype, pad)
        append_in_a_loop(rows, expected)
        fg.append_kv(there.k, there.v, cache.k, cache.v, **given, backend=gpu.BACKEND)
        for one, other in zip(cache.storage, expected.storage, strict=True):
            assert torch.equal(one.cpu(), other)


def test_rows_without_a_place_are_skipped() -> None:
    rows = rows_of((3, 3, 3), (3, 40, 130), SHAPE, DIMS, torch.float16)
    rows.table[1, 2], rows.table[2] = 40, -1
    rows.lengths[0] = 2
    expected, cache = on_device("nhd", torch.float16)
    there = moved(rows)
    given = AppendOperands(there.k, there.v, cache.k, cache.v, **there.by_table)
    prepare(given, gpu.BACKEND, None).run(given)
    rows.slots[2] = rows.slots[1]  # the last two rows of a sequence of two keys
    rows.slots[1] = rows.slots[0]
    rows.slots[[0, 3, 4, 5, 6, 7, 8]] = -1
    append_in_a_loop(rows, expected)
    for one, other in zip(cache.storage, expected.storage, strict=True):
        assert torch.equal(one.cpu(), other)


def test_a_call_waits_for_nothing_and_a_replayed_graph_reads_tables_anew() -> None:
    rows = moved(rows_of((1, 1), (3, 40), SHAPE, DIMS, torch.float16))
    _, cache = on_device("split", torch.float16)

    def call() -> tuple[Tensor, ...]:
        fg.append_kv(rows.k, rows.v, cache.k, cache.v, **rows.by_table, backend=gpu.BACKEND)
        return (cache.k,)

    for length, pages in replayed(call, rows):
        assert (cache.k[pages, :, length - 1] == length).all()


def replayed(call: Call, rows: Appended) -> Iterator[tuple[int, Tensor]]:
    """The lengths and pages of replays of a graph of a call, which waits for nothing."""
    call()
    gpu.synchronize()
    with gpu.no_waiting():
        call()
    graph = gpu.Graph(call)
    for length in (7, 12):
        rows.lengths.fill_(length)
        rows.k.fill_(length)
        graph.replay()
        yield length, rows.table[:, 0].long()


def coded(kv_dtype: str, device: torch.device | str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Caches of codes, and a scale for each slot."""
    caches = [
        torch.zeros(*SHAPE, dim, dtype=torch.uint8, device=device).view(getattr(torch, kv_dtype))
        for dim in DIMS
    ]
    return caches, {f"{x}_scale": torch.full(SHAPE, 0.02, device=device) for x in "kv"}


def all_bytes(caches: list[Tensor], scales: dict[str, Tensor]) -> list[Tensor]:
    return [x.cpu().view(torch.uint8) for x in (*caches, *scales.values())]


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_codes_and_scales_are_those_of_the_cpu_path(
    kv_dtype: str, dtype: torch.dtype, write: bool
) -> None:
    rows = rows_of((0, 7, 1), (3, 40, 130), SHAPE, DIMS, dtype, packed=True, behind=2)
    rows.k[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    found = []
    for own, device, how in ((rows, "cpu", "tiled"), (moved(rows), gpu.DEVICE, gpu.BACKEND)):
        caches, scales = coded(kv_dtype, device)
        given: dict[str, Any] = {**own.by_table, **scales, "write_scales": write, "backend": how}
        fg.append_kv(own.k, own.v, *caches, **given)
        found.append(all_bytes(caches, scales))
    assert all(map(torch.equal, *found))


def test_a_replayed_graph_writes_the_scales_of_new_rows() -> None:
    rows = moved(rows_of((1, 1), (3, 40), SHAPE, DIMS, torch.float16))
    caches, scales = coded("int8", gpu.DEVICE)
    given: dict[str, Any] = {**rows.by_table, **scales, "write_scales": True}

    def call() -> tuple[Tensor, ...]:
        fg.append_kv(rows.k, rows.v, *caches, **given, backend=gpu.BACKEND)
        return (caches[0],)

    for length, pages in replayed(call, rows):
        assert (caches[0][pages, :, length - 1] == 127).all()
        assert (scales["k_scale"][pages, :, length - 1] * 127 - length).abs().max() < 1e-5
