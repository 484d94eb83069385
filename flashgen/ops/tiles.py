"""What calls of the tiled algorithms need around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from flashgen.ops.backends import DEFAULT_ARCH
from flashgen.plan import Tile
from flashgen.spec import AttentionSpec


@contextmanager
def quiet() -> Iterator[None]:
    """Torch without recording of gradients and without autocast: products keep their dtype."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def tiles_of(
    spec: AttentionSpec,
    arch: str,
    sram: int | None,
    tiles: Mapping[str, Tile],
    *,
    backward: bool = False,
) -> dict[str, int]:
    """Block sizes of the plan, where it is another than the tiled algorithms' own default."""
    if arch == DEFAULT_ARCH and sram is None and not tiles:
        return {}
    from flashgen.plan import plan, plan_backward

    if backward:
        chosen = plan_backward(spec, arch, sram=sram, tiles=tiles).of_keys
    else:
        chosen = plan(spec, arch, sram=sram, tile=tiles.get("forward"))
    return {"block_q": chosen.block_q, "block_k": chosen.block_k}
