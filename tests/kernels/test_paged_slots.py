"""Calls with keys and values in pages: slots without effect, unknown pages, layouts of caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashgen as fg
from flashgen.calls.ops import ForwardRun, run_forward
from flashgen.shared.paths import PATHS
from tests.support.judged import equal, normal
from tests.support.paged_caches import LAYOUTS, cache_of
from tests.support.paged_calls import Paged
from tests.support.paged_specs import CAUSAL, DECODING, paged
from tests.support.planted import nan_in_parts, planted
from tests.support.tiers import slow

Tensor = torch.Tensor

ARCHS = tuple(PATHS)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_parts_that_are_not_written_are_not_read(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan_in_parts(monkeypatch)
    paged("causal", DECODING, arch, split_size=64).judged()


def unknown_pages(call: Paged, arch: str, page: int) -> ForwardRun:
    """A run in which a page of the first sequence is unknown, as it is on a GPU: without checks."""
    q, k, v, tables = call.operands()
    tables["page_table"][0, 1] = page
    given = {"backend": "emulator", **call.how}
    return run_forward(call.spec, q, k, v, tensors=tables, **given)


@pytest.mark.parametrize(
    ("arch", "page_size", "page"),
    [
        ("sm_80", 16, -1),
        slow("sm_90a", 4, 10_000),
        slow("sm_90a", 16, 10_000),
        *(slow(arch, 4, -1) for arch in ARCHS),
        slow("sm_80", 4, 10_000),
        slow("sm_80", 16, 10_000),
        slow("sm_90a", 16, -1),
    ],
)
def test_an_unknown_page_makes_its_sequence_nan_and_no_other(
    arch: str, page_size: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashgen.calls.runtime.arguments.call.check_pages", lambda *_: None)
    call = paged("causal", DECODING, arch, page_size, split_size=128)
    run = unknown_pages(call, arch, page)
    assert run.out[0].isnan().all()
    assert torch.equal(run.out[1:], call.run().out[1:])


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
def test_a_page_is_not_read_past_the_length(arch: str) -> None:
    """The entries behind a sequence's last page name pages that do not exist."""
    call = paged("causal", DECODING, arch, split_size=128)
    q, k, v, tables = call.operands()
    table = tables["page_table"]
    table[table < 0] = 10_000
    given = {"backend": "emulator", **call.how}
    assert equal(run_forward(CAUSAL, q, k, v, tensors=tables, **given), call.run())


@pytest.mark.parametrize(
    ("arch", "old", "new"),
    [
        ("sm_80", "const bool valid = r < valid_rows", "const bool valid = r < valid_rows + 16"),
        slow("sm_90a", "box + p.box_rows <= valid_rows", "true"),
        slow("sm_80", "position - entry * p.page_size", "0"),
        slow("sm_90a", "const bool valid = r < valid_rows", "const bool valid = true"),
        slow("sm_90a", "read_page_table(p, b, entry)", "read_page_table(p, 0, entry)"),
    ],
)
def test_bugs_of_pages_are_seen(arch: str, old: str, new: str) -> None:
    """Rows past the length, a box that ends past it, one slot for all keys, another's pages."""
    call = paged("causal", DECODING, arch, split_size=None)
    with planted("forward", old, new), pytest.raises((AssertionError, fg.EmulatorError)):
        call.judged()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "layout"),
    [
        ("sm_90a", "nhd"),
        *((arch, layout) for arch in ARCHS for layout in LAYOUTS if layout != "nhd"),
    ],
)
def test_caches_of_serving_engines_are_read_in_place(arch: str, layout: str) -> None:
    cache = cache_of(layout, (9, 2, 16), (64, 64), torch.float16)
    plain = [each.contiguous() for each in (cache.k, cache.v)]
    tables = {
        "page_table": torch.tensor([[7, 2, -1], [0, 4, 5]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([18, 40], dtype=torch.int32),
    }
    q = normal((2, 4, 1, 64), torch.float16, 3)
    how: dict[str, Any] = {"backend": "emulator", "arch": arch, "tensors": tables}
    found = run_forward(CAUSAL, q, cache.k, cache.v, split_size=128, **how)
    assert equal(found, run_forward(CAUSAL, q, *plain, split_size=128, **how))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_a_cache_that_is_not_aligned_is_read_element_by_element(arch: str) -> None:
    call = paged("causal", DECODING, arch, split_size=128)
    q, k, v, tables = call.operands()
    odd = [torch.nn.functional.pad(each, (0, 1))[..., :-1] for each in (k, v)]
    how: dict[str, Any] = {"backend": "emulator", "arch": arch, "tensors": tables}
    run = run_forward(CAUSAL, q, *odd, split_size=128, **how)
    assert run.report.access_bytes == 2
    call.judge(run)
