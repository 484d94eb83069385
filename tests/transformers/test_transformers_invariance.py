"""Models of transformers in the batch-invariant mode: a row has the same bits in each kind of call.

All other layers are computed row by row, so that the attention of each layer has the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.cache_utils import DynamicCache

import flashgen as fg
from flashgen.calls.runtime.programs import SpecProgram
from flashgen.shared.paths import PATHS
from tests.support.tiers import slow
from tests.support.transformers_models import tiny

Tensor = torch.Tensor
LENGTHS = 75, 41


def by_rows(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_each(x: Tensor) -> Tensor:
        rows = [forward(row[None]) for row in x.reshape(-1, x.shape[-1])]
        return torch.cat(rows).view(*x.shape[:-1], -1)

    return of_each


class Sampled:
    """A model, the ids of two sequences, and what its attention returned for each position."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = tiny(name).model("fg", layers=2).to(dtype)
        for module in list(self.model.modules()):
            kind = type(module).__name__
            if kind == "Linear" or kind.endswith(("RMSNorm", "MLP")):
                module.forward = by_rows(module.forward)
        self.found: list[Tensor] = []
        for layer in self.model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(self._keep)
        draw = torch.Generator().manual_seed(9)
        self.ids = [torch.randint(3, 97, (1, n), generator=draw) for n in LENGTHS]

    def _keep(self, module: Any, given: tuple[Tensor]) -> None:
        self.found.append(given[0])

    def call(self, ids: Tensor, **options: Any) -> Tensor:
        """The attention outputs of both layers beside each other, [batch, rows, columns]."""
        self.found = []
        with torch.no_grad():
            logits = self.model(ids, **options).logits
        return torch.cat([*self.found, logits], -1)

    def alone(self) -> list[Tensor]:
        return [self.call(ids, use_cache=False) for ids in self.ids]

    def in_parts(self, ids: Tensor, sizes: tuple[int, ...], *, whole: bool = False) -> Tensor:
        """The sequence in several calls, with a cache.

        Args:
            whole: whether layers with a window keep the keys before it too.
        """
        cache = DynamicCache() if whole else DynamicCache(config=self.model.config)
        parts = [self.call(part, past_key_values=cache) for part in ids.split(sizes, 1)]
        return torch.cat(parts, 1)

    def batched(self) -> list[Tensor]:
        """Both sequences in a batch that is padded on the right."""
        ids = torch.zeros(2, max(LENGTHS), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for b, each in enumerate(self.ids):
            ids[b, : each.shape[1]] = each
            mask[b, : each.shape[1]] = 1
        found = self.call(ids, attention_mask=mask, use_cache=False)
        return [found[b : b + 1, :n] for b, n in enumerate(LENGTHS)]

    def packed(self) -> list[Tensor]:
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        found = self.call(torch.cat(self.ids, 1), position_ids=positions, use_cache=False)
        return list(found.split(LENGTHS, 1))


@pytest.fixture(autouse=True)
def the_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(SpecProgram, "invariant_split", lambda self, target: 64)  # several splits
    with fg.batch_invariant_mode():
        yield


@pytest.mark.parametrize("name", ["llama", "gemma2", slow("mistral"), slow("gemma3")])
def test_prefills_chunks_decoding_and_batches_have_the_bits_of_training(name: str) -> None:
    model = Sampled(name)
    whole = model.alone()
    for found, expected in zip(model.batched(), whole, strict=True):
        assert torch.equal(found, expected)
    for sizes in ((75,), (50, 24, 1), (3, 64, 8), (70, 1, 1, 1, 1, 1)):
        assert torch.equal(model.in_parts(model.ids[0], sizes), whole[0])
    assert torch.equal(model.in_parts(model.ids[1], (1,) * 41), whole[1])
    for found, expected in zip(model.packed(), whole, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("arch", PATHS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_kernels_give_a_model_the_same_bits_where_keys_keep_their_places(
    name: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a window's cache drops keys, or a sequence begins inside of a row."""
    monkeypatch.setenv("FLASHGEN_BACKEND", "emulator")
    monkeypatch.setenv("FLASHGEN_ARCH", arch)
    model = Sampled(name, torch.float16)
    whole = model.alone()
    for found, expected in zip(model.batched(), whole, strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(model.in_parts(model.ids[0], (50, 22, 1, 1, 1), whole=True), whole[0])
    assert torch.equal(model.packed()[0], whole[0])
