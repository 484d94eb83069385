"""Panels: how tiles lie in shared memory on the sm_90a path, for TMA and wgmma.

A tile is stored as panels of columns. A panel is as wide as the swizzle pattern that TMA writes and
wgmma reads: 128, 64 or 32 bytes. Columns beyond the head dim are filled with zeros by TMA.
"""

from __future__ import annotations

from flashgen.shared.launch_facts import KEY_KERNELS

GROUP_ROWS = 64  # rows that a warpgroup multiplies at a time
DEPTH_STEP = 16  # columns of 16-bit operands that one wgmma multiplies
PANEL_COLUMNS = (64, 32, 16)  # of 16-bit operands: swizzle patterns of 128, 64 and 32 bytes
MOST_COLUMNS = 256  # of a wgmma (PTX ISA 8.8, section 9.7.15.5)


def panels_of(dim: int) -> tuple[int, int]:
    """Columns of a panel and the number of panels for rows of ``dim`` elements of 16 bits."""
    return _panels(_padded(dim, DEPTH_STEP))


def panels_of_kernel(
    kernel: str,
    d_qk: int,
    d_v: int,
    column_warps: int,
    *,
    one_tensor: bool = False,
    streamed: bool = False,
) -> tuple[tuple[int, int], ...]:
    """Columns of a panel and the number of panels in a kernel: (Q and K, V and dO).

    Where a block owns keys, dQ^T takes K in blocks of 64 columns. Where warps share the columns of
    dK and dV, so do the products for both. Where a block owns queries, each share of the columns
    of V has whole panels. V in the tile of K has the panels of K. Tiles that come panel by panel
    have panels of 64 columns.
    """
    if streamed:
        return _panels(_padded(d_qk, GROUP_ROWS)), _panels(_padded(d_v, GROUP_ROWS))
    if one_tensor:
        panel, count = panels_of(d_qk)
        return (panel, count), (panel, -(-d_v // panel))
    if kernel not in KEY_KERNELS:
        panel, count = panels_of(-(-d_v // column_warps))
        return panels_of(d_qk), (panel, count * column_warps)
    unit_v = GROUP_ROWS if column_warps > 1 else DEPTH_STEP
    return _panels(_padded(d_qk, GROUP_ROWS)), _panels(_padded(d_v, unit_v))


def columns_of_instructions(columns: int) -> tuple[int, ...]:
    """The columns of each wgmma of a product; a wgmma has at most 256 of them.

    A transposed operand begins at a whole swizzle pattern: all but the first begin at a multiple of
    64 columns, where a panel of any width begins.
    """
    if columns <= MOST_COLUMNS:
        return (columns,)
    first = (columns // PANEL_COLUMNS[0] + 1) // 2 * PANEL_COLUMNS[0]
    return first, columns - first


def panel_of_scores(block_k: int) -> int:
    """Keys of a panel of P and dS: rows of whole panels."""
    return next(width for width in PANEL_COLUMNS if block_k % width == 0)


def queries_of_sums(block_q: int, head_dim: int) -> int:
    """Queries of a dQ tile whose sums "fused" adds side by side.

    Where each warpgroup owns its own keys, two divide the blocks of 64 columns of dQ where their
    number is even, and the queries where it is odd.
    """
    blocks = -(-head_dim // GROUP_ROWS)
    return block_q // 2 if blocks % 2 else block_q


def rows_of_sums(block_q: int, box_q: int, head_dim: int) -> int:
    """Queries of a tile of the sums of dQ where tiles are gathered from boxes of ``box_q`` queries.

    A tile has one box, or two where each warpgroup has whole boxes: `queries_of_sums` queries are
    added side by side.
    """
    share = queries_of_sums(block_q, head_dim)
    return box_q if share % box_q else box_q * (block_q // share)


def _padded(dim: int, unit: int) -> int:
    return unit * -(-dim // unit)


def _panels(dim: int) -> tuple[int, int]:
    width = next(width for width in PANEL_COLUMNS if dim % width == 0)
    return width, dim // width
