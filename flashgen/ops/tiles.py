"""What calls of the tiled algorithms need around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flashgen.ops.backends import DEFAULT_ARCH
from flashgen.spec import AttentionSpec


@contextmanager
def quiet() -> Iterator[None]:
    """Torch without recording of gradients and without autocast: products keep their dtype."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def tiles_of(spec: AttentionSpec, arch: str, *, backward: bool = False) -> dict[str, int]:
    """Block sizes of the plan for another architecture than the tiled algorithms' own default."""
    if arch == DEFAULT_ARCH:
        return {}
    from flashgen.plan import plan, plan_backward

    chosen = plan_backward(spec, arch).of_keys if backward else plan(spec, arch)
    return {"block_q": chosen.block_q, "block_k": chosen.block_k}
