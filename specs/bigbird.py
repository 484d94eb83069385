"""A window of blocks, a global first block row and column, and random blocks.

    live(i, j) = abs(i - j) <= 1 or i < 1 or j < 1 or random(i, j)       blocks of 32 x 32

The random part, an eighth of all blocks, is a hash of a seed and the block's coordinates, so that
it is the same at every length.

Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, section 2.
"""

import flashgen as fg

WINDOW, GLOBAL, SEED, SHARE = 1, 1, 2020, 1 / 8


def bigbird(i, j):
    mixed = (i * 73856093 ^ j * 19349663 ^ SEED) % 65536 * 40503 % 65536
    return abs(i - j) <= WINDOW or i < GLOBAL or j < GLOBAL or mixed < SHARE * 65536


spec = fg.AttentionSpec(
    block_sparse=fg.BlockSparse(bigbird, block_q=32, block_k=32), head_dim=64, dtype="float16"
)
