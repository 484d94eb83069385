"""Where the tiles of a kernel lie in dynamic shared memory."""

from __future__ import annotations

from collections.abc import Mapping

from flashgen.plan import model
from flashgen.plan.formulas import Number
from flashgen.plan.model_backward import ROW_BYTES
from flashgen.plan.model_backward_sm90 import regions

# The order of the tiles, and how many bytes each has. Sizes are multiples of 128 bytes, because
# blocks are multiples of 16 rows and head dims of 8 elements: the swizzle works on aligned groups.
_KEYS = ("smem_k", "smem_v", "smem_q", "smem_do", "smem_rows", "smem_p", "smem_ds")
_ORDER = {
    "dkdv": _KEYS,
    "fused": _KEYS,
    "dq": ("smem_q", "smem_do", "smem_k", "smem_v"),
    "captured": ("smem_q", "smem_do", "smem_k", "smem_v"),
    "captured_exact": ("smem_q", "smem_do", "smem_k", "smem_v"),
}


def layout(path: str, kernel: str, at: Mapping[str, Number]) -> dict[str, int]:
    """Byte offsets by the names of `Plan`'s fields; 0 for a tile that the kernel does not have.

    Args:
        at: sizes of the chosen tile, "smem" among them.
    """
    found = dict.fromkeys(_KEYS, 0)
    e, block_q, block_k = int(at["e"]), int(at["block_q"]), int(at["block_k"])
    d_qk, d_v = int(at["d_qk"]), int(at["d_v"])
    if path == "sm_90a" and kernel != "forward":
        return found | regions(kernel, at)
    if path == "sm_90a":
        depth, depth_v, stages = int(at["depth"]), int(at["depth_v"]), int(at["stages"])
        found["smem_k"] = e * block_q * max(depth, depth_v)
        found["smem_v"] = found["smem_k"] + stages * e * block_k * depth
        return found
    if kernel == "forward":
        found["smem_k"] = int(model.K_OFFSET(at))
        found["smem_v"] = found["smem_k"] + e * block_k * d_qk
        return found
    by_keys = kernel in ("dkdv", "fused")
    scores = e * block_q * block_k
    q, k = e * block_q * d_qk, e * block_k * d_qk
    size = {
        "smem_q": 2 * q if by_keys else q,
        "smem_k": k if by_keys else 2 * k,
        "smem_v": e * block_k * d_v,
        "smem_do": e * block_q * d_v,
        "smem_rows": 2 * ROW_BYTES * block_q,
        "smem_p": scores if at["exchanged"] else 0,
        "smem_ds": scores if at["exchanged"] or kernel == "fused" else 0,
    }
    end = 0
    for name in _ORDER[kernel]:
        if size[name]:
            found[name] = end
            end += size[name]
    assert end == at["smem"], "the layout is what the model counts"
    return found
