"""The shared-memory layout of a kernel: byte offsets of its tiles in dynamic shared memory."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.planner.models import forward_sm80
from flashgen.planner.models.backward_sm80 import ROW_BYTES
from flashgen.planner.models.backward_sm90 import ALIGNED, SCORE_BUFFERS, TILE_BYTES
from flashgen.planner.models.kernel_model import KEY_KERNELS
from flashgen.planner.quantities import Number

# Sizes of tiles are multiples of 128 bytes, because block sizes are multiples of 16 rows and head
# dims of 8 elements: the swizzle of the sm_80 path works on aligned groups.
_FIELDS = ("smem_k", "smem_v", "smem_q", "smem_do", "smem_rows", "smem_p", "smem_ds")


def tile_offsets(path: str, kernel: str, at: Mapping[str, Number]) -> dict[str, int]:
    """Byte offsets by the names of `Plan`'s fields; 0 for a tile that the kernel does not have.

    Args:
        at: the quantities of the chosen tile, "smem" among them.
    """
    if kernel != "forward":
        sizes, end = _backward_sm90(kernel, at) if path == "sm_90a" else _backward_sm80(kernel, at)
        offsets = _one_after_another(sizes)
        assert offsets.pop("end") + end == at["smem"], "the tiles are those that the model counts"
    elif path == "sm_90a":
        smem_k = int(at["e"] * at["block_q"] * max(at["depth"], at["depth_v"]))
        smem_v = smem_k + int(at["stages"] * at["e"] * at["block_k"] * at["depth"])
        offsets = {"smem_k": smem_k, "smem_v": smem_v}
    else:
        smem_k = int(forward_sm80.K_OFFSET(at))
        offsets = {"smem_k": smem_k, "smem_v": smem_k + int(at["e"] * at["block_k"] * at["d_qk"])}
    return {name: offsets.get(name, 0) for name in _FIELDS}


def _one_after_another(sizes: Mapping[str, int]) -> dict[str, int]:
    """The offsets of the tiles that have a size, in their order, and their "end"."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        if size:
            offsets[name] = end
            end += size
    return {**offsets, "end": end}


def _backward_sm80(kernel: str, at: Mapping[str, Number]) -> tuple[dict[str, int], int]:
    """Bytes of each tile in their order, and of what follows them."""
    e, block_q, block_k = int(at["e"]), int(at["block_q"]), int(at["block_k"])
    q, k = e * block_q * int(at["d_qk"]), e * block_k * int(at["d_qk"])
    do, v = e * block_q * int(at["d_v"]), e * block_k * int(at["d_v"])
    if kernel not in KEY_KERNELS:
        return {"smem_q": q, "smem_do": do, "smem_k": 2 * k, "smem_v": v}, 0
    scores = e * block_q * block_k
    exchanged = at["exchanged"]
    sizes = {
        "smem_k": k,
        "smem_v": v,
        "smem_q": 2 * q,
        "smem_do": do,
        "smem_rows": 2 * ROW_BYTES * block_q,
        "smem_p": scores if exchanged else 0,
        "smem_ds": scores if exchanged or kernel == "fused" else 0,
    }
    return sizes, 0


def _backward_sm90(kernel: str, at: Mapping[str, Number]) -> tuple[dict[str, int], int]:
    """Bytes of each tile in their order, and of the barriers that follow them."""
    size = {name: int(value) for name, value in at.items() if isinstance(value, int)}
    e, stages, depth, depth_v = size["e"], size["stages"], size["depth"], size["depth_v"]
    block_q, block_k = size["block_q"], size["block_k"]
    queries, keys = e * block_q, e * block_k
    barriers = 8 * (1 + 4 * stages)
    if kernel not in KEY_KERNELS:
        sizes = {
            "smem_q": queries * depth,
            "smem_do": queries * depth_v,
            "smem_k": stages * keys * depth,
            "smem_v": stages * keys * depth_v,
            "smem_rows": TILE_BYTES * stages,
        }
        return sizes, barriers
    exchanged = size["exchanged"]
    scores = SCORE_BUFFERS * block_q * keys
    sizes = {
        "smem_k": keys * depth,
        "smem_v": keys * depth_v,
        "smem_q": stages * queries * depth,
        "smem_do": ALIGNED * -(-stages * queries * depth_v // ALIGNED),
        "smem_p": scores if exchanged else 0,
        "smem_ds": scores if exchanged or kernel == "fused" else 0,
        "smem_dq": 4 * block_q * depth if kernel == "fused" else 0,  # not in Plan: it follows dS
        "smem_rows": stages * (block_q * size["query_bytes"] + TILE_BYTES),
    }
    return sizes, barriers
