"""flashgen as a server calls it: one query per sequence, the keys split among blocks, or paged."""

from __future__ import annotations

from typing import Any

import torch

import flashgen as fg
from benchmarks.suite.cases import Case
from benchmarks.suite.contenders import Prepared, Tensor
from benchmarks.suite.contenders.libraries import named
from benchmarks.suite.contenders.ours import spec_of
from benchmarks.suite.device import Device
from flashgen.kernels.planner import plan_splits
from flashgen.shared.arch import facts

PAGE = 16


class Served:
    """Calls with split keys, or with a cache of pages of `PAGE` keys, on one code path."""

    ours = True

    def __init__(self, arch: str, *, paged: bool) -> None:
        self.name = f"flashgen {facts(arch).path} {'paged' if paged else 'split'}"
        self.arch = arch
        self.paged = paged

    def library(self, device: Device) -> str:
        return named("flashgen")

    def supports(self, case: Case, device: Device) -> str | None:
        if case.seq_q != 1:
            return "for decoding: one query per sequence"
        if self.paged and case.seq_k % PAGE:
            return f"for keys in whole pages of {PAGE}, which are a view of contiguous keys"
        return None

    def prepare(self, case: Case, device: Device) -> Prepared:
        paged = spec_of(case).replace(paged=True)
        options: dict[str, Any] = {
            "backend": device.backend,
            "arch": self.arch,
            **dict(case.scalars),
        }
        if not self.paged:
            op = fg.attention(spec_of(case))
            options["split_size"] = plan_splits(paged, self.arch, case.heads_kv).size
            return Prepared(lambda q, k, v: op(q, k, v, **options), ("forward",))
        op = fg.attention(paged)
        options["page_table"] = table_of(case, device.torch)
        lengths = torch.full((case.batch,), case.seq_k, dtype=torch.int32)
        options["cache_seqlens"] = lengths.to(device.torch)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return op(q, pages_of(k), pages_of(v), **options)

        return Prepared(attend, ("forward",))


def table_of(case: Case, device: torch.device) -> Tensor:
    """int32 [batch, pages]: the numbers of each sequence's pages in the result of `pages_of`."""
    rows = case.seq_k // PAGE
    starts = torch.arange(case.batch, dtype=torch.int32) * (case.heads_kv * rows)
    return (starts[:, None] + torch.arange(rows, dtype=torch.int32)).to(device)


def pages_of(keys: Tensor) -> Tensor:
    """Keys [batch, heads, n, d] as a cache of pages [pages, heads, page, d], without a copy.

    The pages of head 0 of every batch entry follow each other at PAGE * d elements; those of
    the other heads are the same pages, n * d elements further. n is a multiple of the page.
    """
    batch, heads, n, d = keys.shape
    pages = (batch * heads - heads + 1) * (n // PAGE)
    return keys.as_strided((pages, heads, PAGE, d), (PAGE * d, n * d, d, 1))
