"""Boxes of tensors that TMA copies: PTX that copies one, and the same by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator import Counters, TensorMap, launch

Array = np.ndarray[Any, Any]

# The constants lie first in device memory: what lies outside must be zero all the same.
HEADER = """.version 8.6
.target sm_90a
.address_size 64
.const .align 16 .b32 first[4] = {7, 7, 7, 7};
"""


def box_kernel(rank: int, size: int, how: str = "load", at: int = 0) -> str:
    """PTX: loads a box and writes it out as it lies, or puts it into the tensor.

    Args:
        rank: coordinates of the box, which the kernel reads from its second argument.
        size: bytes of the box, which the third argument gets or has.
        how: "load", "store", or the operation of a reduction.
        at: where in shared memory the box lies.
    """
    where = ", ".join(f"%c{i}" for i in range(rank))
    reads = "".join(f"ld.global.s32 %c{i}, [%where+{4 * i}];\n" for i in range(rank))
    copy = """L: setp.ge.u32 %p, %i, SIZE; @%p bra E; add.u32 %a, %i, %s; cvt.u64.u32 %x, %i;
        add.u64 %x, %x, %raw; ONE; add.u32 %i, %i, 512; bra L; E:"""
    if how != "load":
        name = "cp.async.bulk" if how == "store" else "cp.reduce.async.bulk"
        kind = "tile" if how == "store" else f"{how}.tile"
        body = copy.replace("ONE", "ld.global.u32 %v, [%x]; st.shared.u32 [%a], %v")
        body += f"""fence.proxy.async.shared::cta; bar.sync 0; @%q bra END;
            {name}.tensor.{rank}d.global.shared::cta.{kind}.bulk_group [%map, {{{where}}}], [%s];
            cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:"""
    else:
        body = f"""@%q bra W; mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], SIZE;
            cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
                [%s], [%map, {{{where}}}], [bar];
            W: mbarrier.try_wait.parity.shared::cta.b64 %p, [bar], 0; @!%p bra W;"""
        body += copy.replace("ONE", "ld.shared.u32 %v, [%a]; st.global.u32 [%x], %v")
    return (
        HEADER
        + f""".extern .shared .align 1024 .b8 s[];
        .visible .entry k(.param .align 64 .b8 m[128], .param .u64 where, .param .u64 raw) {{
        .reg .pred %p, %q; .reg .b32 %t, %i, %a, %s, %v; .reg .s32 %c<5>;
        .reg .b64 %map, %where, %raw, %x; .shared .align 8 .b64 bar;
        mov.b64 %map, m; cvta.param.u64 %map, %map; ld.param.u64 %where, [where];
        ld.param.u64 %raw, [raw]; {reads} mov.u32 %t, %tid.x; setp.ne.u32 %q, %t, 0;
        mov.u32 %s, s; add.u32 %s, %s, {at}; shl.b32 %i, %t, 2;
        @!%q mbarrier.init.shared::cta.b64 [bar], 1;
        fence.mbarrier_init.release.cluster; bar.sync 0; {body} ret; }}""".replace(
            "SIZE", str(size)
        )
    )


def load(
    tensor: TensorMap, at: tuple[int, ...], seed: int | None = None, offset: int = 0
) -> tuple[Array, Counters]:
    """Bytes of shared memory after a load."""
    size = tensor.spec.box_bytes
    out = np.zeros(size, np.uint8)
    ptx = box_kernel(len(at), size, at=offset)
    where = np.array(at, np.int32)
    arguments: list[Any] = [tensor, where, out]
    counters = launch(ptx, "k", 1, 128, arguments, size + offset, order_seed=seed, profile=True)
    return out, counters


def swizzled_by_hand(linear: Array, span: int) -> Array:
    """Rows of ``span`` bytes; in chunks of 16, chunk c of row r goes to place c ^ f(r) of it."""
    chunks = linear.reshape(-1, span // 16, 16)
    out = np.empty_like(chunks)
    for row, column in np.ndindex(*chunks.shape[:2]):
        turn = {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}[span]
        out[row, column ^ turn] = chunks[row, column]
    return out.reshape(-1)
