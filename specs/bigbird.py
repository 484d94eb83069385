"""A window of blocks, blocks that all see and that see all, and some at random.

    live(h, i, j) = abs(i - j) <= 1 or i < 1 or j < 1 or j in random(h, i)       blocks of 32 x 32

The random part, 2 blocks for each row of blocks and head, is drawn from a seed.

Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, section 2.
"""

import random

import flashgen as fg

WINDOW, GLOBAL, RANDOM, FARTHEST, SEED = 1, 1, 2, 16, 2020


def bigbird(b, h, i, j):
    near = abs(i - j) <= WINDOW or i < GLOBAL or j < GLOBAL
    # A function of the seed, the head and the row alone, whatever the lengths are.
    chosen = random.Random(f"{SEED} {h} {i}").sample(range(FARTHEST), RANDOM)
    return near or (j - i) % FARTHEST in chosen


spec = fg.AttentionSpec(
    block_sparse=fg.BlockSparse(bigbird, block_q=32, block_k=32), head_dim=64, dtype="float16"
)
